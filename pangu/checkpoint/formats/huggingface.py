"""Folders of Hugging Face's transformers: GPT-2 (Conv1D), Llama, and PanGu-α under the names of its community port."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pangu.checkpoint.formats.native import tokenizer_files
from pangu.checkpoint.formats.pickles import load_pickle
from pangu.checkpoint.formats.stored import (
    GPT2,
    PANGU,
    PANGU_VOCAB,
    PLAIN,
    Job,
    Naming,
    Source,
    Stored,
    make_table,
    one_by_one,
    require_expressible,
)
from pangu.checkpoint.safetensors_file import write_safetensors
from pangu.config.data import TokenizerConfig
from pangu.config.errors import Problem, UserError
from pangu.config.files import read_json
from pangu.config.model import ModelConfig

SHARD_BYTES = 5 * 10**9
"""Largest file of weights, unless one tensor is larger."""
ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "fast_gelu": "quick_gelu", "swiglu": "silu"}
"""Their names of our activations."""

_GPT2_OUTSIDE = {
    "embedding.word.weight": "transformer.wte.weight",
    "embedding.position.weight": "transformer.wpe.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}
_GPT2 = Naming(
    _GPT2_OUTSIDE,
    {
        "ln_1": ("attention_norm",),
        "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
        "attn.c_proj": ("attention.output",),
        "ln_2": ("mlp_norm",),
        "mlp.c_fc": ("mlp.up",),
        "mlp.c_proj": ("mlp.down",),
    },
    lambda layer: f"transformer.h.{layer}.",
    transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
)
_PANGU = Naming(
    {**_GPT2_OUTSIDE, "query_embedding.weight": "transformer.wqe.weight"},
    one_by_one(
        "ln_1",
        *("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.c_proj"),
        *("ln_2", "mlp.c_fc", "mlp.c_proj"),
    ),
    lambda layer: f"transformer.h.{layer}.",
)
_LLAMA = Naming(
    {
        "embedding.word.weight": "model.embed_tokens.weight",
        "final_norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    },
    {
        "input_layernorm": ("attention_norm",),
        "self_attn.q_proj": ("attention.query",),
        "self_attn.k_proj": ("attention.key",),
        "self_attn.v_proj": ("attention.value",),
        "self_attn.o_proj": ("attention.output",),
        "post_attention_layernorm": ("mlp_norm",),
        "mlp.gate_proj": ("mlp.gate",),
        "mlp.up_proj": ("mlp.up",),
        "mlp.down_proj": ("mlp.down",),
    },
    lambda layer: f"model.layers.{layer}.",
)


@dataclass(frozen=True)
class _Kind:
    """One `model_type` of transformers."""

    naming: Naming
    trunk: str
    """What all names but the head's begin with; some files leave it out."""
    keys: Mapping[str, str]
    """Keys of `ModelConfig`: their names in config.json."""
    means: Mapping[str, Any]
    """What the type says of a model by itself."""
    defaults: Mapping[str, Any]
    """Values of keys that config.json may leave out."""
    writes: Mapping[str, Any]
    """What config.json says besides."""


_SHARED = {"vocab": "vocab_size", "init_std": "initializer_range", "tied_head": "tie_word_embeddings"}
_LIKE_GPT2 = {
    **_SHARED,
    "activation": "activation_function",
    "norm_eps": "layer_norm_epsilon",
    "dropout": "resid_pdrop",
    "attention_dropout": "attn_pdrop",
}
_DEFAULTS = {
    "ffn": None,
    "tied_head": True,
    "norm_eps": 1e-5,
    "init_std": 0.02,
    "dropout": 0.1,
    "attention_dropout": 0.1,
}
_SIZES = {"hidden": "hidden_size", "ffn": "intermediate_size", "sequence": "max_position_embeddings"}
_CODE = Path(__file__).parent / "modeling_pangu.py"
_KINDS = {
    "gpt2": _Kind(
        _GPT2,
        "transformer.",
        _LIKE_GPT2
        | {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "sequence": "n_positions", "ffn": "n_inner"},
        {**GPT2, "kind": "gpt"},
        {**_DEFAULTS, "activation": "gelu_new"},
        {"architectures": ["GPT2LMHeadModel"]},
    ),
    "gpt_pangu": _Kind(
        _PANGU,
        "transformer.",
        _LIKE_GPT2 | _SIZES | {"layers": "num_layers", "heads": "num_heads"},
        PANGU,
        {**_DEFAULTS, "activation": "gelu"},
        {
            "architectures": ["PanguForCausalLM"],
            "auto_map": {
                "AutoConfig": f"{_CODE.stem}.PanguConfig",
                "AutoModelForCausalLM": f"{_CODE.stem}.PanguForCausalLM",
            },
        },
    ),
    "llama": _Kind(
        _LLAMA,
        "model.",
        {
            **_SHARED,
            **_SIZES,
            "layers": "num_hidden_layers",
            "heads": "num_attention_heads",
            "kv_heads": "num_key_value_heads",
            "activation": "hidden_act",
            "norm_eps": "rms_norm_eps",
            "rope_base": "rope_theta",
            "biases": "attention_bias",
            "attention_dropout": "attention_dropout",
        },
        {**PLAIN, "kind": "gpt", "norm": "rmsnorm", "positions": "rope"},
        {"kv_heads": None, "tied_head": False, "norm_eps": 1e-6, "init_std": 0.02, "attention_dropout": 0.0}
        | {"activation": "silu", "rope_base": 1e4, "biases": False},
        {"architectures": ["LlamaForCausalLM"]},
    ),
}
_SAME = {"pangu": "gpt_pangu"}
"""Other names of these types."""
_ONLY = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
}
"""Keys of config.json that change what is computed, and the only values that we compute."""


def _kind_of(model: ModelConfig) -> str:
    """`model_type` of a model. Raises ConfigError if no type can express it."""
    name = "gpt_pangu" if model.kind == "pangu" else "gpt2" if model.norm == "layernorm" else "llama"
    activations = ["swiglu"] if name == "llama" else ["gelu_tanh", "gelu", "fast_gelu"]
    require_expressible(model, f"transformers' {name}", _KINDS[name].means, activation=activations)
    return name


def table(model: ModelConfig, tensor: int) -> list[Stored]:
    """The tensors of a model. Raises ConfigError if transformers has no such model."""
    return make_table(model, _KINDS[_kind_of(model)].naming)


def _read_model(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Keys of `ModelConfig` that a config.json tells. Raises UserError for a model that is none of ours."""
    name = config.get("model_type", "")
    if _SAME.get(name, name) not in _KINDS:
        raise UserError(f"{path}: model_type = {name}: cannot be converted; {', '.join(_KINDS)} can")
    kind = _KINDS[_SAME.get(name, name)]
    if missing := [key for ours, key in kind.keys.items() if key not in config and ours not in kind.defaults]:
        raise UserError(f"{path}: {', '.join(missing)} must be given")
    told = {ours: config[theirs] if theirs in config else kind.defaults[ours] for ours, theirs in kind.keys.items()}
    only = {**_ONLY, "mlp_bias": told.get("biases")}
    rope = config.get("rope_parameters") or {}
    if kind is _KINDS["llama"]:
        told["rope_base"] = float(rope.get("rope_theta", told["rope_base"]))
        only |= {"rope_type": "default", "head_dim": told["hidden"] // told["heads"]}
    if kind is _KINDS["gpt_pangu"]:
        told["vocab"] = PANGU_VOCAB.get(told["vocab"], told["vocab"])
    found = {key: rope.get(key, config.get(key)) for key in only}
    wrong = [
        Problem(key, found[key], "is not computed here", f"{value} is")
        for key, value in only.items()
        if found[key] is not None and found[key] != value
    ]
    activations = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {"gelu_pytorch_tanh": "gelu_tanh"}
    if told["activation"] not in activations:
        wrong.append(Problem(kind.keys["activation"], told["activation"], f"is none of {', '.join(activations)}"))
    if wrong:
        raise UserError(f"{path}:\n" + "\n".join(f"  {problem}" for problem in wrong))
    return {"dropout": 0.0, **told, **kind.means, "activation": activations[told["activation"]]}


def _config_json(job: Job) -> dict[str, Any]:
    model = job.config.model
    name = _kind_of(model)
    full = {
        "ffn": model.ffn_size,
        "activation": ACTIVATIONS[model.activation],
        "kv_heads": model.kv_heads or model.heads,
        "rope_base": model.rotary_base,
    }
    told = {theirs: full.get(ours, getattr(model, ours)) for ours, theirs in _KINDS[name].keys.items()}
    more = {"mlp_bias": model.biases} if name == "llama" else {"embd_pdrop": model.dropout}
    dtype = str(job.described[0].dtype).removeprefix("torch.")
    return {"model_type": name, "torch_dtype": dtype, **told, **more, **_KINDS[name].writes, **_ids(job)}


class HuggingFaceSource(Source):
    """A local folder with config.json and weights in safetensors files or, failing those, in pickles."""

    def __init__(self, path: Path) -> None:
        config = _read_json(path / "config.json")
        self.known = _read_model(config, path / "config.json")
        eod, pad = config.get("eos_token_id"), config.get("pad_token_id")
        self.packing = {"eod": eod if isinstance(eod, int) else None, "pad": None if pad == eod else pad}
        self._trunk = _KINDS[_SAME.get(config["model_type"], config["model_type"])].trunk
        self._files = {self._full(name): (file, name) for name, file in _weight_map(path).items()}
        self._pickles: dict[Path, dict[str, Tensor]] = {}
        if (path / "vocab.model").is_file():
            facts = path / "tokenizer_config.json"
            jieba = not facts.is_file() or _read_json(facts).get("jieba", True)
            self.tokenizer = TokenizerConfig("pangu" if jieba else "sentencepiece", str(path / "vocab.model"))
        elif any((path / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
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
            files = sorted({path / Path(file).name for file in _read_json(index).get("weight_map", {}).values()})
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


def _ids(job: Job) -> dict[str, int | None]:
    packing = job.config.data.packing
    return {
        "bos_token_id": packing.eod,
        "eos_token_id": packing.eod,
        "pad_token_id": packing.eod if packing.pad is None else packing.pad,
    }


def write(path: Path, job: Job) -> None:
    """A folder that transformers loads; PanGu-α's carries the code of its model."""
    path.mkdir(parents=True)
    config = _config_json(job)
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", _ids(job))
    if config["model_type"] == "gpt_pangu":
        shutil.copy(_CODE, path)
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
