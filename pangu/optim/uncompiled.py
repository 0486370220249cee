"""Optimizers of torch, constructed and stepped without importing its compiler."""

from __future__ import annotations

import inspect

import torch


class Uncompiled(torch.optim.Optimizer):
    """Optimizer that does not import torch.compile.

    torch wraps these methods only to keep its compiler out of them, and for that imports `torch._dynamo`: 75 MiB and a
    second in every process of a run. The wrapped functions themselves are torch's.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class AdamW(Uncompiled, torch.optim.AdamW):
    """AdamW optimizer with decoupled weight decay (Loshchilov & Hutter 2019, Algorithm 2)."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
