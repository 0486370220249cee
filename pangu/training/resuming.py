"""How a run comes back from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pangu.checkpoint.files import list_checkpoints, tidy
from pangu.checkpoint.index import read_index, require_facts
from pangu.checkpoint.reading import damage, intact, load, load_weights
from pangu.checkpoint.run_folder import identity
from pangu.checkpoint.standing import Standing, continuation_order, read_standing
from pangu.collectives.agreement import agree
from pangu.config.data import DataConfig, IndexedData
from pangu.config.errors import UserError, shown
from pangu.config.model import ModelConfig
from pangu.config.schema import RunConfig
from pangu.data.order import ORDER_VERSION
from pangu.topology.mesh import Mesh
from pangu.training.saving import state_of, weights_of
from pangu.training.step import MOMENTS, Trainer

log = logging.getLogger("pangu")


def place_to_continue(config: RunConfig, mesh: Mesh) -> Path | None:
    """Return the best checkpoint of the run folder to continue from, see `continuation_order`, that is intact. None:
    the beginning, because there is no checkpoint, or because those that are there were condemned before any was proven
    and `faults.action` = rollback. All ranks read the files between them, and come to the same.

    Raises:
        UserError: on all ranks, if there are checkpoints that should not be given up unasked.
    """
    folder = Path(config.train.output) / "checkpoints"

    def look() -> list[tuple[Path, Standing]]:
        return [(path, read_standing(path)) for path in list_checkpoints(folder)]

    (found, *_) = agree(mesh, look, runs_here=mesh.is_first)
    assert found is not None
    problems = [f"{path}: is {standing}" for path, standing in found if standing.condemned]
    for line in problems:
        log.warning("skipping a checkpoint: %s", line)
    order = continuation_order(found)
    for path in order:
        if not (lines := damage(path, mesh)):
            return path
        problems += lines
        for line in lines:
            log.warning("skipping a checkpoint: %s", line)
    if not order and config.faults.action == "rollback" and not any(standing.proven for _, standing in found):
        return None
    works = "checkpoint.resume=CHECKPOINT continues from a condemned one" if len(order) < len(found) else ""
    raise UserError(
        f"{folder}: no checkpoint here is intact and not condemned; choose another train.output to start from the "
        + "; ".join(filter(None, ("beginning", works)))
        + ":\n"
        + "\n".join(f"  {line}" for line in problems)
    )


def load_checkpoint(path: Path, config: RunConfig, trainer: Trainer) -> dict[str, Any]:
    """Restore the state of a run, exactly, from an intact checkpoint, which becomes the newest of the run folder.
    Returns its index: among others `samples` and `watch`, as given to `Saver.save`. Raises UserError if the checkpoint
    belongs to another model, optimizer or seed, or does not say where its run was."""
    index = read_index(path)
    require_facts(path, index, "step", "skipped", "samples", "loss_scale", "identity")
    _compare(path, index["identity"], identity(config))
    _compare_order(path, index, config.data)
    trainer.restart_optimizer(index["step"], index["skipped"])
    agree(trainer.mesh, lambda: _require_moments(path, index, config), runs_here=True)
    agree(trainer.mesh, lambda: load(path, index, list(state_of(trainer))), runs_here=True)
    trainer.parameters.publish()
    if scale := trainer.loss_scale.restore(index["loss_scale"]):
        log.info("%-12s %s", "loss scale", scale)
    if trainer.scales is not None:
        trainer.scales.restore(path, index.get("fp8"))
    if trainer.balance is not None:
        trainer.balance.restore(path, index.get("experts"))
    folder = Path(config.train.output) / "checkpoints"
    (abandoned, *_) = agree(trainer.mesh, lambda: tidy(folder, trainer.step), runs_here=trainer.mesh.is_first)
    for checkpoint in abandoned or ():
        log.warning("%s: this run continues from an earlier step; delete it if you do not need it", checkpoint)
    return index


def _require_moments(path: Path, index: Mapping[str, Any], config: RunConfig) -> None:
    """Raise a UserError if tensors that are trained now were frozen when a checkpoint was written."""
    if index["step"] == index["skipped"]:
        return
    patterns = config.train.frozen
    missing = [
        name
        for kind, _, name in (key.partition("/") for key in index["tensors"])
        if kind == "weight"
        and f"{MOMENTS[0]}/{name}" not in index["tensors"]
        and not any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if missing:
        frozen = index.get("frozen", [])
        raise UserError(
            f"train.frozen = {shown(patterns)}: {len(missing)} tensors ({', '.join(missing[:3])}"
            f"{', ...' * (len(missing) > 3)}) were frozen in the run that wrote {path}, which has no optimizer state "
            f"of theirs; "
            f"train.frozen={shown(frozen)} continues it, checkpoint.init_from={path} with another train.output begins "
            "a new run with its weights"
        )


def _compare_order(path: Path, index: Mapping[str, Any], data: DataConfig) -> None:
    """Say so if the place that a checkpoint has in a blend of datasets was reached in another order."""
    if index.get("order", 1) != ORDER_VERSION and isinstance(data, IndexedData) and len(data.train) > 1:
        log.warning(
            "%s: written when datasets were blended by another rule. Each goes on from its share of sample %d; the "
            "few samples by which its count differed there come again or are left out",
            path,
            index["samples"],
        )


def begin_with(path: Path, config: RunConfig, trainer: Trainer) -> None:
    """Give a new run the weights of a checkpoint; with `checkpoint.upcycle`, of a dense model. Raises UserError as
    `load_weights`."""
    weights, model, upcycle = weights_of(trainer), config.model, config.checkpoint.upcycle
    if model.experts is not None:
        from pangu.checkpoint.upcycling import of_dense_model, require_kind

        require_kind(intact(path, trainer.mesh), upcycle)
        weights, model = (of_dense_model(weights), model.without_experts) if upcycle else (weights, model)
    index = load_weights(path, trainer.mesh, weights)
    trainer.parameters.publish()
    if trainer.balance is not None and index.get("experts") is not None:
        trainer.balance.restore(path, index["experts"])
    for key, now, before in _differences(index["identity"], identity(replace(config, model=model))):
        if key.startswith("model."):
            log.warning("%s = %s: the weights of %s were trained with %s", key, now, path, before)


def _compare(path: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    wrong = [f"  {key} = {now}: the checkpoint has {before}" for key, now, before in _differences(saved, current)]
    if wrong:
        advice = "give the same values to continue it, or another train.output to start a new run"
        raise UserError(f"{path}: belongs to a different run; {advice}:\n" + "\n".join(wrong))


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Keys that are saved, those of groups one by one, with their values now and before, where these differ."""
    for key, before in saved.items():
        now = current.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from ((f"{key}.{name}", *values) for name, *values in _differences(before, now))
        elif now != before and not _is_default(key, now, before, current):
            yield key, now, before


def _is_default(key: str, now: object, before: object, current: Mapping[str, Any]) -> bool:
    """Whether null, now or in a checkpoint, stands for the other value of a key of the model."""
    if (now is None) == (before is None) or key not in current or not key.startswith("model."):
        return False
    fields = {name.partition(".")[2]: value for name, value in current.items() if name.startswith("model.")}
    name = key.partition(".")[2]
    model = ModelConfig(**{**fields, "attention": "auto", name: None})
    return bool(getattr(model.explicit, name) == (before if now is None else now))
