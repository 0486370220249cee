"""Linear layers that ranks share compute what the plain ones do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pangu
from pangu.common.errors import UserError
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from tests.threads import Ranks


def layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, 8).double(), nn.Linear(8, 8, bias=False).double(), nn.Linear(8, 6).double()]


def batch(step: int) -> Tensor:
    """[sequence, batch, width]"""
    return torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train(rank: int, world: int, layout: Layout, folder: Path) -> float:
    mesh = Mesh.connect(layout, torch.device("cpu"))
    up, middle, down = layers()
    up.weight.requires_grad_(False)
    first = nn.LayerNorm(6).double()
    inner = [pangu.column_parallel(up, mesh), nn.Tanh(), pangu.row_parallel(middle, mesh)]
    mlp = nn.Sequential(first, *inner, pangu.column_parallel(down, mesh))
    sharded = pangu.shard(mlp, mesh)
    sgd = torch.optim.SGD([{"params": sharded.main_parameters()}], lr=0.5)
    for step in range(3):
        x = batch(step).chunk(layout.replicas, dim=1)[mesh.replica]
        y = mlp(pangu.local_sequence(x, mesh))  # [sequence, batch, 6 / ranks]
        target = x.chunk(layout.tensor, dim=-1)[mesh.at.tensor]
        part = (y - target).square().sum() / x.numel()
        # the sum over the ranks' outputs, whose gradient is that of each part, is the loss
        part.backward()
        done = sharded.step(sgd, clip=0.5)
    pangu.save(folder, sharded)
    return float(done.grad_norm)


def plain() -> tuple[float, dict[str, Tensor]]:
    up, middle, down = layers()
    up.weight.requires_grad_(False)
    mlp = nn.Sequential(nn.LayerNorm(6).double(), up, nn.Tanh(), middle, down)
    sgd = torch.optim.SGD([p for p in mlp.parameters() if p.requires_grad], lr=0.5)
    for step in range(3):
        sgd.zero_grad()
        x = batch(step)
        (mlp(x) - x).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(mlp.parameters(), 0.5)
        sgd.step()
    return float(norm), mlp.state_dict()


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tensor=2),
        Layout(tensor=2, sequence=True),
        Layout(tensor=2, sequence=True, data=2, zero=3),
        Layout(tensor=2, data=2, zero=1),
    ],
    ids=str,
)
def test_shared_layers_equal_the_plain_ones(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    norm, state = plain()
    for other in ranks.run(layout.world, train, layout, tmp_path / "saved"):
        assert other == pytest.approx(norm, rel=1e-12)
    saved = pangu.read_weights(tmp_path / "saved")
    assert saved.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-11, atol=1e-12, msg=name)


def refuse(rank: int, world: int) -> None:
    mesh = Mesh.connect(Layout(tensor=2, sequence=True), torch.device("cpu"))
    with pytest.raises(UserError, match=r"^out_features = 3: must be a multiple of the 2 tensor-parallel ranks$"):
        pangu.column_parallel(nn.Linear(2, 3), mesh)
    with pytest.raises(UserError, match=r"^in_features = 3: must be a multiple of the 2 tensor-parallel ranks$"):
        pangu.row_parallel(nn.Linear(3, 2), mesh)
    with pytest.raises(UserError, match=r"^LayerNorm: only an nn\.Linear can be split over tensor-parallel ranks$"):
        pangu.column_parallel(nn.LayerNorm(4), mesh)
    with pytest.raises(UserError, match=r"^sequence length = 3: must be a multiple of the 2 tensor-parallel ranks$"):
        pangu.local_sequence(torch.zeros(3, 2), mesh)


def test_sizes_that_the_ranks_do_not_divide(ranks: Ranks) -> None:
    ranks.run(2, refuse)
