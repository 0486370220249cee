"""Products in fp8: their numbers, their scales, and what a step does with them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from pangu.common.errors import UserError
from pangu.evaluation.inference import mean_loss
from pangu.layers import fp8
from pangu.layers.fp8 import HISTORY, Fp8Scales, cast, require_fp8, scaled_matmul
from pangu.layers.linear import ParallelLinear
from pangu.layers.recompute import SavedTensors
from pangu.layers.tensor_parallel_matmul import ALONE, column_parallel_matmul
from pangu.topology.layout import Layout
from pangu.training.step import Trainer
from tests.parallel.harness import OVERRIDES, small_trainer, whole

CPU = torch.device("cpu")
E4M3, E5M2 = 448.0, 57344.0
FORMATS = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
NAME = "layers.0.mlp.up.weight"


@pytest.mark.parametrize("limit", [E4M3, E5M2])
def test_a_cast_rounds_to_the_nearest_saturates_and_shows_what_is_not_finite(limit: float) -> None:
    x = torch.tensor([[1.0, -1.0625, 0.3, 1e-9], [limit, -limit, 3e4, -1e30]]) * torch.tensor([[1.0], [2.0]])
    amax, scale, sums = torch.tensor(5.0), torch.tensor(2.0), torch.ones(1, 4)
    rows, columns = (torch.zeros(shape, dtype=FORMATS[limit]) for shape in ((2, 4), (4, 2)))
    cast(x, scale, amax, rows, columns, sums)
    assert torch.equal(rows.float(), (2 * x).clamp(-limit, limit).to(FORMATS[limit]).float())
    assert torch.equal(columns.float(), rows.float().t())
    assert rows[1, 3] == -limit
    assert amax == 2e30
    assert sums[0].tolist() == x.sum(0).tolist()
    alone = torch.zeros_like(columns)
    cast(x, scale, amax, None, alone, None)
    assert torch.equal(alone.float(), columns.float())
    for value in (math.inf, -math.inf, math.nan):
        x[0, 0] = value
        cast(x, scale, amax, rows, None, None)
        assert rows.float().isnan().tolist() == x.isfinite().logical_not().tolist()
        assert not amax.isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("left_format", FORMATS.values(), ids=str)
def test_products_are_those_of_torchs_own_kernel(left_format: torch.dtype, dtype: torch.dtype) -> None:
    """Powers of two and sums of few bits: exact in fp32, in any order."""
    left = torch.randint(-3, 4, (32, 64)).to(left_format)
    right = torch.randint(-3, 4, (48, 64)).to(torch.float8_e4m3fn)
    bias = torch.randint(-3, 4, (48,)).to(dtype)
    inverses = torch.tensor(0.5), torch.tensor(0.25)
    value = torch._scaled_mm(left, right.t(), *inverses, out_dtype=dtype)
    assert torch.equal(scaled_matmul(left, right, inverses, dtype), value)
    assert torch.equal(scaled_matmul(left, right, inverses, dtype, bias), (value.float() + bias.float()).to(dtype))


def scales_after(*steps: tuple[float, float, float]) -> Fp8Scales:
    """Of steps with these magnitudes of input, weight and gradient."""
    scales = Fp8Scales({NAME: (32, 16), "layers.0.mlp.up.bias": (32,), "head.weight": (64, 16)}, CPU)
    for number, magnitudes in enumerate(steps):
        note(scales, number, magnitudes)
    return scales


def note(scales: Fp8Scales, step: int, magnitudes: tuple[float, float, float]) -> None:
    scales.amax.copy_(torch.tensor(magnitudes))
    scales.start_update(None)
    scales.finish_update(step)


def test_a_scale_is_a_power_of_two_that_leaves_room() -> None:
    scales = scales_after((3.0, 4.0, 1e-4))
    # below 2^2, 2^3 and 2^-13
    assert scales.scale.tolist() == [2.0**6, 2.0**5, 2.0**28]
    assert (scales.scale * scales.inverse).tolist() == [1, 1, 1]
    assert scales.amax.tolist() == [0, 0, 0]
    for magnitudes in ((1e-45, 1e-38, 1e-45), (3e38, 3e38, 3e38)):
        extreme = scales_after(magnitudes)
        assert (extreme.scale * extreme.inverse).tolist() == [1, 1, 1]
        assert (extreme.scale * torch.tensor(magnitudes)).max() < E5M2


def test_the_largest_magnitude_of_the_last_steps_counts() -> None:
    """Steps in which a tensor was 0, or not finite, say nothing."""
    steps = [(64.0, 0.0, math.inf), (1.0, 0.0, math.nan), *[(1.0, 2.0, 1.0)] * (HISTORY - 2)]
    assert scales_after(*steps[:2]).scale.tolist() == [2.0, 1.0, 2.0**24]
    assert scales_after(*steps).scale.tolist() == [2.0, 2.0**6, 2.0**14]
    assert scales_after(*steps, steps[-1]).scale.tolist() == [2.0**7, 2.0**6, 2.0**14]  # 64 is forgotten


def test_a_history_is_restored_or_begun_anew() -> None:
    """Of what a run that goes back had seen nothing stays, as if it were resumed."""
    scales, path = scales_after((64.0, 2.0, 1.0), (1.0, 2.0, 1.0)), Path("step-00000002")
    again = scales_after((5.0, 5.0, 5.0))
    again.restore(path, scales.state())
    assert again.state() == scales.state()
    assert torch.equal(again.scale, scales.scale)
    again.restore(path, None)
    assert not again.known
    assert again.state() is None
    fresh = scales_after()
    for each in (again, fresh):
        note(each, 7, (1.0, 1.0, 1.0))
    assert again.state() == fresh.state()
    with pytest.raises(UserError, match=rf"{path}.index\.json: damaged: no fp8 scaling history of {NAME}"):
        again.restore(path, {})


WORDS = (*OVERRIDES, "model.dropout=0", "model.attention_dropout=0", "precision=bf16")


@pytest.fixture(scope="module")
def pair() -> tuple[Trainer, Trainer]:
    """After a step in fp8, and one without."""
    trainers = []
    for words in (("precision.matmul=fp8",), ()):
        trainer, batches = small_trainer(Layout(), *WORDS, *words)
        trainer.train_step(batches)
        trainers.append(trainer)
    return trainers[0], trainers[1]


def test_the_first_step_only_looks(pair: tuple[Trainer, Trainer]) -> None:
    ours, plain = (whole(trainer, of_gradients=False) for trainer in pair)
    assert all(torch.equal(ours[name], weight) for name, weight in plain.items())
    scales = pair[0].scales
    assert scales is not None
    assert scales.known
    state = scales.state()
    assert state is not None
    assert all(row[0] for row in state["layers.0.attention.query.weight"])  # the first of three in one matrix
    assert not any(map(any, state["layers.0.attention.key.weight"]))


def test_later_steps_multiply_in_fp8(pair: tuple[Trainer, Trainer]) -> None:
    """e5m2 rounds by up to an eighth, e4m3 by a sixteenth: gradients of matrices differ, and not by more than that."""
    _, batches = small_trainer(Layout(), *WORDS)
    gradients = []
    for trainer in pair:
        trainer.forward_backward(batches)
        gradients.append(whole(trainer, of_gradients=True))
    for name, plain in gradients[1].items():
        if name.startswith("layers.") and plain.dim() == 2:
            assert 0.01 < (gradients[0][name] - plain).norm() / plain.norm() < 0.25, name
    scales = pair[0].scales
    assert scales is not None
    noted = scales.amax.clone()
    mean_loss(pair[0].runner, pair[0].stages.schedule, batches, pair[0].mesh)
    assert torch.equal(scales.amax, noted)


@pytest.mark.parametrize(
    ("words", "casts"),
    [((), 1), (("memory.recompute=full",), 1), (("parallel.zero=3", "memory.offload=[parameters]"), 4)],
)
def test_a_weight_is_cast_once_while_its_values_stay(words: tuple[str, ...], casts: int) -> None:
    """In a step of two micro-batches; weights that are gathered for each pass, once for each."""
    layout = Layout(zero=3) if "parallel.zero=3" in words else Layout()
    sizes = ("batch.micro_size=2", "batch.global_size=4", "precision.matmul=fp8", *words)
    trainer, batches = small_trainer(layout, *WORDS, *sizes)
    layers = [layer for layer in trainer.model.modules() if isinstance(layer, ParallelLinear)]
    trainer.train_step(batches)
    counts = [0] * len(layers)

    def counting(x: torch.Tensor, *others: torch.Tensor) -> None:
        for place, layer in enumerate(layers):
            counts[place] += x.data_ptr() == layer.weight.data_ptr()
        cast(x, *others)

    with patch.object(fp8, "cast", counting):
        trainer.train_step(batches)
        assert counts == [casts] * len(layers)
        trainer.train_step(batches)
        assert counts == [2 * casts] * len(layers)


def test_a_cast_input_is_saved_unless_it_is_recomputed() -> None:
    """One byte for each number instead of two, or none."""
    x, weight = (torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    scales = Fp8Scales({NAME: (32, 16)}, CPU)
    scales.known = True
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        column_parallel_matmul(x, weight, None, ALONE, None, scales.of(NAME))
        assert [tensor.shape for tensor in saved] == [(16, 32), (32, 16)]
        assert saved[0].dtype == torch.float8_e4m3fn
    kept, tensors = list[torch.Tensor](), SavedTensors()
    keep = patch.object(tensors, "_keep", lambda tensor: kept.append(tensor) or tensor)
    with keep, tensors.discarding(torch.sin, x) as normed:
        column_parallel_matmul(normed, weight, None, ALONE, None, scales.of(NAME))
    assert [tensor.dtype for tensor in kept] == [torch.bfloat16, torch.bfloat16]  # x for the sine, and the weight


def test_magnitudes_are_noted_above_what_is_frozen() -> None:
    """Of the output's gradient too where nobody asks for the input's: it is a factor of the weight's."""
    frozen = "train.frozen=[embedding.*,layers.0.attention_norm.*]"
    trainer, batches = small_trainer(Layout(), *WORDS, "precision.matmul=fp8", frozen)
    trainer.train_step(batches)
    assert trainer.scales is not None
    state = trainer.scales.state()
    assert state is not None
    assert all(row[0] for row in state["layers.0.attention.query.weight"])


def test_a_step_that_is_not_finite_is_skipped_and_leaves_no_scale() -> None:
    trainer, batches = small_trainer(Layout(), *WORDS, "precision.matmul=fp8")
    assert not trainer.train_step(batches).skipped
    assert trainer.scales is not None
    before = trainer.scales.scale[2::3].clone()
    spoiled = [replace(batch, weights=batch.weights * (math.inf if i == 1 else 1)) for i, batch in enumerate(batches)]
    assert trainer.train_step(spoiled).skipped
    assert torch.equal(trainer.scales.scale[2::3], before)  # of gradients; all other tensors were finite
    assert not trainer.train_step(batches).skipped


def test_gradients_survive_the_step_after_a_first_one_that_was_skipped() -> None:
    """They have no history then. 2^20 tokens in a batch: they are far below the least number of e5m2."""
    spoiled, gradients = math.nan, []
    for words in (("precision.matmul=fp8",), ()):
        trainer, batches = small_trainer(Layout(), *WORDS, *words)
        assert trainer.train_step([replace(batch, weights=batch.weights * spoiled) for batch in batches]).skipped
        with patch.object(trainer.loss_scale, "scale", trainer.loss_scale.scale * 2.0**-14):
            trainer.forward_backward(batches)
        gradients.append(whole(trainer, of_gradients=True))
    for name, plain in gradients[1].items():
        if name.startswith("layers.") and plain.dim() == 2:
            assert 0.01 < (gradients[0][name] - plain).norm() / plain.norm() < 0.25, name


def test_devices_without_fp8_are_refused() -> None:
    device = torch.device("cuda", 0)
    with (
        patch.object(torch.version, "cuda", "12.8"),
        patch.object(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB"),
        patch.object(torch.cuda, "get_device_capability", lambda _: (8, 0)),
    ):
        with pytest.raises(UserError, match="A100-SXM4-80GB has no fp8 matmuls"):
            require_fp8("bf16", device)
        assert "emulated" in require_fp8("fp64", device)
        with patch.object(torch.cuda, "get_device_capability", lambda _: (8, 9)):
            assert "_scaled_mm" in require_fp8("bf16", device)
    assert "emulated" in require_fp8("bf16", CPU)
