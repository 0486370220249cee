"""Parameters on the meta device with the shapes of the placement table; `pangu.zero` adds storage and values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pangu.collectives.context import ContextRegion
from pangu.collectives.exchange import ExpertRegion
from pangu.collectives.regions import TensorRegion
from pangu.config.schema import RunConfig
from pangu.topology.mesh import Mesh
from pangu.topology.placement import Placement, PlacementTable

if TYPE_CHECKING:
    from pangu.layers.expert_balance import ExpertBalance
    from pangu.layers.fp8 import Fp8Scales
    from pangu.layers.fp8_blocks import BlockScaledMatmuls
    from pangu.layers.largest_logits import LargestLogits
    from pangu.layers.weight_gradient_store import WeightGradientStore

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Builder:
    """Placement table, path of a module such as `layers.3.attention`, and parallel groups, to build layers from."""

    table: PlacementTable = field(default_factory=PlacementTable)
    path: str = ""
    region: TensorRegion = field(default_factory=TensorRegion)
    """Tensor-parallel region, which only layers read."""
    context: ContextRegion | None = None
    """Context-parallel region; None: sequences are not split."""
    store: WeightGradientStore | None = None
    """Store for the gradients of token embedding and head; None: autograd's."""
    layers_store: WeightGradientStore | None = None
    """Store for the gradients of the matrices of layers; None: autograd's."""
    scales: Fp8Scales | BlockScaledMatmuls | None = None
    balance: ExpertBalance | None = None
    logits: LargestLogits | None = None
    """Largest attention logits, which QK-clip reads; None: not needed."""
    experts: ExpertRegion | None = None
    norm: str = "torch"
    """Kernel of norms, a value of `kernels.norm`."""

    @classmethod
    def on(cls, mesh: Mesh, config: RunConfig, **fields: Any) -> Builder:
        """Return an empty builder for training on a rank of `mesh`."""
        region, context, experts = TensorRegion.of(mesh, config.parallel.overlap_chunks), None, None
        if mesh.layout.context > 1:
            context = ContextRegion.of(mesh, config)
        if mesh.layout.splits_experts:
            experts = ExpertRegion.on(mesh, config.parallel.fixed_exchange)
        return cls(region=region, context=context, experts=experts, **fields)

    def at(self, name: object) -> Builder:
        """Return the builder of a child module."""
        return replace(self, path=self._below(str(name)))

    def parameter(self, name: str) -> nn.Parameter:
        """Return the parameter of this name below the path, as in `named_parameters`."""
        return nn.Parameter(torch.empty(self.table.shapes[self._below(name)], device="meta"))

    def optional(self, name: str) -> nn.Parameter | None:
        """Return the parameter of this name, or None if the table has none."""
        return self.parameter(name) if self._below(name) in self.table.shapes else None

    def placements(self, name: str) -> list[Placement]:
        """Return the logical tensors that are stored in a parameter."""
        return self.table.stored_in(self._below(name))

    def _below(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name
