"""Shared code of the suite's parts: configurations without Hydra, the trainer on one device, the file of a part."""

from __future__ import annotations

import copy
import gc
import json
import math
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import yaml
from torch import Tensor

from pangu.common.files import write_atomically
from pangu.config.schema import RunConfig
from pangu.data.batch import Batch, make_batch
from pangu.metrics.devices import processor_name
from pangu.pipeline.layouts import choose_layout
from pangu.topology.mesh import Mesh
from pangu.topology.placement import Placement
from pangu.training.autotune import choose
from pangu.training.step import Trainer
from pangu.zero import flat_parameter

ROOT = Path(__file__).resolve().parent.parent.parent
QUIET = (
    *("data=synthetic", "validation.every=0", "checkpoint.every=0", "metrics.wandb=off", "metrics.tensorboard=false"),
    *("parallel.tensor=1", "parallel.zero=0", "parallel.pipeline=1", "model.dropout=0", "model.attention_dropout=0"),
    *("faults.straggler_every=0", "lr_schedule.warmup_steps=0", "sample.prompts=[]"),
)
PRESETS = {
    "tiny": (
        *("model=pangu_quickstart", "model.positions=learned", "model.layers=3", "model.hidden=32", "model.heads=4"),
        *("model.vocab=101", "model.sequence=16", "batch.global_size=8", "batch.micro_size=2", "optimizer.lr=0.01"),
    ),
    "gpt2_124m": ("+config=gpt2_124m", "batch.micro_size=16", "batch.global_size=32"),
    "pangu_350m": ("+config=pangu_350m", "batch.micro_size=8", "batch.global_size=16"),
    # GPT-3 XL (Brown et al. 2020, table 2.1), with 16 heads of 128 as of its larger siblings
    "gpt3_1_3b": (
        *("+config=gpt3_175b", "model.layers=24", "model.hidden=2048", "model.heads=16", "optimizer.lr=2e-4"),
        *("batch.micro_size=4", "batch.global_size=8", "memory.recompute=none"),
    ),
    "pangu_2_6b": ("+config=pangu_2_6b", "batch.micro_size=4", "batch.global_size=8", "memory.recompute=none"),
    "pangu_13b": ("+config=pangu_13b", "batch.micro_size=4", "batch.global_size=8"),
    "pangu_200b": ("+config=pangu_200b", "batch.micro_size=1", "batch.global_size=4"),
}
"""Files of presets/ -> the words of `pretrain.py` that compose them, beside `QUIET`; `python -m benchmarks.gpu_suite
--compose` writes them."""
SMALL = {
    **{"model.layers": 3, "model.hidden": 64, "model.heads": 4, "model.sequence": 64, "model.vocab": 512},
    **{"batch.micro_size": 2, "batch.global_size": 4},
}
"""Overrides that replace a preset's sizes on a CPU."""
PACKAGES = ("torch", "numpy", "transformers", "safetensors", "flash-attn", "apex", "triton", "pytest")


def composed(name: str) -> dict[str, Any]:
    """Return what a file of presets/ holds, from the shipped recipes. Needs Hydra, which nothing else here does."""
    from pangu.training.command import compose

    return compose(ROOT / "configs", (*PRESETS[name], *QUIET))


def write_presets() -> None:
    """Write all files of presets/ again."""
    for name in PRESETS:
        _file(name).write_text(yaml.safe_dump(composed(name), sort_keys=False), encoding="utf-8")


def _file(name: str) -> Path:
    return Path(__file__).parent / "presets" / f"{name}.yaml"


def preset(name: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A resolved configuration as plain dictionaries. `changes`: dotted key -> value."""
    values = yaml.safe_load(_file(name).read_text(encoding="utf-8"))
    for key, value in (changes or {}).items():
        *groups, last = key.split(".")
        place = values
        for group in groups:
            place = place[group]
        assert last in place, key
        place[last] = copy.deepcopy(value)
    return values


@dataclass
class Setting:
    """Where a part runs, and what it writes."""

    device: torch.device
    output: Path
    part: str
    document: dict[str, Any] = field(default_factory=dict)
    _began: tuple[float, float] = field(default_factory=lambda: (time.perf_counter(), time.process_time()))

    @property
    def on_host(self) -> bool:
        """Then everything is small: it is to be seen that it works."""
        return self.device.type == "cpu"

    @property
    def path(self) -> Path:
        return self.output / f"{self.part}.json"

    def values(self, name: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A preset as it is run here; its whole configuration goes into the file."""
        sizes = SMALL if self.on_host and name != "tiny" else {}
        values = preset(name, {**sizes, **(changes or {}), "train.device": self.device.type})
        known = self.document["configurations"]
        label = name if not changes else f"{name} {' '.join(f'{key}={value}' for key, value in changes.items())}"
        known.setdefault(label, values)
        return values

    def begin(self, command: str) -> None:
        """Write what is known before anything is measured."""
        self.document |= {
            "part": self.part,
            "command": command,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "commit": commit(),
            "device": describe(self.device),
            "versions": {"python": platform.python_version(), **versions()},
            "configurations": {},
            "rows": [],
        }
        self._write()

    def add(self, row: str, **figures: Any) -> None:
        """Write a row at once: what comes later may fail."""
        self.document["rows"].append({"row": row, **figures, "during": self._during()})
        self._write()
        print(f"  {row}: {', '.join(f'{key} {short(value)}' for key, value in figures.items())}", flush=True)

    def _during(self) -> dict[str, Any]:
        """Seconds since the row before, by the clock and of this process; allocator retries, clocks and power."""
        now = time.perf_counter(), time.process_time()
        wall, process = (new - old for new, old in zip(now, self._began, strict=True))
        self._began = now
        found: dict[str, Any] = {"wall_seconds": wall, "process_seconds": process}
        if self.device.type == "cuda":
            found["allocator_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
            found |= clocks()
        return found

    def _write(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, to_json(self.document), sync=False)

    @contextmanager
    def row(self, name: str) -> Iterator[dict[str, Any]]:
        """Figures of a row, which is written when the block ends. An error in it is one of them, and the next row is
        begun all the same."""
        figures: dict[str, Any] = {}
        try:
            yield figures
        except Exception as error:
            figures["error"] = f"{type(error).__name__}: {str(error)[:2000]}"
        self.add(name, **figures)

    def synchronize(self) -> None:
        if not self.on_host:
            torch.accelerator.synchronize()

    def release(self) -> None:
        """Give back the memory of what nobody holds any more, and count peaks from here."""
        gc.collect()
        if not self.on_host:
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats()


GPU_FIGURES = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
"""Figures of nvidia-smi, in MHz, watts and degrees Celsius."""


def clocks() -> dict[str, float]:
    """Clocks, power and temperature of the first GPU; nothing where nvidia-smi is not there or does not know."""
    words = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(GPU_FIGURES)}", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=5).stdout
        return dict(zip(GPU_FIGURES, map(float, told.split(",")), strict=True))
    return {}


def to_json(value: Any) -> bytes:
    """With null for what is not finite, which is no JSON."""

    def plain(one: Any) -> Any:
        if isinstance(one, float):
            return one if math.isfinite(one) else None
        if isinstance(one, Mapping):
            return {str(key): plain(item) for key, item in one.items()}
        return [plain(item) for item in one] if isinstance(one, (list, tuple)) else one

    return (json.dumps(plain(value), indent=1, default=str) + "\n").encode()


def short(value: Any) -> str:
    """A figure for people."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).partition("\n")[0][:120]


def commit() -> str:
    """Return the commit of the code, and whether files differ from it; `unknown` outside of a checkout."""
    with suppress(OSError, subprocess.SubprocessError):
        words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return "unknown"


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def describe(device: torch.device) -> dict[str, Any]:
    """The device, its memory and driver."""
    facts: dict[str, Any] = {"type": device.type, "name": processor_name(device), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        facts["gib"] = torch.cuda.get_device_properties(device).total_memory / 2**30
        facts |= {"capability": torch.cuda.get_device_capability(device), "cuda": torch.version.cuda}
        facts |= {"nccl": torch.cuda.nccl.version(), "cudnn": torch.backends.cudnn.version()}
    return facts


def make_trainer(values: Mapping[str, Any], device: torch.device, world: int = 1, mesh: Mesh | None = None) -> Trainer:
    """The trainer of a configuration, as `pangu.training.run` makes it; with several processes their group is there."""
    config, layout, stages = choose_layout(values, world)
    mesh = mesh or Mesh.connect(layout, device, config.parallel.timeout_s)
    choices = choose(config, mesh)
    torch.set_float32_matmul_precision(choices.fp32_matmul)
    return Trainer(config, mesh, stages, choices)


@contextmanager
def quick_weights(device: torch.device) -> Iterator[None]:
    """First weights by the device's own generator, the same in each block. By ours, which gives every layout the same,
    a host takes half a minute for 2.6B."""
    source = torch.Generator(device).manual_seed(0)

    def fill(tensor: Tensor, placement: Placement, seed: int, offsets: tuple[int, ...] | None = None) -> None:
        if placement.std is None:
            tensor.fill_(placement.constant)
        else:
            tensor.copy_(torch.randn(tensor.shape, device=device, generator=source).mul_(placement.std))

    with patch.object(flat_parameter, "fill", fill):
        yield


def tokens_of(config: RunConfig, step: int = 0) -> Tensor:
    """int64 [global batch, sequence + 1], a function of the step."""
    size = (config.batch.global_size, config.model.sequence + 1)
    return torch.randint(0, config.model.vocab, size, generator=torch.Generator().manual_seed(step))


def batches_of(config: RunConfig, replica: int = 0, replicas: int = 1, step: int = 0) -> list[Batch]:
    """The micro-batches of a replica."""
    micro, every = config.batch.micro_size, tokens_of(config, step)
    own = np.array_split(np.arange(len(every)), replicas)[replica]
    parts = [own[begin : begin + micro] for begin in range(0, len(own), micro)]
    return [make_batch(every[part].numpy(), part.tolist(), config.data.packing) for part in parts]


def looped(trainer: Trainer) -> Callable[[], float]:
    """Steps as the training loop makes them, on the same batches: the result of one is read while the next is computed.
    Each returns the loss of the one before, the first NaN."""
    batches, pending = batches_of(trainer.config), None

    def step() -> float:
        nonlocal pending
        trainer.forward_backward(batches)
        loss = math.nan if pending is None else trainer.read(pending).loss
        pending = trainer.update()
        return loss

    return step


def seconds_of(setting: Setting, step: Callable[[], object], budget_s: float, stretch: int = 3) -> list[float]:
    """Seconds of a step, in the mean over stretches of steps, each until the device has finished."""
    taken: list[float] = []
    while len(taken) < 2 or (stretch * sum(taken) < budget_s and len(taken) < 10):
        setting.synchronize()
        began = time.perf_counter()
        for _ in range(stretch):
            step()
        setting.synchronize()
        taken.append((time.perf_counter() - began) / stretch)
    return taken


def require_near(found: Sequence[float], expected: Sequence[float], tolerance: float) -> None:
    """Raises ValueError if two lists of losses differ by more anywhere, or are of different lengths."""
    off = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    if not off <= tolerance:  # which is so for what is no number, too
        raise ValueError(f"{list(found)} are up to {off:.3g} from {list(expected)}; {tolerance:g} are allowed")
