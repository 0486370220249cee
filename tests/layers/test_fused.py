"""How often an operator of an accelerator is compiled. Its function runs as it stands here: what counts is how many
codes torch asks its compiler for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from pangu.layers import fused, vocab_parallel_loss
from pangu.layers.builder import Builder
from pangu.layers.loss import Head
from pangu.layers.loss_rows import row_statistics
from pangu.layers.scores import token_losses
from pangu.topology.placement import PlacementTable

pytestmark = pytest.mark.usefixtures("empty_compiler")
E4M3, E5M2 = 448.0, 57344.0


def compiled(function: Callable[..., Tensor | None]) -> Callable[..., Any]:
    with patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        return fused._compiled(function)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def scaled(x: Tensor, scale: Tensor, limit: float) -> Tensor:
    return (x * scale).clamp(-limit, limit)


def test_all_shapes_of_a_model_are_compiled() -> None:
    """Of PanGu's inputs, matrices and gradients, with its query layer, on one rank and on two: more than torch compiles
    a function for if it is not asked to."""
    cast = compiled(scaled)
    shapes = set()
    for ranks in (1, 2):
        width = 64 // ranks
        of_inputs = [(16, 64), (16, width), (16, 4 * width)]
        of_matrices = [(3 * width, 64), (width, 64), (2 * width, 64), (64, width), (4 * width, 64), (64, 4 * width)]
        of_gradients = [(16, 3 * width), (16, width), (16, 2 * width), (16, 64), (16, 4 * width)]
        shapes |= {(E4M3, shape) for shape in (*of_inputs, *of_matrices)} | {(E5M2, shape) for shape in of_gradients}
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for limit, shape in sorted(shapes):
            cast(torch.ones(shape), torch.ones(()), limit)
    assert graphs() == len(shapes) > 8


def test_parameters_and_what_wants_a_gradient_are_plain_tensors() -> None:
    """No code of their own, and none that takes every parameter to lie as the first one."""
    cast = compiled(scaled)
    seen: list[Tensor] = []
    with patch.object(torch, "compile", lambda *_, **__: lambda *args: seen.extend(args)):
        watched = fused._compiled(scaled)
    for weight in (torch.ones(16, 32), torch.ones(16, 32, requires_grad=True), nn.Parameter(torch.ones(16, 32))):
        for trained in (True, False):
            x = weight if trained else nn.Parameter(weight.detach(), requires_grad=False)
            cast(x, torch.ones(()), E4M3)
            watched(x)
    assert graphs() == 1
    assert not any(isinstance(x, nn.Parameter) or x.requires_grad for x in seen)


def test_any_number_of_scored_tokens_shares_a_kernel() -> None:
    """Tasks count other numbers of tokens in each batch."""
    operator = fused.fused(
        "statistics_of_a_test(Tensor logits, Tensor labels, int start, int width) -> Tensor",
        row_statistics,
        vocab_parallel_loss._like_statistics,
        on_cpu=compiled(vocab_parallel_loss._statistics),
    )
    head = Head(Builder(PlacementTable()), 37, None)
    hidden, table, labels = torch.randn(16, 2, 8), torch.randn(37, 8), torch.randint(37, (2, 16))
    expected = F.cross_entropy((hidden @ table.t()).flatten(0, 1), labels.t().flatten(), reduction="none")
    with (
        patch.object(fused, "has_triton", lambda: True),
        patch.object(vocab_parallel_loss, "loss_statistics", operator),
        torch.no_grad(),
    ):
        for count in range(2, 16):
            weights = (torch.arange(16) < count).expand(2, -1).float()
            found = token_losses(head, hidden, table, labels, weights)[0]
            torch.testing.assert_close(found, expected.view(16, 2).t() * weights)
    assert graphs() == 1
