"""Checkpoints of Megatron: the PanGu-α port of Megatron-LM 1.1 and GPT of Megatron-Core (torch format).

latest_checkpointed_iteration.txt                 a number, or `release`
iter_0001000/mp_rank_00/model_optim_rng.pt        one for each tensor-parallel rank
"""

from __future__ import annotations

import argparse
import math
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pangu.checkpoint.formats.pickles import load_pickle
from pangu.checkpoint.formats.stored import (
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
from pangu.config.errors import Problem, UserError
from pangu.config.model import ModelConfig

ROWS = 128
"""Megatron-Core pads the vocabulary to a multiple of this times the tensor-parallel size."""

_TOP = "language_model.topQueryEmbedding.top_query_embeddings.weight"


def _port(model: ModelConfig) -> Naming:
    trunk = "language_model.transformer."
    return Naming(
        {
            "embedding.word.weight": "language_model.embedding.word_embeddings.weight",
            "embedding.position.weight": "language_model.embedding.position_embeddings.weight",
            "query_embedding.weight": _TOP,
            "final_norm.weight": f"{trunk}final_layernorm.weight",
            "final_norm.bias": f"{trunk}final_layernorm.bias",
        },
        one_by_one(
            "input_layernorm",
            *("attention.query", "attention.key", "attention.value", "attention.dense"),
            *("post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        ),
        lambda layer: trunk + (f"layers.{layer}." if layer < model.layers - 1 else "topQueryLayer."),
        columns=("attention.query", "attention.key", "attention.value", "mlp.dense_h_to_4h"),
        rows=("attention.dense", "mlp.dense_4h_to_h"),
    )


def _core(model: ModelConfig, tensor: int) -> Naming:
    up = ("mlp.gate", "mlp.up") if model.activation == "swiglu" else ("mlp.up",)
    return Naming(
        {
            "embedding.word.weight": "embedding.word_embeddings.weight",
            "embedding.position.weight": "embedding.position_embeddings.weight",
            "final_norm.weight": "decoder.final_layernorm.weight",
            "final_norm.bias": "decoder.final_layernorm.bias",
            "head.weight": "output_layer.weight",
        },
        {
            "input_layernorm": ("attention_norm",),
            "self_attention.linear_qkv": ("attention.query", "attention.key", "attention.value"),
            "self_attention.linear_proj": ("attention.output",),
            "pre_mlp_layernorm": ("mlp_norm",),
            "mlp.linear_fc1": up,
            "mlp.linear_fc2": ("mlp.down",),
        },
        lambda layer: f"decoder.layers.{layer}.",
        columns=("self_attention.linear_qkv", "mlp.linear_fc1"),
        rows=("self_attention.linear_proj", "mlp.linear_fc2"),
        # rows of the queries, keys and values that belong together; gate and up of each rank
        groups={"self_attention.linear_qkv": model.kv_heads or model.heads, "mlp.linear_fc1": tensor},
    )


def table(model: ModelConfig, tensor: int) -> list[Stored]:
    """The tensors of a model. Raises UserError if Megatron has no such model or cannot cut it so."""
    if model.kind == "pangu":
        require_expressible(model, "Megatron's PanGu-α port", PANGU, activation=["gelu_tanh", "gelu"])
    else:
        choices: dict[str, list[Any]] = {
            "positions": ["learned", "rope"],
            "activation": ["gelu_tanh", "gelu", "swiglu"],
        }
        choices["biases"] = [True, False]
        require_expressible(model, "Megatron-Core", PLAIN, **choices)
    if (model.kv_heads or model.heads) % tensor or model.ffn_size % tensor:
        raise UserError(
            f"tensor-parallel size {tensor}: must divide the {model.kv_heads or model.heads} (key) heads and the "
            f"feed-forward width {model.ffn_size}"
        )
    if model.kind == "pangu":
        # the released files have 40,064 rows, which every usual number of ranks divides
        return make_table(model, _port(model), math.lcm(ROWS, tensor), tensor)
    return make_table(model, _core(model, tensor), ROWS * tensor, tensor)


_ARGUMENTS = {
    "heads": "num_attention_heads",
    "dropout": "hidden_dropout",
    "attention_dropout": "attention_dropout",
    "norm_eps": "layernorm_epsilon",
    "init_std": "init_method_std",
}
"""Keys of `ModelConfig` that no shape tells: Megatron's options of the same meaning."""
_ONLY = {
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "apply_layernorm_1p": False,
    "apply_residual_connection_post_layernorm": False,
    "window_size": None,
}
"""Options that change what is computed, and the only values that we compute."""


class MegatronSource(Source):
    """The folder that `--load` names, or one with the mp_rank_XX folders in it."""

    def __init__(self, path: Path) -> None:
        self._paths = _rank_files(path)
        loaded = [load_pickle(file) for file in self._paths]
        self._ranks = [dict(_tensors(found.get("model", found.get("module", found)))) for found in loaded]
        options = loaded[0].get("args")
        arguments = vars(options) if isinstance(options, argparse.Namespace) else {}
        wrong = [
            Problem(key, arguments[key], "is not computed here", f"{value} is")
            for key, value in _ONLY.items()
            if arguments.get(key, value) != value
        ]
        if wrong:
            raise UserError(f"{self._paths[0]}:\n" + "\n".join(f"  {problem}" for problem in wrong))
        shapes = {name: tuple(tensor.shape) for name, tensor in self._ranks[0].items()}
        told = {ours: arguments[theirs] for ours, theirs in _ARGUMENTS.items() if theirs in arguments}
        try:
            told |= (_port_sizes if _TOP in shapes else _core_sizes)(shapes, len(self._ranks), arguments)
        except KeyError as error:
            raise UserError(
                f"{self._paths[0]}: neither a PanGu-α of Megatron 1.1 nor a GPT of Megatron-Core: no {error} in it"
            ) from error
        self.known = told | {
            "layers": len({found[1] for name in shapes if (found := re.search(r"layers\.(\d+)\.", name))})
            + (_TOP in shapes),
            "vocab": arguments.get("vocab_size") or PANGU_VOCAB.get(told["vocab"], told["vocab"]),
        }
        self.packing = {}

    def table(self, model: ModelConfig) -> list[Stored]:
        return table(model, len(self._ranks))

    def inspect(self, table: Sequence[Stored], problems: list[str]) -> dict[str, Tensor]:
        cuts = {stored.name: stored.cut for stored in table}
        first = self._ranks[0]
        for file, rank in zip(self._paths[1:], self._ranks[1:], strict=True):
            problems += [f"{name}: only in one of {self._paths[0]} and {file}" for name in first.keys() ^ rank.keys()]
            problems += [
                f"{name}: {list(rank[name].shape)} in {file}, {list(first[name].shape)} in {self._paths[0]}"
                for name in first.keys() & rank.keys()
                if rank[name].shape != first[name].shape
            ]
        whole = {}
        for name, tensor in first.items():
            cut, shape = cuts.get(name), list(tensor.shape)
            if cut is not None and cut < len(shape):
                shape[cut] *= len(self._ranks)
            whole[name] = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return whole

    def read(self, stored: Stored) -> Tensor:
        if stored.cut is None:
            return self._ranks[0][stored.name]
        return torch.cat([rank[stored.name] for rank in self._ranks], dim=stored.cut)


_Shapes = Mapping[str, tuple[int, ...]]


def _port_sizes(shapes: _Shapes, ranks: int, _: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `ModelConfig` that the tensors of one of `ranks` files tell."""
    rows, hidden = shapes["language_model.embedding.word_embeddings.weight"]
    return {
        "kind": "pangu",
        "hidden": hidden,
        "vocab": rows * ranks,
        "sequence": shapes[_TOP][0],
        "ffn": shapes["language_model.transformer.topQueryLayer.mlp.dense_h_to_4h.weight"][0] * ranks,
    }


def _core_sizes(shapes: _Shapes, ranks: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same; `arguments` are Megatron's options, as far as they are known."""
    rows, hidden = shapes["embedding.word_embeddings.weight"]
    layer = "decoder.layers.0."
    ffn = shapes[f"{layer}mlp.linear_fc2.weight"][1] * ranks
    gated = shapes[f"{layer}mlp.linear_fc1.weight"][0] * ranks == 2 * ffn
    tanh = arguments.get("bias_gelu_fusion", False) or arguments.get("openai_gelu", False)
    told = {
        "kind": "gpt",
        "hidden": hidden,
        "vocab": rows * ranks,
        "ffn": ffn,
        "activation": "swiglu" if gated else "gelu_tanh" if tanh else "gelu",
        "norm": "layernorm" if "decoder.final_layernorm.bias" in shapes else "rmsnorm",
        "biases": f"{layer}self_attention.linear_proj.bias" in shapes,
        "tied_head": "output_layer.weight" not in shapes,
    }
    if heads := arguments.get("num_attention_heads"):
        told["kv_heads"] = (
            (shapes[f"{layer}self_attention.linear_qkv.weight"][0] * ranks - hidden) * heads // hidden // 2
        )
    if table := shapes.get("embedding.position_embeddings.weight"):
        return told | {"positions": "learned", "sequence": table[0]}
    told |= {"positions": "rope", "rope_base": float(arguments.get("rotary_base", 10000))}
    return told | ({"sequence": length} if (length := arguments.get("max_position_embeddings")) else {})


def _rank_files(path: Path) -> list[Path]:
    """Files of all tensor-parallel ranks, in their order. Raises UserError if some are missing."""
    tracker = path / "latest_checkpointed_iteration.txt"
    if tracker.is_file():
        latest = tracker.read_text(encoding="utf-8").strip()
        path = path / (f"iter_{int(latest):07d}" if latest.isdecimal() else "release")
    folders = sorted(folder for folder in path.glob("mp_rank_*") if folder.is_dir())
    if not folders:
        raise UserError(f"{path}: no folder mp_rank_00 here, nor a latest_checkpointed_iteration.txt that names one")
    if stages := [folder.name for folder in folders if folder.name.count("_") > 2]:
        raise UserError(
            f"{path}: {stages[0]} is of a pipeline; save it with --pipeline-model-parallel-size 1 (Megatron's "
            "tools/checkpoint/convert.py)"
        )
    files = []
    for rank in range(len(folders)):
        found = [*(path / f"mp_rank_{rank:02d}").glob("model_optim_rng.pt*")]
        if not found:
            raise UserError(
                f"{path / f'mp_rank_{rank:02d}'}: no model_optim_rng.pt here; {len(folders)} ranks expected"
            )
        files.append(found[0])
    return files


def _tensors(values: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of nested dictionaries by their dotted names, as Megatron-Core has them without Transformer Engine."""
    for key, value in values.items() if isinstance(values, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _tensors(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor) and not key.endswith("_extra_state"):
            name = prefix + key
            name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
            yield name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."), value


def write(path: Path, job: Job) -> None:
    """A folder for `--load`, one file for each tensor-parallel rank, marked as a release: no optimizer, iteration 0."""
    model, pangu = job.config.model, job.config.model.kind == "pangu"
    opened = []
    described = [_cut(stored, tensor, job.tensor) for stored, tensor in zip(job.table, job.described, strict=True)]
    for rank in range(job.tensor):
        file = path / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        with FakeTensorMode():
            flat = {
                stored.name: torch.empty(pieces[rank].shape, dtype=pieces[rank].dtype)
                for stored, pieces in zip(job.table, described, strict=True)
            }
        facts = {"args": _arguments(model, job), "iteration": 0, "checkpoint_version": 0 if pangu else 3.0}
        # the file with room for the tensors, which are then written into it one by one
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save({"model": _nested(flat) if pangu else flat, **facts}, file)
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            opened.append(dict(_tensors(load_pickle(file)["model"])))
    for stored, tensor in zip(job.table, job.contents, strict=True):
        for room, part in zip(opened, _cut(stored, tensor, job.tensor), strict=True):
            room[stored.name].copy_(part)
    (path / "latest_checkpointed_iteration.txt").write_text("release", encoding="utf-8")


def _cut(stored: Stored, tensor: Tensor, ranks: int) -> Sequence[Tensor]:
    """What each rank has of a whole tensor."""
    return [tensor] * ranks if stored.cut is None else tensor.chunk(ranks, stored.cut)


def _nested(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    """The port keeps the transformer's tensors in one flat dictionary and all others as module, then `weight`."""
    trunk = "language_model.transformer."
    model: dict[str, Any] = {"embedding": {}, "topQueryEmbedding": {}, "transformer": {}}
    for name, tensor in flat.items():
        if name.startswith(trunk):
            model["transformer"][name.removeprefix(trunk)] = tensor
        else:
            _, outer, inner, kind = name.split(".")
            model[outer][inner] = {kind: tensor}
    return {"language_model": model}


def _arguments(model: ModelConfig, job: Job) -> argparse.Namespace:
    """Megatron's options that concern the architecture."""
    values = {theirs: getattr(model, ours) for ours, theirs in _ARGUMENTS.items()} | {
        "num_layers": model.layers - (model.kind == "pangu"),
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn_size,
        "max_position_embeddings": model.sequence,
        "vocab_size": model.vocab,
        "padded_vocab_size": job.table[0].shape[0],
        "make_vocab_size_divisible_by": ROWS,
        "model_parallel_size": job.tensor,
        "tensor_model_parallel_size": job.tensor,
        "pipeline_model_parallel_size": 1,
        "group_query_attention": model.kv_heads not in (None, model.heads),
        "num_query_groups": model.kv_heads or model.heads,
        "add_bias_linear": model.biases,
        "bias_gelu_fusion": False,
        "openai_gelu": model.activation == "gelu_tanh",
        "swiglu": model.activation == "swiglu",
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "position_embedding_type": "rope" if model.positions == "rope" else "learned_absolute",
        "add_position_embedding": model.positions == "learned",
        "rotary_base": model.rotary_base,
        "untie_embeddings_and_output_weights": not model.tied_head,
    }
    return argparse.Namespace(**values)
