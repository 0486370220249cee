"""Operators that stand in the graph of a compiled block for code that cannot be traced.

One compiled code serves all layers of a kind. The differences between them (weights, the place of a dropout, the matrix
of a gradient) are passed as tensors, whose values no guard checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from pangu.layers.dropout import Dropout, DropoutKeys, Masks, keys_of_heads
from pangu.layers.dropout_masks import drop
from pangu.layers.linear import ParallelLinear, RowParallelLinear
from pangu.layers.recompute import SavedTensors, checkpointed
from pangu.layers.tensor_parallel_matmul import ColumnParallelMatmul, LocalMatmul, RowParallelMatmul, Use
from pangu.topology.placement import TensorRank

_LIBRARY = torch.library.Library("pangu", "FRAGMENT")
_NUMBERS = itertools.count()
_LAYERS: WeakValueDictionary[int, ParallelLinear] = WeakValueDictionary()
"""Layers by number, as operators take only tensors and numbers."""


# One operator in the forward and one in the backward pass, each including its communication, which overlaps as it does
# without a graph.
@dataclass(frozen=True)
class GraphMatmul:
    """Traceable matmul of a layer with communication, fp8 or its own weight gradient."""

    number: Tensor
    by_rows: bool
    """True if partial sums are added over ranks."""

    def __call__(self, layer: ParallelLinear, x: Tensor) -> Tensor:
        """Apply the layer to x."""
        slices, x = layer.region.num_slices, x.contiguous()
        rows = x.shape[0] // slices if self.by_rows else x.shape[0] * slices
        # autograd would drop a node of which it gets no gradient
        apart = layer.store is not None and x.requires_grad
        weight = layer.weight.detach() if apart else layer.weight
        bias = layer.bias.detach() if layer.bias is not None and apart else layer.bias
        out: Tensor = torch.ops.pangu.matmul(x, weight, bias, self.number, rows, apart)
        return out


def hold_in_graph(layer: nn.Module) -> None:
    """Replace the matmul of a layer by an operator in traced graphs, if the compiler cannot trace it."""
    if not isinstance(layer, ParallelLinear) or (layer.region.size == 1 and layer.store is None and layer.fp8 is None):
        return
    number = next(_NUMBERS)
    layer.in_graph = GraphMatmul(torch.tensor(number), by_rows=_kind(layer) is RowParallelMatmul)
    _LAYERS[number] = layer


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, rows: int, apart: bool) -> Tensor:
    layer = _LAYERS[int(number)]
    return _kind(layer).value(x, Use(layer.weight, layer.bias, layer.region, layer.store, layer.fp8))


def _kind(layer: ParallelLinear) -> Any:
    if layer.region.size == 1:
        return LocalMatmul
    return RowParallelMatmul if isinstance(layer, RowParallelLinear) else ColumnParallelMatmul


def _like_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor, rows: int, apart: bool) -> Tensor:
    return x.new_empty(rows, *x.shape[1:-1], weight.shape[0])


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, number: Tensor, apart: bool, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor, ...]:
    """Return the gradients of input, weight and, if requested, bias; empty if they go elsewhere (`apart`)."""
    layer = _LAYERS[int(number)]
    use = Use(layer.weight, layer.bias, layer.region, layer.store if apart else None, fp8=layer.fp8)
    grad_x, _, _, _, *others = _kind(layer).backward(SimpleNamespace(saved_tensors=(x, weight), use=use), grad)
    asked_for: list[Any] = [grad_x]
    for parameter, gradient, asked in zip((layer.weight, layer.bias), others, (not apart, needs_bias), strict=True):
        if gradient is not None and parameter is not None and not asked:
            parameter.backward(gradient)  # the store was not open
        asked_for.append(x.new_empty(0) if gradient is None or not asked else gradient)
    return tuple(asked_for)


def _like_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, number: Tensor, apart: bool, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor, ...]:
    weight_like = torch.empty_like(weight) if needs_weight else x.new_empty(0)
    return torch.empty_like(x), weight_like, x.new_empty(weight.shape[0] if needs_bias else 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, number, _, ctx.apart = inputs
    ctx.save_for_backward(x, weight, number)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, number = ctx.saved_tensors
    _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    grad_x, grad_weight, grad_bias = torch.ops.pangu.matmul_gradients(
        grad.contiguous(), x, weight, number, ctx.apart, needs_weight, needs_bias
    )
    return grad_x, grad_weight if needs_weight else None, grad_bias if needs_bias else None, None, None, None


_LIBRARY.define("matmul(Tensor x, Tensor weight, Tensor? bias, Tensor number, int rows, bool apart) -> Tensor")
_LIBRARY.define(
    "matmul_gradients(Tensor grad, Tensor x, Tensor weight, Tensor n, bool apart, bool needs_weight, bool needs_bias)"
    " -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("matmul", _matmul, "CompositeExplicitAutograd")
_LIBRARY.impl("matmul_gradients", _gradients, "CompositeExplicitAutograd")
torch.library.register_fake("pangu::matmul", _like_matmul, lib=_LIBRARY)
torch.library.register_fake("pangu::matmul_gradients", _like_gradients, lib=_LIBRARY)
torch.library.register_autograd("pangu::matmul", _backward, setup_context=_save, lib=_LIBRARY)


@dataclass(frozen=True)
class TensorKeys(DropoutKeys):
    """Dropout keys of a layer as tensors; `rows` are those of this rank's part of the sequence."""

    heads: Tensor | None = None
    """Row keys of attention probabilities, int64 [batch, heads / ranks, sequence]."""
    places: Mapping[str, Tensor] = field(default_factory=dict)
    """Name of a dropout in its layer -> key of its place and step, int64 scalar on the host."""

    @classmethod
    def of(cls, keys: DropoutKeys, region: TensorRank, num_heads: int) -> TensorKeys:
        """Return the keys that all layers share in a micro-batch; `num_heads` counts those of all ranks."""
        assert keys.rows is not None
        like = keys.rows[:1, :1].expand(1, num_heads // region.size)
        heads = keys_of_heads(keys.rows, like, region.rank * like.shape[1])
        rows = keys.rows.chunk(region.size)[region.rank] if region.slices_sequence else keys.rows
        return cls(keys.seed, keys.step, keys.samples, rows, heads)

    def at(self, dropouts: Iterable[Dropout]) -> TensorKeys:
        """Return the keys of a layer with these dropouts."""
        return replace(self, places={_name(dropout): torch.tensor(dropout.key(self)) for dropout in dropouts})


def _name(dropout: Dropout) -> str:
    return dropout.place.rpartition(".")[2]


class GraphDropout(Dropout):
    """Dropout with the masks of `Dropout`, from keys that are tensors."""

    def __init__(self, dropout: Dropout) -> None:
        """Take the place of a dropout."""
        self.probability, self.place, self.region = dropout.probability, dropout.place, dropout.region
        self.name = _name(dropout)

    def hidden(self, x: Tensor, keys: DropoutKeys | None, residual: Tensor | None = None) -> Tensor:
        """Drop from hidden states, and add `residual`; see `Dropout.hidden`."""
        if self.probability == 0.0 or not isinstance(keys, TensorKeys):
            return super().hidden(x, keys, residual)
        assert keys.rows is not None
        return drop(x, residual, keys.rows, keys.places[self.name], self.probability)

    def probabilities(self, x: Tensor, keys: DropoutKeys | None) -> Tensor:
        """Drop from attention probabilities; see `Dropout.probabilities`."""
        if self.probability == 0.0 or not isinstance(keys, TensorKeys):
            return super().probabilities(x, keys)
        assert keys.heads is not None
        return drop(x, None, keys.heads, keys.places[self.name], self.probability)

    def masks(self, query: Tensor, keys: DropoutKeys | None) -> Masks | None:
        """Return the masks for a kernel; see `Dropout.masks`."""
        if self.probability == 0.0 or not isinstance(keys, TensorKeys):
            return super().masks(query, keys)
        assert keys.heads is not None
        return Masks(keys.heads, keys.places[self.name], self.probability)

    def in_kernel(self, keys: DropoutKeys | None) -> float:
        """Return the probability; the generator has already been seeded."""
        return self.probability if isinstance(keys, TensorKeys) else super().in_kernel(keys)


class GraphTensors(SavedTensors):
    """Saved tensors of a compiled graph: the compiler gets a list of what to recompute, as it ignores hooks."""

    @contextmanager
    def discarding(self, compute: Callable[[Tensor], Tensor], source: Tensor, on: bool = True) -> Iterator[Tensor]:
        """Yield `compute(source)`, recomputed in the backward pass."""
        yield checkpointed(compute, source, on=on)
