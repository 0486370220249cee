"""Dynamic loss scale for fp16 (Micikevicius et al. 2018, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pangu.config.errors import UserError
from pangu.config.optimizer import LossScaleConfig


class LossScale:
    """The factor on the loss that keeps small fp16 gradients from vanishing; 1 for every other format. A step unscales
    with the scale that backward used, clips, updates the weights, then calls `update`: doubling earlier would halve the
    gradient of that step."""

    def __init__(self, config: LossScaleConfig | None) -> None:
        self.config = config
        self.scale = config.initial if config else 1.0
        self.clean_steps = 0

    def state(self) -> dict[str, float] | None:
        return None if self.config is None else {"scale": self.scale, "clean_steps": self.clean_steps}

    def restore(self, state: Mapping[str, Any] | None) -> str | None:
        """Continue with the scale of a checkpoint, if it has one; returns the scale in words, None without a loss
        scale."""
        if self.config is None:
            return None
        if state is None:
            return f"{self.scale:g} (precision.loss_scale.initial: the checkpoint is of a run without one)"
        self.scale = max(self.config.minimum, float(state["scale"]))
        self.clean_steps = int(state["clean_steps"])
        return f"{self.scale:g} (of the checkpoint)"

    def update(self, overflow: bool) -> None:
        """Halve after an overflow, double after `growth_interval` steps without one. Raises UserError on an overflow at
        the smallest scale: the loss itself is not finite."""
        if self.config is None:
            return
        if overflow:
            if self.scale <= self.config.minimum:
                raise UserError(
                    f"precision.loss_scale.minimum = {self.config.minimum:g}: gradients still overflow at this scale, "
                    "so the loss itself has left fp16; lower optimizer.lr or use precision=bf16"
                )
            self.scale = max(self.config.minimum, self.scale / 2)
            self.clean_steps = 0
            return
        self.clean_steps += 1
        if self.clean_steps >= self.config.growth_interval:
            self.scale *= 2
            self.clean_steps = 0
