"""What the router of every mixture-of-experts layer knows of the loads of its experts, and what is told of them."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import Function

from pangu.collectives.reduce import all_reduce
from pangu.config.errors import UserError
from pangu.config.model import ModelConfig
from pangu.topology.recorder import AxisGroup

FIGURES = ("load", "least_load", "dropped", "balance_loss", "z_loss")


class ExpertBalance:
    """Loads are numbers of tokens, which add up to the same whatever the layout and the micro-batches are; so the
    biases and the shares that come from them are the same to the last bit on every rank."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.experts is not None
        self.config, self.layers, experts = config, config.expert_layers, config.experts
        self._sums = torch.zeros(len(self.layers), experts + 3, dtype=torch.float64)
        """Of each layer in this step: choices of each expert, choices that were dropped, and both losses."""
        self.shares = torch.full((len(self.layers), experts), 1 / experts, dtype=torch.float64)
        """Of the choices of the global batch of the last step that changed weights."""
        self.bias = torch.zeros(len(self.layers), experts, dtype=torch.float32)
        """Added to scores where experts are chosen, with `router.balance` = bias."""
        self.scale = torch.zeros(())
        """Gradient of the objective by the sum over sequences of a loss here."""
        self.sequences = 1.0
        """In the global batch."""

    def to(self, device: torch.device) -> Self:
        self._sums, self.shares, self.bias = (x.to(device) for x in (self._sums, self.shares, self.bias))
        return self

    def reset(self) -> None:
        """Forget all loads."""
        self.shares.fill_(1 / self.shares.shape[1])
        self.bias.zero_()

    def row(self, layer: int) -> int:
        """Of a layer in all tensors here."""
        return self.layers.index(layer)

    def start_step(self, loss_scale: Tensor, sequences: float) -> None:
        """`sequences`: in the global batch."""
        self._sums.zero_()
        self.scale, self.sequences = loss_scale / sequences, sequences

    @torch.no_grad()
    def note(self, row: int, loads: Tensor, dropped: Tensor, losses: Tensor) -> None:
        """What a layer did with a micro-batch: loads [experts], a number, both losses [2] as sums over sequences."""
        self._sums[row] += torch.cat([loads.double(), dropped.double().view(1), losses.double()])

    @torch.no_grad()
    def finish_step(self, group: AxisGroup | None, skipped: Tensor) -> Tensor:
        """Add up over all ranks, move biases and shares unless the step is `skipped` (a bool on the device), and return
        `FIGURES`, fp64 on the device: the largest and the smallest load over the mean of its layer, the share of
        choices that were dropped, and means over layers and sequences of both losses."""
        sums, experts, router = all_reduce(self._sums, group), self.shares.shape[1], self.config.router
        loads = sums[:, :experts]
        mean = loads.mean(1, keepdim=True)
        self.shares.copy_(torch.where(skipped, self.shares, loads / loads.sum(1, keepdim=True)))
        if router.balance == "bias":
            step = router.bias_rate * (mean - loads).sign()
            self.bias += torch.where(skipped, torch.zeros_like(step), step).float()
        ratios, choices = loads / mean, loads.sum()
        losses = sums[:, experts + 1 :].mean(0) / self.sequences
        return torch.cat([torch.stack([ratios.max(), ratios.min(), sums[:, experts].sum() / choices]), losses])

    def split(self, numbers: list[float]) -> tuple[list[float], dict[str, float]]:
        """Numbers without the figures of experts, which are the last of them, and these by name."""
        return numbers[: -len(FIGURES)], dict(zip(FIGURES, numbers[-len(FIGURES) :], strict=True))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, by layer."""
        return {"layers": list(self.layers), "bias": self.bias.tolist(), "shares": self.shares.tolist()}

    def restore(self, path: object, state: Any) -> None:
        """Take over the state that a checkpoint at `path` keeps. Raises UserError if it is not of such a model."""
        known = state if isinstance(state, dict) and state.get("layers") == list(self.layers) else {}
        try:
            for name, tensor in (("bias", self.bias), ("shares", self.shares)):
                tensor.copy_(torch.tensor(known[name], dtype=torch.float64).view_as(tensor))
                if not tensor.isfinite().all():
                    raise ValueError
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            message = f"{path}: does not say how the experts of layers {list(self.layers)} were balanced"
            raise UserError(message) from error


class Attach(Function):
    """Adds a loss to the objective where it is made: in backward its gradient is `scale`, whatever is computed from
    `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.scale, ctx.dtype = scale, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.scale.to(ctx.dtype), None
