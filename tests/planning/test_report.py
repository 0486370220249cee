"""Model states per device follow the ZeRO paper."""

from __future__ import annotations

import pytest

from pangu.planning.report import describe, model_states, size
from pangu.topology.layout import Layout
from tests.configs import config

MIXED = config("precision=bf16").precision


@pytest.mark.parametrize(("zero", "bytes_per_parameter"), [(0, 18.0), (1, 6 + 12 / 64), (2, 2 + 16 / 64), (3, 18 / 64)])
def test_bytes_per_parameter_with_fp32_gradients(zero: int, bytes_per_parameter: float) -> None:
    assert model_states(MIXED, Layout(data=64, zero=zero)).total == pytest.approx(bytes_per_parameter)


def test_wide_formats_need_no_second_copy_of_the_weights() -> None:
    assert model_states(config("precision=fp32").precision, Layout()).total == 16
    assert model_states(config("precision=fp64").precision, Layout()).total == 32


def test_200b_on_the_reports_layout() -> None:
    """1.616 billion parameters on each of 2,048 devices; 6 + 12/16 bytes each."""
    chosen = config("+config=pangu_200b")
    text = describe(chosen, Layout(tensor=8, pipeline=16, data=16, zero=1))
    assert "206,861,008,896 parameters" in text
    assert f"{size(206_861_008_896 / 128 * 6.75)} of model states" in text
    assert "= 2048 devices" in text
    assert "each replica computes 32 micro-batches of 1" in text
