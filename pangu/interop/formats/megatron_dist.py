"""Megatron checkpoints in its default format (`--ckpt-format torch_dist`), for any layout.

    latest_checkpointed_iteration.txt    a number, or `release`
    iter_0001000/metadata.json           name of the format
    iter_0001000/common.pt               common to all ranks, options included
    iter_0001000/.metadata, *.distcp     tensors of all ranks, of torch.distributed.checkpoint

Tensors are complete there. Those of the layers are stacked, `decoder.layers.mlp.linear_fc1.weight` with a leading
dimension of layers, or separate with the layer's index in the name.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pangu.common.errors import UserError, shown
from pangu.common.files import read_json_object
from pangu.config.model import MOST_LAYERS, ModelConfig
from pangu.interop.formats.fields import check_fields
from pangu.interop.formats.megatron_experts import as_stored
from pangu.interop.formats.megatron_names import TRACKER, begin_release, fused_name, plain_name, table
from pangu.interop.formats.megatron_options import ROWS, read_model, write_options
from pangu.interop.formats.megatron_ranks import RankSource, options_of
from pangu.interop.formats.pickles import load_pickle
from pangu.interop.formats.stored import Job, Stored, WeightSource
from pangu.interop.formats.torch_dist import Folder, TensorBlock, write_folder

_FACTS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Supported values in metadata.json. Newer versions of Megatron omit the last two."""
MOST_PARTS = 2**17
"""Largest number of matrices in one stacked tensor: experts of all layers."""
_TRAINING = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine|opt_param_scheduler")
"""Prefixes of the names of tensors that are not weights."""
_STACKED = re.compile(r"(decoder\.layers\.)(?!\d+\.)(.*)")


class DistSource(WeightSource):
    """Folder with a `.metadata` file."""

    def __init__(self, path: Path) -> None:
        """Open a folder. Raises UserError if it cannot be converted."""
        common, facts = path / "common.pt", path / "metadata.json"
        if facts.is_file():
            check_fields(read_json_object(facts), facts, (), (), {key: [value] for key, value in _FACTS.items()})
        options = options_of(load_pickle(common), common) if common.is_file() else {}
        self._folder = Folder(path, lambda name: not _TRAINING.match(name))
        self._where: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        """Stored tensors, each with the index along its leading dimensions, by name in the format of ranks."""
        for name, entry in sorted(self._folder.entries.items()):
            short = plain_name(re.sub(r"^(model|module)\.", "", name))
            # gate and up, one below the other, may be two tensors
            short = re.sub(r"(linear_fc1\.weight|linear_fc1\.bias)_[vw]$", r"\1", short)
            if (stacked := _STACKED.fullmatch(short)) and entry.shape[0] > MOST_LAYERS:
                raise UserError(f"{path}: {shown(name)} has {entry.shape[0]} layers; the limit is {MOST_LAYERS}")
            pattern = f"{stacked[1]}{{}}.{stacked[2]}" if stacked else short
            pattern, experts = re.subn(r"(mlp\.experts\.)experts\.(linear_fc)", r"\1local_experts.{}.\2", pattern)
            # experts one by one, as newer versions store them
            pattern = re.sub(r"(mlp\.experts\.)experts\.(\d+\.linear_fc)", r"\1local_experts.\2", pattern)
            axes = entry.shape[: bool(stacked) + experts]
            if prod(axes) > MOST_PARTS:
                raise UserError(f"{path}: {shown(name)} has {prod(axes)} matrices; the limit is {MOST_PARTS}")
            for index in itertools.product(*map(range, axes)):
                full = pattern
                for number in index:
                    full = full.replace("{}", str(number), 1)
                self._where.setdefault(full, []).append((name, index))
        for full, places in self._where.items():
            # the gate, `_w`, comes first
            places.sort(key=lambda place: place[0], reverse=True)
            if len(places) > 1 and [name[-2:] for name, _ in places] != ["_w", "_v"]:
                raise UserError(f"{path}: {shown(full)} is in the files more than once")
        self._tensor = options.get("tensor_model_parallel_size")
        self.tensors = {name: self._meta(name) for name in self._where}
        self.model_keys = read_model(options, {name: tuple(t.shape) for name, t in self.tensors.items()}, 1, {}, path)

    def _meta(self, name: str) -> Tensor:
        entries = [(self._folder.entries[stored], index) for stored, index in self._where[name]]
        halves = [torch.empty(entry.shape[len(index) :], dtype=entry.dtype, device="meta") for entry, index in entries]
        if len({(part.shape[1:], part.dtype) for part in halves}) > 1:
            raise UserError(f"{shown(name)}: its two halves differ in shape or format")
        return torch.cat(halves) if len(halves) > 1 else halves[0]

    def table(self, model: ModelConfig) -> list[Stored]:
        """Return the tensors with the padding of the training run, whose tensor-parallel size a file may omit."""
        ranks = self._tensor if isinstance(self._tensor, int) and 0 < self._tensor < 2**16 else 1
        return [
            stored
            if stored.rows is None
            else replace(stored, rows=range(stored.rows.start, stored.rows.start + ROWS * ranks))
            for stored in table(as_stored(model, self.model_keys), 1)
        ]

    def read(self, stored: Stored) -> Tensor:
        """Return one full tensor."""
        parts = [self._folder.read(name, index) for name, index in self._where[stored.name]]
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def open_folder(path: Path) -> WeightSource:
    """Open a folder for `--load`, or one iteration in it. Raises UserError."""
    tracker = path / TRACKER
    if tracker.is_file():
        latest = tracker.read_bytes()[:20].strip()
        number = latest.isdigit() and int(latest)
        path = path / (f"iter_{number:07d}" if latest.isdigit() else "release")
        if not path.is_dir():
            raise UserError(
                f"{tracker}: names {shown(latest.decode(errors='replace'))}, but there is no folder {path.name}"
            )
    if (path / ".metadata").is_file():
        return DistSource(path)
    if not any(folder.is_dir() for folder in path.glob("mp_rank_*")):
        raise UserError(f"{path}: no mp_rank_00 folder, .metadata or latest_checkpointed_iteration.txt here")
    return RankSource(path)


def dist_table(model: ModelConfig, tensor: int) -> list[Stored]:
    """Return the complete tensors of a model. Raises UserError if the format has no such model."""
    if model.kind == "pangu":
        raise UserError("Megatron's PanGu-α port reads only per-rank files; use --megatron-format torch")
    return table(model, 1)


def write(path: Path, job: Job) -> None:
    """Write a folder for `--load`, with stacked layers: no optimizer, iteration 0."""
    path = begin_release(path, job, "Megatron-LM", "--ckpt-format torch_dist")
    model = job.config.model
    # layers of one kind are stacked, of several kinds stand one by one
    stacked = len(model.expert_layers) in (0, model.layers)
    blocks = []
    for stored, tensor in zip(job.table, job.described, strict=True):
        name, index, sizes = _place(stored.name, model, stacked)
        shape = tuple(tensor.shape)
        offsets = (*index, *(0 for _ in shape))
        blocks.append(TensorBlock(name, (*sizes, *shape), offsets, (*(1 for _ in index), *shape), tensor.dtype))
    objects = []
    for layer in range(model.layers):
        for part in _modules_with_state(model, model.has_experts(layer)):
            full, index, sizes = _place(f"decoder.layers.{layer}.{part}._extra_state", model, stacked)
            shards = "_".join(".".join(map(str, numbers)) for numbers in (index or (0,), sizes or (1,)))
            objects.append(f"{full}/shard_{shards}")
    objects += [f"{name}._extra_state/shard_0_1" for name in ("decoder.final_layernorm", "output_layer")]
    write_folder(path, blocks, job.contents, objects)
    facts: dict[str, Any] = {"iteration": 0, "checkpoint_version": 3.0}
    torch.save({"args": write_options(model, job.table[0].shape[0], 1), **facts}, path / "common.pt")
    (path / "metadata.json").write_text(json.dumps(_FACTS), encoding="utf-8")


def _modules_with_state(model: ModelConfig, experts: bool) -> Iterator[str]:
    """Yield the modules of a layer for which Megatron requires Transformer Engine's state, which may be empty."""
    attention = ["linear_qkv", *(("q_layernorm", "k_layernorm") if model.qk_norm else ())]
    if model.latent is not None:
        yield "input_layernorm"
        queries = ("linear_q_proj",) if model.latent.q_rank is None else ("linear_q_down_proj", "linear_q_up_proj")
        attention = [*queries, "linear_kv_down_proj", "linear_kv_up_proj"]
    for name in (*attention, "linear_proj", "core_attention"):
        yield f"self_attention.{name}"
    if experts:
        yield "pre_mlp_layernorm"
    each = [f"mlp.experts.local_experts.{number}" for number in range(model.experts or 0)] if experts else ["mlp"]
    for module in (*each, *(["mlp.shared_experts"] if experts and model.shared_experts else [])):
        yield f"{module}.linear_fc1"
        yield f"{module}.linear_fc2"


def _place(name: str, model: ModelConfig, stacked: bool) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return the stored name of a tensor of a layer or expert, its index along layers and experts, and their counts."""
    index, sizes = [], []
    if layer := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name):
        name = fused_name(name, model)
        if stacked:
            name = name.replace(f"layers.{layer[1]}.", "layers.", 1)
            index.append(int(layer[1]))
            sizes.append(model.layers)
    if expert := re.search(r"mlp\.experts\.local_experts\.(\d+)\.", name):
        assert model.experts is not None
        name = name.replace(expert[0], "mlp.experts.experts.")
        index.append(int(expert[1]))
        sizes.append(model.experts)
    return name, tuple(index), tuple(sizes)
