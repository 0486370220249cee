"""torch's optimizers, made and stepped without torch's compiler, which neither needs."""

from __future__ import annotations

import inspect

import torch


class Uncompiled(torch.optim.Optimizer):
    """An optimizer that is made and steps without importing torch.compile.

    torch wraps these methods only to keep its compiler out of them, and for that the wrappers import `torch._dynamo`:
    75 MiB and a second of every process of a run. What is wrapped stays torch's.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class AdamW(Uncompiled, torch.optim.AdamW):
    """Decoupled weight decay (Loshchilov & Hutter 2019, Algorithm 2)."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
