"""Optimizers of a sharded model: parameter groups by name, and checks of optimizers on flat shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from pangu.common.errors import UserError, shown
from pangu.config.build import build
from pangu.config.optimizer import AdamConfig, LambConfig
from pangu.optim.lamb import Lamb

Groups = Sequence[Mapping[str, Any]]


_owners: MutableMapping[Tensor, ReferenceType[Any]] = WeakTensorKeyDictionary()
"""Sharded models that own main parameters, and the parameters that the models had before."""


def watch(tensors: Iterable[Tensor], owner: Any) -> None:
    """Let an optimizer of these tensors step only while the sharded model `owner` is stepping."""
    for tensor in tensors:
        _owners[tensor] = ref(owner)


def _require_owner(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        known = _owners.get(group["params"][0]) if group["params"] else None
        owner = None if known is None else known()
        if owner is not None and not owner.is_stepping:
            raise UserError(
                "optimizer.step(): its tensors belong to a sharded model, whose weights would not change; call "
                "`sharded.step(optimizer)` on all ranks, with an optimizer created after `shard`"
            )


register_optimizer_step_pre_hook(_require_owner)


def options_of(
    groups: Groups, names: Sequence[str], config: AdamConfig | LambConfig
) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the options of each group with the names of its parameters, ungrouped ones first.

    Args:
        groups: Groups with `params`, a name or pattern of parameters or a list of them, and options to override.
        names: Names of the trained parameters.
        config: Default options.

    Raises:
        UserError: A group has no parameters, a parameter is in several groups, or an option is invalid.
    """
    options: list[tuple[dict[str, Any], list[str]]] = [({}, [])]
    owner: dict[str, int] = {}
    for number, group in enumerate(groups):
        own = {name: value for name, value in group.items() if name != "params"}
        known = {field for field in vars(config) if field not in ("name", "clip", "moments", "exclude_vectors")}
        if unknown := sorted(set(own) - known):
            raise UserError(f"groups[{number}]: unknown key {unknown[0]}; use {', '.join(sorted(known))}")
        build(type(config), {**_plain(vars(config)), **_plain(own)})
        patterns = group.get("params", ())
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            if not isinstance(pattern, str):
                raise UserError(f"groups[{number}]: params = {shown(pattern)}: must be names or patterns of parameters")
            matching = [name for name in names if fnmatchcase(name, pattern)]
            if not matching:
                few = ", ".join(names[:3])
                raise UserError(f"groups[{number}]: {pattern!r} matches no trained parameter; names are {few}, ...")
            for name in matching:
                if owner.setdefault(name, number) != number:
                    raise UserError(f"{name}: is in groups[{owner[name]}] and in groups[{number}]; keep one")
        options.append((own, [name for name in names if owner.get(name) == number]))
    options[0][1].extend(name for name in names if name not in owner)
    return options


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def require_alone(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError if an optimizer does not update elementwise: it would see flat shards instead of matrices."""
    if isinstance(optimizer, Lamb) or not _treats_elements_alone(optimizer):
        raise UserError(
            f"{type(optimizer).__name__}: its update depends on the shape or norm of a tensor, but main "
            "parameters are flat shards; use `sharded.lamb(...)`, `sharded.adamw(...)` or a torch optimizer "
            "that updates each element independently"
        )


def _treats_elements_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether elements get equal updates in one tensor and split in two, as far as that can be tried."""
    groups = [group for group in optimizer.param_groups if group["params"]]
    if not groups:
        return True
    like = groups[0]["params"][0]
    values = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=like.dtype, device=like.device)
    gradients = torch.tensor([0.3, -0.01, 2.0, -0.4], dtype=like.dtype, device=like.device)
    results = []
    for sizes in ([4], [1, 3]):
        tensors = [part.clone() for part in values.split(sizes)]
        # a twin with another state: `optimizer.step` may be wrapped by a scheduler, for the optimizer itself
        twin = object.__new__(type(optimizer))
        twin.__dict__.update(optimizer.__dict__)
        twin.state = defaultdict(dict)
        twin.param_groups = [{**groups[0], "params": tensors, "lr": 0.1}]
        try:
            for _ in range(3):
                for tensor, gradient in zip(tensors, gradients.split(sizes), strict=True):
                    tensor.grad = gradient.clone()
                type(optimizer).step(twin)
        except Exception:  # whatever it needs, its own step says
            return True
        results.append(torch.cat(tensors))
    together, apart = results
    return torch.allclose(together, apart, rtol=1e-4, atol=1e-6)
