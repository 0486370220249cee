"""Folders of Hugging Face's transformers: config.json (`huggingface_config`), weights and tokenizer."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pangu.checkpoint.run_folder import CHAT_TEMPLATE, read_text, require_inside, tokenizer_files
from pangu.checkpoint.safetensors_file import write_safetensors
from pangu.common.errors import UserError, reading, shown
from pangu.common.files import read_json_object
from pangu.config.data import TokenizerConfig
from pangu.config.model import ModelConfig
from pangu.data.boundaries import begin_id, tokenizer_facts
from pangu.data.tokenizers import Tokenizer, load_tokenizer
from pangu.interop.formats.card import BASE_MODEL, write_hub_card
from pangu.interop.formats.huggingface_config import ModelType, kind_in, kind_of, read_model, write_model
from pangu.interop.formats.pickles import load_pickle
from pangu.interop.formats.stored import PANGU_PADDING, Job, Stored, WeightSource, make_table
from pangu.interop.hub import HUB_NAME
from pangu.layers.rotary import rotary_frequencies
from pangu.prepare.chat import FINE_TUNED

_GENERATION = "generation_config.json"
_TOKENIZERS = ("vocab.model", "tokenizer.json", "vocab.json", "tokenizer.model")
SHARD_BYTES = 5 * 10**9
"""Largest size of a weight file in bytes, unless one tensor is larger."""


def table(model: ModelConfig, tensor: int, kind: ModelType | None = None) -> list[Stored]:
    """Return the tensors of a model in files of `kind`, by default its own. Raises ConfigError if there is none."""
    # PanGu-α's files keep their padding; transformers would not load any other file with more rows than words
    return make_table(model, kind_of(model, kind).name, spare=PANGU_PADDING if model.kind == "pangu" else 0)


def predicts(model: ModelConfig) -> bool:
    """Return whether files of a model's type hold multi-token prediction. Raises ConfigError if there is no type."""
    return "predicts" in kind_of(model).tensors


class HuggingFaceSource(WeightSource):
    """Local folder with config.json and weights in safetensors files or, failing those, in pickles."""

    def __init__(self, path: Path) -> None:
        """Open a folder. Raises UserError if it cannot be converted."""
        config = read_json_object(path / "config.json")
        self.model_keys = read_model(config, path / "config.json")
        generation = read_json_object(path / _GENERATION) if (path / _GENERATION).is_file() else {}
        self.packing = _read_ids(path, config, generation)
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
        self.generation = {"config.json": ids} | ({_GENERATION: generation} if generation else {})
        self.generation |= {BASE_MODEL: {"name": _hub_name(path, config)}}
        if (path / "adapter_config.json").exists():
            raise UserError(
                f"{path / 'adapter_config.json'}: transformers would add this adapter to the weights; merge it"
            )
        self._kind = kind_in(config, path)
        # the prefix of all names but the head's, which some files omit
        trunk = self._kind.tensors["layer"].partition(".")[0] + "."
        self._head = self._kind.tensors["outside"].get("head.weight", "lm_head.weight")
        self._places: dict[str, tuple[Path, str, Tensor]] = {}
        """File, name in it and meta tensor, by full name of the tensor."""
        for file in _weight_files(path):
            for name, tensor in _tensors_in(file).items():
                full = name if name.startswith(trunk) or name == self._head else trunk + name
                if full in self._places:
                    raise UserError(f"{file}: {shown(name)} is in {self._places[full][0]} as well")
                self._places[full] = (file, name, tensor)
        # the copy of a tied head, and what transformers computes and older versions stored all the same
        tied = f"|{re.escape(self._head)}" if self.model_keys["tied_head"] else ""
        implied = re.compile(r".*\.(attn|attention)\.(bias|masked_bias)|.*rotary_emb\.inv_freq" + tied)
        self._ahead, self._copies = self._layers_ahead()
        left_out = self._copies.keys() | {name for name in self._places if implied.fullmatch(name)}
        self.tensors = {name: tensor for name, (_, _, tensor) in self._places.items() if name not in left_out}
        self._pickles: dict[Path, dict[str, Tensor]] = {}
        if files := [path / name for name in _TOKENIZERS if (path / name).is_file()]:
            tokenizer_files(path)
            facts, own = tokenizer_facts(path), files[0].name == "vocab.model"
            self.tokenizer = TokenizerConfig("huggingface", str(path))
            # code of the folder, which is not run, reads this file
            if own or (files[0].name == "tokenizer.model" and "auto_map" in facts):
                jieba = facts.get("jieba", own)
                self.tokenizer = TokenizerConfig("pangu" if jieba else "sentencepiece", str(files[0]))
        self.packing["bos"] = None if self.tokenizer is None else "auto"
        if (path / CHAT_TEMPLATE).is_file():
            require_inside(path, path / CHAT_TEMPLATE)
            text = read_text(path / CHAT_TEMPLATE)
            self.chat_template = text if text.startswith(FINE_TUNED) else None

    def _layers_ahead(self) -> tuple[list[str], dict[str, str]]:
        """Return prefixes of the layers of multi-token prediction, and copies in them with the originals' names."""
        naming, layers = self._kind.tensors, list[str]()
        named: Mapping[str, str] = naming.get("predicts", {})
        while named:
            prefix = naming["layer"].format(self.model_keys["layers"] + len(layers))
            if not any(name.startswith(prefix) for name in self._places):
                break
            layers.append(prefix)
        if "mtp_layers" in self.model_keys:
            # not in config.json: transformers keeps its number, and saves no such layers
            self.model_keys["mtp_layers"] = len(layers)
        originals = {name: naming["outside"][ours] for name, ours in named.items() if ours in naming["outside"]}
        return layers, {f"{layer}{name}": original for layer in layers for name, original in originals.items()}

    def table(self, model: ModelConfig) -> list[Stored]:
        """Return the tensors of a model in this format."""
        # how experts will be balanced in training is not the files' matter, but for biases that choose them
        balance = self._kind.means.get("router.balance", "none")
        tensors = table(replace(model, router=replace(model.router, balance=balance)), 1, self._kind)
        return [stored for stored in tensors if not stored.copy]

    def inspect(self, table: Sequence[Stored], problems: list[str]) -> Mapping[str, Tensor]:
        """Return the tensors; omitted ones, which the configuration implies, must equal the implied value."""
        words = next(stored.name for stored in table if stored.parts == ("embedding.word.weight",))
        kept = [layer for layer in self._ahead if any(stored.name.startswith(layer) for stored in table)]
        for layer in kept:
            if any(stored.name.startswith(layer) and stored.name not in self.tensors for stored in table):
                fix = "set model.mtp_layers=0 to leave it out"
                problems.append(f"{layer}*: tensors of multi-token prediction are missing; {fix}")
        dropped = tuple(layer for layer in self._ahead if layer not in kept)
        for name in sorted(name for name in self._places.keys() - self.tensors.keys() if not name.startswith(dropped)):
            found = self._read(name)
            if name in self._copies:
                original = self._copies[name] if self._copies[name] in self._places else words
                if original in self._places and not torch.equal(found, self._read(original)):
                    fix = "set model.mtp_layers=0 to leave multi-token prediction out"
                    problems.append(f"{name}: differs from {original}, but pangu keeps only one copy; {fix}")
            elif name == self._head:
                if words in self._places and not torch.equal(found, self._read(words)):
                    problems.append(
                        f"{name}: differs from {words}, but config.json says that they are the same; "
                        f'"tie_word_embeddings": false keeps both, and without {name} the second is the head'
                    )
            elif not _is_implied(name.rpartition(".")[2], found, self.model_keys):
                problems.append(
                    f"{shown(name)}: is not what config.json implies, so the model would compute something else; "
                    "correct config.json, or remove the tensor from the file if nothing uses it"
                )
        implied = {stored.name: self.read(stored).to("meta") for stored in table if stored.implied is not None}
        problems += [f"{name}: {self._kind.name} has no such tensor" for name in implied if name in self.tensors]
        return {name: x for name, x in self.tensors.items() if not name.startswith(dropped)} | implied

    def read(self, stored: Stored) -> Tensor:
        """Return one full tensor."""
        if stored.implied is not None:
            return torch.full(stored.shape, stored.implied, dtype=next(iter(self.tensors.values())).dtype)
        return self._read(stored.name)

    def _read(self, full: str) -> Tensor:
        file, name, _ = self._places[full]
        if file.suffix != ".safetensors":
            if file not in self._pickles:
                self._pickles[file] = load_pickle(file)
            tensor: Tensor = self._pickles[file][name]
            return tensor
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name)


def _is_implied(kind: str, found: Tensor, keys: Mapping[str, Any]) -> bool:
    """Return whether a stored buffer equals the one that transformers computes from the configuration."""
    if kind == "bias":
        mask = torch.ones(found.shape[-2:], dtype=torch.bool).tril()
        return found.dim() == 4 and found.shape[-1] == found.shape[-2] and bool((found.bool() == mask).all())
    if kind == "masked_bias":
        # -1e4 in the first versions, and all of them far below any score
        return found.numel() == 1 and float(found) <= -1e4
    size = (
        keys["latent"].rope_head_dim
        if keys.get("latent")
        else int((keys["head_dim"] or keys["hidden"] // keys["heads"]) * keys["partial_rotary_factor"])
    )
    scaling, base = keys.get("rope_scaling"), keys.get("rope_base") or 1e4
    choices = [rotary_frequencies(size, base, each, torch.float64) for each in {None, scaling}]
    # rounded to the format of the file after a power in fp32; small ones lose their last bits in fp16
    numbers = torch.finfo(found.dtype if found.is_floating_point() else torch.float32)
    rtol, atol = max(4 * numbers.eps, 1e-6), 2 * numbers.smallest_normal * numbers.eps
    near = (torch.allclose(found.double(), each, rtol, atol) for each in choices if each.shape == found.shape)
    return any(near)


def _hub_name(path: Path, config: Mapping[str, Any]) -> str:
    """Return a model's name on the hub, by its config.json or the hub's cache, or else that of its folder."""
    named = config.get("_name_or_path")
    if isinstance(named, str) and HUB_NAME.fullmatch(named) and not Path(named).exists():
        return named
    cached = [part for part in path.resolve().parts if part.startswith("models--")]
    return cached[0].removeprefix("models--").replace("--", "/") if cached else path.resolve().name


def _weight_files(path: Path) -> list[Path]:
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        single, index = path / f"{stem}.{suffix}", path / f"{stem}.{suffix}.index.json"
        if single.is_file():
            return [single]
        if index.is_file():
            named = read_json_object(index).get("weight_map")
            if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
                raise UserError(f"{index}: weight_map must be a JSON object that maps tensors to files")
            files = {file.name: file for file in path.iterdir() if file.is_file()}
            names = sorted({Path(file).name for file in named.values()})
            if missing := [name for name in names if name not in files or not name.isprintable()]:
                raise UserError(f"{index}: weight_map names {shown(missing[0])}, which is not a file in the folder")
            return [files[name] for name in names]
    raise UserError(f"{path}: no model.safetensors or pytorch_model.bin here, nor an index of several")


def _tensors_in(file: Path) -> dict[str, Tensor]:
    if file.suffix != ".safetensors":
        pickled = load_pickle(file).items()
        return {str(name): value.to("meta") for name, value in pickled if isinstance(value, Tensor)}
    formats: dict[str, torch.dtype] = {}
    described = {}
    rule = "is not a safetensors file"
    with reading(file, SafetensorError, rule=rule), safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            part = opened.get_slice(name)
            shape, code = part.get_shape(), part.get_dtype()
            if code not in formats:
                # one element shows the format
                formats[code] = part[(slice(0, 1),) * len(shape)].dtype
            described[name] = torch.empty(shape, dtype=formats[code], device="meta")
    return described


def _read_ids(path: Path, config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return ids for `PackingConfig` from config.json and generation_config.json; the first end is the document's."""
    ends: list[int] = []
    for source, values in ((path / "config.json", config), (path / _GENERATION, generation)):
        end = values.get("eos_token_id")
        ids = end if isinstance(end, list) else [] if end is None else [end]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise UserError(f"{source}: eos_token_id = {shown(end)}: must be an id, a list of ids or null")
        ends += [i for i in ids if i >= 0]
    eod, *stop = dict.fromkeys(ends) or [None]
    pad = config.get("pad_token_id")
    known = isinstance(pad, int) and not isinstance(pad, bool) and pad >= 0 and pad not in ends
    return {"eod": eod, "stop": tuple(stop), "pad": pad if known else None}


def put_tokenizer_end_first(packing: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the packing with the tokenizer's end of document as `eod`, and the other ends (of turns) as `stop`."""
    ends = [token for token in (packing["eod"], *packing["stop"]) if token is not None]
    eod, *stop = dict.fromkeys([*([] if tokenizer.eod is None else [tokenizer.eod]), *ends]) or [None]
    pad = None if packing["pad"] == eod else packing["pad"]
    return {**packing, "eod": eod, "stop": tuple(stop), "pad": pad}


def _ids(job: Job, file: str) -> dict[str, Any]:
    packing = job.config.data.packing
    ids = {
        "bos_token_id": begin_id(packing.bos, _opened(job.tokenizer)),
        "eos_token_id": [packing.eod, *packing.stop] if packing.stop else packing.eod,
        "pad_token_id": packing.eod if packing.pad is None else packing.pad,
    }
    if "config.json" not in job.source.generation:
        return ids
    kept = dict(job.source.generation.get(file, job.source.generation["config.json"]))
    ends = [each.get("eos_token_id") for each in job.source.generation.values()]
    known = {token for end in ends for token in (end if isinstance(end, list) else [end])} - {None}
    # the tokenizer's own end may have come to those of the files
    if not known or {packing.eod, *packing.stop} not in (known, {packing.eod, *known}):
        kept["eos_token_id"] = ids["eos_token_id"]
    if isinstance(packing.bos, int):
        kept["bos_token_id"] = packing.bos
    return kept


def write(path: Path, job: Job) -> None:
    """Write a folder with config.json, weights and tokenizer."""
    path.mkdir(parents=True)
    config = write_model(job.config.model)
    dtype = str(job.described[0].dtype).removeprefix("torch.")
    _write_json(path / "config.json", {**config, "torch_dtype": dtype, **_ids(job, "config.json")})
    _write_json(path / _GENERATION, _ids(job, _GENERATION))
    if config["model_type"] == "gpt_pangu":
        shutil.copy(Path(__file__).with_name("modeling_pangu.py"), path)
    if job.tokenizer is not None:
        _write_tokenizer(path, job.tokenizer)
        if job.source.chat_template is not None:
            _write_template(path, job.source.chat_template, job.tokenizer)
    write_hub_card(path, job, config)
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
    if tokenizer.kind in ("huggingface", "gpt2"):
        given = Path(tokenizer.path)
        for file in [given] if given.is_file() else tokenizer_files(given):
            shutil.copy(file, path / ("tokenizer.json" if given.is_file() else file.name))
        if given.is_file() or tokenizer.kind == "gpt2":
            kind = "GPT2Tokenizer" if tokenizer.kind == "gpt2" else "PreTrainedTokenizerFast"
            _write_json(path / "tokenizer_config.json", {"tokenizer_class": kind, **_pieces(tokenizer)})
        return
    shutil.copy(tokenizer.path, path / "vocab.model")
    shutil.copy(Path(__file__).with_name("tokenization_pangu.py"), path)
    auto = {"AutoTokenizer": ["tokenization_pangu.PanguTokenizer", None]}
    facts = {"tokenizer_class": "PanguTokenizer", "auto_map": auto, "jieba": tokenizer.kind == "pangu"}
    facts |= _pieces(tokenizer)
    _write_json(path / "tokenizer_config.json", facts)


def _write_template(path: Path, template: str, tokenizer: TokenizerConfig) -> None:
    """Replace the tokenizer's chat templates by `template`, and declare the SentencePiece tokens that it spells."""
    (path / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    values = tokenizer_facts(path)
    values.pop("chat_template", None)
    if (path / "vocab.model").is_file() and (opened := _opened(tokenizer)):
        declared = values.values()
        values["additional_special_tokens"] = [p for p in opened.special if p in template and p not in declared]
    if values:
        _write_json(path / "tokenizer_config.json", values)


def _opened(tokenizer: TokenizerConfig | None) -> Tokenizer | None:
    """Return the tokenizer, or None where it cannot be opened: an export then lacks only its settings."""
    try:
        return load_tokenizer(tokenizer) if tokenizer else None
    except UserError:
        return None


def _pieces(tokenizer: TokenizerConfig) -> dict[str, Any]:
    opened = _opened(tokenizer)
    if opened is None:
        return {}
    names: dict[int | None, str] = {token: piece for piece, token in opened.special.items()}
    known = {"eos_token": names.get(opened.eod), "bos_token": names.get(opened.bos)}
    return {key: piece for key, piece in known.items() if piece} | {"add_bos_token": opened.bos is not None}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
