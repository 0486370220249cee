"""Makes parameters of the shapes in the placement table, on the meta device, without memory; the flat parameters of
`pangu.zero` give them storage and initial values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pangu.collectives.regions import TensorRegion
from pangu.config.schema import RunConfig
from pangu.topology.mesh import Mesh
from pangu.topology.placement import Placement, PlacementTable

if TYPE_CHECKING:
    from pangu.collectives.context import ContextRegion
    from pangu.collectives.exchange import ExpertRegion
    from pangu.layers.expert_balance import ExpertBalance
    from pangu.layers.fp8 import Fp8Products, Fp8Scales
    from pangu.layers.weight_gradient_store import WeightGradientStore

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Builder:
    """The placement table, the path of a module, e.g. `layers.3.attention`, and the tensor-parallel group."""

    table: PlacementTable = field(default_factory=PlacementTable)
    path: str = ""
    region: TensorRegion = field(default_factory=TensorRegion)
    """Layers read it; models only pass it on."""
    context: ContextRegion | None = None
    """Those that share a sequence; None: nobody does."""
    store: WeightGradientStore | None = None
    """Takes the gradients of the words' table and of the head; None: they are autograd's."""
    layers_store: WeightGradientStore | None = None
    """The same for the matrices of layers."""
    scales: Fp8Scales | None = None
    balance: ExpertBalance | None = None
    """Of a model with experts."""
    experts: ExpertRegion | None = None
    """Of a layout that splits the experts."""

    @classmethod
    def on(cls, mesh: Mesh, config: RunConfig, **fields: Any) -> Builder:
        """An empty one, for training on a rank of `mesh`."""
        region, context, experts = TensorRegion.of(mesh, config.parallel.overlap_chunks), None, None
        if mesh.layout.context > 1:
            from pangu.collectives.context import ContextRegion

            context = ContextRegion.of(mesh, config)
        if mesh.layout.splits_experts:
            from pangu.collectives.exchange import ExpertRegion

            experts = ExpertRegion.on(mesh)
        return cls(region=region, context=context, experts=experts, **fields)

    def at(self, name: object) -> Builder:
        return replace(self, path=self._below(str(name)))

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of this name below the path, as `named_parameters` will give it."""
        return nn.Parameter(torch.empty(self.table.shapes[self._below(name)], device="meta"))

    def optional(self, name: str) -> nn.Parameter | None:
        return self.parameter(name) if self._below(name) in self.table.shapes else None

    def placements(self, name: str) -> list[Placement]:
        return self.table.stored_in(self._below(name))

    def fp8_products(self, name: str) -> Fp8Products | None:
        return None if self.scales is None else self.scales.of(self.placements(name)[0].name)

    def _below(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name
