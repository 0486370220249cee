"""Steps with a fault each, in a process with the fake device: what is broken -> what the auditor says of it; and
what it says of those with copies while they are whole."""

from pangu.dryrun.device import load_device

FAKE = load_device()  # before torch is imported

import json  # noqa: E402
from collections import Counter  # noqa: E402
from contextlib import nullcontext  # noqa: E402
from dataclasses import replace  # noqa: E402
from typing import Any  # noqa: E402
from unittest.mock import patch  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from pangu.checkpoint.staging import StagingMemory  # noqa: E402
from pangu.collectives import point_to_point, reduce, regions  # noqa: E402
from pangu.data.batch import Batch  # noqa: E402
from pangu.dryrun.run import dry_run  # noqa: E402
from pangu.layers import offload  # noqa: E402
from pangu.pipeline.layouts import choose_layout  # noqa: E402
from pangu.topology.copy_stream import CopyStream, DeviceEvent  # noqa: E402
from pangu.topology.recorder import AxisGroup  # noqa: E402
from pangu.training.profile import Profile  # noqa: E402
from pangu.training.step import Trainer  # noqa: E402
from pangu.zero import gradients, norms, unshard  # noqa: E402
from tests.dryrun.layouts import SEGMENT, values  # noqa: E402


class Unwaited:
    """Something that is on its way and that nobody waits for."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        """Does not."""


class Unsynchronized:
    """An event that the host does not wait for."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def synchronize(self) -> None:
        """Does not."""


def never_waited(start: Any) -> Any:
    """A collective whose wait is taken out."""
    return lambda *args: None if (work := start(*args)) is None else Unwaited(work)


def half_moved(batch: Batch, device: torch.device) -> Batch:
    moved = MOVE(batch, device)
    return Batch(moved.tokens, batch.labels, moved.weights, moved.positions, moved.documents, moved.samples)


def on_the_host(gradients: Any, loss: Any, flags: Any, mesh: Any, *others: Any) -> torch.Tensor:
    assert dist.group.WORLD is not None
    reduce.all_reduce(torch.zeros(2), AxisGroup(dist.group.WORLD, "world"))
    return torch.ones(2, dtype=torch.float64, device=mesh.device)


def read_at_once(*given: Any) -> torch.Tensor:
    sums = norms.norm_and_loss(*given)
    sums.tolist()
    return sums


def pageable(batch: Batch, device: torch.device) -> Batch:
    return replace(batch, tokens=batch.tokens.to(device, non_blocking=True))


HOARD: list[torch.Tensor] = []
MOVE, STEP = Batch.to, Trainer.train_step
HYBRID = "batch.global_size=4 parallel.data=4 parallel.zero=2 parallel.zero_group=2"
BROKEN = {
    "gather before use": (unshard, "start_all_gather", "parallel.data=2 parallel.zero=3"),
    "gather of what was updated": (unshard, "start_all_gather", "parallel.data=2 parallel.zero=1"),
    "reduction of gradients": (gradients, "start_reduce_scatter", "parallel.data=2 parallel.zero=2"),
    "sum over copies behind a reduction": (gradients, "start_reduce_scatter", HYBRID),
    "sum over copies": (gradients, "start_all_reduce", HYBRID),
    "gather of a sequence": (regions, "start_all_gather", "parallel.tensor=2 parallel.sequence=true"),
    "sum of a row-parallel product": (regions, "start_all_reduce", "parallel.tensor=2 parallel.overlap_chunks=2"),
}


RECORDED = (
    "parallel.data=2 parallel.zero=3",
    "parallel.tensor=2 parallel.sequence=true",
    "parallel.pipeline=2",
    HYBRID,
)


def report(layout: str, steps: int = 1) -> Any:
    assert not isinstance(FAKE, str), FAKE
    chosen = choose_layout(values(f"batch.global_size=2 {layout}"), 1)
    return dry_run(chosen, 0, torch.device("cuda", 0), FAKE, steps)


def recorded(trainer: Trainer, batches: list[Batch]) -> None:
    """A step that is recorded as a profiled one is."""
    recorder, mesh = trainer.mesh.recorder, trainer.mesh
    recorder.watches = True
    Profile.begin(mesh)
    with recorder.span("update"):
        STEP(trainer, batches)
    spans = recorder.stop().spans
    # what another stream waits for
    assert not any(span.what == "shard" for span in spans) or mesh.group("copies") is None
    torch.ones((), device=mesh.device).neg_()  # audits look at streams when they see an operation


def saving(trainer: Trainer, batches: list[Batch]) -> None:
    """A step, a save that begins before the host knows its end, and the next update beside the copies."""
    trainer.forward_backward(batches)
    trainer.update()
    copies, trainer.copied = StagingMemory(trainer.mesh.device, trainer.state()).copy(trainer.state())
    trainer.update()
    assert len(list(copies)) > len(trainer.parameters.shards)


def while_saving() -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """What is found of saves whose copies nobody waits for, or that do not wait; and of one that is whole."""
    layout, found = "precision=bf16 optimizer.moments=bf16 optimizer.betas=[0.9,0.95]", {}
    with patch.object(Trainer, "train_step", saving):
        with patch.object(DeviceEvent, "wait", lambda event: None):
            found["update beside a save"] = report(layout).races
        with patch.object(CopyStream, "after_computation", lambda lane: lane._stream or nullcontext()):
            found["save beside an update"] = report(layout).races
        whole = report(layout)
    assert whole.copy_bytes > 0.9 * 3 * 4 * whole.lasting_bytes["parameters"] / 2  # of fp32 copies
    assert list(whole.host_syncs.values()) == [1]  # that of the writer, which is another thread in a run
    return found, {**whole.races, **whole.blocking_copies}


def cost_of_recording(layout: str) -> dict[str, int]:
    """What a recorded step breaks of the rules, and how much more often the host waits in it than in another one."""

    def count(layout: str) -> Counter[str]:
        found = report(layout)
        return Counter({**found.host_syncs, **found.races, **found.findings})

    plain = count(layout)
    with patch.object(Trainer, "train_step", recorded):
        return dict(count(layout) - plain)


def hoarding(trainer: Trainer, batches: list[Batch]) -> None:
    """A step that keeps more with every step."""
    HOARD.append(torch.zeros(2**21, device=trainer.mesh.device))
    STEP(trainer, batches)


def main() -> None:
    found, whole = {}, {}
    for name, (module, function, layout) in BROKEN.items():
        with patch.object(module, function, never_waited(getattr(module, function))):
            found[name] = report(layout).races
    with patch.object(point_to_point.Transfer, "wait", lambda message: message.tensors):
        found["message between stages"] = report("parallel.pipeline=2").races
    for kind in ("activations", "parameters", "optimizer"):
        # alone: otherwise a gather follows the copy, and is waited for
        layout = f"precision=bf16 memory.offload=[{kind}] parallel.zero={3 * (kind == 'parameters')}"
        whole[kind] = report(layout).races
        with patch.object(offload.CopyStream, "wait", staticmethod(lambda event: None)):
            found[f"copy of {kind}"] = report(layout).races
        with patch.object(offload.CopyStream, "after_computation", lambda lane: lane._stream or nullcontext()):
            found[f"what is copied of {kind}"] = report(layout).races
    waits, record = offload.CopyStream.wait, offload.CopyStream.record
    with (
        patch.object(offload.CopyStream, "record", lambda stream: Unsynchronized(record(stream))),
        patch.object(offload.CopyStream, "wait", staticmethod(lambda handle: waits(getattr(handle, "event", handle)))),
    ):
        found["gradients on the host"] = report("precision=bf16 memory.offload=[optimizer]").races
    with patch.object(Batch, "to", half_moved):
        found["labels on the host"] = report("").findings
    with patch.object(norms, "norm_and_loss", on_the_host), patch("pangu.zero.sharded.norm_and_loss", on_the_host):
        found["a collective of the host's memory"] = report("parallel.data=2").findings
    with patch("pangu.zero.sharded.norm_and_loss", read_at_once):
        found["a number that is waited for"] = report("").host_syncs
    with patch.object(Batch, "to", lambda *given: MOVE(pageable(*given), given[1])):
        found["a copy of pageable memory"] = report("").blocking_copies
    with patch.object(Trainer, "train_step", hoarding):
        found["memory that grows"] = report("", steps=2).peak > report("").peak + SEGMENT
    saves, whole["save"] = while_saving()
    found |= saves
    recording = {layout: cost_of_recording(layout) for layout in RECORDED}
    print(json.dumps([found, whole, recording]))


if __name__ == "__main__":
    main()
