"""Pipelines of anybody's modules: every schedule gives the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pangu
from pangu.checkpoint.files import checkpoint_path
from pangu.common.errors import UserError
from pangu.layers.weight_gradient_store import WeightGradientStore
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from tests.threads import Ranks, replaced_here

MICRO, CHUNKS = 4, 4


class Chunk(nn.Module):
    """Hands on two tensors, the second one in a shape of its chunk, by a layer whose weight is made of a parameter;
    splits its backward in part."""

    def __init__(self, number: int, mesh: Mesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.number = number
        self.words = nn.Embedding(7, 6) if number == 0 else None
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.conv, self.side = nn.Conv1d(6, 6, 3, padding=1), nn.Linear(number + 1, number + 2)
        self.logarithm = nn.Parameter(self.side.weight.detach())
        del self.side.weight
        self.register_buffer("calls", torch.zeros(()))
        self.double()
        if mesh is not None:
            self.up, self.down = pangu.column_parallel(self.up, mesh), pangu.row_parallel(self.down, mesh)

    def forward(self, value: Any) -> Any:
        self.calls += 1
        if self.words is not None:
            x = self.words(value)
            value = x, x.mean((0, 1))[:1]
        x, side = value
        x = x + self.conv(self.down(self.up(x).tanh()).mT).mT
        self.side.weight = self.logarithm.exp()
        return x, self.side(side)


def loss_of(output: Any, target: Tensor) -> Tensor:
    x, side = output
    return F.cross_entropy(x.mT, target) + side.square().sum()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [micro-batches, rows, tokens]."""
    source = torch.Generator().manual_seed(step)
    return torch.randint(7, (MICRO, 4, 5), generator=source), torch.randint(6, (MICRO, 4, 5), generator=source)


def plain() -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and last weights of one process; replicas have a row each, in pairs."""
    model = nn.ModuleDict({str(number): Chunk(number) for number in range(CHUNKS)})
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for step in range(3):
        sgd.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for value, target in zip(*batch(step), strict=True):
            for rows in (slice(0, 2), slice(2, 4)):
                carried: Any = value[rows]
                for chunk in model.values():
                    carried = chunk(carried)
                loss = loss + loss_of(carried, target[rows]) / MICRO / 2
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        sgd.step()
        losses.append(float(loss.detach()))
    return losses, norms, dict(model.named_parameters())


def train(rank: int, world: int, layout: Layout, schedule: str, folder: Any) -> Any:
    """The same by a pipeline, a checkpoint at the end; and how many weight gradients waited."""
    mesh, waited = Mesh.connect(layout, torch.device("cpu")), 0
    put = WeightGradientStore.put

    def counted(*arguments: Any) -> None:
        nonlocal waited
        waited += 1
        put(*arguments)

    shared = mesh if layout.tensor > 1 else None
    each = CHUNKS // (layout.pipeline * layout.virtual_stages)
    makers = [partial(several, range(first, first + each), shared) for first in range(0, CHUNKS, each)]
    pipeline = pangu.Pipeline(makers, mesh, MICRO * 2 // layout.data, schedule)
    sgd = torch.optim.SGD([{"params": pipeline.sharded.main_parameters()}], lr=0.1)
    figures = []
    for step in range(3):
        parts = [part.unflatten(1, (2, 2)).flatten(0, 1) for part in batch(step)]  # [micro-batches x 2, 2, tokens]
        parts = [part.chunk(layout.data)[mesh.replica] for part in parts]
        with replaced_here(WeightGradientStore, put=counted):
            loss = pipeline.forward_backward(*parts, loss=loss_of)
        done = pipeline.sharded.step(sgd, clip=0.5, loss=loss)
        figures.append((float(done.loss), float(done.grad_norm)))
    outputs = pipeline.forward([part[0] for part in parts[:1]])
    pangu.save(checkpoint_path(folder, 3), pipeline.sharded, sgd)
    calls = {float(buffer) for name, buffer in pipeline.modules.named_buffers()}
    return figures, waited, calls, len(outputs)


class Several(nn.ModuleDict):
    """Consecutive chunks as one."""

    def forward(self, value: Any) -> Any:
        for chunk in self.values():
            value = chunk(value)
        return value


def several(numbers: range, mesh: Mesh | None) -> nn.Module:
    return Several({str(number): Chunk(number, mesh) for number in numbers})


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        (Layout(pipeline=1), "1f1b"),
        (Layout(pipeline=2), "zb_h1"),
        (Layout(pipeline=2, virtual_stages=2), "zb_v"),
        (Layout(pipeline=2, data=2, zero=3), "zb_h1"),
        (Layout(pipeline=2, virtual_stages=2, data=2, zero=3), "interleaved"),
        (Layout(pipeline=2, data=2, zero=2), "gpipe"),
        (Layout(pipeline=2, tensor=2), "zb_h1"),
    ],
    ids=str,
)
def test_every_schedule_equals_one_process(ranks: Ranks, tmp_path: Any, layout: Layout, schedule: str) -> None:
    losses, norms, state = plain()
    results = ranks.run(layout.world, train, layout, schedule, tmp_path)
    forwards = 3 * MICRO * 2 // layout.data + 1
    for figures, waited, calls, outputs in results:
        assert figures == [pytest.approx(pair, rel=1e-11) for pair in zip(losses, norms, strict=True)]
        assert (waited > 0) == schedule.startswith("zb")
        assert calls == {forwards}
        assert outputs in (0, 1)
    assert sum(outputs for *_, outputs in results) == layout.world // layout.pipeline
    saved = pangu.read_weights(checkpoint_path(tmp_path, 3))
    for name, value in saved.items():
        if "calls" not in name:
            torch.testing.assert_close(value, state[name.partition(".")[2]].data, rtol=1e-11, atol=1e-12, msg=name)


def refuse(rank: int, world: int, make: Callable[[], nn.Module], numbers: Any, schedule: str) -> str:
    mesh = Mesh.connect(Layout(pipeline=2), torch.device("cpu"))

    def use() -> None:
        pipeline = pangu.Pipeline([make, make], mesh, 2, schedule)
        pipeline.forward_backward(numbers, numbers, lambda x, _: x.sum())

    with pytest.raises(UserError) as caught:
        use()
    return str(caught.value)


def test_no_step_follows_micro_batches_that_failed(ranks: Ranks) -> None:
    """Gradients of some are summed already."""
    ranks.run(1, fail_in_the_second)


def fail_in_the_second(rank: int, world: int) -> None:
    pipeline = pangu.Pipeline([partial(nn.Linear, 2, 2)], Mesh.connect(Layout(), torch.device("cpu")), 2)
    losses = iter([lambda x: x.sum(), lambda x: 1 / 0])
    with pytest.raises(ZeroDivisionError):
        pipeline.forward_backward(TWO, TWO, lambda x, _: next(losses)(x))
    for go_on in (
        lambda: pipeline.forward_backward(TWO, TWO, lambda x, _: x.sum()),
        lambda: pipeline.sharded.step(pipeline.sharded.adamw(1e-3)),
    ):
        with pytest.raises(UserError, match="the last backward pass failed and left partial gradients"):
            go_on()


class Integers(nn.Linear):
    """Returns what has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).long()


TWO = [torch.zeros(3, 2)] * 2


@pytest.mark.parametrize(
    ("make", "numbers", "schedule", "message"),
    [
        (
            partial(nn.Linear, 2, 2),
            TWO,
            "zb_v",
            "with virtual_stages = 1: zb_v needs exactly 2 chunks per stage; use 2",
        ),
        (partial(nn.Linear, 2, 2), TWO, "zb", "schedule zb: unknown schedule; use one of 1f1b, "),
        (partial(nn.Linear, 2, 2), TWO[:1], "1f1b", "1 inputs, 1 targets: the schedule has 2 micro-batches"),
        (partial(nn.Linear, 2, 2), [torch.zeros(3, 2), torch.zeros(2)], "1f1b", "inputs of several shapes: "),
        (nn.Linear(2, 2), TWO, "1f1b", "chunks: must be functions that return modules, not modules"),
        (partial(Integers, 2, 2), TWO, "1f1b", "chunk 0 returns torch.int64; return a floating-point tensor"),
    ],
)
def test_mistakes_get_one_message(ranks: Ranks, make: Any, numbers: Any, schedule: str, message: str) -> None:
    for text in ranks.run(2, refuse, make, numbers, schedule):
        assert message in text
