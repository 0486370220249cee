"""What the host does in a step: Python functions that it calls and operators that it dispatches, by what they are for.

A step is carried out on tensors without memory, on the branches that a GPU takes: what one more layer adds to an
action, and what the actions, the optimizer and the rest of a step do without layers. A run of the loop is counted on
the CPU, without its steps.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

from pangu.dryrun.device import FakeDevice, load_device

OVERRIDES = (
    *("precision=bf16", "model.attention=sdpa", "model.dropout=0", "model.attention_dropout=0"),
    *("batch.micro_size=1", "batch.global_size=2"),
)
LAYERS = (2, 4)
"""Layers of the stage that is counted; four layers more are two more for each of two micro-batches."""
MODES = {
    "one device": "",
    "recompute full": "memory.recompute=full",
    "data 2, ZeRO-3": "parallel.data=2 parallel.zero=3 batch.global_size=4",
    "tensor 2, sequence": "parallel.tensor=2 parallel.sequence=true",
    "pipeline 2, zero bubble": "parallel.pipeline=2 parallel.schedule=zb_h1 batch.global_size=4",
    "LAMB": "optimizer=lamb",
}
WARM_UP, STEPS = 4, 6
"""Steps of the loop before those that are counted, and of these."""


class Update(NamedTuple):
    """The optimizer's step, as an action of its own."""

    kind: str = "optimizer"
    micro: int | None = None


Counts = dict[str, dict[str, float]]
"""Name of an action -> operators and Python calls."""


def of_step(fake: FakeDevice, words: str, layers: int) -> Counts:
    """The counts of an action of each kind, of the optimizer, and of the rest of a step."""
    import torch

    from pangu.dryrun.run import audited, carry_out, micro_batches, on_fake_tensors
    from pangu.pipeline.layouts import choose_layout
    from tests.dryrun.layouts import values

    stages = 2 if "pipeline" in words else 1
    chosen = choose_layout(values(words, *OVERRIDES, f"model.layers={layers * stages}"), 1)
    config, layout, _ = chosen
    with on_fake_tensors(0, layout.world), audited(chosen, torch.device("cuda", 0), fake) as (audit, trainer):
        update = trainer.optimizer.step

        def optimizer_step(*args: Any) -> Any:
            audit.enter(Update())
            result = update(*args)
            audit.enter(None)
            return result

        with patch.object(trainer.optimizer, "step", optimizer_step):
            for _ in range(3):  # the first one creates what the others find
                gc.collect()
                gc.disable()  # it would call what was registered for objects that go
                audit.by_action.clear()
                audit.enter(None)
                carry_out(audit, trainer, micro_batches(config, layout))
                gc.enable()
        found: dict[str, list[Counter[Any]]] = {}
        for action, counted in audit.by_action.items():
            kind = getattr(action, "kind", action)
            name = "rest of a step" if action is None else kind if isinstance(kind, str) else "move of a batch"
            found.setdefault(str(name), []).append(counted)
    return {
        name: {key: sum(one[event,] for one in every) / len(every) for key, event in EVENTS.items()}
        for name, every in found.items()
    }


EVENTS = {"operators": "operators", "Python calls": "python_calls"}


def of_mode(fake: FakeDevice, words: str) -> Counts:
    """The counts of a layout: of a layer in each action, and of each action beside its layers."""
    fewer, more = (of_step(fake, words, layers) for layers in LAYERS)
    counts: Counts = {}
    for name, of_more in more.items():
        layer = {key: (of_more[key] - fewer[name][key]) / (LAYERS[1] - LAYERS[0]) for key in EVENTS}
        if name in ("F", "B", "I", "W"):
            counts[f"{name}, a layer"] = layer
        counts[f"{name}, beside layers"] = {key: fewer[name][key] - LAYERS[0] * layer[key] for key in EVENTS}
    return counts


@contextmanager
def outside_of_steps(calls: list[int]) -> Iterator[None]:
    """Count the functions that the loop calls around each of some steps, without those of the trainer."""
    from pangu.training.step import Trainer

    def count(frame: FrameType, event: str, argument: Any) -> None:
        calls[-1] += event == "call" and frame.f_code.co_filename != __file__

    def quiet(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(trainer: Trainer, *args: Any) -> Any:
            sys.setprofile(None)
            gc.disable()  # it would call what was registered for objects that go
            result = original(trainer, *args)
            if WARM_UP <= trainer.step < WARM_UP + STEPS:
                calls.extend([0] * (original.__name__ == "update"))
                sys.setprofile(count)
            return result

        return method

    methods: dict[str, Any] = {name: quiet(getattr(Trainer, name)) for name in ("forward_backward", "update")}
    with patch.multiple(Trainer, **methods):
        yield
    sys.setprofile(None)
    gc.enable()


def of_loop() -> Counts:
    """The Python calls of a step of the loop that waits for no batch, without the trainer's; it has no operators."""
    from pangu.training.run import run
    from tests.configs import composed
    from tests.dryrun.layouts import SMALL

    calls = [0]
    with tempfile.TemporaryDirectory() as folder, outside_of_steps(calls):
        words = (f"train.output={Path(folder) / 'run'}", f"train.steps={WARM_UP + STEPS + 2}", "checkpoint.every=0")
        run(composed(*SMALL, *OVERRIDES, *words, "train.device=cpu", "sample.prompts=[]"))
    return {"step": {"Python calls": min(calls[1:-1])}}


def main() -> None:
    """Print the counts of all layouts and of the loop as JSON."""
    if sys.argv[1:] == ["loop"]:
        print(json.dumps(of_loop()))
        return
    fake = load_device()
    if isinstance(fake, str):
        sys.exit(fake)
    print(json.dumps({mode: of_mode(fake, words) for mode, words in MODES.items()}))


if __name__ == "__main__":
    main()
