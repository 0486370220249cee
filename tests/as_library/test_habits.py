"""What users of plain torch do by habit works on a sharded model, or is refused by name."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pangu
from pangu.common.errors import UserError
from pangu.library.sharded_model import ShardedModel
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from tests.threads import Ranks


class Prompted(nn.Module):
    """Prompts in lists and dictionaries of parameters, layers in a container of the user's own, an unused head."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ParameterList([torch.randn(8) for _ in range(2)])
        self.gains = nn.ParameterDict({"a": torch.randn(8)})
        self.body = nn.Module()
        self.body.layers = nn.ModuleList([nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())])
        self.body.prompts = nn.ParameterList([torch.randn(8)])
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.prompts[0] + self.prompts[1] + self.body.prompts[0]
        for layer in self.body.layers:
            x = layer(x) * self.gains["a"]
        return x


def prompted() -> Prompted:
    torch.manual_seed(0)
    return Prompted().double()


def batch(step: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def mesh_of(layout: Layout) -> Mesh:
    return Mesh.connect(layout, torch.device("cpu"))


def sharded_of(layout: Layout, **options: Any) -> ShardedModel:
    return pangu.shard(prompted(), mesh_of(layout), **options)


def backward(sharded: ShardedModel, step: int) -> None:
    part = batch(step).chunk(sharded.mesh.layout.replicas)[sharded.mesh.replica]
    sharded.model(part).square().mean().backward()


def weights_of(sharded: ShardedModel) -> dict[str, Tensor]:
    with sharded.full_parameters():
        return {name: value.clone() for name, value in sharded.model.state_dict().items()}


GROUPS = [
    {"params": ["body.*"], "lr": 0.01},
    {"params": ["prompts.*", "gains.*"], "weight_decay": 0.3},
]


def optimizer_of(kind: str, sharded: ShardedModel) -> torch.optim.Optimizer:
    make = sharded.lamb if kind == "lamb" else sharded.adamw
    return make(lr=0.05, weight_decay=0.1, groups=GROUPS)


def train(rank: int, world: int, layout: Layout, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    sharded = sharded_of(layout)
    optimizer, norms = optimizer_of(kind, sharded), []
    for step in range(4):
        backward(sharded, step)
        norms.append(float(sharded.step(optimizer, clip=0.5).grad_norm))
    return norms, weights_of(sharded)


def plain(kind: str) -> dict[str, Tensor]:
    """One process without any of this, with torch's groups."""
    model = prompted()
    groups: list[dict[str, Any]] = []
    for name, parameter in model.named_parameters():
        own: dict[str, Any] = {"weight_decay": 0.0 if parameter.dim() < 2 else 0.1}
        own |= {"lr": 0.01} if name.startswith("body") else {}
        own |= {"weight_decay": 0.3} if name.startswith(("prompts", "gains")) else {}
        groups.append({"params": [parameter], **own})
    if kind == "lamb":
        groups = [{**group, "adapt": group["params"][0].dim() > 1, "exclude_vectors": False} for group in groups]
        optimizer: torch.optim.Optimizer = pangu.Lamb(groups, lr=0.05)
    else:
        optimizer = torch.optim.AdamW(groups, lr=0.05)
    for step in range(4):
        model(batch(step)).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("kind", ["lamb", "adamw"])
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_parameter_lists_and_groups_train_as_in_one_process(ranks: Ranks, zero: int, kind: str) -> None:
    expected = plain(kind)
    for _, weights in ranks.run(2, train, Layout(data=2, zero=zero), kind):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-11, msg=name)


def unused_after(rank: int, world: int, layout: Layout) -> tuple[Tensor, Tensor]:
    sharded = sharded_of(layout)
    before = weights_of(sharded)["unused.weight"]
    optimizer = sharded.lamb(lr=0.05, weight_decay=0.1)
    for step in range(4):
        backward(sharded, step)
        sharded.step(optimizer)
    return before, weights_of(sharded)["unused.weight"]


def test_an_unused_head_does_not_shrink_by_the_rate_per_step(ranks: Ranks) -> None:
    for before, after in ranks.run(2, unused_after, Layout(data=2, zero=3)):
        torch.testing.assert_close(after, before * (1 - 0.05 * 0.1) ** 4, rtol=1e-14, atol=0)


class Shifted(nn.Module):
    """Adds one number to all scores of a row, which in exact arithmetic has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.shift = nn.Linear(8, 5), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + self.shift(x)


def shifted(rank: int, world: int, layout: Layout) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, mesh = Shifted().double(), mesh_of(layout)
    sharded = pangu.shard(model, mesh)
    optimizer = sharded.lamb(lr=0.05, weight_decay=0.0)
    for step in range(5):
        x = batch(step, 8).chunk(layout.replicas)[mesh.replica]
        nn.functional.cross_entropy(model(x), x[:, :5].argmax(-1)).backward()
        sharded.step(optimizer)
    return weights_of(sharded)


def test_rounding_does_not_move_weights_without_a_gradient(ranks: Ranks) -> None:
    """Steps of lr * |w| along rounding errors differ by 10 % of the weights between layouts."""
    (expected,) = ranks.run(1, shifted, Layout())
    for weights in ranks.run(2, shifted, Layout(data=2, zero=3)):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10, msg=name)


def copied(rank: int, world: int, layout: Layout) -> list[Tensor]:
    """Outputs of the model and of a copy; after another step of the copy, of the model and of its average."""
    sharded = sharded_of(layout)
    optimizer = sharded.lamb(lr=0.05)
    backward(sharded, 0)
    sharded.step(optimizer)
    outputs = [sharded.model(batch(9)).detach()]
    with sharded.full_parameters():
        twin = copy.deepcopy(sharded.model)
        average = torch.optim.swa_utils.AveragedModel(sharded.model)
    outputs.append(twin(batch(9)).detach())
    backward(sharded, 1)
    sharded.step(optimizer)
    with sharded.full_parameters():
        average.update_parameters(sharded.model)
    outputs += [twin(batch(9)).detach(), sharded.model(batch(9)).detach(), average(batch(9)).detach()]
    twin(batch(9)).sum().backward()
    assert all(type(parameter) is nn.Parameter for parameter in twin.parameters())
    assert twin.body.layers[0].weight.grad is not None
    twin.load_state_dict(prompted().state_dict())
    pangu.shard(twin, sharded.mesh)
    return outputs


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_copy_is_a_plain_module(ranks: Ranks, zero: int) -> None:
    for first, twin, later, trained, average in ranks.run(2, copied, Layout(data=2, zero=zero)):
        assert torch.equal(first, twin)
        assert torch.equal(first, later)
        assert torch.equal(trained, average), "the first update of an average takes the weights over"
        assert not torch.equal(first, trained)


def parallel_copy(rank: int, world: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    mesh = mesh_of(Layout(tensor=2))
    up, down = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.Sequential(pangu.column_parallel(up, mesh), nn.Tanh(), pangu.row_parallel(down, mesh))
    pangu.shard(model, mesh)
    x = torch.randn(3, 1, 8)
    return model(x).detach(), copy.deepcopy(model)(x).detach()


def test_a_copy_of_parallel_layers_communicates_in_their_group(ranks: Ranks) -> None:
    for ours, twin in ranks.run(2, parallel_copy):
        assert torch.equal(ours, twin)


def late_group(rank: int, world: int, layout: Layout, folder: Path, first: int, last: int) -> Any:
    """Train with a group that joins at step 2; the weights, and the step counts of this rank's shards."""
    sharded = sharded_of(layout)
    named = dict(sharded.named_main_parameters())
    parts = [[main for name, main in named.items() if name.startswith("body") == late] for late in (False, True)]
    optimizer = torch.optim.Adam([{"params": parts[0]}], lr=0.05)
    if first:
        optimizer.add_param_group({"params": parts[1]})
        pangu.load(folder / "saved", sharded, optimizer)
    for step in range(first, last):
        if step == 2 and not first:
            optimizer.add_param_group({"params": parts[1]})
        backward(sharded, step)
        sharded.step(optimizer)
    if last == 3:
        pangu.save(folder / "saved", sharded, optimizer)
    return weights_of(sharded), {name: float(optimizer.state[main]["step"]) for name, main in named.items()}


def test_checkpoints_keep_a_step_count_of_each_tensor(ranks: Ranks, tmp_path: Path) -> None:
    ((expected, _),) = ranks.run(1, late_group, Layout(), tmp_path, 0, 5)
    ranks.run(2, late_group, Layout(data=2, zero=3), tmp_path, 0, 3)
    for layout in (Layout(), Layout(data=2, zero=1)):
        for weights, counts in ranks.run(layout.world, late_group, layout, tmp_path, 3, 5):
            assert {name.startswith("body"): count for name, count in counts.items()}.items() <= {
                (True, 3.0),
                (False, 5.0),
            }
            for name, value in expected.items():
                torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-11, msg=name)


def hooked_after(rank: int, world: int, layout: Layout) -> float:
    sharded = sharded_of(layout)
    for parameter in sharded.model.parameters():
        parameter.register_hook(lambda grad: 2 * grad)
    backward(sharded, 0)
    return float(sharded.step(sharded.lamb(lr=0.1)).grad_norm)


def test_a_hook_that_is_registered_after_shard_is_called(ranks: Ranks) -> None:
    (expected, _), *_ = ranks.run(1, train, Layout(), "lamb")
    for norm in ranks.run(2, hooked_after, Layout(data=2, zero=3)):
        assert norm == pytest.approx(2 * expected[0], rel=1e-12)


def plain_step(sharded: ShardedModel) -> None:
    backward(sharded, 0)
    sharded.lamb(lr=0.1).step()


def plain_step_of_adam(sharded: ShardedModel) -> None:
    backward(sharded, 0)
    sharded.adamw(lr=0.1).step()


def plain_step_of_torch(sharded: ShardedModel) -> None:
    torch.optim.SGD([{"params": sharded.main_parameters()}], lr=0.1).step()


def step_of_optimizer_before(sharded: ShardedModel) -> None:
    model = prompted()
    optimizer = torch.optim.AdamW(model.parameters())
    pangu.shard(model, sharded.mesh)
    optimizer.step()


def save_by_torch(sharded: ShardedModel) -> None:
    with sharded.full_parameters():
        torch.save(sharded.model, io.BytesIO())


def copy_all(sharded: ShardedModel) -> None:
    copy.deepcopy(sharded)


def clip_weights(sharded: ShardedModel) -> None:
    backward(sharded, 0)
    nn.utils.clip_grad_norm_(sharded.model.parameters(), 1.0)


def clip_shards(sharded: ShardedModel) -> None:
    backward(sharded, 0)
    nn.utils.clip_grad_norm_(sharded.main_parameters(), 1.0)


def adafactor(sharded: ShardedModel) -> None:
    sharded.step(torch.optim.Adafactor([{"params": sharded.main_parameters()}]))


def lamb_of_shards(sharded: ShardedModel) -> None:
    sharded.step(pangu.Lamb([{"params": sharded.main_parameters()}]))


def no_such_name(sharded: ShardedModel) -> None:
    sharded.lamb(groups=[{"params": "heads.*", "lr": 0.1}])


def named_twice(sharded: ShardedModel) -> None:
    sharded.adamw(groups=[{"params": "body.*"}, {"params": "*.weight"}])


def no_such_option(sharded: ShardedModel) -> None:
    sharded.adamw(groups=[{"params": "body.*", "rate": 0.1}])


def no_such_rate(sharded: ShardedModel) -> None:
    sharded.lamb(groups=[{"params": "body.*", "lr": -0.1}])


def tensors_in_groups(sharded: ShardedModel) -> None:
    sharded.lamb(groups=[{"params": list(sharded.model.parameters())}])


def hooked_before(sharded: ShardedModel) -> None:
    model = prompted()
    model.unused.weight.register_hook(lambda grad: grad)
    pangu.shard(model, sharded.mesh)


def hooked_layer(sharded: ShardedModel) -> None:
    layer = nn.Linear(8, 8)
    layer.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    pangu.column_parallel(layer, sharded.mesh)


def half(sharded: ShardedModel) -> None:
    pangu.shard(nn.Linear(8, 8), sharded.mesh, dtype=torch.float16)


def half_model(sharded: ShardedModel) -> None:
    pangu.Pipeline([lambda: nn.Linear(8, 8).half()], sharded.mesh, 1)


def half_message(sharded: ShardedModel) -> None:
    pangu.shard(nn.Linear(8, 8), sharded.mesh, message=torch.float16)


def list_as_region(sharded: ShardedModel) -> None:
    pangu.shard(prompted(), sharded.mesh, regions=["prompts"])


def no_such_chunk(sharded: ShardedModel) -> None:
    pangu.Pipeline([prompted], sharded.mesh, 1, regions={1: ["unused"]})


def said(rank: int, world: int, action: Callable[[ShardedModel], None], zero: int) -> str:
    sharded = sharded_of(Layout(data=2, zero=zero))
    with pytest.raises(UserError) as caught:
        action(sharded)
    return str(caught.value)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize(
    ("action", "message"),
    [
        (plain_step, "`sharded.step(optimizer)` on all ranks"),
        (plain_step_of_adam, "`sharded.step(optimizer)` on all ranks"),
        (plain_step_of_torch, "`sharded.step(optimizer)` on all ranks"),
        (step_of_optimizer_before, "with an optimizer created after `shard`"),
        (
            save_by_torch,
            "`pangu.save`, or copy.deepcopy(sharded.model) in `with sharded.full_parameters():` for a plain module",
        ),
        (copy_all, "copy.deepcopy(sharded.model) in `with sharded.full_parameters():` for a plain module"),
        (clip_weights, "until `sharded.step(optimizer, clip=...)`, which clips by the global norm"),
        (clip_shards, "until `sharded.step(optimizer, clip=...)`, which clips by the global norm"),
    ],
)
def test_habits_are_refused_at_every_stage(ranks: Ranks, action: Any, message: str, zero: int) -> None:
    for text in ranks.run(2, said, action, zero):
        assert message in text


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (adafactor, "Adafactor: its update depends on the shape or norm of a tensor"),
        (lamb_of_shards, "Lamb: its update depends on the shape or norm of a tensor"),
        (no_such_name, "groups[0]: 'heads.*' matches no trained parameter; names are "),
        (named_twice, "body.layers.0.weight: is in groups[0] and in groups[1]; keep one"),
        (no_such_option, "groups[0]: unknown key rate; use betas, eps, lr, weight_decay"),
        (no_such_rate, "lr = -0.1: must be above 0"),
        (tensors_in_groups, "must be names or patterns of parameters"),
        (hooked_before, "unused.weight: has a hook, which is lost"),
        (hooked_layer, "bias: has a hook, which is lost"),
        (half, "dtype = torch.float16: small gradients underflow in it without a loss scale"),
        (half_model, "dtype = torch.float16: small gradients underflow in it without a loss scale"),
        (half_message, "message = torch.float16: small gradients underflow in it without a loss scale"),
        (list_as_region, "regions: prompts is ParameterList, which has no forward"),
        (no_such_chunk, "regions: unknown chunk 1; use 0 to 0"),
    ],
)
def test_what_cannot_work_is_refused_by_name(ranks: Ranks, action: Any, message: str) -> None:
    for text in ranks.run(2, said, action, 1):
        assert message in text


@pytest.mark.parametrize(
    "make",
    [
        lambda tensors: torch.optim.SGD(tensors, lr=0.0, momentum=0.9),
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Rprop,
        torch.optim.ASGD,
        torch.optim.RAdam,
    ],
)
def test_optimizers_that_treat_each_element_alone_may_step(make: Any) -> None:
    sharded = sharded_of(Layout())
    optimizer = make(sharded.main_parameters())
    torch.optim.lr_scheduler.LinearLR(optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded.parameters, "update", lambda *_, **__: None)
        backward(sharded, 0)
        sharded.step(optimizer)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_a_pipeline_takes_regions_by_chunk() -> None:
    pipeline = pangu.Pipeline(
        [prompted, prompted], mesh_of(Layout()), 1, "breadth_first", regions={1: ["body.layers.0"]}
    )
    uses = pipeline.sharded.parameters.unsharder.uses
    assert [name for name in uses if name.startswith("1")] == ["1", "1.body.layers.0"]
    assert [name for name in uses if name.startswith("0")] == ["0", "0.body.layers.0", "0.body.layers.1.0", "0.unused"]


def words_norm(rank: int, world: int, layout: Layout, sparse: bool) -> float:
    torch.manual_seed(0)
    mesh = mesh_of(layout)
    model = nn.Sequential(nn.Embedding(8, 8, sparse=sparse), nn.Linear(8, 8)).double()
    sharded = pangu.shard(model, mesh)
    for step in range(2):
        with nullcontext() if step else sharded.no_sync():
            model(torch.arange(4).chunk(layout.replicas)[mesh.replica] + step).square().mean().backward()
    return float(sharded.step(sharded.lamb(lr=0.1)).grad_norm)


@pytest.mark.parametrize("zero", [0, 3])
def test_sparse_gradients_of_embeddings_count_like_dense_ones(ranks: Ranks, zero: int) -> None:
    dense, sparse = (ranks.run(2, words_norm, Layout(data=2, zero=zero), one) for one in (False, True))
    assert sparse == dense
