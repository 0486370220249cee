"""Every variant of the architecture equals a few plain lines of torch, alone and with the others."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.t5.modeling_t5 import T5Attention

from pangu.config.attention import obstacles
from pangu.config.data import PackingConfig
from pangu.config.model import LatentConfig, ModelConfig, RouterConfig
from pangu.config.rope import LinearScaling, Llama3Scaling, YarnScaling
from pangu.config.sparse import BigBirdSparsity, FixedSparsity, StridedSparsity
from pangu.data.batch import Batch, make_batch
from pangu.layers import offload
from pangu.layers.builder import Builder
from pangu.layers.linear import RMSNorm
from pangu.layers.masks import AttentionMask
from pangu.layers.rotary import RotaryEmbedding
from pangu.layers.sparse import blocks_seen
from pangu.models.language_model import ModuleHooks, Options, build_model
from pangu.models.parameters import ModelPart, parameters_by_module
from pangu.models.size import num_parameters, training_flops_per_token
from pangu.topology.copy_stream import host_memory
from pangu.topology.placement import Placement, PlacementTable, TensorRank
from tests.models.helpers import GROUPED_FLOPS, logical_gradients, logical_weights, make, variant
from tests.weights import whole_logits, whole_loss

EOD = 9
LLAMA3 = Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0, original_sequence=16)
YARN = YarnScaling(name="yarn", factor=4.0, original_sequence=16, beta_fast=2.0, beta_slow=0.2)
LATENT = LatentConfig(kv_rank=10, q_rank=14, nope_head_dim=6, rope_head_dim=4, value_head_dim=8)
VARIANTS: list[dict[str, object]] = [
    {"norm": "rmsnorm"},
    {"activation": "gelu"},
    {"activation": "fast_gelu"},
    {"activation": "swiglu", "ffn": 40},
    {"biases": False},
    {"biases": "qkv"},
    {"biases": "attention"},
    {"head_dim": 6},
    {"qk_norm": True},
    {"qk_norm": True, "norm": "rmsnorm", "positions": "rope", "kv_heads": 2, "head_dim": 6},
    {"positions": "rope", "rope_base": 50.0, "rope_scaling": LLAMA3},
    {"positions": "rope", "rope_scaling": LinearScaling(name="linear", factor=3.0), "partial_rotary_factor": 0.5},
    {"positions": "rope", "rope_base": 50.0, "head_dim": 12, "rope_scaling": YARN},
    {"positions": "rope", "rope_base": 50.0, "rope_scaling": replace(YARN, truncate=False, attention_factor=1.3)},
    {"activation": "relu"},
    {"activation": "squared_relu", "embedding_norm": True},
    {"norm_placement": "sandwich", "kv_heads": 2},
    {"norm_placement": "sandwich", "norm": "rmsnorm", "embedding_norm": True, "residual_scores": True},
    {"kind": "gpt", "parallel_block": True, "positions": "rope", "partial_rotary_factor": 0.3, "head_dim": 8},
    {"kind": "gpt", "parallel_block": "shared_norm", "norm": "rmsnorm", "experts": 4, "expert_ffn": 20},
    {"tied_head": False},
    {"kv_heads": 2},
    {"kv_heads": 1},
    {"positions": "rope"},
    {"positions": "rope", "rope_base": 50.0},
    {"positions": "alibi"},
    {"positions": "relative"},
    {"positions": "relative", "relative_buckets": 6, "relative_distance": 9},
    {"window": 5},
    {"window": 5, "full_layers": 2},
    {"attention_sinks": True},
    {"attention_sinks": True, "window": 3, "full_layers": 2, "kv_heads": 2, "positions": "relative"},
    {"attention_sinks": True, "residual_scores": True, "positions": "alibi"},
    {"window": 4, "full_layers": (0,), "nope_layers": 3, "positions": "rope", "kv_heads": 2},
    {"nope_layers": (0, 2), "positions": "rope", "partial_rotary_factor": 0.5},
    {"residual_scores": True},
    {"norm_placement": "post"},
    {"norm_placement": "post", "final_norm": "after_query"},
    {
        "norm_placement": "post",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "biases": False,
        "tied_head": False,
        "kv_heads": 2,
        "positions": "rope",
    },
    {"kv_heads": 2, "positions": "relative", "window": 9, "residual_scores": True},
    {"sparse": FixedSparsity("fixed", 2, 2, 1)},
    {"sparse": StridedSparsity("strided", 2, 1, 3), "kv_heads": 2, "positions": "relative", "residual_scores": True},
    {"sparse": BigBirdSparsity("bigbird", 3, 1, 1, 1, seed=4), "window": 19, "positions": "alibi"},
    {"activation": "clamped_swiglu", "ffn": 40, "init_std": 0.5},
    {
        "experts": 4,
        "activation": "clamped_swiglu",
        "attention_sinks": True,
        "router": RouterConfig(learned_bias=True, balance="none"),
    },
    {"kind": "gpt", "positions": "rope", "latent": LATENT, "attention_sinks": True, "full_layers": 2, "window": 4},
    {"kind": "gpt", "positions": "rope", "latent": replace(LATENT, q_rank=None), "norm": "rmsnorm", "biases": False},
    {
        "kind": "gpt",
        "positions": "rope",
        "latent": replace(LATENT, rope_head_dim=8),
        "rope_scaling": replace(YARN, mscale_all_dim=0.7),
        "residual_scores": True,
        "window": 9,
    },
    {"experts": 4, "expert_ffn": 20},
    {"experts": 6, "experts_per_token": 1, "activation": "swiglu", "biases": False, "expert_capacity": 0.6},
    {
        "layers": 4,
        "dense_layers": 1,
        "experts": 9,
        "experts_per_token": 4,
        "shared_experts": 2,
        "expert_ffn": 12,
        "router": RouterConfig("sigmoid", True, 2.5, "group_limited", 3, 2, "bias", z_loss=0.1),
    },
    {
        "experts": 9,
        "experts_per_token": 4,
        "expert_ffn": 12,
        "router": RouterConfig("softmax", False, 2.5, "group_limited_best", 3, 2),
    },
    {
        "layers": 4,
        "expert_every": 2,
        "experts": 8,
        "experts_per_token": 4,
        "expert_capacity": 0.8,
        "router": RouterConfig(normalised=False, selection="each_group", groups=2, learned_scale=True),
    },
]


def batch_of(config: ModelConfig, resets: bool = True) -> Batch:
    """Two rows of random ids with some ends of documents, at which masks and positions may be reset."""
    source = torch.Generator().manual_seed(1)
    tokens = torch.randint(10, config.vocab, (2, config.sequence + 1), generator=source)
    tokens[0, [4, 11]] = EOD
    packing = PackingConfig(eod=EOD, pad=None, reset_mask=resets, reset_positions=resets)
    return make_batch(tokens.numpy(), range(2), packing)


def choice(scores: list[float], router: RouterConfig, count: int) -> list[int]:
    """The experts of one token."""

    def best(experts: list[int], number: int) -> list[int]:
        return sorted(experts, key=lambda expert: (-scores[expert], expert))[:number]

    size = len(scores) // router.groups
    groups = [list(range(first, first + size)) for first in range(0, len(scores), size)]
    if router.selection == "each_group":
        return [expert for group in groups for expert in best(group, count // router.groups)]
    if router.selection.startswith("group_limited"):
        counted = 1 if router.selection == "group_limited_best" else 2
        liked = sorted(groups, key=lambda group: (-sum(scores[expert] for expert in best(group, counted)), group[0]))
        groups = liked[: router.groups_per_token]
    return best([expert for group in groups for expert in group], count)


class Plain:
    """The model in plain lines over the logical weights. [batch, sequence, hidden]; loops over heads."""

    def __init__(self, weights: dict[str, Tensor], config: ModelConfig) -> None:
        self.w, self.c = weights, config
        self.below: list[Tensor] = []

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, x: Tensor, name: str) -> Tensor:
        gain = self.w[f"{name}.weight"]
        x = x.unflatten(-1, (-1, len(gain)))
        return self.normed(x, gain, name).flatten(-2)

    def normed(self, x: Tensor, gain: Tensor, name: str) -> Tensor:
        if self.c.norm == "rmsnorm":
            return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.c.norm_eps) * gain
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        return centred / torch.sqrt(variance + self.c.norm_eps) * gain + self.w[f"{name}.bias"]

    def heads(self, x: Tensor, asked: Tensor, name: str, positions: Tensor) -> tuple[list[Tensor], ...]:
        """Queries, keys and values of each head."""
        q, k, v = (self.linear(y, f"{name}.{p}") for y, p in ((asked, "query"), (x, "key"), (x, "value")))
        size = self.c.head_dim or self.c.hidden // self.c.heads
        if self.c.qk_norm:
            q, k = self.norm(q, f"{name}.query_norm"), self.norm(k, f"{name}.key_norm")
        if self.c.positions == "rope" and not self.listed(int(name.split(".")[1]), self.c.nope_layers):
            turning = int(size * self.c.partial_rotary_factor)
            q, k = self.turn(q, size, turning, positions), self.turn(k, size, turning, positions)
        group = self.c.heads // (self.c.kv_heads or self.c.heads)
        shared = ([part for part in x.split(size, -1) for _ in range(group)] for x in (k, v))
        return list(q.split(size, -1)), *shared

    def latent_heads(self, x: Tensor, name: str, positions: Tensor) -> tuple[list[Tensor], ...]:
        """Queries, keys and values of each head (DeepSeek-V2, equations 37 to 47)."""
        latent, asked = self.c.latent, x
        assert latent is not None
        if latent.q_rank is not None:
            asked = self.norm(self.linear(x, f"{name}.query_down"), f"{name}.query_norm")
        squeezed = self.norm(self.linear(x, f"{name}.kv_down"), f"{name}.kv_norm")
        size, turning = latent.rope_head_dim, latent.rope_head_dim
        shared = self.turn(self.linear(x, f"{name}.shared_key"), size, turning, positions)
        queries = []
        for head in self.linear(asked, f"{name}.query").chunk(self.c.heads, -1):
            still, turned = head.split([latent.nope_head_dim, size], -1)
            queries.append(torch.cat([still, self.turn(turned, size, turning, positions)], -1))
            if isinstance(scaling := self.c.rope_scaling, YarnScaling):
                queries[-1] = queries[-1] * (1 + scaling.mscale_all_dim * math.log(scaling.factor) / 10) ** 2
        keys = self.linear(squeezed, f"{name}.key").chunk(self.c.heads, -1)
        values = self.linear(squeezed, f"{name}.value").chunk(self.c.heads, -1)
        return queries, [torch.cat([key, shared], -1) for key in keys], list(values)

    def attention(self, x: Tensor, asked: Tensor, name: str, batch: Batch) -> Tensor:
        if self.c.latent is None:
            q, k, v = self.heads(x, asked, name, batch.positions)
        else:
            q, k, v = self.latent_heads(x, name, batch.positions)
        places = torch.arange(x.shape[1])
        distance = places[:, None] - places
        layer = int(name.split(".")[1])
        whole = self.c.window is None or self.listed(layer, self.c.full_layers)
        seen = (distance >= 0) & (distance < (len(places) if whole else self.c.window or 0))
        if self.c.sparse is not None:
            seen = seen & self.blocks_seen(batch)
        if batch.documents is not None:
            seen = seen & (batch.documents[:, :, None] == batch.documents[:, None, :])
        results, passed = [], []
        for head in range(self.c.heads):
            scores = q[head] @ k[head].transpose(1, 2) / math.sqrt(q[head].shape[-1])
            if self.below:
                scores = scores + self.below[head]
            passed.append(scores)
            scores = scores + self.bias(head, distance.clamp(min=0))
            shares = scores.masked_fill(~seen, -math.inf).exp()
            total = shares.sum(-1, keepdim=True)
            if self.c.attention_sinks:
                total = total + self.w[f"{name}.sinks"][head].exp()
            results.append(shares / total @ v[head])
        if self.c.residual_scores:
            self.below = passed
        return self.linear(torch.cat(results, -1), f"{name}.output")

    def listed(self, layer: int, pattern: int | tuple[int, ...] | None) -> bool:
        """Whether a layer, counted from 1, is a multiple of a number, or counted from 0 is in a list."""
        return (layer + 1) % pattern == 0 if isinstance(pattern, int) else layer in (pattern or ())

    def blocks_seen(self, batch: Batch) -> Tensor:
        """bool [batch, sequence, sequence]. With documents, positions are counted from their starts."""
        assert self.c.sparse is not None
        blocks = batch.positions // self.c.sparse.block
        return torch.tensor(
            [[[key in blocks_seen(self.c.sparse, query) for key in row] for query in row] for row in blocks.tolist()]
        )

    def bias(self, head: int, distance: Tensor) -> Tensor:
        """What a head adds to the score at each distance."""
        if self.c.positions == "alibi":
            return -(2.0 ** (-8 * (head + 1) / self.c.heads)) * distance
        if self.c.positions == "relative":
            buckets, furthest = self.c.relative_buckets or 32, self.c.relative_distance or 128
            bucket = T5Attention._relative_position_bucket(-distance, False, buckets, furthest)
            return self.w["position_bias.weight"][bucket, head]
        return torch.zeros(())

    def turn(self, x: Tensor, size: int, turning: int, positions: Tensor) -> Tensor:
        """Each pair (i, i + size / 2) of each head as a complex number times e^(i m θ)."""
        heads = x.unflatten(-1, (-1, size))
        heads, still = heads[..., :turning].unflatten(-1, (2, turning // 2)).transpose(-1, -2), heads[..., turning:]
        base, scaling, factor = self.c.rope_base or 10000.0, self.c.rope_scaling, 1.0
        theta = [base ** (-2 * i / turning) for i in range(turning // 2)]
        if isinstance(scaling, Llama3Scaling):
            theta = [self.slowed(frequency, scaling) for frequency in theta]
        elif isinstance(scaling, LinearScaling):
            theta = [frequency / scaling.factor for frequency in theta]
        elif scaling is not None:
            theta = [self.between(pair, theta[pair], turning, scaling) for pair in range(turning // 2)]
            factor = scaling.attention_factor or 1 + math.log(scaling.factor) / 10
        angles = (positions[..., None] * torch.tensor(theta, dtype=torch.float64))[:, :, None]
        phase = torch.polar(torch.full_like(angles, factor), angles)
        turned = torch.view_as_complex(heads.contiguous()) * phase
        return torch.cat([torch.view_as_real(turned).transpose(-1, -2).flatten(-2), still], -1).flatten(2)

    def between(self, pair: int, frequency: float, size: int, scaling: YarnScaling) -> float:
        """YaRN's frequency: the pair with n turns in the original texts has 2 π n = length x base^(-2 pair / size)."""
        ends = [
            math.log(scaling.original_sequence / (2 * math.pi * turns), self.c.rope_base or 10000.0) * size / 2
            for turns in (scaling.beta_fast, scaling.beta_slow)
        ]
        first, last = (math.floor(ends[0]), math.ceil(ends[1])) if scaling.truncate else ends
        slow = min(max((pair - max(first, 0)) / (min(last, size - 1) - max(first, 0)), 0), 1)
        return (1 - slow) * frequency + slow * frequency / scaling.factor

    def slowed(self, frequency: float, scaling: Llama3Scaling) -> float:
        """In wavelengths, as Llama 3.1's released code says it."""
        length = 2 * math.pi / frequency
        if length > scaling.original_sequence / scaling.low_freq_factor:
            return frequency / scaling.factor
        if length < scaling.original_sequence / scaling.high_freq_factor:
            return frequency
        smooth = scaling.original_sequence / length - scaling.low_freq_factor
        smooth /= scaling.high_freq_factor - scaling.low_freq_factor
        return (1 - smooth) * frequency / scaling.factor + smooth * frequency

    def feed_forward(self, x: Tensor, name: str) -> Tensor:
        if f"{name}.router.weight" in self.w:
            return self.mixture(x, name)
        up = self.linear(x, f"{name}.up")
        if self.c.activation == "clamped_swiglu":
            gate = torch.minimum(self.linear(x, f"{name}.gate"), torch.tensor(7.0))
            up = gate / (1 + torch.exp(-1.702 * gate)) * (1 + up.clamp(-7, 7))
        elif self.c.activation == "swiglu":
            gate = self.linear(x, f"{name}.gate")
            up = gate * torch.sigmoid(gate) * up
        elif self.c.activation == "fast_gelu":
            up = up / (1 + torch.exp(-1.702 * up))
        elif self.c.activation in ("relu", "squared_relu"):
            up = up.clamp(min=0) ** (1 if self.c.activation == "relu" else 2)
        elif self.c.activation == "gelu":
            up = up * 0.5 * (1 + torch.erf(up / math.sqrt(2)))
        else:
            up = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        return self.linear(up, f"{name}.down")

    def mixture(self, x: Tensor, name: str) -> Tensor:
        """Every expert computes every token, and most of it is multiplied by 0."""
        logits, router, count = x @ self.w[f"{name}.router.weight"].T, self.c.router, self.c.experts_per_token or 2
        if router.learned_bias:
            logits = logits + self.w[f"{name}.router.logit_bias"]
        scores = logits.softmax(-1) if router.score == "softmax" else logits.sigmoid()
        experts = scores.shape[-1]
        used = torch.zeros_like(scores)
        room = math.inf if self.c.expert_capacity is None else self.c.expert_capacity * x.shape[1] * count / experts
        for row in range(len(x)):
            loads = [0] * experts
            for place in range(x.shape[1]):
                chosen = choice(scores[row, place].tolist(), router, count)
                weight = scores[row, place, chosen].sum() if router.normalised else 1.0
                for expert in chosen:
                    loads[expert] += 1
                    used[row, place, expert] = router.scale / weight * (loads[expert] - 1 < room)
        if router.learned_scale:
            used = used * self.w[f"{name}.router.scale"]
        result = sum(
            ((scores * used)[..., [e]] * self.feed_forward(x, f"{name}.experts.{e}") for e in range(experts)),
            torch.zeros_like(x),
        )
        return result + self.feed_forward(x, f"{name}.shared") if self.c.shared_experts else result

    def block(self, x: Tensor, number: int, batch: Batch, asked: Tensor | None = None) -> Tensor:
        name = f"layers.{number}"
        if self.c.norm_placement == "post":
            x = x + self.attention(x, x if asked is None else asked, f"{name}.attention", batch)
            x = self.norm(x, f"{name}.attention_norm")
            return self.norm(x + self.feed_forward(x, f"{name}.mlp"), f"{name}.mlp_norm")
        normed = self.norm(x, f"{name}.attention_norm")
        attended = self.attention(normed, normed if asked is None else asked, f"{name}.attention", batch)
        if self.c.parallel_block:
            own = normed if self.c.parallel_block == "shared_norm" else self.norm(x, f"{name}.mlp_norm")
            return x + attended + self.feed_forward(own, f"{name}.mlp")
        sandwich = self.c.norm_placement == "sandwich"
        x = x + (self.norm(attended, f"{name}.attention_output_norm") if sandwich else attended)
        change = self.feed_forward(self.norm(x, f"{name}.mlp_norm"), f"{name}.mlp")
        return x + (self.norm(change, f"{name}.mlp_output_norm") if sandwich else change)

    def hidden(self, batch: Batch) -> Tensor:
        x = self.w["embedding.word.weight"][batch.tokens]
        if self.c.positions == "learned":
            x = x + self.w["embedding.position.weight"][batch.positions]
        x = self.norm(x, "embedding_norm") if self.c.embedding_norm else x
        for number in range(self.c.layers - (self.c.kind == "pangu")):
            x = self.block(x, number, batch)
        if self.c.final_norm == "before_query":
            x = self.norm(x, "final_norm")
        if self.c.kind == "pangu":
            x = self.block(x, self.c.layers - 1, batch, self.w["query_embedding.weight"][batch.positions])
        if self.c.final_norm == "after_query":
            x = self.norm(x, "final_norm")
        return x

    def scores(self, x: Tensor) -> Tensor:
        return x @ self.w["embedding.word.weight" if self.c.tied_head else "head.weight"].T

    def loss(self, batch: Batch) -> Tensor:
        self.below = []
        chances = self.scores(self.hidden(batch)).log_softmax(-1)
        return -(chances.gather(-1, batch.labels[..., None])[..., 0] * batch.weights).sum()


@pytest.mark.parametrize("kind", ["gpt", "pangu"])
@pytest.mark.parametrize(
    ("kernel", "resets", "changes"),
    [
        (kernel, resets, changes)
        for kernel, resets in (
            ("reference", True),
            ("sdpa", True),
            ("sdpa", False),
        )
        for changes in VARIANTS
        if not any(obstacles(kernel, variant(**changes), "fp64", "cpu"))
    ],
    ids=str,
)
def test_loss_and_every_gradient(kind: str, kernel: str, resets: bool, changes: dict[str, object]) -> None:
    """fp64; 1e-10: sums of at most 128 products in another order through three layers."""
    config = variant(**{"kind": kind} | changes)
    model, table = make(config, kernel)
    weights = {name: weight.requires_grad_() for name, weight in logical_weights(model, table).items()}
    batch = batch_of(config, resets)
    loss, expected = whole_loss(model, batch) / 48, Plain(weights, config).loss(batch) / 48
    torch.testing.assert_close(loss, expected, atol=1e-11, rtol=1e-11)
    loss.backward()
    expected.backward()
    for name, gradient in logical_gradients(model, table).items():
        torch.testing.assert_close(gradient, weights[name].grad, atol=1e-10, rtol=1e-10, msg=name)


def test_outputs_into_the_residual_stream_begin_smaller_unless_all_matrices_are_alike() -> None:
    for scaled, factor in ((True, math.sqrt(2 * 3)), (False, 1.0)):
        _, table = make(variant(scaled_init=scaled))
        outputs = {entry.std for entry in table if entry.name.endswith((".output.weight", ".down.weight"))}
        assert outputs == {0.2 / factor}
        assert {entry.std for entry in table if entry.name.endswith((".query.weight", ".up.weight"))} == {0.2}


@pytest.mark.parametrize(
    "changes", [{"window": 3}, {"positions": "alibi"}, {"sparse": FixedSparsity("fixed", 2, 2, 1)}], ids=str
)
def test_a_mask_that_depends_on_the_length_alone_is_made_once(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, original = [], AttentionMask.dense

    def counted(mask: AttentionMask, queries: range, *rest: Any) -> Tensor:
        made.append(len(queries))
        return original(mask, queries, *rest)

    monkeypatch.setattr(AttentionMask, "dense", counted)
    config = variant(**changes)
    model, _ = make(config, "sdpa")
    whole, cut = batch_of(config, False), batch_of(replace(config, sequence=12), False)
    losses = [float(whole_loss(model, batch).detach()) for batch in (whole, whole, cut, cut, whole)]
    assert losses == [losses[0], losses[0], losses[2], losses[2], losses[0]]
    assert made == [config.sequence, 12, config.sequence]
    for _ in range(2):
        whole_loss(model, batch_of(config, True))
    assert len(made) == 5


def test_a_bias_that_all_layers_share_is_not_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer moves what it moves without the bias, of which there would be a copy for each."""
    sizes: list[int] = []

    def counting(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        sizes.append(numel)
        return host_memory(numel, dtype, device)

    monkeypatch.setattr(offload, "host_memory", counting)
    for positions in ("learned", "alibi"):
        config = variant(sequence=32, positions=positions)
        model, _ = make(config, "sdpa")
        model.offload = True
        whole_loss(model, batch_of(config, False))
    assert sizes[: len(sizes) // 2] == sizes[len(sizes) // 2 :] != []


@pytest.mark.parametrize("kind", ["gpt", "pangu"])
def test_scores_cross_the_border_of_two_parts(kind: str) -> None:
    config = variant(kind=kind, residual_scores=True, positions="relative")
    whole, _ = make(config)
    parts = [ModelPart(range(1), first=True), ModelPart(range(1, 3), last=True)]
    halves, _ = build_model(config, Options(), parts=parts)
    halves.load_state_dict(whole.state_dict(), assign=True)
    batch = batch_of(config)
    received = halves(parts[0], None, batch)
    assert received.scores is not None
    loss = halves.loss_of(halves(parts[1], received, batch).hidden, batch)
    assert torch.equal(loss, whole_loss(whole, batch))


class Listed(ModuleHooks):
    """A gate that keeps a list."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def before(self, region: str, x: Tensor) -> Tensor:
        self.events.append(f"{region} begins")
        return x

    def after(self, region: str, x: Tensor) -> Tensor:
        self.events.append(f"{region} ends")
        return x


@pytest.mark.parametrize(
    ("kind", "order"), [("gpt", "before_query"), ("pangu", "before_query"), ("pangu", "after_query")]
)
def test_regions_follow_one_another_and_hold_what_they_use(kind: str, order: str) -> None:
    config = variant(kind=kind, final_norm=order, positions="relative")
    model, table = make(config)
    model.hooks = listed = Listed()
    whole_loss(model, batch_of(config))
    uses = parameters_by_module(config, tuple(table.shapes), ModelPart.full(config))
    assert list(uses) == ["position_bias", "embedding", "layers.0", "layers.1", "layers.2", "head"]
    assert listed.events == [f"{name} {event}" for name in uses for event in ("begins", "ends")]
    home = {
        "final_norm.weight": "layers.2" if kind == "pangu" and order == "before_query" else "head",
        "query_embedding.weight": "layers.2",
        "layers.1.mlp.up.weight": "layers.1",
        "embedding.word.weight": "embedding, head",
    }
    for name, _ in model.named_parameters():
        using = ", ".join(region for region, names in uses.items() if name in names)
        assert using == home.get(name, using) != ""


def test_rms_norm_takes_its_statistics_in_fp32() -> None:
    """In bf16 a sum of 4096 squares would stop growing at 256; the result is one rounding of 2^-8 from exact."""
    table = PlacementTable()
    table.place("norm.weight", [Placement("norm.weight", (4096,), None, 1.0)], TensorRank())
    norm = RMSNorm(Builder(table), "norm", 1e-5)
    norm.weight = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    x = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = x.double() / torch.sqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5)
    result = norm(x)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), expected, atol=0, rtol=2**-8)


FIELDS: dict[str, list[object]] = {
    "kind": ["gpt", "pangu"],
    "norm": ["layernorm", "rmsnorm"],
    "norm_placement": ["pre", "post"],
    "activation": ["gelu_tanh", "swiglu"],
    "biases": [True, False],
    "ffn": [None, 40],
    "tied_head": [True, False],
    "kv_heads": [None, 2],
    "positions": ["learned", "rope", "alibi", "relative"],
}


def test_number_of_parameters_of_every_combination() -> None:
    combinations = [dict(zip(FIELDS, values, strict=True)) for values in itertools.product(*FIELDS.values())]
    for changes in [*combinations, *VARIANTS, *({**one, "kind": "gpt"} for one in VARIANTS)]:
        config = variant(**changes)
        model, table = build_model(config)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count == sum(tensor.numel for tensor in table) == num_parameters(config), changes


@pytest.mark.parametrize("kind", ["gpt", "pangu"])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_flops_equal_torchs_count_of_the_matrix_products(kind: str, changes: dict[str, object]) -> None:
    config = variant(**{"kind": kind} | changes)
    if config.experts is not None:
        config = replace(config, biases=False)  # those of rows are added as products
    model, _ = make(config, "reference")
    tokens = torch.zeros(2, 24, dtype=torch.long)
    with FlopCounterMode(display=False, custom_mapping=GROUPED_FLOPS) as counter:
        whole_logits(model, tokens, torch.arange(24).expand_as(tokens)).sum().backward()
    # this kernel computes what it masks
    assert counter.get_total_flops() == training_flops_per_token(replace(config, sparse=None)) * tokens.numel()


def test_a_turn_depends_on_the_distance_alone_and_takes_its_angles_in_fp32() -> None:
    """bf16 knows no position above 256 exactly; the result is one rounding of 2^-9 of the length from exact."""
    x = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    near, far = torch.arange(4)[None], torch.arange(1000, 1004)[None]
    config = variant(hidden=8, heads=1, positions="rope")
    exact = [RotaryEmbedding(positions, config, torch.float64)(x.double()) for positions in (near, far)]
    torch.testing.assert_close(exact[0] @ exact[0].mT, exact[1] @ exact[1].mT)
    result = RotaryEmbedding(far, config, torch.bfloat16)(x)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), exact[1], atol=2**-9 * float(x.abs().max()), rtol=2**-8)
