"""A model without a trainer: real parameters, logical tensors cut out of them, its loss and its logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pangu.data.batch import Batch
from pangu.layers.dropout import DropoutKeys
from pangu.layers.initial import fill, replace_parameter
from pangu.models.language_model import LanguageModel
from pangu.models.parameters import ModelPart
from pangu.topology.placement import Placement, PlacementTable


def materialise(
    model: nn.Module, table: PlacementTable, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> None:
    """Give a model from the meta device real parameters, one by one, filled with their first values."""
    for name, parameter in list(model.named_parameters()):
        stored = torch.zeros(parameter.shape, dtype=dtype, device=device)
        for placement in table.stored_in(name):
            fill(logical_view(stored, placement), placement, seed)
        replace_parameter(model, name, stored)


def logical_view(stored: Tensor, placement: Placement) -> Tensor:
    """The part of a stored parameter (or of anything of its size) that holds the slice of one logical tensor."""
    flat = stored.view(-1)[placement.offset : placement.offset + placement.local_numel]
    return flat.view(placement.local_shape)


def whole_loss(model: LanguageModel, batch: Batch, keys: DropoutKeys | None = None) -> Tensor:
    """Loss of a micro-batch by a model that was built in one part."""
    return model.loss_of(model(ModelPart.full(model.config), None, batch, keys).hidden, batch)


def whole_logits(model: LanguageModel, tokens: Tensor, positions: Tensor) -> Tensor:
    """Scores [sequence, batch, vocab] of every next token by a model that was built in one part; all tokens are of one
    document."""
    batch = Batch(tokens, tokens, torch.ones(tokens.shape), positions, None, tuple(range(len(tokens))))
    return model.logits_of(model(ModelPart.full(model.config), None, batch).hidden)
