"""LAMB equals a direct transcription of the algorithm."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

from pangu.config.optimizer import AdamConfig, LambConfig
from pangu.optim import build, lamb
from pangu.optim.build import make_optimizer
from pangu.optim.lamb import Lamb
from pangu.topology.placement import Placement
from tests.memory import LiveBytes
from tests.references.lamb_reference import AdamWReference, LambReference

SHAPES = {"matrix": (7, 5), "row": (1, 300), "bias": (11,), "scalar": (1,), "zero": (4, 4), "large": (64, 33)}
VECTORS = ("bias", "scalar")


def weights() -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=source, dtype=torch.float64) for name, shape in SHAPES.items()}
    made["zero"].zero_()  # a norm of 0: ratio 1
    return made


def gradients(step: int) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randn(shape, generator=source, dtype=torch.float64) * 10.0 ** (step % 5 - 3)
        for name, shape in SHAPES.items()
    }


def entries(tensors: dict[str, torch.Tensor]) -> list[tuple[Placement, torch.Tensor]]:
    return [(Placement(name, tuple(t.shape)), t) for name, t in tensors.items()]


def run(optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor], steps: int) -> None:
    for step in range(steps):
        for name, gradient in gradients(step).items():
            tensors[name].grad = gradient
        optimizer.step()


@pytest.fixture(params=["fused", "apart"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, and as on a device whose fused AdamW neither scales nor skips."""
    for module in (lamb, build):
        monkeypatch.setattr(module, "updates_at_once", lambda device: request.param == "fused")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("inside", "max_ratio", "exclude", "decay"),
    list(itertools.product([True, False], [None, 0.5], [True, False], [0.0, 0.1])),
)
def test_20_steps_in_float64(inside: bool, max_ratio: float | None, exclude: bool, decay: float) -> None:
    """1e-12: each step adds a few roundings of 1.1e-16 to numbers of order 1."""
    config = LambConfig("lamb", 0.01, (0.9, 0.99), 1e-6, inside, decay, exclude, max_ratio, "fp32", None)
    ours = weights()
    run(make_optimizer(config, entries(ours)), ours, 20)
    reference = LambReference(
        weights(),
        lr=0.01,
        betas=(0.9, 0.99),
        eps=1e-6,
        eps_inside_root=inside,
        weight_decay=decay,
        max_ratio=max_ratio,
        excluded=VECTORS if exclude else (),
    )
    for step in range(20):
        reference.step(gradients(step))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, reference.weights[name], atol=1e-12, rtol=1e-12, msg=name)
        assert not torch.equal(tensor, weights()[name])


def test_ratio_is_1_where_a_norm_is_0() -> None:
    """A zero weight moves by lr x direction; a zero gradient without decay moves nothing and gives no NaN."""
    weight, still = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    weight.grad, still.grad = torch.full_like(weight, 2.0), torch.zeros_like(still)
    Lamb([weight, still], lr=0.1, eps=1e-12, weight_decay=0.0).step()
    torch.testing.assert_close(weight, torch.full_like(weight, -0.1))
    assert torch.equal(still, torch.ones_like(still))


@pytest.mark.usefixtures("device")
def test_adamw_decays_matrices_only() -> None:
    config = AdamConfig("adam", 0.01, (0.9, 0.99), 1e-8, 0.1, "fp32", None)
    ours = weights()
    run(make_optimizer(config, entries(ours)), ours, 20)
    reference = AdamWReference(weights(), lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, excluded=VECTORS)
    for step in range(20):
        reference.step(gradients(step))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, reference.weights[name], atol=1e-12, rtol=1e-12, msg=name)


def test_the_largest_ratio_binds_a_tensor_of_norm_0_too() -> None:
    weight = torch.zeros(3, 3, requires_grad=True)
    weight.grad = torch.ones(3, 3)
    optimizer = Lamb([weight], lr=0.1, max_ratio=0.7, weight_decay=0.0)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3, 3), -0.07))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["adam", "lamb", "lamb, epsilon inside the root"])
def test_a_step_divides_gradients_and_does_nothing_where_it_is_told_to(kind: str, moments: Any) -> None:
    """As torch's fused optimizers; a skipped step, the first one or a later one, leaves every bit as it was."""
    if kind == "adam":
        config: Any = AdamConfig("adam", 0.01, (0.9, 0.99), 1e-8, 0.1, moments, None)
    else:
        config = LambConfig("lamb", 0.01, (0.9, 0.99), 1e-6, "," in kind, 0.1, True, None, moments, None)
    plain, scaled = ({name: tensor.float() for name, tensor in weights().items()} for _ in range(2))
    one, other = (make_optimizer(config, entries(tensors)) for tensors in (plain, scaled))
    other.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    for step in range(3):
        for name, gradient in gradients(step).items():
            plain[name].grad, scaled[name].grad = gradient.float(), torch.full_like(scaled[name], torch.nan)
        before = copy.deepcopy((other.state_dict(), scaled))
        other.found_inf = torch.ones(())  # type: ignore[attr-defined]
        other.step()
        torch.testing.assert_close((other.state_dict(), scaled), before, rtol=0, atol=0)
        other.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        for name, tensor in scaled.items():
            tensor.grad = 4 * gradients(step)[name].float()
        one.step()
        other.step()
    assert all(torch.equal(plain[name], scaled[name]) for name in plain)


@pytest.mark.parametrize("moments", [None, torch.bfloat16])
def test_it_makes_little_beside_its_state(moments: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number in fp32 for each element of a piece, four with moments in bf16 (two are of the piece
    before); pieces change no element."""
    results = []
    for piece in (1000, 2**18):
        monkeypatch.setattr(lamb, "_IN_CACHE", piece)
        source = torch.Generator().manual_seed(1)
        tensors = [torch.randn(size, generator=source) for size in (9999, 500, 400, 7)]
        optimizer = Lamb(tensors, lr=0.1, moments=moments, exclude_vectors=False, reuse_gradients=True)
        for tensor in tensors:
            tensor.grad = torch.randn(tensor.shape, generator=source)
        state = [value for each in tensors for value in (each, each.grad, *optimizer.state[each].values())]
        with LiveBytes(*state) as live:
            optimizer.step()
        results.append((live.peak, tensors))
    (little, ours), (much, whole) = results
    assert little < (4 if moments is None else 16) * 1000 + 2000 < much
    assert all(map(torch.equal, ours, whole))
