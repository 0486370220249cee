"""Published training systems and what they do in a step, by Korthikanti et al. 2022 (activations, table 2; sequence
and tensor parallelism), Narayanan et al. 2021 (FLOPs, messages) and Rajbhandari et al. 2020 (model states)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import yaml

from pangu.config.model import ModelConfig
from pangu.models.parameters import VOCABULARY_MULTIPLE
from pangu.models.size import layer_matrices
from pangu.planning.program import Plan
from pangu.schedule.groups import groups_of
from pangu.schedule.spans import Axis, Collective, Matmul, Work
from pangu.topology.placement import room


class System(NamedTuple):
    """Properties of a training system that its step depends on; `systems.yaml` describes them."""

    name: str
    flash: bool
    fused: bool
    launches: float
    gradient_bytes: int
    accumulation_bytes: float
    spare_bytes: int = 0
    score_elements: float = 0.0
    rotary: float = 10.0
    hidden_tensor: float = 0.0
    hidden_backward: float = 0.0
    hidden_context: float = 0.9
    hidden_experts: float = 0.0
    overlapped: bool = False
    contended_us: float = 0.0
    deferred_head: bool = False
    fused_loss: bool = False
    rescales: bool = False
    doubled: bool = False
    stops_early: bool = False
    sends_once: bool = False
    graphs: bool = False
    replicated: bool = False
    operators: float = 0.0


class Setup(NamedTuple):
    """Model, system and layout of a published run."""

    model: ModelConfig
    system: System
    plan: Plan
    fp8: bool = False
    """Whether the matmuls of layers take operands of fewer than 16 bits; those of attention and of the head do not."""
    node: int = 8
    """Devices of a node."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.plan.micro_size * max(1, self.model.sequence // self.plan.context)

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are reduced after each micro-batch: by ZeRO-3, and ZeRO-2 without a pipeline, unless their
        weights' come late. A pipeline sums the gradients of a step first (Llama 3, section 3.3.2)."""
        return self.plan.zero > (2 if self.plan.pipeline > 1 else 1) and not self.plan.schedule.startswith("zb")


def data(name: str) -> Any:
    """Return the content of a YAML file of this folder."""
    return yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8"))


DECODER = ModelConfig(**data("systems")["decoder"])
"""GPT-3's decoder, of any size; Llama's has `activation="swiglu"`, rotary positions and an untied head."""
SYSTEMS = {name: System(**fields) for name, fields in data("systems")["systems"].items()}
"""Published systems by their names."""
OPTIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = data("systems")["options"]
"""Pattern in the words of a row -> the fields that it changes, of fully sharded systems and of models with experts."""
RULES = SimpleNamespace(**data("figures")["rules"])
"""Numbers that all systems share, and those by which rows are read, chosen and fitted."""
DEVICES: Mapping[str, Mapping[str, Any]] = data("devices")
"""Devices that are like others, by their names."""
RUNS: Mapping[str, Mapping[str, Mapping[str, str]]] = data("runs")
"""Source -> model -> columns that a table leaves empty, from the scripts that made its runs."""


class Module(NamedTuple):
    """Work of a module for one micro-batch on one rank."""

    passes: tuple[Work, Work, Work, Work]
    """Forward, recompute, backward for the input gradient, backward for the weight gradients."""
    saved_bytes: float
    """Bytes of activations that are kept from the forward to the backward pass."""
    parameters: float
    """Parameters of this rank before sharding over replicas, without experts."""
    experts: float = 0.0
    """Parameters of the experts of this rank, whose replicas are fewer."""


def embedding_work(setup: Setup) -> Module:
    """Return the work of the token and position embedding."""
    model, hidden = setup.model, setup.model.hidden
    elements = float(setup.tokens * hidden)
    forward = Work((), 10 * elements, 6, (Collective("all_reduce", "tensor", 2 * elements),))
    passes = forward, Work(), Work((), 12 * elements, 5), Work()
    positions = model.sequence * (model.positions == "learned")
    return Module(passes, elements, (room(model.vocab, setup.plan.tensor, VOCABULARY_MULTIPLE) + positions) * hidden)


def head_work(setup: Setup) -> Module:
    """Return the work of the final norm, the output matrix and the loss: logits in 16 bits and, unless fused, fp32."""
    tokens, h, system = setup.tokens, setup.model.hidden, setup.system
    columns = room(setup.model.vocab, setup.plan.tensor, VOCABULARY_MULTIPLE)
    logits, is_late = 1.0 * tokens * columns, system.deferred_head and setup.plan.pipeline > 1
    bytes_forward, bytes_backward, saved = (4, 4, 2) if system.fused_loss else (22, 14, 10)
    # The loss reduces the maximum, the sum and the label's logit of a token. Wgrad matmuls that come late hide nothing.
    loss = Collective("all_reduce", "tensor", 4.0 * tokens, 3)
    hidden = 0.0 if is_late else max(system.hidden_tensor, system.hidden_backward)
    inputs = Collective("all_reduce", "tensor", 2.0 * tokens * h, 1, hidden)
    passes = (
        Work((Matmul(tokens, columns, h),), logits * bytes_forward + 8.0 * tokens * h, 14, (loss,)),
        Work(),
        Work((Matmul(tokens, h, columns),), logits * bytes_backward + 12.0 * tokens * h, 8, (inputs,)),
        Work((Matmul(h, columns, tokens),), system.accumulation_bytes * columns * h, 1),
    )
    return Module(passes, tokens * h * 4 + saved * logits, columns * h)


class FeedForward(NamedTuple):
    """Feed-forward layer of a rank, dense or of experts."""

    matmuls: tuple[Matmul, ...]
    inner: float
    """Elements of a token's activation on this rank, of all its experts."""
    cast: float
    """Bytes that casts to FP8 move for each element of a token's hidden vector, forward or backward."""
    parameters: float
    experts: float = 0.0
    """Parameters of routed experts."""
    permuted_bytes: float = 0.0
    """Bytes that permutations move for a token, forward or backward."""
    launches: float = 0.0


def feed_forward(setup: Setup, layer: int) -> FeedForward:
    """Return the feed-forward layer: dense, or of experts that get equal numbers of tokens."""
    model, system, plan, fp8 = setup[:4]
    tokens, h, t, up = setup.tokens, model.hidden, plan.tensor, 2 if model.is_gated else 1
    each = 6 if system.rescales else 4

    def matmuls(rows: int, width: int, batch: int = 1) -> tuple[Matmul, Matmul]:
        return Matmul(rows, up * width, h, batch, fp8=fp8), Matmul(rows, h, width, batch, fp8=fp8)

    if not model.has_experts(layer):  # what writes a hidden vector casts it, too
        width = model.ffn_size
        return FeedForward(matmuls(tokens, width // t), width / t, each - 2, (up + 1) * h * width / t)
    assert model.experts is not None
    width, chosen, shared = model.expert_size, model.num_chosen, model.shared_experts
    splits, own = plan.expert_tensor or t, model.experts // plan.expert
    routed = matmuls(max(1, round(tokens * chosen * splits / t / own)), width // splits, own)
    beside = matmuls(tokens, shared * width // t) if shared else ()
    # A token is copied for each of its experts and summed again: before it is sent and sorted, or after.
    copies = chosen + (_distinct(chosen, plan.expert) if system.sends_once else 2 * chosen)
    launches = RULES.expert_launches * own * (2 if fp8 else 1)
    return FeedForward(
        (Matmul(max(1, tokens // t), model.experts, h), *routed, *beside),
        (chosen + shared) * width / t,
        RULES.permuted * each * chosen * splits / t + (each - 2) * (shared > 0),
        (up + 1) * h * shared * width / t + h * model.experts,
        (up + 1) * h * width * own / splits,
        RULES.permuted * 2 * h * (2 + 2 * copies) / t,
        launches + RULES.routing_launches * (not (system.graphs and system.sends_once)),
    )


def layer_work(setup: Setup, layer: int = 0) -> Module:
    """Return the work of a transformer layer."""
    model, system, plan, fp8 = setup[:4]
    tokens, h, t, feed = setup.tokens, model.hidden, plan.tensor, feed_forward(setup, layer)
    attention = layer_matrices(model.without_experts, t, layer)[:-2]
    parameters = sum(depth * columns for depth, columns in attention) + feed.parameters + 13 * h / t
    sends, exchange = _communication(setup, layer), _exchange(setup) if model.has_experts(layer) else ()
    calls = sum(send.calls for send in sends)
    back = tuple(one._replace(hidden=max(one.hidden, system.hidden_backward)) for one in sends)
    # Sequence parallelism gathers the inputs of matmuls once more for the weight gradients.
    again = (sends[0]._replace(hidden=1.0),) if plan.sequence and t > 1 else ()
    held: Mapping[Axis, float] = {"shard": parameters, "expert_shard": feed.experts} if plan.zero == 3 else {}
    gather = tuple(Collective("all_gather", axis, 2 * count, 1, 1.0) for axis, count in held.items() if count)
    sums = tuple(one._replace(kind="reduce_scatter", bytes=system.gradient_bytes / 2 * one.bytes) for one in gather)
    bytes_forward, bytes_backward = _layer_bytes(setup, feed)
    heads = max(1, model.heads // t)
    # Megatron's fused softmax takes the scores of four heads at a time.
    own = 0.0 if system.graphs else system.launches + 9 * (not system.flash and plan.micro_size * heads % 4 > 0)
    launches, late = own + feed.launches, 4 * (not system.graphs) + feed.launches
    moved = system.accumulation_bytes * (parameters + feed.experts)
    if fp8:  # casts and transposes of matmul inputs, of output gradients, and of weights for the input gradients
        each, outputs = 6 if system.rescales else 4, (1 + model.is_gated) * feed.inner
        full = (each - 2 + feed.cast) * h
        bytes_forward += tokens * (each * (model.values_size / t + feed.inner) + full)
        bytes_backward += tokens * (each * (sum(columns for _, columns in attention[:-1]) + outputs) + full)
        moved += 2 * (parameters + feed.experts)
    products = (*(Matmul(tokens, columns, depth, fp8=fp8) for depth, columns in attention), *feed.matmuls)
    if system.hidden_experts:  # each pass of another micro-batch hides a third of both exchanges
        exchange = tuple(one._replace(calls=one.calls * 2 / 3) for one in exchange)
    forward = Work(products + _attention(setup, 1), bytes_forward, launches + 2 * calls, sends + exchange + gather)
    recompute = Work()
    if plan.recompute == "full":
        repeated = products[:-1] if system.stops_early else products
        recompute, gather = replace(forward, matmuls=repeated + _attention(setup, 1)), ()
    elif plan.recompute == "selective" and model.latent:  # Megatron's mla_up_proj
        recompute = Work(products[1:3])
    elif plan.recompute == "selective" and system.flash:  # torchtitan: all but every other matmul and attention
        recompute = Work(tuple(one._replace(calls=0.5) for one in products), bytes_forward, launches - 3)
    elif plan.recompute == "selective":
        recompute = Work(_attention(setup, 1), 13.0 * tokens * model.sequence * heads, 4)
    inputs = tuple(one._replace(columns=one.depth, depth=one.columns) for one in products)
    weights = tuple(one._replace(rows=one.depth, depth=one.rows) for one in products)
    received = back + exchange + again + gather
    backward = Work(inputs + _attention(setup, 2), bytes_backward, 2 * launches - late + 2 * calls, received)
    passes = forward, recompute, backward, Work(weights, moved, late, sums + exchange * (system.hidden_experts > 0))
    return Module(passes, kept_bytes(setup, plan.recompute, layer), parameters, feed.experts)


def _attention(setup: Setup, passes: float) -> tuple[Matmul, ...]:
    """Return the matmuls of scores and values; `passes` is 1 for the forward pass and 2 for the backward pass."""
    model, plan = setup.model, setup.plan
    length, heads = max(1, model.sequence // plan.context), plan.micro_size * max(1, model.heads // plan.tensor)
    size = (model.query_size + model.values_size) // (2 * model.heads)
    if setup.system.flash:
        # Both matmuls, half of them causally masked; backward computes the scores again: 2.5 times forward.
        return (Matmul(length, model.sequence, size, heads, 0.5 * (2 if passes == 1 else 5), True),)
    scores = Matmul(length, model.sequence, size, heads, passes)
    return scores, scores._replace(columns=scores.depth, depth=scores.columns)


def _keys_and_values(model: ModelConfig) -> float:
    """Return the width of all key heads and all value heads, which is another one with latent attention."""
    return model.kv_size * (1 + model.values_size / model.query_size)


def _layer_bytes(setup: Setup, feed: FeedForward) -> tuple[float, float]:
    """Return the bytes that the memory-bound kernels of a layer move, forward and backward: norms, bias-dropout-add,
    activation, transposes, permutations of tokens, without flash attention scale-mask-softmax and dropout of scores."""
    model, system, plan = setup[:3]
    h, t, shared = model.hidden, plan.tensor, plan.tensor if plan.sequence else 1
    down = feed.inner * t / h
    up = down * (2 if model.is_gated else 1)
    residual = 11.0 if system.fused else 15.0
    projected = 2 * (model.query_size + model.values_size + _keys_and_values(model)) / h
    rotary = system.rotary * (model.positions == "rope" and not system.fused) * (model.query_size + model.kv_size) / h
    forward = residual / shared + (2 * down + up + projected + rotary) / t
    backward = 1.9 * residual / shared + (2 * up + 2 * down + 12 + rotary) / t
    scores = model.heads / t * model.sequence / h * system.score_elements
    unit, permuted = 2.0 * setup.tokens * h, setup.tokens * feed.permuted_bytes
    return unit * (forward + scores) + permuted, unit * (backward + scores * 1.6) + permuted


def kept_bytes(setup: Setup, recompute: str, layer: int = 0) -> float:
    """Return the bytes of a layer's activations: Korthikanti et al. 2022, table 2, for any activation function."""
    model, system, plan = setup[:3]
    tokens, h, t, shared = setup.tokens, model.hidden, plan.tensor, plan.tensor if plan.sequence else 1
    if recompute == "full":
        return 2.0 * tokens * h / shared
    mlp = (6 if model.is_gated else 4) * feed_forward(setup, layer).inner * t / h
    mlp += 2 * model.num_chosen * model.has_experts(layer)
    projected = 2 * (model.query_size + model.values_size + _keys_and_values(model)) / h
    saved = tokens * h * ((8 if system.flash else 10) / shared + (projected + mlp) / t)
    if model.latent and recompute == "selective":  # neither queries nor keys nor values
        return saved - 2.0 * tokens * (model.query_size + _keys_and_values(model)) / t
    if system.flash and recompute == "selective":
        return saved / 2  # torchtitan's selective-op keeps the output of every other matmul
    if not system.flash and recompute == "none":
        saved += tokens * model.sequence * model.heads / t * 5
    return saved


def _communication(setup: Setup, layer: int) -> tuple[Collective, ...]:
    """Return the collectives of a layer's forward pass; the backward pass sends the same."""
    model, system, plan, fp8 = setup[:4]
    full, hidden, experts = 2.0 * setup.tokens * model.hidden, system.hidden_tensor, model.has_experts(layer)
    # Routed experts of their own tensor-parallel rank need no other rank's tokens.
    calls = 1 if experts and not model.shared_experts else 2
    collectives = (Collective("all_reduce", "tensor", full, calls, hidden),) * (plan.tensor > 1)
    if plan.tensor > 1 and plan.sequence:
        gather = Collective("all_gather", "tensor", full / (2 if fp8 else 1), calls, hidden)
        collectives = gather, Collective("reduce_scatter", "tensor", full, calls, hidden)
    if plan.context > 1:
        keys = full * plan.context * _keys_and_values(model) / model.hidden / plan.tensor
        collectives += (Collective("all_gather", "context", keys, 1, system.hidden_context),)
    return collectives


def _distinct(chosen: float, places: int) -> float:
    """Return the expected number of different places among equal ones that `chosen` experts of a token lie on."""
    return places * (1 - (1 - 1 / places) ** chosen)


def _exchange(setup: Setup) -> tuple[Collective, ...]:
    """Return the exchange of a rank's tokens with the experts of other ranks, there and back."""
    plan, hidden, copies = setup.plan, setup.system.hidden_experts, float(setup.model.num_chosen)
    full = 2.0 * setup.tokens * setup.model.hidden / plan.tensor
    group, splits = groups_of(plan.layout, setup.node)["expert"], plan.expert_tensor or plan.tensor
    nodes = -(-group.size // group.inside)
    sent = _distinct(copies, nodes if nodes > 1 else group.size) if setup.system.sends_once else copies
    exchange = (Collective("all_to_all", "expert", full * sent, 2, hidden),) * (plan.expert > 1)
    if splits > 1:
        exchange += (Collective("all_gather", "tensor", full * copies * splits, 1, hidden),)
        exchange += (Collective("reduce_scatter", "tensor", full * copies * splits, 1, hidden),)
    return exchange
