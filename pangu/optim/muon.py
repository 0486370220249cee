"""Muon for matrices (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982, section 2), AdamW for other tensors.

Like LAMB, it knows nothing of ranks: tensors may be flat shards of matrices, and `orthogonalize` replaces the shards of
the momentum by those of the orthogonal matrices, in batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor

from pangu.common.errors import UserError
from pangu.config.optimizer import UPDATED_AT_ONCE
from pangu.optim.lamb import Lamb, require_dense
from pangu.optim.moments import MOMENTS
from pangu.optim.newton_schulz import orthogonalize, scale_of

RULES = "match_rms_adamw", "original"
"""Values of `adjust_lr`, see `scale_of`."""
_KEPT = "_shapes", "_dtype", "_orthogonalize"


class Muon(Lamb):
    """Optimizer with the update w ← w − lr · (s · O + λw), where O is the momentum with singular values of about 1.

    The momentum is m ← μm + (1 − μ)g, and with Nesterov's form O is made of μm + (1 − μ)g. s depends on the shape. That
    holds for parameter groups with `matrices` (default), whose only state is `exp_avg`; the others get AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr: str = "match_rms_adamw",
        dtype: torch.dtype | None = None,
        moments: torch.dtype | None = None,
        shapes: Mapping[Tensor, Sequence[int]] | None = None,
        orthogonalize: Callable[[list[Tensor]], Iterable[Sequence[int]]] | None = None,
        reuse_gradients: bool = False,
    ) -> None:
        """Start with moments and step counts of 0.

        Args:
            params: Matrices, or groups of parameters; `matrices` of a group is False for AdamW.
            lr: Learning rate of both.
            betas: Decay rates of AdamW's moments.
            eps: AdamW's ε.
            weight_decay: Decoupled weight decay λ of both.
            momentum: Decay rate μ.
            nesterov: True for Nesterov's form of the momentum.
            ns_steps: Number of Newton-Schulz iterations.
            adjust_lr: `match_rms_adamw`: s = 0.2 √max(rows, columns), the size of AdamW's updates; `original`: s =
                √max(1, rows / columns). As `adjust_lr_fn` of `torch.optim.Muon`.
            dtype: Format of the iterations; None: that of the tensors.
            moments: Storage format of the moments between steps; None: that of the tensors.
            shapes: Shape of what is orthogonalized, by tensor: of the matrix of which a tensor is a shard, or of blocks
                of its rows; None: tensors are matrices.
            orthogonalize: Function that replaces shards, in the order of the groups, by those of orthogonalized
                matrices, and yields the indices of those replaced; None: tensors are matrices.
            reuse_gradients: True to overwrite the gradients with the update, which saves memory of their size.

        Raises:
            UserError: A tensor of a group with `matrices` is no matrix, or an option is out of range.
        """
        self._shapes, self._dtype, self._orthogonalize = shapes, dtype, orthogonalize
        self.own_options = {"adapt": False, "matrices": True, "momentum": momentum, "nesterov": nesterov}
        self.own_options |= {"ns_steps": ns_steps, "adjust_lr": adjust_lr}
        options: dict[str, Any] = {"exclude_vectors": False, "moments": moments, "reuse_gradients": reuse_gradients}
        super().__init__(params, lr, betas, eps, weight_decay, **options)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle."""
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _KEPT}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add and check a parameter group; raise `UserError` for what is no matrix or an option out of range."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if not 0 <= group["momentum"] < 1:
            raise UserError(f"momentum = {group['momentum']}: must be at least 0 and below 1")
        if not isinstance(group["ns_steps"], int) or group["ns_steps"] < 1:
            raise UserError(f"ns_steps = {group['ns_steps']}: must be an integer of at least 1")
        if group["adjust_lr"] not in RULES:
            raise UserError(f"adjust_lr = {group['adjust_lr']}: must be one of {', '.join(RULES)}")
        for tensor in group["params"]:
            if group["matrices"] and self._shapes is None and tensor.dim() != 2:
                raise UserError(f"params: a tensor of shape {list(tensor.shape)} is not a matrix; set matrices=False")

    def share_steps(self) -> None:
        """Let equal step counts share one tensor again, apart for matrices, which this class counts (a host sync)."""
        super().share_steps()
        for group in self.param_groups:
            apart: dict[int, Tensor] = {}
            for state in (self.state[one] for one in group["params"] if group["matrices"]):
                if state:
                    state["step"] = apart.setdefault(id(state["step"]), state["step"].clone())

    def _update_others(self) -> None:
        groups = [group for group in self.param_groups if group["matrices"]]
        parts = [(group, part) for group in groups for part in _parts(group["params"])]
        updates = [self._update_momentum(group, part) for group, part in parts]
        if self._orthogonalize is None:
            for (group, part), part_updates in zip(parts, updates, strict=True):
                blocks = (update.view(-1, *self._shape(one)) for one, update in zip(part, part_updates, strict=True))
                orthogonalize([*chain(*blocks)], group["ns_steps"], self._dtype)
                self._apply_matrices(group, part, part_updates)
        else:
            of = [(group, one) for group, part in parts for one in part]
            shards = [*chain(*updates)]
            # a rank without a shard of any matrix still takes part in it
            for replaced in self._orthogonalize(shards):
                for _, alike in groupby(replaced, lambda index: id(of[index][0])):
                    some = list(alike)
                    self._apply_matrices(of[some[0]][0], [of[i][1] for i in some], [shards[i] for i in some])
        steps = (self.state[one]["step"] for _, part in parts for one in part)
        for step in {id(step): step for step in steps}.values():
            step.add_(self._applied_on(step.device))

    def _shape(self, tensor: Tensor) -> Sequence[int]:
        return tensor.shape if self._shapes is None else self._shapes[tensor]

    def _update_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["matrices"]]

    def _moments_of(self, group: dict[str, Any]) -> Collection[str]:
        return MOMENTS[:1] if group["matrices"] else MOMENTS

    def _update_momentum(self, group: dict[str, Any], tensors: list[Tensor]) -> list[Tensor]:
        """Update the momentum, and return what is to be orthogonalized: 0 if the step is skipped."""
        applied, beta, dtype = self._applied_on(tensors[0].device), group["momentum"], tensors[0].dtype
        wide = torch.promote_types(dtype, torch.float32)
        updates = [one.grad.to(wide, copy=not self.reuse_gradients) for one in tensors if one.grad is not None]
        if group["maximize"]:
            torch._foreach_neg_(updates)
        if self.grad_scale is not None:
            torch._foreach_div_(updates, self.grad_scale.to(tensors[0].device))
        for update in updates:
            update.masked_fill_(applied == 0, 0.0)  # not `* 0`, which keeps non-finite values
        kept = [self.state[one]["exp_avg"] for one in tensors]
        moments = [moment.to(wide) for moment in kept]
        decay = torch.full((), beta, dtype=wide, device=applied.device).masked_fill_(applied == 0, 1.0)
        torch._foreach_mul_(moments, decay)
        torch._foreach_add_(moments, updates, alpha=1 - beta)
        if any(moment is not own for moment, own in zip(moments, kept, strict=True)):
            torch._foreach_copy_(kept, moments)
        if group["nesterov"]:
            torch._foreach_mul_(updates, 1 - beta)
            torch._foreach_add_(updates, moments, alpha=beta)
        else:
            torch._foreach_copy_(updates, moments)
        return updates

    def _apply_matrices(self, group: dict[str, Any], tensors: list[Tensor], updates: list[Tensor]) -> None:
        rate = self._applied_on(tensors[0].device).to(updates[0].dtype) * group["lr"]
        torch._foreach_mul_(updates, [scale_of(self._shape(one), group["adjust_lr"]) for one in tensors])
        torch._foreach_add_(updates, tensors, alpha=group["weight_decay"])
        torch._foreach_addcmul_(tensors, updates, [rate] * len(tensors), value=-1)


def _parts(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors that have a gradient, in parts of one format whose moments may be copied in a wider one."""
    part: list[Tensor] = []
    elements = 0
    for tensor in tensors:
        if tensor.grad is None:
            continue
        require_dense(tensor.grad)
        unlike = part and (tensor.dtype, tensor.device) != (part[0].dtype, part[0].device)
        if unlike or (part and elements + tensor.numel() > UPDATED_AT_ONCE):
            yield part
            part, elements = [], 0
        part.append(tensor)
        elements += tensor.numel()
    if part:
        yield part
