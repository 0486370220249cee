"""Texts drawn by several replicas, each of which draws a share."""

from __future__ import annotations

from collections.abc import Sequence

from pangu.collectives.reduce import gather_objects
from pangu.evaluation.generation import Sampling, generate
from pangu.evaluation.loaded import LoadedModel


def generate_shared(model: LoadedModel, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
    """As `generate`, called by all ranks of all replicas together, with the same prompts; all get all texts."""
    mesh = model.mesh
    # with sharded weights (in training) replicas compute in step: each draws everything
    replicas = 1 if mesh.layout.zero == 3 else mesh.layout.data
    mine = generate(model, prompts[mesh.at.data % replicas :: replicas], sampling)
    shares = gather_objects(mine, mesh.group("data"))
    return [shares[place % replicas][place // replicas] for place in range(len(prompts))]
