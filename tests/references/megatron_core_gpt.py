"""Started by torchrun: Megatron-Core's own GPT model saves or loads a checkpoint, and its logits, on CPUs.

torchrun --nproc-per-node=RANKS megatron_core_gpt.py save|load torch|torch_dist VARIANT FOLDER IDS LOGITS
"""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda *_: None

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.activations import squared_relu  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.transformer import MLATransformerConfig, TransformerConfig  # noqa: E402

WORDS, LENGTH = 256, 24
OPTIONS = {
    "gpt": {
        "num_attention_heads": 4,
        "bias_gelu_fusion": True,
        "position_embedding_type": "learned_absolute",
        "untie_embeddings_and_output_weights": False,
    },
    "llama": {
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "group_query_attention": True,
        "normalization": "RMSNorm",
        "swiglu": True,
        "ffn_hidden_size": 48,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "rotary_base": 500,
        "untie_embeddings_and_output_weights": True,
    },
}
OPTIONS["linear"] = {
    **OPTIONS["llama"],
    "swiglu": False,
    "squared_relu": True,
    "rotary_percent": 0.5,
    "rotary_seq_len_interpolation_factor": 3,
}
OPTIONS["yarn"] = {
    **OPTIONS["llama"],
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 12,
    "yarn_beta_fast": 4.0,
    "yarn_beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
OPTIONS["deepseek"] = {
    "num_attention_heads": 4,
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "qk_layernorm": True,
    "rope_type": "yarn",
    "rotary_base": 50.0,
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 12,
    "beta_fast": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.5,
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 48,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "num_experts": 6,
    "moe_layer_freq": [0, 1, 1],
    "moe_ffn_hidden_size": 20,
    "moe_shared_expert_intermediate_size": 40,
    "moe_router_topk": 4,
    "moe_router_num_groups": 3,
    "moe_router_group_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none",
}


class Core(torch.nn.Module):
    """Attention to values that are narrower than keys, which Megatron-Core has with Transformer Engine alone."""

    def __init__(self, softmax_scale: float, **_: object) -> None:
        """Keep the scale."""
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: object) -> Tensor:
        """Attend [sequence, batch, heads, size]; True in `mask` hides."""
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.scale
        shares = scores.masked_fill(mask, float("-inf")).softmax(-1)
        return torch.einsum("bhqk,kbhv->qbhv", shares, value).flatten(2)


def build_latent(ranks: int) -> torch.nn.Module:
    """A DeepSeek-V3."""
    options = dict(OPTIONS["deepseek"])
    for name in ("swiglu", "position_embedding_type", "untie_embeddings_and_output_weights"):
        del options[name]
    config = MLATransformerConfig(
        num_layers=3,
        hidden_size=32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=options.pop("num_experts"),
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
        init_method_std=0.2,
        moe_token_dispatcher_type="allgather",
        **options,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = Core
    return GPTModel(
        config,
        spec,
        WORDS,
        LENGTH,
        parallel_output=False,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=options["rotary_base"],
    )


def build(variant: str, ranks: int) -> torch.nn.Module:
    """The model of a variant."""
    if variant == "deepseek":
        return build_latent(ranks)
    options = OPTIONS[variant]
    llama, gated = variant != "gpt", options.get("swiglu", False)
    config = TransformerConfig(
        num_layers=3,
        hidden_size=32,
        num_attention_heads=options["num_attention_heads"],
        num_query_groups=options.get("num_query_groups"),
        ffn_hidden_size=options.get("ffn_hidden_size"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization=options.get("normalization", "LayerNorm"),
        gated_linear_unit=gated,
        activation_func=F.silu if gated else squared_relu if llama else F.gelu,
        bias_activation_fusion=not llama,
        add_bias_linear=options.get("add_bias_linear", True),
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
        init_method_std=0.2,
    )
    for name, value in options.items():
        if name.startswith(("yarn_", "rotary_scaling", "mscale")):
            setattr(config, f"yarn_{name.removeprefix('yarn_')}", value)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        WORDS,
        LENGTH,
        parallel_output=False,
        share_embeddings_and_output_weights=not options["untie_embeddings_and_output_weights"],
        position_embedding_type=options["position_embedding_type"],
        rotary_base=options.get("rotary_base", 10000),
        rotary_percent=options.get("rotary_percent", 1.0),
        seq_len_interpolation_factor=options.get("rotary_seq_len_interpolation_factor"),
    )


def save(model: torch.nn.Module, how: str, variant: str, folder: Path) -> None:
    """Write the folder of an iteration with random norms and biases, as one rank."""
    noise = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            # norms and row-parallel biases are the same on all ranks
            if parameter.dim() == 1 and not getattr(parameter, "tensor_model_parallel", False):
                parameter += 0.1 * torch.randn(parameter.shape, generator=noise)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer += 0.1 * torch.randn(buffer.shape, generator=noise)
    arguments = argparse.Namespace(num_layers=3, hidden_size=32, max_position_embeddings=LENGTH, **OPTIONS[variant])
    facts = {"args": arguments, "iteration": 5, "checkpoint_version": 3.0}
    path = folder / "iter_0000005"
    if how == "torch_dist":
        path.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save({**model.sharded_state_dict(), **facts}, str(path))
    else:
        file = path / f"mp_rank_{dist.get_rank():02d}/model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        torch.save({**facts, "model": model.state_dict_for_save_checkpoint()}, file)
    (folder / "latest_checkpointed_iteration.txt").write_text("5")


def load(model: torch.nn.Module, how: str, variant: str, folder: Path) -> None:
    """Read the folder of a release, as one rank."""
    path = folder / "release"
    if how == "torch_dist":
        wanted = model.sharded_state_dict()
        state = dist_checkpointing.load(dict(wanted), str(path))
        arguments, weights = state["args"], {name: state[name] for name in wanted}
    else:
        state = torch.load(path / f"mp_rank_{dist.get_rank():02d}/model_optim_rng.pt", weights_only=False)
        arguments, weights = state["args"], state["model"]
        if variant == "deepseek":
            weights = as_local(weights, model.state_dict())
    assert arguments.num_attention_heads == OPTIONS[variant]["num_attention_heads"]
    model.load_state_dict(weights)


def as_local(weights: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's tensors for modules of Megatron-Core, from those of Transformer Engine's."""
    found = {}
    for name, tensor in weights.items():
        name = re.sub(r"linear_(q|kv)_up_proj\.layer_norm_", r"\1_layernorm.", name)
        name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        ranks = len(tensor) // len(wanted[name])
        found[name] = tensor.chunk(ranks)[dist.get_rank()] if "_down_proj" in name else tensor
    return found


def main(action: str, how: str, variant: str, folder: str, ids: str, logits: str) -> None:
    """Save or load one rank's part; the first rank writes the logits."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(ranks)
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_: nullcontext()  # nothing is dropped
    torch.manual_seed(1)
    model = build(variant, ranks).eval()
    (save if action == "save" else load)(model, how, variant, Path(folder))
    with torch.no_grad():
        tokens = torch.load(ids)
        places = torch.arange(LENGTH).expand_as(tokens)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
        scores = model(tokens, places, mask)
    if rank == 0:
        torch.save(scores, logits)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
