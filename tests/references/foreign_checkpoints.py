"""PanGu-α checkpoints of other programs, made from what is published of their names, shapes and bytes.

Shares no code with the package: protocol buffers are written by Google's library, merged tensors are cut with numpy.
Weights are those of `pangu_reference`: [out, in], fp16 or fp32.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from torch import Tensor

Weights = dict[str, Tensor]
LAYER_PARTS = (
    "attention_norm",
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.output",
    "mlp_norm",
    "mlp.up",
    "mlp.down",
)


def num_layers(weights: Weights) -> int:
    """Layers, the query layer counted."""
    return 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))


def padded(words: Tensor, rows: int) -> Tensor:
    """A word embedding with rows of zeros below."""
    return torch.cat([words, torch.zeros(rows - len(words), words.shape[1], dtype=words.dtype)])


# --- the PanGu-α port of Megatron-LM 1.1 ---------------------------------------------------------------------------


def write_megatron_port(folder: Path, weights: Weights, ranks: int, rows: int, heads: int | None, extras: bool) -> None:
    """`folder`/iter_0001000/mp_rank_XX/model_optim_rng.pt.

    Args:
        folder: what --load names.
        weights: fp16, as released.
        ranks: tensor-parallel size.
        rows: of the padded word embedding.
        heads: goes into the options; None: the file has no options, as the released ones.
        extras: with what a training run saves besides.
    """
    layers = num_layers(weights)
    for rank in range(ranks):

        def columns(name: str, rank: int = rank) -> Tensor:
            return weights[name].chunk(ranks, 0)[rank].clone()

        def inputs(name: str, rank: int = rank) -> Tensor:
            return weights[name].chunk(ranks, 1)[rank].clone()

        transformer: Weights = {}
        for i in range(layers):
            theirs = f"layers.{i}." if i < layers - 1 else "topQueryLayer."
            ours = f"layers.{i}."
            for kind in ("weight", "bias"):
                transformer[f"{theirs}input_layernorm.{kind}"] = weights[f"{ours}attention_norm.{kind}"]
                transformer[f"{theirs}post_attention_layernorm.{kind}"] = weights[f"{ours}mlp_norm.{kind}"]
                for part in ("query", "key", "value"):
                    transformer[f"{theirs}attention.{part}.{kind}"] = columns(f"{ours}attention.{part}.{kind}")
                transformer[f"{theirs}mlp.dense_h_to_4h.{kind}"] = columns(f"{ours}mlp.up.{kind}")
            transformer[f"{theirs}attention.dense.weight"] = inputs(f"{ours}attention.output.weight")
            transformer[f"{theirs}attention.dense.bias"] = weights[f"{ours}attention.output.bias"]
            transformer[f"{theirs}mlp.dense_4h_to_h.weight"] = inputs(f"{ours}mlp.down.weight")
            transformer[f"{theirs}mlp.dense_4h_to_h.bias"] = weights[f"{ours}mlp.down.bias"]
        transformer["final_layernorm.weight"] = weights["final_norm.weight"]
        transformer["final_layernorm.bias"] = weights["final_norm.bias"]
        words = padded(weights["embedding.word.weight"], rows).chunk(ranks, 0)[rank].clone()
        language_model = {
            "embedding": {
                "word_embeddings": {"weight": words},
                "position_embeddings": {"weight": weights["embedding.position.weight"]},
            },
            "topQueryEmbedding": {"top_query_embeddings": {"weight": weights["query_embedding.weight"]}},
            "transformer": transformer,
        }
        state: dict[str, object] = {"iteration": 1000, "model": {"language_model": language_model}}
        if heads is not None:
            state["args"] = argparse.Namespace(num_layers=layers - 1, num_attention_heads=heads, padded_vocab_size=rows)
        if extras:
            state["np_rng_state"] = np.random.RandomState(1).get_state()
            state["random_rng_state"] = random.Random(1).getstate()
            state["torch_rng_state"] = torch.get_rng_state()
        path = folder / "iter_0001000" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save(state, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("1000")


# --- the community's port to transformers --------------------------------------------------------------------------


def huggingface_tensors(weights: Weights) -> Weights:
    """Names of the community's port; nothing is transposed."""
    modules = ("ln_1", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    named = {
        "transformer.wte.weight": weights["embedding.word.weight"],
        "transformer.wpe.weight": weights["embedding.position.weight"],
        "transformer.wqe.weight": weights["query_embedding.weight"],
        "transformer.ln_f.weight": weights["final_norm.weight"],
        "transformer.ln_f.bias": weights["final_norm.bias"],
    }
    for i in range(num_layers(weights)):
        for part, module in zip(LAYER_PARTS, modules, strict=True):
            for kind in ("weight", "bias"):
                named[f"transformer.h.{i}.{module}.{kind}"] = weights[f"layers.{i}.{part}.{kind}"]
    return named


def write_huggingface(folder: Path, weights: Weights, heads: int) -> None:
    """A folder as the community's: one pickle, with buffers and the tied head in it."""
    folder.mkdir(parents=True)
    words, positions = weights["embedding.word.weight"], weights["embedding.position.weight"]
    config = {
        "model_type": "gpt_pangu",
        "vocab_size": words.shape[0],
        "max_position_embeddings": positions.shape[0],
        "hidden_size": words.shape[1],
        "intermediate_size": None,
        "num_layers": num_layers(weights),
        "num_heads": heads,
        "activation_function": "gelu",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "initializer_range": 0.02,
        "eos_token_id": 9,
        "pad_token_id": 6,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = huggingface_tensors(weights) | {"lm_head.weight": words}
    for i in range(num_layers(weights)):
        tensors[f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8).tril()
        tensors[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    torch.save(tensors, folder / "pytorch_model.bin")


# --- MindSpore -----------------------------------------------------------------------------------------------------

_INT64, _INT32, _STRING, _BYTES, _MESSAGE = 3, 5, 9, 12, 11


def _messages() -> dict[str, type]:
    """Classes of checkpoint.proto and node_strategy.proto."""
    file = descriptor_pb2.FileDescriptorProto(name="foreign.proto", package="foreign", syntax="proto2")

    def message(name: str, *fields: tuple[str, int, int, str, bool]) -> None:
        added = file.message_type.add(name=name)
        for field, number, kind, of, repeated in fields:
            made = added.field.add(name=field, number=number, type=kind, label=3 if repeated else 1)
            if of:
                made.type_name = f".foreign.{of}"

    message(
        "TensorProto",
        ("dims", 1, _INT64, "", True),
        ("tensor_type", 2, _STRING, "", False),
        ("tensor_content", 3, _BYTES, "", False),
    )
    message("Value", ("tag", 1, _STRING, "", False), ("tensor", 2, _MESSAGE, "TensorProto", False))
    message("Checkpoint", ("value", 1, _MESSAGE, "Value", True))
    message("Dims", ("dim", 1, _INT32, "", True))
    message(
        "Layouts",
        ("dev_matrix", 1, _MESSAGE, "Dims", True),
        ("tensor_map", 2, _MESSAGE, "Dims", True),
        ("field", 5, _INT32, "", False),
        ("opt_weight_shard_step", 6, _INT32, "", False),
        ("opt_weight_shard_size", 7, _INT32, "", False),
    )
    message("LayoutItem", ("param_name", 1, _STRING, "", False), ("layouts", 2, _MESSAGE, "Layouts", False))
    message("StrategyMap", ("current_stage", 1, _INT32, "", False), ("layout", 3, _MESSAGE, "LayoutItem", True))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"foreign.{name}"))
        for name in ("Checkpoint", "StrategyMap")
    }


_CLASSES: dict[str, Any] = _messages()
_TYPE_NAMES = {torch.float32: "Float32", torch.float16: "Float16"}


def mindspore_tensors(weights: Weights) -> Weights:
    """Names of the released files; three matrices of a layer are [in, out]."""
    modules = (
        "layernorm1",
        "attention.dense1",
        "attention.dense2",
        "attention.dense3",
        "attention.projection",
        "layernorm2",
        "output.mapping",
        "output.projection",
    )
    named = {
        "backbone.word_embedding.embedding_table": weights["embedding.word.weight"],
        "backbone.position_embedding.embedding_table": weights["embedding.position.weight"],
        "backbone.top_query_embedding.embedding_table": weights["query_embedding.weight"],
        "backbone.layernorm.gamma": weights["final_norm.weight"],
        "backbone.layernorm.beta": weights["final_norm.bias"],
    }
    layers = num_layers(weights)
    for i in range(layers):
        prefix = f"backbone.blocks.{i}." if i < layers - 1 else "backbone.top_query_layer."
        for part, module in zip(LAYER_PARTS, modules, strict=True):
            weight, bias = (weights[f"layers.{i}.{part}.{kind}"] for kind in ("weight", "bias"))
            turned = module in ("attention.projection", "output.mapping", "output.projection")
            names = ("gamma", "beta") if "norm" in module else ("weight", "bias")
            named[f"{prefix}{module}.{names[0]}"] = weight.T.contiguous() if turned else weight
            named[f"{prefix}{module}.{names[1]}"] = bias
    return named


def write_checkpoint(path: Path, tensors: Weights) -> None:
    """One .ckpt file, with the state that training leaves in it."""
    checkpoint = _CLASSES["Checkpoint"]()
    for name, tensor in tensors.items():
        value = checkpoint.value.add(tag=name)
        value.tensor.dims.extend(tensor.shape)
        value.tensor.tensor_type = _TYPE_NAMES[tensor.dtype]
        value.tensor.tensor_content = tensor.contiguous().numpy().tobytes()
    step = checkpoint.value.add(tag="step_num")
    step.tensor.dims.extend([0])
    step.tensor.tensor_type = "Int64"
    step.tensor.tensor_content = bytes(8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(checkpoint.SerializeToString())


def read_checkpoint(path: Path) -> Weights:
    """The tensors of a .ckpt file, those of several parts put together."""
    checkpoint = _CLASSES["Checkpoint"].FromString(path.read_bytes())
    contents: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for value in checkpoint.value:
        before = contents[value.tag][2] if value.tag in contents else b""
        tensor = value.tensor
        contents[value.tag] = (tensor.tensor_type, tuple(tensor.dims), before + tensor.tensor_content)
    kinds = {"Float32": np.float32, "Float16": np.float16}
    return {
        name: torch.from_numpy(np.frombuffer(content, kinds[kind]).reshape(dims).copy())
        for name, (kind, dims, content) in contents.items()
    }


def write_slices(folder: Path, weights: Weights, data: int, model: int) -> None:
    """`data` x `model` slice files, the strategy file and three .npy tables, cut as the released ones."""
    strategy = _CLASSES["StrategyMap"](current_stage=0)
    slices: list[Weights] = [{} for _ in range(data * model)]
    folder.mkdir(parents=True)
    for name, tensor in mindspore_tensors(weights).items():
        item = strategy.layout.add(param_name=name)
        item.layouts.dev_matrix.add(dim=[data, model])
        item.layouts.field = 0
        if name.endswith("embedding_table"):
            np.save(folder / f"{name.split('.')[1]}.npy", tensor.numpy())
        kind = name.split(".", 2)[-1].split(".", 1)[-1] if "blocks" in name else name.split(".", 2)[-1]
        cut = None
        if kind in ("attention.projection.weight", "output.projection.weight") or ".dense" in f".{kind}":
            cut = 0
        elif kind == "output.mapping.weight":
            cut = 1
        elif kind == "output.mapping.bias":
            cut = 0
        axes = [-1] * tensor.dim()
        if cut is not None:
            axes[cut] = 0
            item.layouts.opt_weight_shard_step, item.layouts.opt_weight_shard_size = model, -1
        else:
            item.layouts.opt_weight_shard_step, item.layouts.opt_weight_shard_size = 0, 0
        item.layouts.tensor_map.add(dim=axes)
        for rank in range(data * model):
            piece = tensor
            if cut is not None:
                piece = tensor.chunk(model, cut)[rank % model].chunk(data, 0)[rank // model]
            if not name.endswith("embedding_table"):
                slices[rank][name] = piece
    for rank, tensors in enumerate(slices):
        write_checkpoint(folder / f"part_{rank % 4}" / f"filerted_{rank}.ckpt", tensors)
    (folder / "pangu_alpha_ckpt_strategy.ckpt").write_bytes(strategy.SerializeToString())
