"""Any module on a mesh: every gradient and weight equals one process's, and mistakes get one message."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pangu
from pangu.common.errors import UserError
from pangu.library.regions import regions_of
from pangu.library.sharded_model import ShardedModel
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from tests.threads import Ranks

CLIP, STEPS = 0.1, 3


class Block(nn.Module):
    """A residual block of a convolution, in place where a user would write so; with `again`, computed anew."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.frozen = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.again = again
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, *, gain: Tensor) -> dict[str, Any]:
        if self.again and self.training:
            return {"x": checkpoint(self.inner, x, gain, use_reentrant=False)}
        return {"x": self.inner(x, gain)}

    def inner(self, x: Tensor, gain: Tensor) -> Tensor:
        """[batch, 6, length] -> the same."""
        return x + gain * self.norm(self.frozen(self.conv(x).mT).mT)


class Foreign(nn.Module):
    """All that a user's model may have: a tied table, parameters beside the children, one of no dimension, frozen ones
    in a trained region, buffers, a convolution, an unused layer."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.gain, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.randn(6, 1))
        self.blocks = nn.ModuleList(Block(again) for _ in range(3))
        self.unused = nn.Linear(5, 5)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.words(tokens).mT, 0.0) + self.shift
        for block in self.blocks:
            x = block(x, gain=self.gain)["x"]
            x.relu_()
        return self.head(x.mT)


def model_of(again: bool = False) -> Foreign:
    torch.manual_seed(3)
    return Foreign(again).double()


def batch(step: int, micro: int) -> Tensor:
    """Four rows of one micro-batch, which replicas share."""
    return torch.randint(11, (4, 8), generator=torch.Generator().manual_seed(10 * step + micro))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:]) / 2  # two micro-batches


def optimizer_of(name: str, sharded: ShardedModel) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD([{"params": sharded.main_parameters()}], lr=0.5, momentum=0.9)
    return sharded.lamb(lr=0.05, weight_decay=0.1) if name == "lamb" else sharded.adamw(lr=0.05, weight_decay=0.1)


def plain(name: str, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """One process without any of this: norms, and the state after some steps."""
    model, norms = model_of(), []
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()  # whose statistics replicas do not share
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    full, bare = ([p for p in trained if (p.dim() >= 2) == wide] for wide in (True, False))
    groups = [{"params": full, "weight_decay": 0.1}, {"params": bare, "weight_decay": 0.0, "adapt": False}]
    if name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(trained, lr=0.5, momentum=0.9)
    elif name == "lamb":
        optimizer = pangu.Lamb(groups, lr=0.05)
    else:
        optimizer = torch.optim.AdamW([{k: v for k, v in group.items() if k != "adapt"} for group in groups], lr=0.05)
    for step in range(steps):
        for micro in range(2):
            loss_of(model, batch(step, micro)).backward()
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norm = torch.stack([p.grad.norm() for p in trained if p.grad is not None]).norm()
        divisor = ((norm + 1e-6) / CLIP).clamp(min=1.0)
        for parameter in trained:
            assert parameter.grad is not None
            parameter.grad /= divisor
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(norm))
    return norms, model.state_dict()


def make(layout: Layout, again: bool = False, **options: Any) -> ShardedModel:
    model = model_of(again)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    return pangu.shard(model, Mesh.connect(layout, torch.device("cpu")), **options)


def steps_of(sharded: ShardedModel, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train; the norms."""
    norms, mesh = [], sharded.mesh
    for step in steps:
        parts = [batch(step, micro).chunk(mesh.layout.replicas)[mesh.replica] for micro in range(2)]
        with sharded.no_sync():
            loss_of(sharded.model, parts[0]).backward()
        loss_of(sharded.model, parts[1]).backward()
        norms.append(float(sharded.step(optimizer, clip=CLIP).grad_norm))
        optimizer.zero_grad()
        assert mesh.layout.zero < 3 or not sharded.parameters.unsharder.unsharded, "a region stays whole"
        assert all(parameter.grad is None for parameter in sharded.model.parameters())
    return norms


def state_of(sharded: ShardedModel) -> dict[str, Tensor]:
    with sharded.full_parameters():
        return {name: value.clone() for name, value in sharded.model.state_dict().items()}


def train(rank: int, world: int, layout: Layout, name: str, again: bool, options: dict[str, Any]) -> Any:
    sharded = make(layout, again, **options)
    norms = steps_of(sharded, optimizer_of(name, sharded), range(STEPS))
    return norms, state_of(sharded)


def same(results: list[Any], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    """fp64: sums of a few hundred terms differ in their order alone."""
    for norms, state in results:
        assert norms == pytest.approx(expected[0], rel=1e-12)
        assert list(state) == list(expected[1])
        for name, value in expected[1].items():
            torch.testing.assert_close(state[name], value, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("layout", "name", "again", "options"),
    [
        (Layout(), "lamb", False, {}),
        (Layout(data=2), "sgd", False, {"bucket_mib": 0.001}),
        (Layout(data=2, zero=1), "lamb", True, {}),
        (Layout(data=2, zero=2), "sgd", False, {}),
        (Layout(data=2, zero=3), "lamb", False, {}),
        (Layout(data=2, zero=3), "sgd", True, {"overlap": False}),
        (Layout(data=4, zero=3, zero_group=2), "adam", False, {}),
        (Layout(data=2, zero=3), "lamb", True, {"offload": ["optimizer", "parameters"]}),
        (Layout(data=2, zero=2), "adam", False, {"offload": ["optimizer"]}),
        (Layout(data=2, zero=3), "adam", False, {"regions": ["blocks.0", "blocks.2"]}),
    ],
    ids=str,
)
def test_training_equals_one_process(
    ranks: Ranks, layout: Layout, name: str, again: bool, options: dict[str, Any]
) -> None:
    """SGD, unlike the others, sees a gradient that is wrong by a factor. `again`: layers are computed again."""
    same(ranks.run(layout.world, train, layout, name, again, options), plain(name, STEPS))


def save_and_load(rank: int, world: int, layout: Layout, name: str, folder: Path, first: int, last: int) -> Any:
    sharded = make(layout)
    optimizer = optimizer_of(name, sharded)
    if first:
        with torch.no_grad():
            for value in (*sharded.parameters.shards,):
                value.main.fill_(torch.nan)
            for buffer in sharded.model.buffers():
                buffer.zero_()
        assert pangu.load(folder / "saved", sharded, optimizer) == {"step": first}
    norms = steps_of(sharded, optimizer, range(first, last))
    if not first:
        sharded.model.blocks[0].norm.num_batches_tracked.fill_(7)
        pangu.save(folder / "saved", sharded, optimizer, {"step": last})
    return norms, state_of(sharded)


@pytest.mark.parametrize("name", ["lamb", "sgd"])
def test_a_checkpoint_goes_on_with_other_ranks(ranks: Ranks, tmp_path: Path, name: str) -> None:
    norms, state = plain(name, STEPS)
    written = ranks.run(2, save_and_load, Layout(data=2, zero=3), name, tmp_path, 0, 2)
    again = pangu.read_weights(tmp_path / "saved")
    assert "head.weight" not in again
    for layout in (Layout(), Layout(data=4, zero=1)):
        for norms_after, state_after in ranks.run(layout.world, save_and_load, layout, name, tmp_path, 2, STEPS):
            assert norms_after == pytest.approx(norms[2:], rel=1e-12)
            assert state_after.pop("blocks.0.norm.num_batches_tracked") == 7
            for key, value in state_after.items():
                torch.testing.assert_close(value, state[key], rtol=1e-11, atol=1e-12, msg=key)
    fresh = model_of()
    fresh.load_state_dict(again, strict=False)
    for key, value in fresh.state_dict().items():
        assert torch.equal(value, written[0][1][key]), key


def most_whole(rank: int, world: int, layout: Layout) -> tuple[int, int]:
    """Most regions that were whole at a time, and regions."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)) for _ in range(6)))
    sharded = pangu.shard(model, Mesh.connect(layout, torch.device("cpu")))
    unsharder, peak = sharded.parameters.unsharder, 0
    begin = unsharder.begin

    def counted(*arguments: Any) -> None:
        nonlocal peak
        begin(*arguments)
        peak = max(peak, len(unsharder.unsharded | unsharder.in_flight.keys()))

    unsharder.begin = counted
    for _ in range(2):
        model(torch.randn(3, 8)).sum().backward()
        sharded.step(sharded.adamw(lr=0.1))
    with torch.no_grad():
        model(torch.randn(3, 8))
    assert not unsharder.unsharded
    return peak, len(unsharder.flat_parameters)


def test_two_regions_are_whole_at_a_time(ranks: Ranks) -> None:
    assert ranks.run(2, most_whole, Layout(data=2, zero=3)) == [(2, 6)] * 2


class Pair(nn.Module):
    """An encoder whose output every layer of the decoder takes."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(8, 2, 2, 2, 16, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x, x.flip(1))


def train_pair(rank: int, world: int, layout: Layout) -> list[Tensor]:
    torch.manual_seed(0)
    model = Pair().double()
    x = torch.randn(4, 5, 8, dtype=torch.float64)
    mesh = Mesh.connect(layout, torch.device("cpu"))
    sharded = pangu.shard(model, mesh)
    assert len(sharded.parameters.unsharder.uses) == 6
    sgd = torch.optim.SGD(sharded.main_parameters(), lr=0.1)
    for _ in range(2):
        model(x.chunk(layout.replicas)[mesh.replica]).square().mean().backward()
        sharded.step(sgd)
    return list(state_of(sharded).values())


def test_regions_with_several_inputs(ranks: Ranks) -> None:
    (expected,) = ranks.run(1, train_pair, Layout())
    for state in ranks.run(2, train_pair, Layout(data=2, zero=3)):
        torch.testing.assert_close(state, expected, rtol=1e-11, atol=1e-12)


def test_default_regions_are_the_children_and_the_layers_of_lists() -> None:
    assert list(regions_of(Foreign(), {0: ""}).uses[0]) == [
        "",
        "words",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "unused",
        "head",
    ]
    model = nn.Sequential(
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1), 2, nn.LayerNorm(4), enable_nested_tensor=False),
    )
    assert list(regions_of(model, {0: ""}).uses[0]) == ["0", "1.0", "2.layers.0", "2.layers.1", "2.norm"]


class Offering(Foreign):
    """Says itself what is unsharded at once."""

    def zero_regions(self) -> list[str]:
        return ["blocks.0", "blocks.1"]


def test_a_module_may_offer_its_regions() -> None:
    used = regions_of(Offering(), {0: ""}).uses[0]
    assert list(used) == ["", "blocks.0", "blocks.1"]
    assert "blocks.2.conv.weight" in used[""]


class Outside(Foreign):
    """Uses a weight where it is sharded."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words.weight[tokens]


class Hidden(nn.Linear):
    """Returns what nobody can look into."""

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(value=super().forward(x))


def said(rank: int, world: int, action: Callable[[int], None]) -> str:
    with pytest.raises(UserError) as caught:
        action(rank)
    return str(caught.value)


def mesh(zero: int = 3) -> Mesh:
    return Mesh.connect(Layout(data=2, zero=zero), torch.device("cpu"))


def differ(rank: int) -> None:
    torch.manual_seed(rank)
    pangu.shard(Foreign(), mesh())


def differ_in_kind(rank: int) -> None:
    torch.manual_seed(0)
    pangu.shard(nn.Linear(2, 2, bias=rank == 0), mesh())


def outside(rank: int) -> None:
    torch.manual_seed(0)
    model = Outside()
    pangu.shard(model, mesh())
    model(batch(0, 0))


def unseen(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Hidden(2, 2))
    pangu.shard(model, mesh())
    model(torch.ones(1, 2))


def state_dict(rank: int) -> None:
    make(Layout(data=2, zero=3)).model.state_dict()


def load_state_dict(rank: int) -> None:
    make(Layout(data=2)).model.load_state_dict(model_of().state_dict())


def twice(rank: int) -> None:
    sharded = make(Layout(data=2, zero=1))
    for _ in range(2):
        loss_of(sharded.model, batch(0, 0)).backward()


def meta(rank: int) -> None:
    pangu.shard(nn.Linear(2, 2, device="meta"), mesh())


def lazy(rank: int) -> None:
    pangu.shard(nn.LazyLinear(2), mesh())


def formats(rank: int) -> None:
    pangu.shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16()), mesh())


def no_region(rank: int) -> None:
    pangu.shard(model_of(), mesh(), regions=["layers"])


def nested(rank: int) -> None:
    pangu.shard(model_of(), mesh(), regions=["blocks.0", "blocks.0.conv"])


def activations(rank: int) -> None:
    pangu.shard(model_of(), mesh(), offload=["activations"])  # type: ignore[list-item]


def one(rank: int) -> ShardedModel:
    torch.manual_seed(0)
    return pangu.shard(nn.Linear(8, 8), mesh())


def of_parameters(rank: int) -> None:
    sharded = one(rank)
    sharded.step(torch.optim.SGD(sharded.model.parameters(), lr=0.1))


def of_another(rank: int) -> None:
    one(rank).step(one(rank).lamb(lr=0.1))


def no_clip(rank: int) -> None:
    sharded = one(rank)
    sharded.step(sharded.lamb(lr=0.1), clip=0.0)


def rates(rank: int) -> None:
    one(rank).lamb(lr=-1, betas=(2, 0.9))


def adam_formats(rank: int) -> None:
    one(rank).adamw(lr=0.1, moments="fp8")


def head_after(rank: int) -> None:
    sharded = make(Layout(data=2, zero=3))
    sharded.model.head = nn.Linear(6, 11).double()
    sharded.step(sharded.lamb(lr=0.1))


def converted(rank: int) -> None:
    sharded = make(Layout(data=2))
    sharded.model.float()
    pangu.save("none", sharded)


def frozen_after(rank: int) -> None:
    sharded = make(Layout(data=2, zero=1))
    sharded.model.requires_grad_(False)
    sharded.step(sharded.lamb(lr=0.1))


def sharded_again(rank: int) -> None:
    pangu.shard(nn.Sequential(make(Layout(data=2)).model), mesh())


def looked_at(rank: int) -> None:
    make(Layout(data=2, zero=3)).model.head.weight.norm()


def copied(rank: int) -> None:
    copy.deepcopy(make(Layout(data=2, zero=3)).model)


def cast(rank: int) -> None:
    make(Layout(data=2, zero=3)).model.float()


class Breaking(torch.autograd.Function):
    """Its backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError


def failed_backward(rank: int) -> None:
    sharded = make(Layout(data=2, zero=2))
    with pytest.raises(ZeroDivisionError):  # before it has reached the model: nothing is summed yet
        Breaking.apply(sharded.model(batch(0, 0))).sum().backward()
    sharded.model.head.register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(sharded.model, batch(0, 0)).backward()
    with pytest.raises(UserError, match="the last backward pass failed"):
        sharded.model(batch(0, 0))
    sharded.step(sharded.lamb(lr=0.1))


def no_mesh(rank: int) -> None:
    pangu.shard(nn.Linear(2, 2), torch.distributed.group.WORLD)


def other_world(rank: int) -> None:
    Mesh.connect(Layout(data=3), torch.device("cpu"))


def no_stage(rank: int) -> None:
    mesh(7)


def no_bucket(rank: int) -> None:
    pangu.shard(nn.Linear(2, 2), mesh(), bucket_mib=-1)


def no_loss(rank: int) -> None:
    sharded = one(rank)
    sharded.step(sharded.lamb(lr=0.1), loss=torch.ones(2))


def message(rank: int) -> None:
    pangu.shard(nn.Linear(2, 2), mesh(), message=torch.int8)


def no_list(rank: int) -> None:
    pangu.shard(nn.Linear(2, 2), mesh(), offload="optimizer")


def over_files(rank: int) -> None:
    with TemporaryDirectory() as folder:
        Path(folder, "notes.txt").touch()
        pangu.save(folder, one(rank))


def no_json(rank: int) -> None:
    with TemporaryDirectory() as folder:
        pangu.save(folder, one(rank), facts={"steps": object()} if rank == 0 else None)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (of_parameters, "step: the optimizer's tensors are not this model's main parameters"),
        (of_another, "step: the optimizer's tensors are not this model's main parameters"),
        (no_clip, "clip = 0.0: must be above 0; use None for no clipping"),
        (rates, "lr = -1.0: must be above 0"),
        (rates, "betas[0] = 2.0: must be at least 0 and below 1"),
        (adam_formats, "moments = 'fp8': must be fp32 or bf16"),
        (message, "message = torch.int8: must be a floating-point dtype"),
        (head_after, "head.weight: was added to the model, or converted, after `shard`, which has no effect"),
        (converted, "gain: was added to the model, or converted, after `shard`, which has no effect"),
        (frozen_after, "was frozen after `shard`, which has no effect; change the model before"),
        (sharded_again, "0: is already sharded; `shard` the full model once"),
        (looked_at, "words.weight is used outside the forward of its region, where it is sharded; `with sharded."),
        (copied, "is used outside the forward of its region, where it is sharded"),
        (cast, "is used outside the forward of its region, where it is sharded"),
        (failed_backward, "the last backward pass failed and left partial gradients; continue from a checkpoint"),
        (no_mesh, "must be a mesh, as `pangu.connect` returns it"),
        (other_world, "needs 3 processes, got 2"),
        (no_stage, "degrees must be at least 1, and zero 0, 1, 2 or 3"),
        (no_bucket, "bucket_mib = -1: must be above 0"),
        (no_loss, "loss = tensor([1., 1.]): must be a tensor with one element"),
        (no_list, "offload = ['optimizer']: use 'optimizer' and 'parameters' in a list"),
        (over_files, ": exists and is not a checkpoint, so it is not replaced"),
        (no_json, "facts: must be a mapping of JSON values (Object of type object is not JSON serializable)"),
        (differ, "shift: its initial values differ between ranks 0 and 1; build the same module"),
        (differ_in_kind, "parameters and buffers differ between ranks 0 and 1"),
        (outside, "words.weight is used outside the forward of its region, where it is sharded; `with sharded."),
        (unseen, "0: its forward returns SimpleNamespace, which has no tensors; return tensors"),
        (state_dict, "state_dict: the weights are sharded; use `pangu.save`"),
        (load_state_dict, "load_state_dict: weights loaded after `shard` are lost"),
        (twice, "a second backward in one step, after the gradients were summed"),
        (meta, "weight: has no values yet; build the module on a real device"),
        (lazy, "weight: has no values yet; build the module on a real device"),
        (
            formats,
            ("several dtypes: 0.weight is torch.float32, 1.weight is torch.bfloat16; set one for all, e.g. dtype="),
        ),
        (no_region, "regions: 'layers' is not a submodule of Foreign; its children are words, blocks, unused, head"),
        (nested, "regions: blocks.0.conv lies inside blocks.0"),
        (activations, "offload = ['activations']: use 'optimizer' and 'parameters' in a list"),
    ],
)
def test_mistakes_get_one_message(ranks: Ranks, action: Callable[[int], None], message: str) -> None:
    for text in ranks.run(2, said, action):
        assert message in text
