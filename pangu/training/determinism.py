"""Bitwise reproducibility on the same devices and libraries (`train.deterministic`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic as memory

from pangu.common.errors import UserError

VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_NVLS_ENABLE": ("0",),
    "HCCL_DETERMINISTIC": ("true", "strict"),
}
"""Values of environment variables with which cuBLAS, NCCL (without sums in switches) and HCCL add in a fixed order."""
REPLACED = {
    *(f"_{name}_attention_backward" for name in ("flash", "scaled_dot_product_flash")),
    *(f"_{name}_attention_backward" for name in ("efficient", "scaled_dot_product_efficient")),
    *("index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_", "index_copy", "index_copy_"),
    *("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
}
"""Operators whose usual GPU kernels add or write in a varying order, and for which torch has a deterministic one."""
REFUSED = {
    *("_cudnn_attention_backward", "_scaled_dot_product_cudnn_attention_backward", "cumsum", "put", "put_", "histc"),
    *("bincount", "median", "nll_loss_forward", "nll_loss2d_forward"),
}
"""Operators without a deterministic kernel, which raise an error in this mode (integer `cumsum`, whose sums are exact,
apart). torch's documentation lists more, which no model here uses."""


@contextmanager
def deterministic(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Make every operator of the block accumulate in an order that depends only on its input.

    torch uses other kernels, Inductor times none, and NCCL leaves no sums to switches, which add in order of arrival.
    Enter this before devices compute and groups are created, as libraries read their settings once. Raises UserError if
    the environment asks otherwise.
    """
    for name, values in VARIABLES.items():
        if (value := environment.setdefault(name, values[0])) not in values:
            message = f"train.deterministic = true: with {name} = {value} sums differ from run to run"
            raise UserError(f"{message}; set {name}={' or '.join(values)}, or train.deterministic=false")
    settings: Any = memory
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # torch would write into every empty tensor, which is a launch
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]
