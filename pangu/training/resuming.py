"""Resuming of a run from a checkpoint."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pangu.checkpoint.files import Slice, tidy
from pangu.checkpoint.index import read_index, require_facts
from pangu.checkpoint.reading import damage, intact, load, load_weights
from pangu.checkpoint.run_folder import identity
from pangu.checkpoint.status import continuation_order
from pangu.checkpoint.writing import weights_of
from pangu.collectives.agreement import agree, agree_on_first
from pangu.common.errors import UserError
from pangu.config.build import read
from pangu.config.data import DataConfig, IndexedData
from pangu.config.model import ModelConfig
from pangu.config.schema import RunConfig
from pangu.data.order import ORDER_VERSION
from pangu.models.parameters import logical_shapes
from pangu.optim.moments import MOMENTS
from pangu.topology.mesh import Mesh
from pangu.training.step import Trainer
from pangu.training.uploading import all_checkpoints, fetch

log = logging.getLogger("pangu")

_EXPERT = re.compile(r"(layers\.\d+\.mlp)\.experts\.\d+")
_ROUTER = re.compile(r"layers\.\d+\.mlp\.router\..*")


def place_to_continue(config: RunConfig, mesh: Mesh, is_running: bool = False) -> Path | None:
    """Return the best intact checkpoint of the run folder to continue from, see `continuation_order`.

    One that is missing or damaged there is fetched from `checkpoint.remote`; a run that `is_running` may do without.
    None: the beginning, because there is no checkpoint, or because all were condemned before any was proven and
    `faults.action` = rollback. All ranks share the reading, and get the same. Raises UserError on all ranks if there
    are checkpoints that should not be given up automatically.
    """
    folder = Path(config.train.output) / "checkpoints"
    found, copies = agree_on_first(mesh, lambda: all_checkpoints(config, is_running))
    problems = [f"{path}: is {status}" for path, status in found if status.condemned]
    for line in problems:
        log.warning("skipping a checkpoint: %s", line)
    order = continuation_order(found)
    for path in order:
        lines = damage(path, mesh)
        if lines and path in copies:
            lines = fetch(copies[path], path, config.checkpoint, mesh) or damage(path, mesh)
        if not lines:
            return path
        problems += lines
        for line in lines:
            log.warning("skipping a checkpoint: %s", line, extra={"alert": "damaged_checkpoint"})
    if not order and config.faults.action == "rollback" and not any(status.proven for _, status in found):
        return None
    fix = ", or checkpoint.resume=CHECKPOINT to continue from a condemned one" if len(order) < len(found) else ""
    raise UserError(
        f"{folder}: every checkpoint here is damaged or condemned; set another train.output to start from the "
        f"beginning{fix}:\n" + "\n".join(f"  {line}" for line in problems)
    )


def load_checkpoint(path: Path, config: RunConfig, trainer: Trainer) -> dict[str, Any]:
    """Restore the exact state of a run from an intact checkpoint, which becomes the newest; return its index.

    The index holds `samples` and `watch`, as given to `Saver.save`. Keys that may change are logged; tensors that were
    frozen start with zero moments. Raises UserError if the checkpoint belongs to another model, optimizer or seed, or
    does not say where its run was.
    """
    index = read_index(path)
    require_facts(path, index, "step", "skipped", "samples", "loss_scale", "identity")
    _compare(path, index, config)
    index = in_sequences_of(path, index, config)
    _compare_order(path, index, config.data)
    unfrozen = {f"{kind}/{name}" for name in _unfrozen(index, config) for kind in MOMENTS}
    trainer.restart_optimizer(index["step"], index["skipped"], _first_updates(index, config))
    saved = [(name, part) for name, part in trainer.state() if name not in unfrozen]
    agree(trainer.mesh, lambda: load(path, index, saved), runs_here=True)
    trainer.parameters.publish()
    if scale := trainer.loss_scale.restore(index["loss_scale"]):
        log.info("%-12s %s", "loss scale", scale)
    if trainer.scales is not None:
        trainer.scales.restore(path, index.get("fp8"))
    if trainer.balance is not None:
        trainer.balance.restore(path, index.get("experts"))
    folder = Path(config.train.output) / "checkpoints"
    for checkpoint in agree_on_first(trainer.mesh, lambda: tidy(folder, trainer.step)):
        log.warning("%s: this run continues from an earlier step; delete it if you do not need it", checkpoint)
    return index


def _unfrozen(index: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return the tensors that are trained now but were frozen, without moments, in the checkpoint."""
    if index["step"] == index["skipped"]:
        return []
    kinds = (key.partition("/") for key in index["tensors"])
    names = [name for kind, _, name in kinds if kind == "weight" and f"{MOMENTS[0]}/{name}" not in index["tensors"]]
    then, now = index.get("frozen", ()), config.train.frozen
    return [name for name in names if _matches(name, then) and not _matches(name, now)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _first_updates(index: Mapping[str, Any], config: RunConfig) -> dict[str, int]:
    """Return the update after which moments began, for each tensor whose moments did not begin with the run."""
    before = index.get("moments_since", {})
    known = {name: count for name, count in before.items() if not _matches(name, config.train.frozen)}
    if unfrozen := _unfrozen(index, config):
        more = f"{', '.join(unfrozen[:3])}{', ...' * (len(unfrozen) > 3)}"
        log.warning("train.frozen: %d tensors (%s) are trained from here on, with moments of 0", len(unfrozen), more)
    return known | dict.fromkeys(unfrozen, index["step"] - index["skipped"])


def in_sequences_of(path: Path, index: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Return a checkpoint's index with its position in samples of the current `model.sequence`; raises UserError."""
    before, now = index.get("identity", {}).get("model.sequence", config.model.sequence), config.model.sequence
    if before == now:
        return dict(index)
    if type(before) is not int or not 0 < before < 2**31:
        raise UserError(f"{path / 'index.json'}: damaged: identity: model.sequence = {before!r:.200}")

    def converted(samples: int) -> int:
        return -(-samples * before // now)

    watch, position = index.get("watch", {}), index.get("position")
    if isinstance(position, dict) and type(position.get("samples")) is int:
        position = {**position, "samples": converted(position["samples"])}
    return {
        **index,
        "samples": converted(index["samples"]),
        "watch": {**watch, "left_out": converted(watch.get("left_out", 0))},
        "position": position,
        "identity": {**index["identity"], "model.sequence": now},
    }


def _compare_order(path: Path, index: Mapping[str, Any], data: DataConfig) -> None:
    """Warn if the checkpoint's position in a blend of datasets was reached in another order."""
    if index.get("order", 1) != ORDER_VERSION and isinstance(data, IndexedData) and len(data.train) > 1:
        log.warning(
            "%s: written when datasets were blended by another rule; each continues from its share of sample %d, so "
            "that a few samples may be repeated or skipped",
            path,
            index["samples"],
        )


def begin_with(path: Path, config: RunConfig, trainer: Trainer) -> None:
    """Initialize a new run with a checkpoint's weights. Raises UserError.

    With `checkpoint.upcycle`, those of a dense model fill the experts (Komatsuzaki et al. 2022, section 3).
    """
    weights, model, upcycle = weights_of(trainer.parameters), config.model, config.checkpoint.upcycle
    if model.experts is not None:
        _require_kind(intact(path, trainer.mesh), upcycle)
        weights, model = (_of_dense_model(weights), model.without_experts) if upcycle else (weights, model)
    index = load_weights(path, trainer.mesh, weights, model.layers)
    trainer.parameters.publish()
    if trainer.balance is not None and index.get("experts") is not None:
        trainer.balance.restore(path, index["experts"], common=True)
    for key, now, before in _changes(index["identity"], replace(config, model=model)):
        if key.startswith("model."):
            log.warning("%s = %s: the weights of %s were trained with %s", key, now, path, before)


def _of_dense_model(weights: Iterable[tuple[str, Slice]]) -> Iterator[tuple[str, Slice]]:
    """Yield a model's slices named by the dense tensors that fill them, without routers, which a dense model lacks."""
    for name, part in weights:
        if not _ROUTER.fullmatch(name):
            yield _EXPERT.sub(r"\1", name), part


def _require_kind(path: Path, dense: bool) -> None:
    """Raise UserError unless a checkpoint is of a dense model, or of one with experts."""
    experts = any("/layers." in name and ".mlp.experts." in name for name in read_index(path)["tensors"])
    if dense and experts:
        raise UserError(f"{path}: its model has experts; set checkpoint.upcycle=false to start from its weights")
    if not dense and not experts:
        raise UserError(
            f"{path}: its model has no experts; set checkpoint.upcycle=true to copy its dense layers into experts"
        )


MAY_CHANGE = (
    *("dropout", "attention_dropout", "init_std", "scaled_init", "sequence"),
    *("rope_base", "rope_scaling", "nope_layers", "window", "full_layers", "expert_capacity"),
    *("router.balance", "router.balance_sequences", "router.balance_weight"),
    *("router.bias_rate", "router.z_loss"),
)
"""Keys of `model` that may change within a run: the weights keep their meaning. If a change alters the shape of a
tensor, as `sequence` does with a table of positions, it is refused."""


def _compare(path: Path, index: Mapping[str, Any], config: RunConfig) -> None:
    """Log the keys that change within the run. Raises UserError, naming every key that must not."""
    tensors, wrong = index["tensors"], []
    shapes = {f"weight/{name}": list(shape) for name, shape in logical_shapes(config.model).items()}
    misfits = [name for name, shape in shapes.items() if name in tensors and tensors[name]["shape"] != shape]
    for key, now, before in _changes(index["identity"], config):
        may_change = any(f"{key}.".startswith(f"model.{name}.") for name in MAY_CHANGE)
        if may_change and not misfits:
            log.warning("%s = %s from here on: %s was trained with %s", key, now, path, before)
        else:
            wrong.append(f"  {key} = {now}: the checkpoint has {before}")
    if wrong:
        wrong += [f"  {name} would be {shapes[name]}, not {tensors[name]['shape']}" for name in misfits[:3]]
        advice = "restore these values, or set another train.output to start a new run"
        raise UserError(f"{path}: belongs to a different run; {advice}:\n" + "\n".join(wrong))


def _changes(saved: Mapping[str, Any], config: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys in which a checkpoint's identity and a run differ, with the values now and before.

    Defaults are written out on both sides: null may stand for one, and a checkpoint lacks the keys younger than it.
    """
    keys = {key.partition(".")[2]: value for key, value in saved.items() if key.startswith("model.")}
    model, problems = read(ModelConfig, {**keys, "attention": "auto"}, "model")
    if not problems:  # otherwise somebody has changed the index
        known = identity(replace(config, model=model.explicit))
        saved = {**saved, **{key: value for key, value in known.items() if key.startswith("model.")}}
    yield from _differences(saved, identity(replace(config, model=config.model.explicit)))


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield saved keys, those of groups one by one, with their values now and before, where these differ."""
    for key, before in saved.items():
        now = current.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from ((f"{key}.{name}", *values) for name, *values in _differences(before, now))
        elif now != before:
            yield key, now, before
