"""Attention kernels, forward and backward, at the presets' shapes: torch's own by name, flex compiled, variable
lengths, and those of the trainer; causal, over documents, with dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_suite.setting import Setting
from pangu.calibration.clock import Clock
from pangu.config.attention import ABILITIES
from pangu.config.build import build
from pangu.config.schema import RunConfig
from pangu.layers.attention import AttentionCore
from pangu.layers.builder import Builder
from pangu.layers.dropout import DropoutKeys
from pangu.layers.gpu_kernels import KERNELS
from pangu.layers.kernel_choice import AttentionShape, attention_trial
from pangu.layers.kernels import QKV, MaskAndBias
from pangu.layers.masks import AttentionMask
from pangu.topology.placement import PlacementTable

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
DOCUMENTS = 2
"""Number of documents of equal length in a sequence, as in the trainer's own trials."""


@dataclass(frozen=True)
class Case:
    """Shape and options that attention is measured on."""

    rows: int
    heads: int
    sequence: int
    size: int
    documents: bool = False
    dropout: float = 0.0

    @property
    def flops(self) -> float:
        """FLOPs of both passes over what the mask leaves; recomputed scores count, as in papers of flash attention
        (Dao 2023, section 4.1)."""
        return 3.5 * 4 * self.rows * self.heads * self.sequence * self.longest * self.size / 2

    @property
    def longest(self) -> int:
        """Tokens of a document."""
        return self.sequence // (DOCUMENTS if self.documents else 1)

    def bounds(self, device: torch.device) -> Tensor:
        """Return the bounds of documents, as `AttentionMask` has them."""
        return torch.arange(0, self.rows * self.sequence + 1, self.longest, device=device, dtype=torch.int32)

    def mask(self, device: torch.device) -> AttentionMask:
        if not self.documents:
            return AttentionMask()
        places = torch.arange(self.sequence, device=device) * DOCUMENTS // self.sequence
        return AttentionMask(places.expand(self.rows, -1).contiguous(), None, self.bounds(device))


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Query, key, value [batch, heads, sequence, head size] -> the same."""


def torchs(backend: SDPBackend, case: Case, device: torch.device) -> Attention:
    """scaled_dot_product_attention, by one kernel."""
    places = range(case.sequence)
    mask = case.mask(device).dense(places, places, device) if case.documents else None
    attend = partial(F.scaled_dot_product_attention, attn_mask=mask, is_causal=mask is None, dropout_p=case.dropout)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return attend(query, key, value)

    return attention


def flex(case: Case, device: torch.device) -> Attention:
    """FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows = case.rows if case.documents else None
    blocks = create_block_mask(case.mask(device).rule(), rows, None, case.sequence, case.sequence, device)
    return partial(torch.compile(flex_attention), block_mask=blocks)


def variable(case: Case, device: torch.device) -> Attention:
    """torch's attention over sequences of different lengths, as many as there are documents."""
    from torch.nn.attention.varlen import varlen_attn

    longest, bounds = case.longest, case.bounds(device)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        flat = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        result = varlen_attn(*flat, bounds, bounds, longest, longest, window_size=(-1, 0))  # causal
        return result.unflatten(0, (case.rows, -1)).transpose(1, 2)

    return attention


def by_hash(kernel: str, case: Case, device: torch.device) -> Attention:
    """One of the trainer's kernels that drop the same elements in every layout."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    compute = KERNELS[kernel](MaskAndBias(case.mask(device), None, case.sequence, dtype, device))
    core = AttentionCore(Builder(PlacementTable()), case.dropout)
    keys = DropoutKeys(0, 0, tuple(range(case.rows))).on(torch.zeros(case.rows, case.sequence, device=device))
    return lambda *parts: core(QKV(*parts), compute, keys)[0]


def trials(
    case: Case, dtype: torch.dtype, device: torch.device, of_trainer: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Kernel -> what makes its trial ready, forward and backward. `of_trainer`: the trainer's kernels in the place of
    torch's flex, which is one of them: compiling takes longest."""
    makers: dict[str, Callable[[Case, torch.device], Attention]] = {
        f"torch {name}": partial(torchs, backend) for name, backend in BACKENDS.items()
    }
    if case.dropout > 0:
        makers |= {f"trainer's {kernel}": partial(by_hash, kernel) for kernel in ("triton", "flex", "reference")}
    else:
        makers |= {"varlen": variable, **({} if of_trainer else {"flex, compiled": flex})}
    for name, make in makers.items():
        yield name, partial(_trial, make, case, dtype, device)
    if case.dropout == 0 and of_trainer:
        shape = AttentionShape(
            case.rows, case.heads, case.heads, case.sequence, case.size, case.documents, window=None, biased=False
        )
        for kernel in ABILITIES:
            yield f"trainer's {kernel}", partial(attention_trial, kernel, shape, dtype, device)


def _trial(
    make: Callable[[Case, torch.device], Attention], case: Case, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    attention = make(case, device)
    # [sequence, batch, heads, head size], as the projections leave it
    shape = (3, case.sequence, case.rows, case.heads, case.size)
    joined = torch.randn(shape, device=device).to(dtype).requires_grad_()
    weight = torch.randn(case.rows, case.heads, case.sequence, case.size, device=device).to(dtype)

    def once() -> object:
        output = attention(*joined.permute(0, 2, 3, 1, 4))
        return torch.autograd.grad(output, joined, weight)

    return once


def cases(setting: Setting) -> Iterator[tuple[str, Case]]:
    """Presets of head size 64, 80 and 128, and the masks of each."""
    for name in ("pangu_2_6b", "pangu_350m", "gpt3_1_3b"):
        config = build(RunConfig, setting.values(name))
        model = config.model
        case = Case(config.batch.micro_size, model.heads, model.sequence, model.hidden // model.heads)
        yield f"{name}, causal", case
        yield f"{name}, documents", replace(case, documents=True)
        yield f"{name}, dropout", replace(case, dropout=0.1)


def measure(setting: Setting) -> None:
    """A row for each kernel and case; one that cannot run here says why."""
    clock = Clock(setting.device, quick=setting.on_host)
    dtype = torch.float32 if setting.on_host else torch.bfloat16
    for name, case in cases(setting):
        for kernel, make in trials(case, dtype, setting.device, of_trainer=name.startswith("pangu_2_6b")):
            setting.release()
            try:
                seconds = clock.seconds(make())
            except Exception as error:
                setting.add(f"{name}, {kernel}", cannot=f"{type(error).__name__}: {error}"[:300])
                continue
            peak = None if setting.on_host else torch.accelerator.max_memory_allocated() / 2**20
            rate = case.flops / seconds / 1e12
            setting.add(f"{name}, {kernel}", microseconds=1e6 * seconds, tflops=rate, peak_mib=peak)
