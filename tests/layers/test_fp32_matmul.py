"""The ways to fp32 products: `auto` never gives up fp32, and products are timed on shapes like the run's."""

from __future__ import annotations

import pytest
import torch

from pangu.layers import fp32_matmul as products
from pangu.layers.fp32_matmul import EXACT, Matmul, matmul_precision, matmul_precisions

CPU = torch.device("cpu")


def test_every_way_of_auto_keeps_products_true_fp32() -> None:
    for way in matmul_precisions("auto", CPU, torch.float32):
        with matmul_precision(way):
            assert products._matmul_error() < EXACT


def test_medium_is_a_way_only_where_its_products_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for error, ways in ((EXACT / 2, ["highest", "medium"]), (1e-2, ["highest"])):

        def probe(error: float = error) -> float:
            seen.append(torch.get_float32_matmul_precision())
            return error

        monkeypatch.setattr(products, "_matmul_error", probe)
        assert matmul_precisions("auto", CPU, torch.float32) == ways
    assert seen == ["medium", "medium"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_requests_win_and_other_devices_and_formats_keep_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_matmul_error", lambda: 0.0)
    assert matmul_precisions("high", CPU, torch.float32) == ["high"]
    assert matmul_precisions("auto", torch.device("cuda"), torch.float32) == ["highest"]
    assert matmul_precisions("auto", CPU, torch.bfloat16) == ["highest"]


def test_a_large_product_is_timed_on_a_smaller_one_and_counts_for_all_of_it() -> None:
    smaller, worth = Matmul(2048, 5120, 15360, repeats=40).cut(2**23)
    assert smaller.rows * smaller.inputs * smaller.outputs <= 2**23
    assert min(smaller.rows, smaller.inputs, smaller.outputs) >= 128
    assert worth * smaller.rows * smaller.inputs * smaller.outputs == 40 * 2048 * 5120 * 15360
    assert Matmul(4, 8, 16).cut(2**23) == (Matmul(4, 8, 16), 1.0)
