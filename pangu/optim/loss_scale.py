"""Dynamic loss scale for fp16 (Micikevicius et al. 2018, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pangu.config.errors import UserError
from pangu.config.optimizer import LossScaleConfig


class LossScale:
    """The factor on the loss that keeps small fp16 gradients from vanishing; 1 for every other format. A step unscales
    with the scale that backward used, clips, updates the weights, then calls `update`: doubling earlier would halve the
    gradient of that step. All of it lies on the device, where it is decided whether a step overflowed."""

    def __init__(self, config: LossScaleConfig | None, device: torch.device | None = None) -> None:
        self.config = config
        self.scale = torch.full((), config.initial if config else 1.0, dtype=torch.float64, device=device)
        self.clean_steps = torch.zeros((), dtype=torch.int64, device=device)

    def state(self) -> dict[str, float] | None:
        return None if self.config is None else {"scale": float(self.scale), "clean_steps": int(self.clean_steps)}

    def restore(self, state: Mapping[str, Any] | None) -> str | None:
        """Continue with the scale of a checkpoint, if it has one; returns the scale in words, None without a loss
        scale."""
        if self.config is None:
            return None
        if state is None:
            return f"{float(self.scale):g} (precision.loss_scale.initial: the checkpoint is of a run without one)"
        scale = max(self.config.minimum, float(state["scale"]))
        self.scale.fill_(scale)
        self.clean_steps.fill_(int(state["clean_steps"]))
        return f"{scale:g} (of the checkpoint)"

    def update(self, overflow: Tensor) -> None:
        """Halve after an overflow, double after `growth_interval` steps without one."""
        if self.config is None:
            return
        clean = self.clean_steps + 1
        grows = clean >= self.config.growth_interval
        smaller = (self.scale / 2).clamp(min=self.config.minimum)
        self.scale = smaller.where(overflow, (self.scale * 2).where(grows, self.scale))
        self.clean_steps = clean.masked_fill(overflow | grows, 0)

    def require_room(self, scale: float) -> None:
        """Raise a UserError if a step overflowed with the smallest `scale`: the loss itself is not finite."""
        if self.config is not None and scale <= self.config.minimum:
            raise UserError(
                f"precision.loss_scale.minimum = {self.config.minimum:g}: gradients still overflow at this scale, "
                "so the loss itself has left fp16; lower optimizer.lr or use precision=bf16"
            )
