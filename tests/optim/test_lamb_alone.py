"""`pangu.Lamb` is an optimizer like those of torch: every tensor is updated as if it were the only one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pangu.common.errors import UserError
from pangu.optim import lamb
from pangu.optim.lamb import Lamb
from tests.references.lamb_reference import LambReference

EPS = torch.finfo(torch.float64).eps


def gradient(step: int, number: int, shape: tuple[int, ...] = (6, 5)) -> Tensor:
    source = torch.Generator().manual_seed(10 * step + number)
    return torch.randn(shape, dtype=torch.float64, generator=source)


def parameters(count: int, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(6, 5, dtype=torch.float64).to(dtype)) for _ in range(count)]


def reference(tensor: Tensor, **options: Any) -> LambReference:
    """Algorithm 2 for a tensor alone."""
    return LambReference({"w": tensor}, eps_inside_root=False, **{"lr": 0.05, "weight_decay": 0.1, **options})


@pytest.fixture(params=["fused", "apart"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lamb, "updates_at_once", lambda device: request.param == "fused")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("joins", [{0: 0, 1: 4, 2: 4}, {0: 4, 1: 0, 2: 2}], ids=["later ones", "the first one"])
def test_bias_correction_counts_the_steps_of_each_tensor(joins: dict[int, int]) -> None:
    ours = parameters(3)
    expected, optimizer = [reference(tensor) for tensor in ours], Lamb(ours, lr=0.05, weight_decay=0.1)
    for step in range(7):
        for number, (tensor, alone) in enumerate(zip(ours, expected, strict=True)):
            tensor.grad = gradient(step, number) if step >= joins[number] and (step, number) != (5, 0) else None
            if tensor.grad is not None:
                alone.step({"w": tensor.grad})
        optimizer.step()
    for tensor, alone in zip(ours, expected, strict=True):
        torch.testing.assert_close(tensor.detach(), alone.weights["w"], rtol=1e-13, atol=1e-13)
        assert float(optimizer.state[tensor]["step"]) == alone.t


def transposed() -> nn.Parameter:
    return nn.Parameter(torch.randn(5, 6, dtype=torch.float64).t())


def channels_last() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 3, 2, 2, dtype=torch.float64).to(memory_format=torch.channels_last))


def strided() -> nn.Parameter:
    return nn.Parameter(torch.randn(6, 10, dtype=torch.float64)[:, ::2])


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize("make", [transposed, channels_last, strided])
def test_memory_order_changes_nothing(make: Callable[[], nn.Parameter], adapt: bool) -> None:
    """With a gradient and loaded moments in another order of memory too."""
    torch.manual_seed(0)
    odd = make()
    plain = nn.Parameter(odd.detach().clone(memory_format=torch.contiguous_format))
    groups = [{"params": [odd], "adapt": adapt}], [{"params": [plain], "adapt": adapt}]
    one, other = (Lamb(group, lr=0.05) for group in groups)
    for step in range(4):
        odd.grad, plain.grad = (gradient(step, 0, tuple(odd.shape)) for _ in range(2))
        if step == 1:
            odd.grad = odd.grad.mT.contiguous().mT
        if step == 2:
            one.load_state_dict(copy.deepcopy(other.state_dict()))
        one.step()
        other.step()
    torch.testing.assert_close(odd, plain, rtol=4 * EPS, atol=4 * EPS)
    torch.testing.assert_close(one.state[odd], other.state[plain], rtol=4 * EPS, atol=4 * EPS, check_stride=False)


@pytest.mark.parametrize(
    "dtypes", [("float64", "float32"), ("float32", "float64", "bfloat16"), ("bfloat16", "float32")]
)
def test_formats_mix_in_a_group(dtypes: tuple[str, ...]) -> None:
    """Each as far from the reference as its own format rounds in five steps of 5 %."""
    ours = [parameters(1, getattr(torch, name))[0] for name in dtypes]
    expected, optimizer = [reference(tensor) for tensor in ours], Lamb(ours, lr=0.05, weight_decay=0.1)
    for step in range(5):
        for number, (tensor, alone) in enumerate(zip(ours, expected, strict=True)):
            tensor.grad = gradient(step, number).to(tensor.dtype)
            alone.step({"w": tensor.grad})
        optimizer.step()
    for tensor, alone in zip(ours, expected, strict=True):
        rounding = 8 * torch.finfo(tensor.dtype).eps
        torch.testing.assert_close(tensor.double(), alone.weights["w"], rtol=rounding, atol=rounding)


def test_many_tensors_are_updated_as_each_alone() -> None:
    together = parameters(4)
    apart = copy.deepcopy(together)
    optimizers = Lamb(together, lr=0.05), *(Lamb([tensor], lr=0.05) for tensor in apart)
    for step in range(3):
        for tensors in (together, apart):
            for number, tensor in enumerate(tensors):
                tensor.grad = gradient(step, number)
        for optimizer in optimizers:
            optimizer.step()
    assert all(map(torch.equal, together, apart))


def test_a_group_may_come_after_construction() -> None:
    first, second = parameters(2)
    alone = reference(second, lr=0.01, weight_decay=0.0)
    optimizer = Lamb([first], lr=0.05)
    first.grad = gradient(0, 0)
    optimizer.step()
    optimizer.add_param_group({"params": [second], "lr": 0.01, "weight_decay": 0.0})
    second.grad = gradient(0, 1)
    optimizer.step()
    alone.step({"w": gradient(0, 1)})
    torch.testing.assert_close(second.detach(), alone.weights["w"], rtol=1e-13, atol=1e-13)


def test_gradients_stay_and_a_closure_may_call_backward() -> None:
    weight = parameters(1)[0]
    optimizer = Lamb([weight], lr=0.05)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    before = weight.detach().clone()
    assert torch.equal(torch.as_tensor(optimizer.step(closure)), before.square().sum())
    assert weight.grad is not None
    assert torch.equal(weight.grad, 2 * before)
    assert not torch.equal(weight.detach(), before)


def test_maximize_follows_the_gradient_upwards() -> None:
    up, down = parameters(1) + parameters(1)
    one, other = Lamb([up], lr=0.05, maximize=True), Lamb([down], lr=0.05)
    for step in range(3):
        up.grad, down.grad = gradient(step, 0), -gradient(step, 0)
        one.step()
        other.step()
    assert torch.equal(up, down)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_rate_may_be_a_tensor(shape: tuple[int, ...]) -> None:
    for excluded in (True, False):
        one, other = (nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))
        one.grad, other.grad = gradient(0, 0, (5,)), gradient(0, 0, (5,))
        Lamb([one], lr=0.05, exclude_vectors=excluded).step()
        Lamb([other], lr=torch.full(shape, 0.05, dtype=torch.float64), exclude_vectors=excluded).step()
        torch.testing.assert_close(one, other, rtol=4 * EPS, atol=4 * EPS)


def saved(optimizer: Lamb) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def of_old_version(optimizer: Lamb) -> Any:
    """A step count of every tensor's own, and groups without the newer options."""
    state = copy.deepcopy(optimizer.state_dict())
    for kept in state["state"].values():
        kept["step"] = kept["step"].clone()
    for group in state["param_groups"]:
        for name in ("eps_inside_root", "exclude_vectors", "max_ratio", "maximize"):
            del group[name]
    return state


@pytest.mark.parametrize("kept", [saved, of_old_version])
@pytest.mark.parametrize(
    ("weights", "moments"),
    [(torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_a_loaded_state_goes_on_with_the_same_bits(
    kept: Callable[[Lamb], Any], weights: torch.dtype, moments: torch.dtype | None
) -> None:
    """In torch, `load_state_dict` converts moments to the format of the weights, and takes over step counts."""
    ours = parameters(3, weights)
    optimizer = Lamb(ours, lr=0.05, moments=moments)
    twins, other = copy.deepcopy(ours), optimizer
    state: Any = None
    for step in range(6):
        if step == 3:
            state = kept(optimizer)
            twins = copy.deepcopy(ours)
            other = Lamb(twins, lr=0.05, moments=moments)
            other.load_state_dict(state)
        for number, tensors in enumerate(zip(ours, twins, strict=True)):
            for tensor in tensors:
                tensor.grad = gradient(step, number).to(weights) if step or number else None
        optimizer.step()
        if other is not optimizer:
            other.step()
    assert all(map(torch.equal, ours, twins))
    assert len({id(each["step"]) for each in other.state.values()}) == 2, "equal counts cost one launch"
    assert all(each["exp_avg"].dtype == (moments or weights) for each in other.state.values())
    assert all(
        torch.equal(optimizer.state[a]["exp_avg"], other.state[b]["exp_avg"]) for a, b in zip(ours, twins, strict=True)
    )
    assert float(state["state"][0]["step"]) == 2, "the state that was loaded changes"


def test_an_optimizer_can_be_copied() -> None:
    ours = parameters(2)
    pair = (ours, Lamb(ours, lr=0.05, max_ratio=0.5, eps_inside_root=True, moments=torch.bfloat16))
    twins = copy.deepcopy(pair)
    for tensors, optimizer in (pair, twins):
        for number, tensor in enumerate(tensors):
            tensor.grad = gradient(0, number)
        optimizer.step()
    assert all(map(torch.equal, pair[0], twins[0]))
    assert next(iter(twins[1].state.values()))["exp_avg"].dtype == torch.bfloat16


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_no_gradient_and_rounding_have_a_ratio_of_1(decay: float) -> None:
    """Zeros and rounding errors in the place of gradients move nothing but by weight decay, at AdamW's rate."""
    dead, noise, live = parameters(3)
    before = [tensor.detach().clone() for tensor in (dead, noise)]
    optimizer = Lamb([dead, noise, live], lr=0.05, weight_decay=decay)
    for step in range(10):
        dead.grad, noise.grad, live.grad = torch.zeros(6, 5).double(), 1e-17 * gradient(step, 1), gradient(step, 2)
        optimizer.step()
    for tensor, first in zip((dead, noise), before, strict=True):
        torch.testing.assert_close(tensor.detach(), first * (1 - 0.05 * decay) ** 10, rtol=0, atol=1e-10)
        assert float(optimizer.ratios[tensor]) == 1
    assert float(optimizer.ratios[live]) != 1


def test_vectors_are_excluded_as_in_sharded_models() -> None:
    """Neither decay nor ratio, as `ShardedModel.lamb`; `exclude_vectors=False` adapts them."""
    bias = nn.Parameter(torch.ones(5, dtype=torch.float64))
    bias.grad = torch.full_like(bias, 2.0)
    optimizer = Lamb([bias], lr=0.1)
    optimizer.step()
    assert not optimizer.ratios
    torch.testing.assert_close(bias.detach(), torch.full_like(bias, 0.9), rtol=1e-6, atol=0)
    adapting = Lamb([bias], lr=0.1, exclude_vectors=False)
    adapting.step()
    assert list(adapting.ratios) == [bias]


def sparse() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    Lamb(table.parameters()).step()


def complex_numbers() -> None:
    Lamb([torch.zeros(2, dtype=torch.complex64)])


def no_decay() -> None:
    Lamb([{"params": parameters(1), "weight_decay": -1.0}])


def betas() -> None:
    Lamb(parameters(1), betas=(0.9, 1.0))


def no_ratio() -> None:
    Lamb(parameters(1), max_ratio=0.0)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (no_ratio, "max_ratio = 0.0: must be above 0"),
        (sparse, "a gradient is sparse, but this optimizer needs dense ones"),
        (complex_numbers, "params: a tensor is torch.complex64"),
        (no_decay, "weight_decay = -1.0: must be at least 0"),
        (betas, "betas = (0.9, 1.0): both must be at least 0 and below 1"),
    ],
)
def test_mistakes_get_one_message(action: Callable[[], None], message: str) -> None:
    with pytest.raises(UserError) as caught:
        action()
    assert message in str(caught.value)
