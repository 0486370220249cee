"""Checkpoints of Megatron-Core's GPT in both of its formats, made from what it writes: tests/references/
megatron_core_gpt.py saves the same with Megatron-Core itself. Shares no code with the package.

Weights have our names, [out, in]; a query, key and value head of each group lie together in `linear_qkv`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

HIDDEN, HEADS, ROWS, LENGTH, LAYERS = 16, 4, 64, 12, 4
GPT = {
    "num_attention_heads": HEADS,
    "bias_gelu_fusion": True,
    "position_embedding_type": "learned_absolute",
    "untie_embeddings_and_output_weights": False,
}
LLAMA = {
    "num_attention_heads": HEADS,
    "num_query_groups": 2,
    "group_query_attention": True,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "ffn_hidden_size": 24,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "rotary_base": 500,
    "untie_embeddings_and_output_weights": True,
}
Weights = dict[str, Tensor]


def weights(llama: bool) -> Weights:
    """Random weights with our names."""
    noise = torch.Generator().manual_seed(7)
    ffn, kv = (24, HIDDEN // 2) if llama else (4 * HIDDEN, HIDDEN)
    shapes = {"embedding.word": (ROWS, HIDDEN)} | ({"head": (ROWS, HIDDEN)} if llama else {})
    shapes |= {} if llama else {"embedding.position": (LENGTH, HIDDEN)}
    for i in range(LAYERS):
        parts = {"query": (HIDDEN, HIDDEN), "key": (kv, HIDDEN), "value": (kv, HIDDEN), "output": (HIDDEN, HIDDEN)}
        shapes |= {f"layers.{i}.attention.{part}": shape for part, shape in parts.items()}
        shapes |= {f"layers.{i}.mlp.up": (ffn, HIDDEN), f"layers.{i}.mlp.down": (HIDDEN, ffn)}
        shapes |= {f"layers.{i}.mlp.gate": (ffn, HIDDEN)} if llama else {}
        shapes |= {f"layers.{i}.attention_norm": (HIDDEN,), f"layers.{i}.mlp_norm": (HIDDEN,)}
    shapes["final_norm"] = (HIDDEN,)
    made = {f"{name}.weight": torch.randn(shape, generator=noise) for name, shape in shapes.items()}
    if not llama:
        biased = [name for name in shapes if not name.startswith("embedding")]
        made |= {f"{name}.bias": torch.randn(shapes[name][0], generator=noise) for name in biased}
    return made


def whole_tensors(made: Weights, llama: bool) -> Weights:
    """Megatron's names and whole tensors, as `torch_dist` has them: all rows of the gate come before those of up."""
    groups = 2 if llama else HEADS
    names = {
        "embedding.word.weight": "embedding.word_embeddings.weight",
        "embedding.position.weight": "embedding.position_embeddings.weight",
        "head.weight": "output_layer.weight",
    }
    theirs = {names[name]: tensor for name, tensor in made.items() if name in names}
    for kind in ("weight", "bias"):
        if f"final_norm.{kind}" in made:
            theirs[f"decoder.final_layernorm.{kind}"] = made[f"final_norm.{kind}"]
        for i in range(LAYERS):
            ours, layer = f"layers.{i}.", f"decoder.layers.{i}."
            if f"{ours}attention_norm.{kind}" in made:
                theirs[f"{layer}self_attention.linear_qkv.layer_norm_{kind}"] = made[f"{ours}attention_norm.{kind}"]
                theirs[f"{layer}mlp.linear_fc1.layer_norm_{kind}"] = made[f"{ours}mlp_norm.{kind}"]
            if f"{ours}attention.query.{kind}" not in made:
                continue
            query, key, value = (made[f"{ours}attention.{part}.{kind}"] for part in ("query", "key", "value"))
            rows: list[Tensor] = []
            for group in range(groups):
                rows += [part.chunk(groups)[group] for part in (query, key, value)]
            theirs[f"{layer}self_attention.linear_qkv.{kind}"] = torch.cat(rows)
            theirs[f"{layer}self_attention.linear_proj.{kind}"] = made[f"{ours}attention.output.{kind}"]
            first = [f"{ours}mlp.gate.{kind}", f"{ours}mlp.up.{kind}"] if llama else [f"{ours}mlp.up.{kind}"]
            theirs[f"{layer}mlp.linear_fc1.{kind}"] = torch.cat([made[name] for name in first])
            theirs[f"{layer}mlp.linear_fc2.{kind}"] = made[f"{ours}mlp.down.{kind}"]
    return theirs


def cut(name: str, tensor: Tensor, rank: int, ranks: int, llama: bool) -> Tensor:
    """What a tensor-parallel rank has of a whole tensor."""
    if llama and "linear_fc1.weight" in name:
        return torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(2)])
    if any(part in name for part in ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias")):
        return tensor.chunk(ranks)[rank]
    if "word_embeddings" in name or "output_layer" in name:
        return tensor.chunk(ranks)[rank]
    if "linear_proj.weight" in name or "linear_fc2.weight" in name:
        return tensor.chunk(ranks, 1)[rank]
    return tensor


def write_ranks(
    folder: Path, whole: Weights, llama: bool, tensor: int, pipeline: int, virtual: int, **more: Any
) -> None:
    """`mp_rank_TT_PPP` folders: layers are dealt out to the virtual stages 0 of all stages, then to the virtual stages
    1; a tied last stage keeps a copy of the word embedding; each stage counts its layers from 0."""
    options = (LLAMA if llama else GPT) | {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
    }
    each = LAYERS // (pipeline * virtual)
    for rank in range(tensor):
        cuts = {name: cut(name, part, rank, tensor, llama).clone() for name, part in whole.items()}
        for stage in range(pipeline):
            state: dict[str, Any] = {"args": argparse.Namespace(**options, **more), "checkpoint_version": 3.0}
            for chunk in range(virtual):
                first = (chunk * pipeline + stage) * each
                model = {
                    name.replace(f"layers.{first + i}.", f"layers.{i}."): part
                    for i in range(each)
                    for name, part in cuts.items()
                    if f"layers.{first + i}." in name
                }
                if first == 0:
                    model |= {name: part for name, part in cuts.items() if name.startswith("embedding")}
                if first + each == LAYERS:
                    ends = ("decoder.final_layernorm", "output_layer")
                    model |= {name: part for name, part in cuts.items() if name.startswith(ends)}
                    if not llama and pipeline > 1:
                        model["output_layer.weight"] = cuts["embedding.word_embeddings.weight"]
                state["model" if virtual == 1 else f"model{chunk}"] = model
            name = f"mp_rank_{rank:02d}" if pipeline == 1 else f"mp_rank_{rank:02d}_{stage:03d}"
            file = folder / "iter_0000007" / name / "model_optim_rng.pt"
            file.parent.mkdir(parents=True)
            torch.save(state, file)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


def stacked(whole: Weights) -> Weights:
    """Tensors of the layers, one above the other."""
    plain = {name: tensor for name, tensor in whole.items() if ".layers." not in name}
    firsts = [name for name in whole if "decoder.layers.0." in name]
    return plain | {
        name.replace("layers.0.", "layers."): torch.stack([whole[name.replace(".0.", f".{i}.")] for i in range(LAYERS)])
        for name in firsts
    }


class Chunks(DefaultSavePlanner):
    """Saves tensors in chunks: one for each layer, cut in two along the dimension that ranks share."""

    def create_local_plan(self) -> SavePlan:
        """An item for each chunk."""
        self.data: dict[MetadataIndex, Tensor] = {}
        items = []
        for name, tensor in self.state_dict.items():
            for offsets, part in _chunks(name, tensor):
                index = MetadataIndex(name, offsets)
                self.data[index] = part
                chunk = ChunkStorageMetadata(torch.Size(offsets), part.shape)
                data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), tensor.shape)
                items.append(WriteItem(index, WriteItemType.SHARD, None, data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The chunk of an item."""
        return self.data[write_item.index]


def _chunks(name: str, tensor: Tensor) -> Iterator[tuple[list[int], Tensor]]:
    layers = range(LAYERS) if "decoder.layers." in name else [None]
    dim = 1 if "linear_proj.weight" in name or "linear_fc2.weight" in name else 0
    for layer in layers:
        part = tensor if layer is None else tensor[layer : layer + 1]
        at = dim if layer is None else dim + 1
        start = 0
        for half in part.chunk(2, at) if "norm" not in name and "position" not in name else [part]:
            offsets = [0] * part.dim()
            offsets[at] = start
            if layer is not None:
                offsets[0] = layer
            yield offsets, half.clone()
            start += half.shape[at]


def write_dist(folder: Path, tensors: Weights, options: dict[str, Any], chunks: bool = False) -> None:
    """A `torch_dist` folder of one iteration."""
    objects = {"rng_state/shard_0.0_1.1": {"state": torch.get_rng_state()}}
    state: dict[str, Any] = dict(tensors) if chunks else {**tensors, **objects}
    planner = (Chunks if chunks else DefaultSavePlanner)(flatten_state_dict=False)
    save(state, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    torch.save({"args": argparse.Namespace(**options), "iteration": 7, "checkpoint_version": 3.0}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
