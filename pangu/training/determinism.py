"""`train.deterministic`: the same command on the same devices and libraries gives the same bits again."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic as memory

from pangu.config.errors import UserError

VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_NVLS_ENABLE": ("0",),
    "HCCL_DETERMINISTIC": ("true", "strict"),
}
"""Environment variable -> values with which cuBLAS adds up in one order on every stream, NCCL not in switches, and HCCL
in one order too."""
REPLACED = {
    *(f"_{name}_attention_backward" for name in ("flash", "scaled_dot_product_flash")),
    *(f"_{name}_attention_backward" for name in ("efficient", "scaled_dot_product_efficient")),
    *("index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_", "index_copy", "index_copy_"),
    *("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
}
"""Operators whose usual kernels on a GPU add, or write, in an order that changes from call to call, and for which torch
has another one."""
REFUSED = {
    *("_cudnn_attention_backward", "_scaled_dot_product_cudnn_attention_backward", "cumsum", "put", "put_", "histc"),
    *("bincount", "median", "nll_loss_forward", "nll_loss2d_forward"),
}
"""Those for which it has none (`cumsum` of integers apart, whose sums are exact): with the mode it raises an error. Of
backward and single operators that no model here has, torch's documentation lists more."""


@contextmanager
def deterministic(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Within the block every operator adds up in an order that only its input decides: torch takes other kernels,
    Inductor times none, and NCCL leaves no sums to switches, which add in the order of arrival. To be entered before a
    device computes and before groups are made: libraries read once what they are told. Raises UserError if they were
    told otherwise."""
    for name, values in VARIABLES.items():
        if (value := environment.setdefault(name, values[0])) not in values:
            message = f"train.deterministic = True: {name} = {value}: sums differ from run to run"
            raise UserError(f"{message}; {name}={' or '.join(values)} works, or train.deterministic=false")
    settings: Any = memory
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # torch would write into every empty tensor, which is a launch
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]
