"""Layers are placed once for all stages that hold them, and no stage changes another's table."""

from __future__ import annotations

import pytest

from pangu.models.parameters import ModelPart, place_tensors
from pangu.topology.experts import ExpertRank
from pangu.topology.placement import Placement, TensorRank
from tests.configs import config


def test_tables_share_layers_and_stay_apart() -> None:
    model = config("+config=pangu_pro_moe").model
    parts, rank, share = [ModelPart.full(model)], TensorRank(1, 2, True), ExpertRank(1, 8)
    table = place_tensors(model, parts, rank, experts=share)
    stage = place_tensors(model, [ModelPart(range(4, 6))], rank, experts=share)
    name = "layers.5.mlp.experts.8.up.weight"
    assert stage[name] is table[name]
    assert stage[name].local_numel == table[name].numel
    assert [*stage] == [one for one in table if one.name.split(".")[1] in ("4", "5")]
    stage.place("more", [Placement("more", (3,))], rank)
    with pytest.raises(AssertionError, match="built twice"):
        stage.extend(table)
    assert "more" not in table.shapes
    assert [*place_tensors(model, parts, rank, experts=share)] == [*table]
