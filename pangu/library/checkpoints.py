"""Checkpoints of a user's model: parameters, buffers and optimizer state by name, for any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pangu.checkpoint.files import Slice
from pangu.checkpoint.index import find_damage, read_index, require_facts
from pangu.checkpoint.reading import load as load_slices
from pangu.checkpoint.reading import load_weights, read_tensor
from pangu.checkpoint.writing import state_of, weights_of, write_together
from pangu.collectives.agreement import agree
from pangu.collectives.reduce import largest_of
from pangu.common.errors import UserError, reading
from pangu.library.sharded_model import ShardedModel
from pangu.optim.lamb import Lamb
from pangu.zero.flat_parameter import Shard


def save(
    path: str | Path,
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint atomically; one in that place is replaced, and nothing else is. All ranks call this.

    Args:
        path: Folder that all ranks see.
        sharded: Model whose main parameters, and persistent buffers of the first replica, are saved.
        optimizer: Optimizer whose elementwise state, such as moments, and number of steps are saved; None: none.
        facts: JSON values that `load` returns, e.g. the number of steps.

    Raises:
        UserError: On all ranks, the disk refuses, the place holds anything else, `facts` are not JSON, or a buffer
            has values that are not finite or not exact in fp64.
    """
    sharded.require_same()
    mesh, path, parameters = sharded.mesh, Path(path), sharded.parameters
    states = [] if optimizer is None else [optimizer.state.get(main, {}) for main in sharded.main_parameters()]
    kinds = dict.fromkeys(kind for state in states for kind in state)
    slices = [*state_of(parameters, optimizer, ("weight", *kinds), owned=True)]
    agree(mesh, lambda: _require_savable(sharded, path, facts), runs_here=True)
    if mesh.replica == 0 and mesh.at.tensor == 0:
        for name, buffer in _buffers(sharded):
            slices.append((f"buffer/{name}", _slice(buffer.to(_stored(buffer)))))
    (steps,) = largest_of([max((float(state.get("step", 0.0)) for state in states), default=0.0)], mesh)
    if optimizer is not None:
        shards = filter(parameters.counts, parameters.trained_shards)
        slices += ((f"step/{name}", _slice(step)) for name, step in _other_steps(shards, optimizer, steps))
    stored = {"optimizer_steps": None if optimizer is None else int(steps), "facts": dict(facts or {})}
    write_together(mesh, path, slices, stored)


def load(path: str | Path, sharded: ShardedModel, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Restore `sharded` and `optimizer` from a checkpoint of any number of ranks; return the `facts` of `save`.

    All ranks call this. Raises UserError on all of them if the checkpoint is damaged, or naming every tensor that only
    one side has or whose shape differs, or if it was written without an optimizer and one is given.
    """
    path, mesh = Path(path), sharded.mesh
    index = load_weights(path, mesh, weights_of(sharded.parameters))
    require_facts(path, index, "facts", "optimizer_steps")
    slices: list[tuple[str, Slice]] = []
    counts_of: list[tuple[dict[str, Any], Tensor]] = []
    if optimizer is not None:
        steps = index["optimizer_steps"]
        if steps is None:
            raise UserError(f"{path}: was written without an optimizer; call `load` without one to get its weights")
        kinds = sorted({name.partition("/")[0] for name in index["tensors"]} - {"weight", "buffer", "step"})
        for shard in sharded.parameters.trained_shards:
            state = optimizer.state[shard.main]
            own = torch.full((1,), float(steps))
            if (name := f"step/{shard.placement.name}") in index["tensors"]:
                slices.append((name, _slice(own)))
            counts_of.append((state, own))
            for kind in kinds:
                state.setdefault(kind, torch.zeros_like(shard.main))
        slices += state_of(sharded.parameters, optimizer, kinds)
    buffers = [(name, one, _slice(torch.empty_like(one, dtype=_stored(one)))) for name, one in _buffers(sharded)]
    slices += ((f"buffer/{name}", part) for name, _, part in buffers)
    agree(mesh, lambda: load_slices(path, index, slices), runs_here=True)
    for state, own in counts_of:
        if own:
            state["step"] = torch.full_like(state.get("step", torch.zeros(())), float(own))
    if isinstance(optimizer, Lamb):
        optimizer.share_steps()
    for _, buffer, part in buffers:
        buffer.copy_(part.tensor.view(buffer.shape))
    sharded.parameters.publish()
    return dict(index["facts"])


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return parameters and buffers of a checkpoint, gathered in host memory, for `module.load_state_dict`.

    Tied parameters have their first name only, so use `strict=False`. Raises UserError if the checkpoint is damaged.
    """
    path = Path(path)
    index = read_index(path)
    if problems := find_damage(path, index):
        raise UserError("\n".join(problems))
    names = [name for name in index["tensors"] if name.partition("/")[0] in ("weight", "buffer")]
    return {name.partition("/")[2]: read_tensor(path, index, name) for name in names}


def _other_steps(
    shards: Iterable[Shard], optimizer: torch.optim.Optimizer, steps: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors [1] with step counts that differ from `steps`, named by the tensor whose first element is here."""
    for shard in shards:
        step = optimizer.state.get(shard.main, {}).get("step")
        is_first = shard.start == 0 and not any(shard.placement.offsets)
        if step is not None and is_first and float(step) != steps:
            yield shard.placement.name, torch.full((1,), float(step))


def _buffers(sharded: ShardedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the persistent buffers, those that `state_dict` has too."""
    for path, module in sharded.model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _stored(buffer: Tensor) -> torch.dtype:
    """Return the dtype of a buffer in checkpoints, which hold floating-point numbers."""
    return buffer.dtype if buffer.is_floating_point() else torch.float64


def _slice(tensor: Tensor) -> Slice:
    tensor = tensor.view(-1) if tensor.dim() == 0 else tensor
    return Slice(tensor, tuple(tensor.shape), (0,) * tensor.dim())


def _require_savable(sharded: ShardedModel, path: Path, facts: Mapping[str, Any] | None) -> None:
    with reading(path):
        if path.exists() and not (path / "index.json").is_file() and not (path.is_dir() and not any(path.iterdir())):
            raise UserError(f"{path}: exists and is not a checkpoint, so it is not replaced; use another name")
    try:
        json.dumps(dict(facts or {}))
    except (TypeError, ValueError) as error:
        raise UserError(f"facts: must be a mapping of JSON values ({error})") from error
    for name, buffer in _buffers(sharded):
        stored = buffer.to(_stored(buffer))
        if buffer.is_complex() or not stored.isfinite().all() or not (stored.to(buffer.dtype) == buffer).all():
            raise UserError(
                f"{name}: a buffer with values that are not finite or not exact in fp64 cannot be saved; "
                "use register_buffer(..., persistent=False)"
            )
