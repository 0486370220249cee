"""The way to fp32 products: `auto` never gives up fp32."""

from __future__ import annotations

import pytest
import torch

from pangu.layers import fp32_products as products
from pangu.layers.fp32_products import EXACT, choose_fp32_products

CPU = torch.device("cpu")


def test_auto_keeps_products_true_fp32() -> None:
    try:
        torch.set_float32_matmul_precision(choose_fp32_products("auto", CPU, torch.float32))
        assert products._products_error() < EXACT
    finally:
        torch.set_float32_matmul_precision("highest")


def test_auto_takes_medium_only_where_its_products_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for error, chosen in ((EXACT / 2, "medium"), (1e-2, "highest")):

        def probe(error: float = error) -> float:
            seen.append(torch.get_float32_matmul_precision())
            return error

        monkeypatch.setattr(products, "_products_error", probe)
        assert choose_fp32_products("auto", CPU, torch.float32) == chosen
    assert seen == ["medium", "medium"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_requests_win_and_other_devices_and_formats_keep_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_products_error", lambda: 0.0)
    assert choose_fp32_products("high", CPU, torch.float32) == "high"
    assert choose_fp32_products("auto", torch.device("cuda"), torch.float32) == "highest"
    assert choose_fp32_products("auto", CPU, torch.bfloat16) == "highest"
