"""The ways to fp32 products: `auto` never gives up fp32, and products are timed on shapes like the run's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pangu.layers import fp32_matmul as products
from pangu.layers.fp32_matmul import EXACT, MatmulShape, matmul_precision, matmul_precisions

CPU = torch.device("cpu")
MATMUL = MatmulShape(128, 256, 192)


def test_every_way_of_auto_keeps_products_true_fp32() -> None:
    x, weight, grad = products.random(CPU, torch.float32, (300, 200), (100, 200), (300, 100))
    for way in matmul_precisions("auto", CPU, torch.float32, MATMUL):
        with matmul_precision(way):
            for left, right in ((x, weight.t()), (grad, weight), (grad.t(), x)):
                errors = (left @ right - left.double() @ right.double()).abs()
                assert errors.max() < EXACT * left.shape[1] ** 0.5


@pytest.mark.parametrize(("narrower", "ways"), [(torch.float32, ["highest", "medium"]), (torch.bfloat16, ["highest"])])
def test_medium_is_a_way_only_where_its_products_are_exact(
    monkeypatch: pytest.MonkeyPatch, narrower: torch.dtype, ways: list[str]
) -> None:
    """As of a library that rounds to a narrower format where it may."""
    original = products.matmul_trial

    def trial(*arguments: Any) -> Callable[[], tuple[torch.Tensor, ...]]:
        multiply = original(*arguments)

        def products_of_library() -> tuple[torch.Tensor, ...]:
            medium = torch.get_float32_matmul_precision() == "medium"
            with matmul_precision("highest"):  # whatever this processor makes of the other
                exact = multiply()
            return tuple(product.to(narrower).float() for product in exact) if medium else exact

        return products_of_library

    monkeypatch.setattr(products, "matmul_trial", trial)
    assert matmul_precisions("auto", CPU, torch.float32, MATMUL) == ways
    assert torch.get_float32_matmul_precision() == "highest"


def test_requests_win_and_other_devices_and_formats_keep_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_error_of_medium", lambda matmul: 0.0)
    assert matmul_precisions("high", CPU, torch.float32, MATMUL) == ["high"]
    assert matmul_precisions("auto", torch.device("cuda"), torch.float32, MATMUL) == ["highest"]
    assert matmul_precisions("auto", CPU, torch.bfloat16, MATMUL) == ["highest"]


def test_a_large_product_is_timed_on_a_smaller_one_and_counts_for_all_of_it() -> None:
    smaller, worth = MatmulShape(2048, 5120, 15360, repeats=40).cut(2**23)
    assert smaller.rows * smaller.inputs * smaller.outputs <= 2**23
    assert min(smaller.rows, smaller.inputs, smaller.outputs) >= 128
    assert worth * smaller.rows * smaller.inputs * smaller.outputs == 40 * 2048 * 5120 * 15360
    assert MatmulShape(4, 8, 16).cut(2**23) == (MatmulShape(4, 8, 16), 1.0)
