"""Megatron checkpoints with one file per rank (`--ckpt-format torch`).

latest_checkpointed_iteration.txt               a number, or `release`
iter_0001000/mp_rank_00/model_optim_rng.pt      one for each tensor-parallel rank
iter_0001000/mp_rank_00_003/model_optim_rng.pt  or one for each of them in each pipeline stage
"""

from __future__ import annotations

import argparse
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pangu.common.errors import UserError, shown
from pangu.config.model import ModelConfig
from pangu.interop.formats.megatron_experts import as_stored
from pangu.interop.formats.megatron_names import begin_release, plain_name, table
from pangu.interop.formats.megatron_options import read_model, write_options
from pangu.interop.formats.pickles import Record, load_pickle, tensors_of
from pangu.interop.formats.stored import Job, Stored, WeightSource


def options_of(content: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Return Megatron's options, as far as a file has them. Raises UserError if they are of an unsupported type."""
    options = content.get("args")
    if options is None:
        return {}
    if not isinstance(options, argparse.Namespace):
        kind = repr(options) if isinstance(options, Record) else type(options).__name__
        raise UserError(f"{where}: args = {shown(kind)}: must be Megatron's argparse.Namespace")
    return vars(options)


class RankSource(WeightSource):
    """Folder with mp_rank_XX or mp_rank_XX_YYY folders."""

    def __init__(self, path: Path) -> None:
        """Open a folder. Raises UserError if it cannot be converted."""
        files = _rank_files(path)
        self._paths = [stages[0] for stages in files]
        loaded = [[load_pickle(file) for file in stages] for stages in files]
        options = options_of(loaded[0][0], files[0][0])
        tied = options.get("untie_embeddings_and_output_weights") is False
        self._ranks = [_join_stages(stages, contents, tied) for stages, contents in zip(files, loaded, strict=True)]
        shapes = {name: tuple(tensor.shape) for name, tensor in self._ranks[0].items()}
        layout: dict[str, Sequence[Any]] = {
            "model_parallel_size": [len(files), None],
            "tensor_model_parallel_size": [len(files)],
            "pipeline_model_parallel_size": [len(files[0])],
            "expert_model_parallel_size": [1, None],
            "expert_tensor_parallel_size": [len(files), None],
        }
        self.model_keys = read_model(options, shapes, len(files), layout, self._paths[0])

    def table(self, model: ModelConfig) -> list[Stored]:
        """Return the tensors of a model in this format."""
        # some versions share latent attention's first matrices
        shapes = {name: tuple(tensor.shape) for name, tensor in self._ranks[0].items() if "_down_proj." in name}
        return [
            replace(stored, cut=0) if shapes.get(stored.name, stored.shape) != stored.shape else stored
            for stored in table(as_stored(model, self.model_keys), len(self._ranks))
        ]

    def inspect(self, table: Sequence[Stored], problems: list[str]) -> dict[str, Tensor]:
        """Return the meta tensors and append what differs between ranks to `problems`."""
        cuts = {stored.name: stored.cut for stored in table}
        first = self._ranks[0]
        for file, rank in zip(self._paths[1:], self._ranks[1:], strict=True):
            problems += [
                f"{shown(name)}: only in one of {self._paths[0]} and {file}" for name in first.keys() ^ rank.keys()
            ]
            problems += [
                f"{shown(name)}: {list(rank[name].shape)} in {file}, {list(first[name].shape)} in {self._paths[0]}"
                for name in first.keys() & rank.keys()
                if rank[name].shape != first[name].shape
            ]
            problems += [
                f"{shown(name)}: differs between {self._paths[0]} and {file}, but every rank must hold the same"
                for name, cut in cuts.items()
                if cut is None and name in first and name in rank and not torch.equal(first[name], rank[name])
            ]
        full = {}
        for name, tensor in first.items():
            cut, shape = cuts.get(name), list(tensor.shape)
            if cut is not None and cut < len(shape):
                shape[cut] *= len(self._ranks)
            full[name] = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return full

    def read(self, stored: Stored) -> Tensor:
        """Return one full tensor, concatenated from the ranks."""
        if stored.cut is None:
            return self._ranks[0][stored.name]
        return torch.cat([rank[stored.name] for rank in self._ranks], dim=stored.cut)


def _rank_files(path: Path) -> list[list[Path]]:
    """Return the files of each tensor-parallel rank's stages, in order. Raises UserError if some are missing."""
    folders = sorted(folder.name for folder in path.glob("mp_rank_*") if folder.is_dir())
    numbers = [re.fullmatch(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?", name, re.ASCII) for name in folders]
    if wrong := [name for name, number in zip(folders, numbers, strict=True) if number is None]:
        raise UserError(
            f"{path}: {shown(wrong[0])} is not a folder of a tensor-parallel rank or pipeline stage (mp_rank_00_000)"
        )
    paths = {(int(number[1]), number[2] and int(number[2])): path / number[0] for number in numbers if number}
    ranks = {rank for rank, _ in paths}
    stages = {stage for _, stage in paths}
    last = max(stage or 0 for stage in stages)
    files: list[list[Path]] = []
    for rank in range(max(ranks) + 1):
        files.append([])
        for stage in [None] if stages == {None} else range(last + 1):
            name = f"mp_rank_{rank:02d}" if stage is None else f"mp_rank_{rank:02d}_{stage:03d}"
            if (file := next(iter(sorted((path / name).glob("model_optim_rng.pt*"))), None)) is None:
                raise UserError(
                    f"{path / name}: no model_optim_rng.pt here; {max(ranks) + 1} tensor-parallel ranks and {last + 1} "
                    "pipeline stages expected"
                )
            files[-1].append(file)
    return files


def _join_stages(files: Sequence[Path], contents: Sequence[Mapping[str, Any]], tied: bool) -> dict[str, Tensor]:
    """Return a rank's tensors of all stages, with the layers, which each virtual stage counts from 0, renumbered."""
    # 8 layers, 2 stages with 2 virtual stages each:    stage 0          stage 1
    #                               virtual stage 0     layers 0, 1      layers 2, 3
    #                               virtual stage 1     layers 4, 5      layers 6, 7
    tensors_of_rank: dict[str, Tensor] = {}
    chunks = [_models(content, file) for content, file in zip(contents, files, strict=True)]
    if wrong := [file for file, stage in zip(files, chunks, strict=True) if len(stage) != len(chunks[0])]:
        raise UserError(f"{wrong[0]}: has a different number of virtual stages than {files[0]}")
    layers = 0
    for virtual in range(len(chunks[0])):
        for file, stage in zip(files, chunks, strict=True):
            tensors = stage[virtual]
            copy = tensors.pop("output_layer.weight", None) if tied and len(files) > 1 else None
            words = tensors_of_rank.get("embedding.word_embeddings.weight")
            if copy is not None and (words is None or not torch.equal(copy, words)):
                raise UserError(
                    f"{file}: output_layer.weight differs from embedding.word_embeddings.weight of the first stage, "
                    "but the options say that they are the same (untie_embeddings_and_output_weights = false)"
                )
            numbers = {name: int(number[1]) for name in tensors if (number := _LAYER.search(name))}
            for name, tensor in tensors.items():
                full = _LAYER.sub(f"layers.{numbers[name] + layers}.", name, count=1) if name in numbers else name
                if full in tensors_of_rank:
                    raise UserError(f"{file}: {shown(full)} is in an earlier pipeline stage as well")
                tensors_of_rank[full] = tensor
            layers += len(set(numbers.values()))
    return tensors_of_rank


_LAYER = re.compile(r"layers\.(\d{1,6})\.", re.ASCII)


def _models(content: Mapping[str, Any], where: Path) -> list[dict[str, Tensor]]:
    keys = [key for key in content if isinstance(key, str) and re.fullmatch(r"model\d{1,4}", key, re.ASCII)]
    models = [content[key] for key in sorted(keys, key=lambda key: int(key[5:]))]
    tensors: list[dict[str, Tensor]] = []
    for model in models or [content.get("model", content.get("module", content))]:
        tensors.append({})
        tensors_of_model = {plain_name(name): tensor for name, tensor in tensors_of(model)}
        for name, tensor in tensors_of(model):
            if (plain := plain_name(name)) in tensors[-1]:
                raise UserError(f"{where}: {shown(plain)} is in the file more than once")
            if not plain.endswith("_extra_state"):
                tensors[-1] |= dict(_one_by_one(plain, tensor, tensors_of_model, where))
    return tensors


def _one_by_one(name: str, tensor: Tensor, model: Mapping[str, Tensor], where: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor, or the experts in a fused one [inputs, outputs] (`--moe-use-legacy-grouped-gemm`)."""
    if not (matrices := re.fullmatch(r"(.*mlp\.)experts\.weight([12])", name)):
        yield name, tensor
        return
    router = model.get(f"{matrices[1]}router.weight")
    if router is None or router.dim() != 2 or tensor.numel() % max(1, router.numel()):
        raise UserError(f"{where}: {shown(name)} does not fit {shown(matrices[1])}router.weight")
    experts, hidden = router.shape
    shape = (experts, hidden, -1) if matrices[2] == "1" else (experts, -1, hidden)
    for number, matrix in enumerate(tensor.reshape(shape)):
        yield f"{matrices[1]}experts.local_experts.{number}.linear_fc{matrices[2]}.weight", matrix.t()


def write(path: Path, job: Job) -> None:
    """Write a folder for `--load`, with a file for each tensor-parallel rank: no optimizer, iteration 0."""
    pangu = job.config.model.kind == "pangu"
    grouped = any(".mlp.experts.linear_fc" in stored.name for stored in job.table)
    ranks, gemm = f"model-parallel-size {job.tensor}", " --moe-grouped-gemm" if grouped else ""
    options = f"--{ranks}" if pangu else f"--ckpt-format torch --tensor-{ranks}{gemm}"
    path = begin_release(path, job, "PanGu-α's port of Megatron 1.1" if pangu else "Megatron-LM", options)
    described = [_cut(stored, tensor, job.tensor) for stored, tensor in zip(job.table, job.described, strict=True)]
    files = []
    for rank in range(job.tensor):
        file = path / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        with FakeTensorMode():
            flat = {
                stored.name: torch.empty(pieces[rank].shape, dtype=pieces[rank].dtype)
                for stored, pieces in zip(job.table, described, strict=True)
            }
        facts = {
            "args": write_options(job.config.model, job.table[0].shape[0], job.tensor, grouped),
            "iteration": 0,
            "checkpoint_version": 0 if pangu else 3.0,
        }
        files.append(_Storages(file, {"model": _nested(flat) if pangu else flat, **facts}, flat))
    for stored, tensor in zip(job.table, job.contents, strict=True):
        for opened, part in zip(files, _cut(stored, tensor, job.tensor), strict=True):
            opened.write(stored.name, part)
    for opened in files:
        opened.writer.write_end_of_file()


class _Storages:
    """torch.save file whose tensors are written one by one, each with its checksum."""

    def __init__(self, file: Path, content: object, flat: Mapping[str, Tensor]) -> None:
        # torch's own writer leaves room for the tensors, from which the rest of the file is taken
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(content, file)
        with zipfile.ZipFile(file) as archive:
            records = {entry.partition("/")[2]: entry for entry in archive.namelist()}
            rest = {name: archive.read(entry) for name, entry in records.items() if name in _RECORDS}
        self.writer = torch._C.PyTorchFileWriter(str(file))
        for name, value in rest.items():
            self.writer.write_record(name, value, len(value))
        numbers = {id(tensor): number for number, (_, tensor) in enumerate(_in_order(content))}
        self._numbers = {name: numbers[id(tensor)] for name, tensor in flat.items()}

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the values of a tensor."""
        plain = tensor.contiguous()
        self.writer.write_record(f"data/{self._numbers[name]}", plain.data_ptr(), plain.nbytes)


_RECORDS = ("data.pkl", ".format_version", ".storage_alignment", "byteorder")
"""Records of a torch.save file besides its tensors and those that its writer adds by itself."""


def _in_order(content: object) -> Iterator[tuple[str, Tensor]]:
    for name, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, Tensor):
            yield name, value
        else:
            yield from _in_order(value)


def _cut(stored: Stored, tensor: Tensor, ranks: int) -> Sequence[Tensor]:
    return [tensor] * ranks if stored.cut is None else tensor.chunk(ranks, stored.cut)


def _nested(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    """Nest tensors like the port: the transformer's in one flat dictionary, all others by module and `weight`."""
    trunk = "language_model.transformer."
    model: dict[str, Any] = {"embedding": {}, "topQueryEmbedding": {}, "transformer": {}}
    for name, tensor in flat.items():
        if name.startswith(trunk):
            model["transformer"][name.removeprefix(trunk)] = tensor
        else:
            _, outer, inner, kind = name.split(".")
            model[outer][inner] = {kind: tensor}
    return {"language_model": model}
