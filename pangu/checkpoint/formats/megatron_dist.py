"""Megatron's checkpoints in the format that it writes by default (`--ckpt-format torch_dist`), for any layout.

latest_checkpointed_iteration.txt    a number, or `release`
iter_0001000/metadata.json           the name of the format
iter_0001000/common.pt               what all ranks have in common, the options among them
iter_0001000/.metadata, *.distcp     the tensors of all ranks, of torch.distributed.checkpoint

Tensors are whole there. Those of the layers are stacked, `decoder.layers.mlp.linear_fc1.weight` with a dimension of
layers in front, or stand one by one with the layer's number in the name.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pangu.checkpoint.formats.fields import check_fields
from pangu.checkpoint.formats.megatron_names import TRACKER, begin_release, fused_name, plain_name, table
from pangu.checkpoint.formats.megatron_options import ROWS, read_model, write_options
from pangu.checkpoint.formats.megatron_ranks import RankSource, options_of
from pangu.checkpoint.formats.pickles import load_pickle
from pangu.checkpoint.formats.stored import Job, Source, Stored
from pangu.checkpoint.formats.torch_dist import Block, Folder, write_folder
from pangu.config.errors import UserError, shown
from pangu.config.files import read_json_object
from pangu.config.model import MOST_LAYERS, ModelConfig

_FACTS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""metadata.json: the only values that are read. Newer versions of Megatron leave out the last two."""
_EXTRA = (
    *("self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention"),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
)
"""Modules of which Megatron insists on reading Transformer Engine's state, which may be empty."""
_TRAINING = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine|opt_param_scheduler")
"""Beginnings of the names of tensors that are no weights."""
_STACKED = re.compile(r"(decoder\.layers\.)(?!\d+\.)(.*)")


class DistSource(Source):
    """The folder with `.metadata` in it."""

    def __init__(self, path: Path) -> None:
        common, facts = path / "common.pt", path / "metadata.json"
        if facts.is_file():
            check_fields(read_json_object(facts), facts, (), (), {key: [value] for key, value in _FACTS.items()})
        options = options_of(load_pickle(common), common) if common.is_file() else {}
        self._folder = Folder(path, lambda name: not _TRAINING.match(name))
        self._where: dict[str, list[tuple[str, int | None]]] = {}
        """Names in the other format -> the stored tensors, and the index of each along dimension 0."""
        for name, entry in sorted(self._folder.entries.items()):
            short = plain_name(re.sub(r"^(model|module)\.", "", name))
            # gate and up, one below the other, may be two tensors
            short = re.sub(r"(linear_fc1\.weight|linear_fc1\.bias)_[vw]$", r"\1", short)
            stacked = _STACKED.fullmatch(short)
            if stacked and entry.shape[0] > MOST_LAYERS:
                raise UserError(f"{path}: {shown(name)} is of {entry.shape[0]} layers; at most {MOST_LAYERS} are read")
            for layer in range(entry.shape[0]) if stacked else (None,):
                full = short if stacked is None else f"{stacked[1]}{layer}.{stacked[2]}"
                self._where.setdefault(full, []).append((name, layer))
        for full, places in self._where.items():
            # the gate, `_w`, comes first
            places.sort(key=lambda place: place[0], reverse=True)
            if len(places) > 1 and [name[-2:] for name, _ in places] != ["_w", "_v"]:
                raise UserError(f"{path}: {shown(full)} is in the files more than once")
        self._tensor = options.get("tensor_model_parallel_size")
        self.tensors = {name: self._meta(name) for name in self._where}
        self.model_keys = read_model(options, {name: tuple(t.shape) for name, t in self.tensors.items()}, 1, {}, path)

    def _meta(self, name: str) -> Tensor:
        entries = [(self._folder.entries[stored], layer) for stored, layer in self._where[name]]
        whole = [
            torch.empty(entry.shape if layer is None else entry.shape[1:], dtype=entry.dtype, device="meta")
            for entry, layer in entries
        ]
        if len({(part.shape[1:], part.dtype) for part in whole}) > 1:
            raise UserError(f"{shown(name)}: its two halves have other shapes or formats")
        return torch.cat(whole) if len(whole) > 1 else whole[0]

    def table(self, model: ModelConfig) -> list[Stored]:
        """Padded as the training run needed it, whose tensor-parallel size a file need not tell."""
        ranks = self._tensor if isinstance(self._tensor, int) and 0 < self._tensor < 2**16 else 1
        return [
            stored
            if stored.rows is None
            else replace(stored, rows=range(stored.rows.start, stored.rows.start + ROWS * ranks))
            for stored in table(model, 1)
        ]

    def read(self, stored: Stored) -> Tensor:
        parts = [self._folder.read(name, layer) for name, layer in self._where[stored.name]]
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def open_folder(path: Path) -> Source:
    """A folder for `--load`, or one iteration in it. Raises UserError."""
    tracker = path / TRACKER
    if tracker.is_file():
        latest = tracker.read_bytes()[:20].strip()
        number = latest.isdigit() and int(latest)
        path = path / (f"iter_{number:07d}" if latest.isdigit() else "release")
        if not path.is_dir():
            raise UserError(
                f"{tracker}: says {shown(latest.decode(errors='replace'))}, and there is no folder {path.name}"
            )
    if (path / ".metadata").is_file():
        return DistSource(path)
    if not any(folder.is_dir() for folder in path.glob("mp_rank_*")):
        raise UserError(
            f"{path}: no folder mp_rank_00 here, no .metadata, nor a latest_checkpointed_iteration.txt that names one"
        )
    return RankSource(path)


def dist_table(model: ModelConfig, tensor: int) -> list[Stored]:
    """The tensors of a model, whole. Raises UserError if the format has no such model."""
    if model.kind == "pangu":
        raise UserError("Megatron's PanGu-α port reads the files of ranks only: --megatron-format torch")
    return table(model, 1)


def write(path: Path, job: Job) -> None:
    """A folder for `--load`, with stacked layers: no optimizer, iteration 0."""
    path = begin_release(path)
    blocks = []
    for stored, tensor in zip(job.table, job.described, strict=True):
        name = fused_name(stored.name)
        shape, offsets = tuple(tensor.shape), (0,) * tensor.dim()
        if layer := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name):
            name = f"decoder.layers.{layer[2]}"
            whole = (job.config.model.layers, *shape)
            shape, offsets = (1, *shape), (int(layer[1]), *offsets)
        else:
            whole = shape
        blocks.append(Block(name, whole, offsets, shape, tensor.dtype))
    layers = job.config.model.layers
    objects = [f"decoder.layers.{name}._extra_state/shard_{i}_{layers}" for i in range(layers) for name in _EXTRA]
    objects += [f"{name}._extra_state/shard_0_1" for name in ("decoder.final_layernorm", "output_layer")]
    write_folder(path, blocks, job.contents, objects)
    facts: dict[str, Any] = {"iteration": 0, "checkpoint_version": 3.0}
    torch.save({"args": write_options(job.config.model, job.table[0].shape[0], 1), **facts}, path / "common.pt")
    (path / "metadata.json").write_text(json.dumps(_FACTS), encoding="utf-8")
