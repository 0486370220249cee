"""Flash attention (Dao 2023) with the dropout masks of `reference`, in one pass: `model.attention=triton`.

No library's fused kernel takes a dropout mask or its keys as input, and FlexAttention changes scores before the softmax
only, so that it would have to attend twice.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from pangu.common.errors import LocalError
from pangu.layers.attention import split_heads, split_projections
from pangu.layers.attention_blocks import Gradients, Output, Scores, Tile, TileDropout
from pangu.layers.dropout import Dropout, DropoutKeys, Masks
from pangu.layers.dropout_masks import COLUMNS, bound_of, signed
from pangu.layers.kernels import QKV, MaskAndBias

_LIBRARY = torch.library.Library("pangu", "FRAGMENT")


class VisibleRange(NamedTuple):
    """Range of the keys that each query sees, which is contiguous within a document and a window."""

    oldest: Tensor | None
    """Position of the first key that a query sees, int32 [batch or 1, sequence]; None: 0. The last is its own."""
    newest: Tensor | None
    """Position of the last query that sees a key, int32 [batch or 1, sequence]."""

    @classmethod
    def of(cls, terms: MaskAndBias) -> VisibleRange:
        """Return the ranges of a mask, shared by all layers; both positions are non-decreasing, as kernels require."""
        mask, length, device = terms.mask, terms.length, terms.device
        assert mask.sparse is None
        assert (mask.documents is None) == (mask.bounds is None)
        if mask.is_plain_causal:
            return cls(None, None)
        rows = 1 if mask.documents is None else mask.documents.shape[0]
        places = torch.arange(rows * length, dtype=torch.int32, device=device).view(rows, length)
        if mask.bounds is not None:
            after, start = torch.searchsorted(mask.bounds, places, right=True), places[:, :1]
            oldest, newest = mask.bounds[after - 1] - start, mask.bounds[after] - (start + 1)
        else:
            oldest, newest = torch.zeros_like(places), torch.full_like(places, length - 1)
        if mask.window is not None:
            places = places - places[:, :1]
            oldest = torch.maximum(oldest, places - (mask.window - 1))
            newest = torch.minimum(newest, places + (mask.window - 1))
        return cls(oldest, newest)


class KernelMask(NamedTuple):
    """Mask and dropout of an attention call."""

    visible: VisibleRange
    masks: Masks | None
    query_at: int = 0
    """Position of the first query; `key_at`: of the first key."""
    key_at: int = 0

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Last arguments of both operators."""
        return *(self.masks or (None, None, 0.0)), self.query_at, self.key_at


def attend(query: Tensor, key: Tensor, value: Tensor, masked: KernelMask) -> tuple[Tensor, Tensor]:
    """Return output [batch, heads, queries, head size] and logarithms of the sums of exponentials."""
    # The latter are fp32 [batch, heads, queries]. A query that sees nothing has output 0 and -inf.
    return torch.ops.pangu.attend(query, key, value, masked.visible.oldest, *masked.arguments)


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum: Tensor, masked: KernelMask
) -> tuple[Tensor, ...]:
    """Return gradients of queries, keys and values."""
    # `output` and `log_sum` are those of all keys that the queries see; `key` may be a part of these.
    tensors = grad, query, key, value, output, log_sum, *masked.visible
    return _parts(torch.ops.pangu.attend_backward(*tensors, *masked.arguments), query, key)


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        oldest: Tensor | None,
        newest: Tensor | None,
        rows: Tensor | None,
        place: Tensor | None,
        probability: float,
    ) -> Tensor:
        masks = None if rows is None or place is None else Masks(rows, place, probability)
        ctx.masked = KernelMask(VisibleRange(oldest, newest), masks)
        output, log_sum = attend(query, key, value, ctx.masked)
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sum = ctx.saved_tensors
        gradients = attend_backward(grads[0], query, key, value, output, log_sum, ctx.masked)
        return (*gradients, None, None, None, None, None)


class Triton:
    """Kernel of our own in Triton, for contiguous keys that end with the query's own: no block-sparse masks."""

    def __init__(self, terms: MaskAndBias) -> None:
        """Compute the ranges of visible keys."""
        self.visible = VisibleRange.of(terms)

    def __call__(
        self, qkv: QKV, dropout: Dropout, keys: DropoutKeys | None, below: Tensor | None, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention; see `Kernel`."""
        rows, place, probability = dropout.masks(qkv.query, keys) or (None, None, 0.0)
        return _Attention.apply(*qkv, *self.visible, rows, place, probability), None


class TritonBlocks:
    """Blocks with the Triton kernels."""

    def __init__(self, terms: MaskAndBias) -> None:
        """Compute the ranges of visible keys."""
        self.visible = VisibleRange.of(terms)

    def forward(self, part: QKV, block: Tile, drops: TileDropout, scores: Scores) -> Output:
        """Attend to a block of keys; see `Blocks`."""
        return Output(*attend(*part, self._masked(part, block, drops)))

    def backward(
        self, grad: Tensor, part: QKV, block: Tile, drops: TileDropout, scores: Scores, full: Output, into: Gradients
    ) -> None:
        """Add the gradients of a block; see `Blocks`."""
        gradients = attend_backward(grad, *part, full.output, full.log_sum, self._masked(part, block, drops))
        for total, gradient in zip(into.of, gradients, strict=True):
            total.add_(gradient)

    def _masked(self, part: QKV, block: Tile, drops: TileDropout) -> KernelMask:
        return KernelMask(self.visible, drops.dropout.masks(part.query, drops.keys), block.query, block.key)


def head_parts(size: int) -> tuple[int, int]:
    """Split heads of `size` columns into two powers of two for the kernels, at least 16, or the second one 0."""
    # Beyond 128 columns, two parts do not fit into a GPU's registers.
    whole = max(16, 1 << (size - 1).bit_length())
    first = whole // 2
    rest = max(16, 1 << max(0, size - first - 1).bit_length())
    return (whole, 0) if not 16 <= first <= 64 or first + rest >= whole else (first, rest)


INSTRUCTIONS = {9: "wgmma", 10: "tcgen05", 11: "tcgen05"}
"""Major compute capability -> instruction of the tensor cores; "mma" for all others."""


class Tiles(NamedTuple):
    """Tile sizes and launch options of a kernel."""

    queries: int
    keys: int
    warps: int
    stages: int


@cache
def matmul_instruction(device: torch.device) -> str:
    """Return the instruction of a device's tensor cores: "mma" of registers, "wgmma" or "tcgen05" of shared memory."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    return INSTRUCTIONS.get(major, "mma")


def tiles_of(kernel: str, size: int, instruction: str) -> Tiles:
    """Return the tiles of a kernel for heads of `size` columns."""
    # The largest whose values fit into the registers, as Triton compiles them (`benchmarks/attention_kernels.py`).
    if size > 128:
        return Tiles(64, 32, 8, 2)
    if kernel == "attend":
        return Tiles(128, 64, 8, 3)
    if kernel == "query_gradients":
        return Tiles(128, 32 if instruction == "mma" else 64, 8, 2)
    if instruction == "mma" and size > 80:
        return Tiles(64, 64, 8, 2)
    # Two programs of few columns share the memory of sums: one computes while the other one loads.
    return Tiles(64, 64, 4, 1) if instruction == "tcgen05" and size <= 80 else Tiles(32, 128, 8, 2)


class _Launcher(NamedTuple):
    """Arguments that all kernels share."""

    query: Tensor
    key: Tensor
    # as `KernelMask.arguments`
    rows: Tensor | None
    place: Tensor | None
    probability: float
    query_at: int
    key_at: int

    def launch(self, name: str, columns: Sequence[Tensor], sums: Sequence[Tensor], edge: Tensor | None) -> None:
        """Launch a kernel; `columns` are tensors with head columns."""
        from triton.errors import TritonError  # noqa: PLC0415 - optional package

        from pangu.layers import triton_kernels  # noqa: PLC0415 - it imports triton

        batch, heads, queries, size = self.query.shape
        groups, keys = self.key.shape[1:3]
        instruction, is_key_kernel = matmul_instruction(self.query.device), name == "key_gradients"
        tiles = tiles_of(name, size, instruction)
        count = -(-queries // tiles.queries) * heads * batch
        grid = (-(-keys // tiles.keys), groups, batch) if is_key_kernel else (count,)
        place = 0 if self.place is None else int(self.place)
        # tcgen05 gives a thread whole rows of a matmul: of transposed scores, a single key
        shared = not is_key_kernel or instruction != "tcgen05"
        kernel, options = getattr(triton_kernels, name), {"num_warps": tiles.warps, "num_stages": tiles.stages}
        arguments = (
            *columns,
            *sums,
            self.query if edge is None else edge,  # not read
            self.query if self.rows is None else self.rows,
            *(stride for part in columns for stride in part.stride()[:3]),
            heads,
            heads // groups,
            queries,
            keys,
            0 if edge is None or edge.shape[0] == 1 else edge.stride(0),
            self.query_at,
            self.key_at,
            math.log2(math.e) / math.sqrt(size),
            signed(place % 2**32, 32),
            place >> 32,
            bound_of(self.probability),
            1.0 / (1.0 - self.probability),
            edge is not None,
            self.rows is not None,
            shared and self.key_at % COLUMNS == tiles.keys % COLUMNS == 0,
            size,
            *head_parts(size),
            tiles.queries,
            tiles.keys,
            *([instruction != "wgmma"] if is_key_kernel else []),
        )
        try:
            kernel[grid](*arguments, **options, enable_fp_fusion=True)
        except (TritonError, subprocess.SubprocessError, OSError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            fix = "set model.attention=reference"
            raise LocalError(f"model.attention = triton cannot run on this device ({reason}); {fix}") from error


def _lined_up(*parts: Tensor) -> list[Tensor]:
    return [part if part.stride(-1) == 1 else part.contiguous() for part in parts]


def _attend(query: Tensor, key: Tensor, value: Tensor, oldest: Tensor | None, *mask_args: Any) -> tuple[Tensor, Tensor]:
    query, key, value = _lined_up(query, key, value)
    output, log_sum = _like_attend(query)
    launcher = _Launcher(query, key, *mask_args)
    assert launcher.rows is None or launcher.rows.is_contiguous()
    launcher.launch("attend", (query, key, value, output), (log_sum,), oldest)
    return output, log_sum


def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    oldest: Tensor | None,
    newest: Tensor | None,
    *mask_args: Any,
) -> Tensor:
    grad, query, key, value, output = _lined_up(grad, query, key, value, output)
    stacked = _like_attend_backward(grad, query, key, value)
    grad_query, grad_key, grad_value = _parts(stacked, query, key)
    log_sum = log_sum.contiguous()
    sums = log_sum, torch.empty_like(log_sum)
    launcher = _Launcher(query, key, *mask_args)
    launcher.launch("query_gradients", (query, key, value, grad, output, grad_query), sums, oldest)
    launcher.launch("key_gradients", (query, key, value, grad, grad_key, grad_value), sums, newest)
    return stacked


def _parts(stacked: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values, whose rows lie side by side if there are equally many."""
    # side by side, they are the gradient of a stacked projection without a copy (`stack_projections`)
    batch, heads, queries, size = query.shape
    groups, keys = key.shape[1:3]
    widths = [heads * size, groups * size, groups * size]
    if queries == keys:
        return split_projections(stacked.view(queries, batch, -1), widths, size)
    parts = stacked.split([query.numel(), key.numel(), key.numel()])
    return tuple([split_heads(part.view(-1, batch, n), size) for part, n in zip(parts, widths, strict=True)])


def _like_attend(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    batch, heads, length, size = query.shape
    output = query.new_empty(length, batch, heads, size).permute(1, 2, 0, 3)
    return output, query.new_empty(query.shape[:3], dtype=torch.float32)


def _like_attend_backward(grad: Tensor, query: Tensor, key: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.numel() + 2 * key.numel())


_OF_MASK = "Tensor? rows, Tensor? place, float probability, int query_at, int key_at"
_LIBRARY.define(f"attend(Tensor query, Tensor key, Tensor value, Tensor? oldest, {_OF_MASK}) -> (Tensor, Tensor)")
_LIBRARY.define(
    "attend_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor log_sum, "
    f"Tensor? oldest, Tensor? newest, {_OF_MASK}) -> Tensor"
)
_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
_LIBRARY.impl("attend_backward", _attend_backward, "CompositeExplicitAutograd")
torch.library.register_fake("pangu::attend", _like_attend, lib=_LIBRARY)
torch.library.register_fake("pangu::attend_backward", _like_attend_backward, lib=_LIBRARY)
