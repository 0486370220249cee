"""Folders of Hugging Face's transformers: what `huggingface_config` knows, its weights and its tokenizer."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pangu.checkpoint.formats.fields import shown
from pangu.checkpoint.formats.huggingface_config import CODE, KINDS, kind_in, kind_of, read_model, write_model
from pangu.checkpoint.formats.pickles import load_pickle
from pangu.checkpoint.formats.stored import Job, Source, Stored, make_table
from pangu.checkpoint.run_tokenizer import require_inside, tokenizer_files
from pangu.checkpoint.safetensors_file import write_safetensors
from pangu.config.data import TokenizerConfig
from pangu.config.errors import UserError
from pangu.config.files import read_json
from pangu.config.model import ModelConfig

SHARD_BYTES = 5 * 10**9
"""Largest file of weights, unless one tensor is larger."""


def table(model: ModelConfig, tensor: int) -> list[Stored]:
    """The tensors of a model. Raises ConfigError if transformers has no such model."""
    return make_table(model, KINDS[kind_of(model)].naming)


class HuggingFaceSource(Source):
    """A local folder with config.json and weights in safetensors files or, failing those, in pickles."""

    def __init__(self, path: Path) -> None:
        config = _read_json(path / "config.json")
        self.known = read_model(config, path / "config.json")
        self.packing = _read_ids(path, config)
        self._trunk = kind_in(config, path).trunk
        self._files = {self._full(name): (file, name) for name, file in _weight_map(path).items()}
        if self.known["layers"] > len(self._files):
            told = f"{len(self._files)} tensors for {self.known['layers']} layers"
            raise UserError(f"{path}: the files do not hold the model of config.json: {told}")
        self._pickles: dict[Path, dict[str, Tensor]] = {}
        if (path / "vocab.model").is_file():
            require_inside(path, path / "vocab.model")
            facts = path / "tokenizer_config.json"
            jieba = not facts.is_file() or _read_json(facts).get("jieba", True)
            self.tokenizer = TokenizerConfig("pangu" if jieba else "sentencepiece", str(path / "vocab.model"))
        elif any((path / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
            tokenizer_files(path)
            self.tokenizer = TokenizerConfig("huggingface", str(path))

    def _full(self, name: str) -> str:
        """Some files leave out the name of the model's trunk."""
        return name if name.startswith((self._trunk, "lm_head.")) else self._trunk + name

    def table(self, model: ModelConfig) -> list[Stored]:
        return table(model, 1)

    def inspect(self, table: Sequence[Stored], problems: list[str]) -> dict[str, Tensor]:
        # causal masks that older versions stored, and the copy of a tied head
        tied = r"|lm_head\.weight" if self.known["tied_head"] else ""
        buffers = re.compile(r".*\.attn\.(bias|masked_bias)|.*rotary_emb\.inv_freq" + tied)
        return {name: self._tensor(name, meta=True) for name in self._files if not buffers.fullmatch(name)}

    def read(self, stored: Stored) -> Tensor:
        return self._tensor(stored.name, meta=False)

    def _tensor(self, name: str, meta: bool) -> Tensor:
        file, key = self._files[name]
        if file.suffix != ".safetensors":
            if file not in self._pickles:
                self._pickles[file] = load_pickle(file)
            tensor = self._pickles[file][key]
            return tensor.to("meta") if meta else tensor
        with safe_open(file, framework="pt") as opened:
            if not meta:
                return opened.get_tensor(key)
            part = opened.get_slice(key)
            # one element tells the format
            shape = part.get_shape()
            return torch.empty(shape, dtype=part[(slice(0, 1),) * len(shape)].dtype, device="meta")


def _read_json(path: Path) -> dict[str, Any]:
    """An object of a JSON file. Raises UserError."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(f"{path}: is no JSON object")
    return found


def _weight_map(path: Path) -> dict[str, Path]:
    """Names of all tensors of a folder, and the files that hold them."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        whole, index = path / f"{stem}.{suffix}", path / f"{stem}.{suffix}.index.json"
        if index.is_file():
            named = _read_json(index).get("weight_map")
            if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
                raise UserError(f"{index}: weight_map must be a JSON object of tensors and their files")
            files = sorted({path / Path(file).name for file in named.values()})
            if wrong := [file.name for file in files if not file.name.isprintable() or not file.is_file()]:
                raise UserError(f"{index}: weight_map names {shown(wrong[0])}, which is no file of the folder")
            return {name: file for file in files for name in _names_in(file)}
        if whole.is_file():
            return dict.fromkeys(_names_in(whole), whole)
    raise UserError(f"{path}: neither model.safetensors nor pytorch_model.bin nor an index of several is here")


def _names_in(file: Path) -> list[str]:
    if file.suffix != ".safetensors":
        return [name for name, value in load_pickle(file).items() if isinstance(value, Tensor)]
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: is not a safetensors file ({error})") from error


def _read_ids(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `PackingConfig`. What ends a text stands in config.json and, for chat models more fully, in
    generation_config.json; the first id is taken for the one between documents."""
    file = path / "generation_config.json"
    ends: list[int] = []
    for source, values in ((path / "config.json", config), (file, _read_json(file) if file.is_file() else {})):
        told = values.get("eos_token_id")
        ids = told if isinstance(told, list) else [] if told is None else [told]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise UserError(f"{source}: eos_token_id = {shown(told)}: must be an id, a list of ids or null")
        ends += [i for i in ids if i >= 0]
    eod, *stop = dict.fromkeys(ends) or [None]
    pad = config.get("pad_token_id")
    known = isinstance(pad, int) and not isinstance(pad, bool) and pad >= 0 and pad not in ends
    return {"eod": eod, "stop": tuple(stop), "pad": pad if known else None}


def _ids(job: Job) -> dict[str, Any]:
    packing = job.config.data.packing
    return {
        "bos_token_id": packing.eod,
        "eos_token_id": [packing.eod, *packing.stop] if packing.stop else packing.eod,
        "pad_token_id": packing.eod if packing.pad is None else packing.pad,
    }


def write(path: Path, job: Job) -> None:
    """A folder that transformers loads; PanGu-α's carries the code of its model."""
    path.mkdir(parents=True)
    config = write_model(job.config.model)
    dtype = str(job.described[0].dtype).removeprefix("torch.")
    _write_json(path / "config.json", {**config, "torch_dtype": dtype, **_ids(job)})
    _write_json(path / "generation_config.json", _ids(job))
    if config["model_type"] == "gpt_pangu":
        shutil.copy(CODE, path)
    if job.tokenizer is not None:
        _write_tokenizer(path, job.tokenizer)
    shards: list[dict[str, Tensor]] = [{}]
    for stored, tensor in zip(job.table, job.described, strict=True):
        size = sum(other.nbytes for other in shards[-1].values()) + tensor.nbytes
        if shards[-1] and size > SHARD_BYTES:
            shards.append({})
        shards[-1][stored.name] = tensor
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = ["model.safetensors"]
    for file, shard in zip(files, shards, strict=True):
        write_safetensors(path / file, shard, (next(job.contents) for _ in shard), {"format": "pt"})
    if len(shards) > 1:
        where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        total = sum(tensor.nbytes for tensor in job.described)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        _write_json(path / "model.safetensors.index.json", index)


def _write_tokenizer(path: Path, tokenizer: TokenizerConfig) -> None:
    if tokenizer.kind == "huggingface":
        for file in tokenizer_files(Path(tokenizer.path)):
            shutil.copy(file, path)
        return
    shutil.copy(tokenizer.path, path / "vocab.model")
    shutil.copy(Path(__file__).parent / "tokenization_pangu.py", path)
    auto = {"AutoTokenizer": ["tokenization_pangu.PanguTokenizer", None]}
    facts = {"tokenizer_class": "PanguTokenizer", "auto_map": auto, "jieba": tokenizer.kind == "pangu"}
    _write_json(path / "tokenizer_config.json", facts)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
