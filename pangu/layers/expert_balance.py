"""Expert loads of every mixture-of-experts layer, the routing biases they move, and the losses on them."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import Function

from pangu.collectives.reduce import all_reduce
from pangu.common.errors import UserError
from pangu.config.model import ModelConfig
from pangu.topology.recorder import AxisGroup

FIGURES = ("load", "least_load", "dropped", "balance_loss", "z_loss")


class ExpertBalance:
    """Expert loads, and the biases and shares that follow from them, bitwise equal on every rank."""

    # Loads are integer counts of tokens, whose sums depend on neither layout nor micro-batches.
    def __init__(self, config: ModelConfig) -> None:
        """Start without loads."""
        assert config.experts is not None
        self.config, self.layers, experts = config, config.expert_layers, config.experts
        self._sums = torch.zeros(len(self.layers), experts + 3, dtype=torch.float64)
        """Choices per expert, dropped choices, and both losses in this step, [layers, experts + 3]."""
        self.shares = torch.full((len(self.layers), experts), 1 / experts, dtype=torch.float64)
        """Share of each expert in the choices of the last global batch that changed weights, [layers, experts]."""
        self.bias = torch.zeros(len(self.layers), experts, dtype=torch.float32)
        """Bias [layers, experts] added to scores when choosing experts, with `router.balance` = bias."""
        self.scale = torch.zeros(())
        """Gradient of the objective with respect to the sum of a loss over sequences."""
        self.sequences = 1.0
        """Number of sequences in the global batch."""

    def to(self, device: torch.device) -> Self:
        """Move all tensors to a device."""
        self._sums, self.shares, self.bias = (x.to(device) for x in (self._sums, self.shares, self.bias))
        return self

    def reset(self) -> None:
        """Forget all loads."""
        self.shares.fill_(1 / self.shares.shape[1])
        self.bias.zero_()

    def row(self, layer: int) -> int:
        """Return the row of a layer in all tensors."""
        return self.layers.index(layer)

    def start_step(self, loss_scale: Tensor, sequences: float) -> None:
        """Reset the sums for a step with this number of `sequences` in the global batch."""
        self._sums.zero_()
        self.scale, self.sequences = loss_scale / sequences, sequences

    @torch.no_grad()
    def record(self, row: int, loads: Tensor, dropped: Tensor, losses: Tensor) -> None:
        """Add a layer's loads [experts], dropped choices and both losses [2] (sums over sequences) of a micro-batch."""
        self._sums[row] += torch.cat([loads.double(), dropped.double().view(1), losses.double()])

    @torch.no_grad()
    def finish_step(self, group: AxisGroup | None, skipped: Tensor) -> Tensor:
        """Sum over all ranks, update biases and shares unless `skipped` (a device bool), and return `FIGURES`."""
        # fp64 on the device: largest and smallest load over the mean of its layer, fraction of dropped choices, and
        # means of both losses over layers and sequences
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
        """Split the figures of experts off the end of `numbers`, and return them by name."""
        return numbers[: -len(FIGURES)], dict(zip(FIGURES, numbers[-len(FIGURES) :], strict=True))

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, by layer."""
        return {"layers": list(self.layers), "bias": self.bias.tolist(), "shares": self.shares.tolist()}

    def restore(self, path: object, state: Any, common: bool = False) -> None:
        """Restore the state of the checkpoint at `path`; raise `UserError` if it does not fit the model.

        With `common`, only one of the two may have the last layers, which are those of multi-token prediction.
        """
        known: dict[str, Any] = state if isinstance(state, dict) and isinstance(state.get("layers"), list) else {}
        saved, layers = known.get("layers", []), list(self.layers)
        count = min(len(saved), len(layers)) if common else len(layers)
        if saved[: count if common else None] != layers[:count]:
            known = {}
        try:
            for name, tensor in (("bias", self.bias), ("shares", self.shares)):
                values = torch.tensor(known[name], dtype=torch.float64)
                tensor[:count].copy_(values.view(len(saved), -1)[:count])
                if not tensor.isfinite().all():
                    raise ValueError
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            message = f"{path}: has no valid balancing state for the experts of layers {list(self.layers)}"
            raise UserError(message) from error


class Attach(Function):
    """Identity in x that adds a loss to the objective: the gradient of the loss is always `scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        """Return x."""
        ctx.scale, ctx.dtype = scale, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of x and loss."""
        return grads[0], ctx.scale.to(ctx.dtype), None
