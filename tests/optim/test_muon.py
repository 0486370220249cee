"""Muon equals `torch.optim.Muon`, and a direct transcription of Moonlight's rule (Liu et al. 2025, section 2)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from pangu.common.errors import UserError
from pangu.config.optimizer import MuonConfig
from pangu.optim.build import make_optimizer
from pangu.optim.muon import Muon
from pangu.optim.newton_schulz import orthogonalize
from pangu.topology.placement import Placement

SHAPES = ((24, 40), (40, 24), (32, 32), (24, 40), (1, 5))
STEPS = 4


def matrices(seed: int, dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=source, dtype=torch.float64).mul_(scale).to(dtype) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor], steps: range = range(STEPS)) -> list[Tensor]:
    for step in steps:
        for tensor, gradient in zip(tensors, matrices(100 + step, tensors[0].dtype, 10.0 ** (step - 2)), strict=True):
            tensor.grad = gradient
        optimizer.step()
    return [tensor.clone() for tensor in tensors]


def transcribed(tensors: Sequence[Tensor], rule: str, nesterov: bool) -> list[Tensor]:
    """Algorithm of Jordan et al. 2024 with equation 4 of Liu et al. 2025."""
    found = []
    for number, weight in enumerate(tensors):
        w, m = weight.clone(), torch.zeros_like(weight)
        for step in range(STEPS):
            g = matrices(100 + step, weight.dtype, 10.0 ** (step - 2))[number]
            m = 0.95 * m + 0.05 * g
            x = 0.95 * m + 0.05 * g if nesterov else m
            x = x / torch.linalg.matrix_norm(x)
            for _ in range(5):
                x = 3.4445 * x - 4.775 * (x @ x.mT) @ x + 2.0315 * (x @ x.mT) @ (x @ x.mT) @ x
            rows, columns = w.shape
            s = 0.2 * max(rows, columns) ** 0.5 if rule == "match_rms_adamw" else max(1, rows / columns) ** 0.5
            w = w - 0.02 * (s * x + 0.1 * w)
        found.append(w)
    return found


@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_the_published_rule_in_float64(rule: str, nesterov: bool) -> None:
    tensors = matrices(0, torch.float64)
    expected = transcribed(tensors, rule, nesterov)
    found = train(Muon(tensors, 0.02, nesterov=nesterov, adjust_lr=rule), tensors)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rule", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_torch(rule: str, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's iterations are always in bfloat16; here they stay in the format of the gradients."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    ours, theirs = matrices(0, torch.float64), matrices(0, torch.float64)
    expected = train(torch.optim.Muon(theirs, 0.02, nesterov=nesterov, adjust_lr_fn=rule), theirs)
    found = train(Muon(ours, 0.02, nesterov=nesterov, adjust_lr=rule), ours)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_the_state_goes_on_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    tensors = matrices(0, torch.float64)
    ours = Muon(tensors, 0.02)
    train(ours, tensors, range(2))
    theirs = torch.optim.Muon(tensors, 0.02, adjust_lr_fn="match_rms_adamw")
    for tensor in tensors:
        theirs.state[tensor]["momentum_buffer"] = ours.state[tensor]["exp_avg"].clone()
    weights = [tensor.clone() for tensor in tensors]
    expected = train(ours, tensors, range(2, 4))
    torch._foreach_copy_(tensors, weights)
    torch.testing.assert_close(train(theirs, tensors, range(2, 4)), expected, rtol=0, atol=1e-13)


def test_a_saved_or_copied_state_continues_alike() -> None:
    tensors = matrices(0, torch.float64)
    first = Muon(tensors, 0.02)
    train(first, tensors, range(2))
    weights, saved = [tensor.clone() for tensor in tensors], copy.deepcopy(first.state_dict())
    expected = train(first, tensors, range(2, 4))
    loaded = Muon(weights, 0.02)
    loaded.load_state_dict(saved)
    assert all(map(torch.equal, train(loaded, weights, range(2, 4)), expected))


def test_copies_and_formats_side_by_side_continue_alike() -> None:
    """A part of the tensors has one format, whatever the first one has."""
    for formats in ((torch.float32, torch.bfloat16), (torch.float64, torch.float32)):
        tensors = [matrix.to(dtype) for matrix, dtype in zip(matrices(0, torch.float64), formats, strict=False)]
        alone = [tensor.clone() for tensor in tensors]
        together, apart = Muon(tensors, 0.02), [Muon([tensor], 0.02) for tensor in alone]
        for step in range(3):
            together = copy.deepcopy(together) if step == 1 else together
            (group,) = together.param_groups
            for mine, theirs, gradient in zip(group["params"], alone, matrices(step, torch.float64), strict=False):
                mine.grad, theirs.grad = gradient.to(mine.dtype), gradient.to(mine.dtype)
            for optimizer in (together, *apart):
                optimizer.step()
        assert all(map(torch.equal, together.param_groups[0]["params"], alone))


def test_a_group_may_be_added_and_maximized() -> None:
    up, down = torch.ones(3, 5), torch.ones(3, 5)
    optimizer = Muon([up], 0.02, weight_decay=0.0)
    optimizer.add_param_group({"params": [down], "maximize": True})
    up.grad = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    down.grad = up.grad.clone()
    optimizer.step()
    torch.testing.assert_close(1 - up, down - 1)
    assert not torch.equal(up, torch.ones(3, 5))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ns_steps": 0}, "ns_steps = 0: must be an integer of at least 1"),
        ({"ns_steps": 2.5}, "ns_steps = 2.5: must be an integer"),
        ({"adjust_lr": "spectral"}, "adjust_lr = spectral: must be one of match_rms_adamw, original"),
        ({"momentum": 1}, "momentum = 1: must be at least 0 and below 1"),
    ],
)
def test_names_options_out_of_range(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Muon([torch.zeros(2, 2)], **options)


def test_other_tensors_get_adamw() -> None:
    config = MuonConfig("muon", 0.02, 0.95, True, 5, "match_rms_adamw", False, (0.9, 0.95), 1e-8, 0.1, "fp32", None)
    names = [
        "layers.0.mlp.up.weight",
        "embedding.weight",
        "head.weight",
        "layers.0.norm.weight",
        "layers.0.mlp.up.bias",
    ]
    shapes = [(24, 40), (40, 24), (24, 40), (24,), (1,)]
    source = torch.Generator().manual_seed(0)
    ours = [torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes]
    theirs = [tensor.clone() for tensor in ours]
    optimizer = make_optimizer(
        config, [(Placement(name, tuple(t.shape)), t) for name, t in zip(names, ours, strict=True)]
    )
    expected = [
        Muon(theirs[:1], 0.02),
        torch.optim.AdamW(theirs[1:3], 0.02, (0.9, 0.95), 1e-8, 0.1),
        torch.optim.AdamW(theirs[3:], 0.02, (0.9, 0.95), 1e-8, 0.0),
    ]
    for _ in range(3):
        for mine, reference in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=source, dtype=torch.float64)
            reference.grad = mine.grad.clone()
        for each in (optimizer, *expected):
            each.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    assert [len(optimizer.state[tensor]) for tensor in ours] == [2, 3, 3, 3, 3]  # the step count and the moments


def test_a_skipped_step_changes_nothing_and_gradients_are_divided() -> None:
    plain, scaled = matrices(0, torch.float64), matrices(0, torch.float64)
    reference, optimizer = Muon(plain, 0.02), Muon(scaled, 0.02)
    optimizer.grad_scale = torch.tensor(8.0)
    for step, bad in enumerate((0.0, 1.0, 0.0)):
        optimizer.found_inf = torch.tensor(bad)
        before = [tensor.clone() for tensor in scaled]
        for mine, theirs, gradient in zip(scaled, plain, matrices(step, torch.float64), strict=True):
            mine.grad, theirs.grad = gradient * 8 * (torch.nan if bad else 1), gradient
        optimizer.step()
        if bad:
            assert all(map(torch.equal, scaled, before))
        else:
            reference.step()
    assert all(map(torch.equal, scaled, plain))
    assert {float(optimizer.state[tensor]["step"]) for tensor in scaled} == {2.0}


def test_singular_values_end_near_one_and_zero_stays_zero() -> None:
    # the coefficients of Jordan et al. bring singular values from 0.01 on to between 0.68 and 1.13
    source = torch.Generator().manual_seed(0)
    many = [torch.randn(shape, generator=source, dtype=torch.float64) for shape in ((30, 70), (70, 30), (30, 70))]
    zero = torch.zeros(30, 70, dtype=torch.float64)
    orthogonalize([*many, zero], 5)
    for matrix in many:
        values = torch.linalg.svdvals(matrix)
        assert values.min() > 0.6
        assert values.max() < 1.3
    assert not zero.any()


def test_the_result_of_a_matrix_does_not_depend_on_the_others() -> None:
    formats = torch.bfloat16, torch.float32, torch.float64
    # computed together, matrices of 8 x 48 differ rarely and in bf16 only, those that begin anywhere in fp32 and fp64
    shapes = [(0, 5, 96, 160), (0, 33, 128, 5), (0, 64, 17, 64), *((seed, 40, 8, 48) for seed in range(30))]
    for dtype, (seed, count, *shape) in product(formats, shapes):
        source = torch.Generator().manual_seed(seed)
        many = [torch.randn(shape, generator=source).to(dtype) for _ in range(count)]
        alone = [matrix.clone() for matrix in many]
        orthogonalize(many, 5)
        for matrix in alone:
            orthogonalize([matrix], 5)
        assert all(map(torch.equal, many, alone)), (dtype, shape)


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4)])
def test_names_what_is_no_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"shape \[.*\] is not a matrix; set matrices=False"):
        Muon([torch.zeros(shape)])
