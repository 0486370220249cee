"""What a device is said to keep follows the ZeRO paper, and the fullest device is the one told of."""

from __future__ import annotations

import time

import pytest

from pangu.models.size import num_parameters
from pangu.pipeline.stages import plan_stages
from pangu.schedule.advice import advise
from pangu.topology.layout import Layout
from pangu.training.describe import describe
from pangu.zero.states import peak_states, plan_states
from tests.configs import config, tiny

GPT2 = ("+config=gpt2_124m", "model.vocab=50304")
"""Rows of the vocabulary are stored as a multiple of 128, which this is."""


def per_parameter(layout: Layout, *overrides: str) -> float:
    chosen = config(*GPT2, f"parallel.zero={layout.zero}", *overrides)
    plan = peak_states(chosen, layout, plan_stages(chosen, layout).of)
    return sum(plan.bytes.values()) / num_parameters(chosen.model)


@pytest.mark.parametrize(("zero", "bytes_per_parameter"), [(0, 18.0), (1, 6 + 12 / 64), (2, 2 + 16 / 64), (3, 18 / 64)])
def test_bytes_per_parameter_with_fp32_gradients(zero: int, bytes_per_parameter: float) -> None:
    """A unit is padded to 64 equal parts, which adds less than a part in ten thousand."""
    found = per_parameter(Layout(data=64, zero=zero), "precision=bf16", "batch.micro_size=1")
    assert bytes_per_parameter <= found * (1 + 1e-12)
    assert found == pytest.approx(bytes_per_parameter, rel=1e-4)


def test_wide_formats_need_no_second_copy_of_the_weights() -> None:
    assert per_parameter(Layout(), "precision=fp32") == 16
    assert per_parameter(Layout(), "precision=fp64") == 32


def test_200b_on_the_reports_layout() -> None:
    """2,048 devices; the last stage holds the most: four layers, the query table and a copy of the word embedding."""
    chosen = config("+config=pangu_200b")
    layout = Layout(tensor=8, pipeline=16, data=16, zero=1)
    stages = plan_stages(chosen, layout)
    fullest = peak_states(chosen, layout, stages.of)
    text = describe(chosen, layout, fullest)
    assert "206,861,008,896 parameters" in text
    assert "= 2,048 devices" in text
    assert "each replica computes 32 micro-batches of 1" in text
    assert f"model states of at most {fullest.words()}" in text
    kept = [
        sum(plan_states(chosen, layout, rank, stages.of(layout.coordinates(rank).pipeline)).bytes.values())
        for rank in range(0, layout.world, 128)
    ]
    assert len(kept) == 16
    assert sum(fullest.bytes.values()) == max(kept)
    layers, tables = 4 * 3_221_438_464, 40_000 * 16_384 + 1_024 * 16_384
    # 6 bytes of each and a 16th of 12; layers are cut in 8, save norms and biases, the tables' positions are whole
    assert max(kept) == pytest.approx((layers + tables) / 8 * 6.75, rel=0.02)


def test_formats_are_told_as_they_are() -> None:
    chosen = config(*GPT2, "precision=fp64")
    text = describe(chosen, Layout(), peak_states(chosen, Layout(), plan_stages(chosen, Layout()).of))
    assert "fp64, adam with fp64 moments, gradients reduced in fp64" in text


def test_a_plan_of_many_layers_stages_and_micro_batches_is_quick() -> None:
    """CPU seconds of this thread; a schedule of 25,600 forwards and 1,000 layers took minutes."""
    began = time.thread_time()
    overrides = ("model.layers=1000", "parallel.pipeline=64", "batch.global_size=512", "batch.micro_size=4")
    chosen = tiny(*overrides, kind="gpt")
    stages = plan_stages(chosen, Layout(pipeline=64))
    peak_states(chosen, Layout(pipeline=64), stages.of)
    advise(stages.schedule, stages.durations, 1000, 1)
    assert time.thread_time() - began < 5


def test_a_model_with_experts_says_what_is_active() -> None:
    """Mixtral 8x7B: 46.7 billion weights, of which a token passes 12.9 (Jiang et al. 2024, table 1)."""
    chosen = config("+config=mixtral_8x7b")
    layout = Layout(tensor=8, pipeline=4)
    text = describe(chosen, layout, peak_states(chosen, layout, plan_stages(chosen, layout).of))
    assert "46,702,792,704 parameters, 12,879,925,248 of them active per token" in text
