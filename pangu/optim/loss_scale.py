"""Dynamic loss scale for fp16 (Micikevicius et al. 2018, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pangu.common.errors import UserError
from pangu.config.optimizer import LossScaleConfig


class LossScale:
    """Loss factor that keeps small fp16 gradients from underflowing; 1 for every other format."""

    # A step unscales with the scale of its backward pass, clips, updates the weights, then calls `update`. The state
    # lives on the device, which decides without a host sync whether a step overflowed.
    def __init__(self, config: LossScaleConfig | None, device: torch.device | None = None) -> None:
        """Start with the initial scale, or 1 if `config` is None."""
        self.config = config
        self.scale = torch.full((), config.initial if config else 1.0, dtype=torch.float64, device=device)
        self.clean_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.overflows = torch.zeros((), dtype=torch.int64, device=device)
        """Overflows since the scale last grew, or in a row, as far as the hysteresis counts them."""

    def state(self) -> dict[str, float] | None:
        """Return the state to save (a host sync), or None without a loss scale."""
        if self.config is None:
            return None
        state = {"scale": float(self.scale), "clean_steps": int(self.clean_steps)}
        return state if self.config.hysteresis == 1 else {**state, "overflows": int(self.overflows)}

    def restore(self, state: Mapping[str, Any] | None) -> str | None:
        """Restore the state of a checkpoint, if it has one; return the scale as text, None without a loss scale."""
        if self.config is None:
            return None
        if state is None:
            return f"{float(self.scale):g} (precision.loss_scale.initial, as the checkpoint has none)"
        scale = max(self.config.minimum, float(state["scale"]))
        self.scale.fill_(scale)
        self.clean_steps.fill_(int(state["clean_steps"]))
        self.overflows.fill_(int(state.get("overflows", 0)))
        return f"{scale:g} (from the checkpoint)"

    def update(self, overflow: Tensor) -> None:
        """Halve the scale after enough overflows, double it after `growth_interval` steps without one."""
        if self.config is None:
            return
        clean = self.clean_steps + 1
        grows, shrinks = clean >= self.config.growth_interval, overflow
        self.clean_steps = clean.masked_fill(overflow | grows, 0)
        if self.config.hysteresis > 1:
            grows = grows & overflow.logical_not()
            forgets = overflow.logical_not() if self.config.consecutive else grows
            self.overflows = (self.overflows + overflow).masked_fill(forgets, 0)
            shrinks = overflow & (self.overflows >= self.config.hysteresis)
        smaller = (self.scale / 2).clamp(min=self.config.minimum)
        self.scale = smaller.where(shrinks, (self.scale * 2).where(grows, self.scale))

    def require_room(self, scale: float) -> None:
        """Raise `UserError` if a step overflowed at the minimum scale, as the loss itself is not finite then."""
        if self.config is None or scale > self.config.minimum:
            return
        # a host sync, which only a step that overflowed at the minimum makes
        if self.config.hysteresis == 1 or int(self.overflows) >= self.config.hysteresis:
            raise UserError(
                f"precision.loss_scale.minimum = {self.config.minimum:g}: gradients still overflow at this scale, "
                "so the loss exceeds the range of fp16; lower optimizer.lr, or set precision=bf16"
            )
