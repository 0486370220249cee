"""Expert layers in the notation of Megatron-LM and its successors: a number, or a list for all layers."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from pangu.config.model import MOST_LAYERS


def layer_pattern(frequency: Any, layers: int, dense: int = 0) -> list[int]:
    """Return 0 or 1 (experts) for each layer; empty if unreadable.

    N or -N has experts in layers 0, N, 2N etc. except the first `dense`; lists and sums of them have 0 or 1 per layer.
    """
    layers = min(layers, MOST_LAYERS)
    if isinstance(frequency, int) and frequency != 0:
        return [int(n >= dense and n % frequency == 0) for n in range(layers)]
    try:
        values = _listed(ast.parse(str(frequency)[:10_000].strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return []
    return values if isinstance(values, list) and len(values) == layers else []


def spread(pattern: Sequence[int]) -> tuple[int, int] | None:
    """Return `model.dense_layers` and `model.expert_every` of a pattern; None if it has none."""
    first = next((n for n, has_experts in enumerate(pattern) if has_experts), -1)
    for dense, every in ((dense, first - dense + 1) for dense in range(first + 1)):
        if list(pattern) == [int(n >= dense and (n - dense) % every == every - 1) for n in range(len(pattern))]:
            return dense, every
    return None


def _listed(node: ast.expr) -> Any:
    """Return the value of sums and multiples of short lists, as Megatron takes them: `([0]*1+[1]*47)`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and 0 <= node.value <= MOST_LAYERS:
        return node.value
    if isinstance(node, ast.List):
        return [_listed(one) for one in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _listed(node.left), _listed(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        times = isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int)
        if times and len(left) * right <= MOST_LAYERS:
            return left * right
    raise ValueError("no list of layers")
