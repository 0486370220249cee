"""One training step of a GPT with a mixture of experts in each block, on one process: ours beside others' layers.

python -m benchmarks.experts --output benchmarks/results/experts.json

All have the plain model's attention, and in each block 8 gated feed-forward layers of width 768 without biases, of
which every token gets the 2 that a softmax router likes best, without a limit of their loads and without a loss for
balance. megatron-core is measured if it can be imported, as in `benchmarks.tensor_parallel`; of its kinds of experts a
CPU runs the one that computes expert by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import PlainBlock, PlainGPT, loop
from benchmarks.side_by_side import SHAPE, Step, command_line, measure
from benchmarks.tensor_parallel import megatron_config

PEERS = ("plain", "pangu", "transformers", "transformers_grouped", "megatron")
EXPERTS, CHOSEN, WIDTH = 8, 2, 768
PANGU = (
    "model.activation=swiglu",
    "model.biases=attention",
    f"model.experts={EXPERTS}",
    f"model.experts_per_token={CHOSEN}",
    f"model.expert_ffn={WIDTH}",
    "model.router.balance=none",
    "model.router.z_loss=0",
)


class PlainExperts(nn.Module):
    """A mixture of experts as a tutorial writes it: for each expert, the tokens that chose it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, EXPERTS, bias=False)
        self.up = nn.ModuleList(nn.Linear(hidden, 2 * WIDTH, bias=False) for _ in range(EXPERTS))
        self.down = nn.ModuleList(nn.Linear(WIDTH, hidden, bias=False) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] -> the same."""
        tokens = x.flatten(0, 1)
        weights, chosen = F.softmax(self.router(tokens).float(), -1).topk(CHOSEN)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows, places = torch.where(chosen == number)
            gate, inner = up(tokens[rows]).chunk(2, -1)
            result = down(F.silu(gate) * inner) * weights[rows, places, None]
            out.index_add_(0, rows, result.to(out.dtype))
        return out.view_as(x)


def mixtral_experts(hidden: int, implementation: str) -> nn.Module:
    """The block of transformers' Mixtral; `implementation` of its experts: `eager` or `grouped_mm`."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=hidden, intermediate_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    return block


class MegatronExperts(nn.Module):
    """The layer of megatron-core, of a group of one rank."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.spec_utils import build_module

        torch.cuda.current_device = lambda: "cpu"
        vars(moe_utils).setdefault("te_general_gemm", None)  # without Transformer Engine it forgets to name it
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        config = megatron_config(
            "fp32",
            1,
            False,
            num_moe_experts=EXPERTS,
            moe_router_topk=CHOSEN,
            moe_ffn_hidden_size=WIDTH,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="allgather",
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=F.silu,
        )
        self.layer = build_module(get_mlp_module_spec(use_te=False, num_experts=EXPERTS), config=config)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] -> the same."""
        return self.layer(x)[0]


class ExpertBlock(PlainBlock):
    """The plain block with experts for its feed-forward layer."""

    def __init__(self, hidden: int, heads: int, experts: nn.Module) -> None:
        super().__init__(hidden, heads)
        del self.up, self.down
        self.experts = experts

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return the output of the experts."""
        return self.experts(x)


def with_experts(vocab: int, make_experts: Callable[[int], nn.Module], shape: Mapping[str, int] = SHAPE) -> PlainGPT:
    """The plain model with such blocks."""
    model, hidden = PlainGPT(vocab, shape), shape["hidden"]
    model.blocks = nn.ModuleList(
        ExpertBlock(hidden, shape["heads"], make_experts(hidden)) for _ in range(shape["layers"])
    )
    return model


def make(peer: str, precision: str, vocab: int, micro: int) -> Step:
    """The step function of a peer."""
    torch.manual_seed(0)
    if peer == "pangu":
        from benchmarks.trainer import pangu_step

        return pangu_step(precision, vocab, micro, *PANGU)
    implementation = {"transformers": "eager", "transformers_grouped": "grouped_mm"}
    kinds: dict[str, Any] = {name: partial(mixtral_experts, implementation=how) for name, how in implementation.items()}
    kinds |= {"plain": PlainExperts, "megatron": MegatronExperts}
    model = with_experts(vocab, kinds[peer])
    return loop(model, model, precision, micro)


if __name__ == "__main__":
    measure(make, 1, command_line(__doc__, PEERS, threads=2, vocab=(8192,)))
