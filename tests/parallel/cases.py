"""Options of a layout and of a model, what cannot be together, and the command line of a case."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any
from unittest.mock import patch

from pangu.topology import mesh
from pangu.topology.layout import Layout
from pangu.training import step
from tests.covering import Case, Rule
from tests.parallel.harness import OVERRIDES, compare, one_process, train_layout
from tests.threads import Ranks

CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "breadth_first": 2, "zb_h1": 1, "zb_v": 2}
"""Schedule -> chunks per stage."""
FROZEN = {
    "nothing": (),
    "bottom": ("embedding.*", "layers.0.*"),  # backward has nothing to do here
    "scattered": ("layers.1.*", "layers.0.mlp.*.bias", "final_norm.*"),
}
RECOMPUTE = {
    "none": "",
    "full": "memory.recompute=full",
    "one_layer": "memory.recompute=1",
    "selective": "memory.recompute=selective",
    "attention": "memory.recompute=selective memory.selective=[attention]",
    "activation": "memory.recompute=selective memory.selective=[activation]",
    "norm": "memory.recompute=selective memory.selective=[norm]",
}
SPARSE = {
    "null": "null",
    "fixed": "{kind:fixed,block:2,local_blocks:2,global_blocks:1}",
    "strided": "{kind:strided,block:1,local_blocks:3,stride:4}",
    "bigbird": "{kind:bigbird,block:2,local_blocks:1,global_blocks:1,random_blocks:1,seed:5}",
}
LATENT = {
    "null": "null",
    "full": "{kv_rank:16,q_rank:32,nope_head_dim:16,rope_head_dim:16,value_head_dim:16}",
    "direct": "{kv_rank:16,nope_head_dim:16,rope_head_dim:16,value_head_dim:32}",
}
ROUTERS = {
    "top": "",
    "biased": "model.router.learned_bias=true model.activation=clamped_swiglu",
    "one": "model.experts_per_token=1 model.router.normalised=false model.router.z_loss=0.01",
    "each_group": "model.router.selection=each_group model.router.groups=2 model.router.normalised=false "
    "model.router.learned_scale=true",
    "three": "model.experts_per_token=3 model.router.score=sigmoid",
    "limited": "model.router.selection=group_limited model.router.groups=2 model.router.groups_per_token=1 "
    "model.router.score=sigmoid model.router.scale=2.5",
}
DROPOUT = {
    "everywhere": "",
    "hidden": "model.attention_dropout=0",
    "none": "model.dropout=0 model.attention_dropout=0",
}
ROWS = {
    "documents": "",
    "one_text": "data.packing.eod=null data.packing.pad=null "
    "data.packing.reset_mask=false data.packing.reset_positions=false",
    "no_masks": "data.packing.reset_mask=false",
    "packed": "data.packing.pad=null",  # see `samples_of`
}
"""Documents, masks and padding of the samples."""
EXPERT_LAYERS = {"all": "", "after_first": "model.dense_layers=1", "every_other": "model.expert_every=2"}
ROTATIONS = {
    "plain": "",
    "linear": "model.rope_scaling={name:linear,factor:2} model.partial_rotary_factor=0.67 model.nope_layers=2",
    "yarn": "model.rope_scaling={name:yarn,factor:4,original_sequence:6,beta_fast:2}",
}
VALUES = {"sparse": SPARSE, "latent": LATENT}
LATENT_NEEDS = {"kind": "gpt", "positions": "rope", "head_dim": "null", "kv_heads": "null", "qk_norm": "false"}
OPTIMIZERS = {
    "adam": "optimizer=adam",
    "lamb": "optimizer=lamb",
    "muon": "optimizer=muon",
    "muon_heads": "optimizer=muon optimizer.split_heads=true",
    "muon_clip": "optimizer=muon optimizer.qk_clip=0.02",
}
GROUPS = {
    "none": "",
    "some": "parameter_groups=[{names:[embedding.*,'*.query.weight','*.experts.1.*'],lr_multiplier:0.5},"
    "{names:['*.mlp.*','*.query.*'],lr_multiplier:2,weight_decay_multiplier:0.25}] "
    "weight_decay_schedule={start:0.3,shape:linear}",
}
RATES = {
    "warm-up": "",
    "cosine": "lr_schedule.warmup_steps=0",
    "linear": "lr_schedule=linear lr_schedule.warmup_steps=0",
    "inverse_sqrt": "lr_schedule=inverse_sqrt lr_schedule.warmup_steps=0",
    "wsd": "lr_schedule=wsd lr_schedule.warmup_steps=0 lr_schedule.decay_steps=10 lr_schedule.decay_shape=minus_sqrt",
}
"""Shapes of the learning rate, of which the second step is a part: no layout enters them."""
STAGES = {"none": "", "grow": "batch.stages=[{until:1,global_size:%d,sequence:8}]"}
"""Whether all steps are alike, or the first one takes fewer and shorter sequences, see `first_batch`."""
FACTORS: dict[str, tuple[str, ...]] = {
    # the layout
    "schedule": tuple(CHUNKS),
    "tensor": ("1", "2", "3", "4"),
    "sequence": ("false", "true"),
    "overlap_chunks": ("1", "3"),
    "pipeline": ("1", "2", "3", "4"),
    "cut": ("even", "uneven"),
    "data": ("1", "2", "4"),
    "context": ("1", "2", "4"),
    "context_kind": ("auto", "gather", "ring", "ulysses"),
    "context_ulysses": ("1", "2"),
    "expert": ("1", "2", "4"),
    "expert_tensor": ("null", "1"),
    "two_batch_overlap": ("false", "true"),
    "zero": ("0", "1", "2", "3"),
    "zero_group": ("null", "2"),
    "overlap": ("true", "false"),
    # collectives as NCCL does them, or as all-to-all and sums, which gloo is quicker at; numbers of rows that go to
    # experts as counted, or fixed
    "exchange": ("false", "true"),
    "recompute": tuple(RECOMPUTE),
    "offload": ("", "activations", "optimizer", "parameters", "activations,optimizer,parameters"),
    "loss_chunk": ("null", "5", "1000"),
    "attention": ("reference", "auto"),  # one process always computes the reference
    "products": ("false", "true"),  # gradients of layers' matrices made by autograd and then added, or by the product
    # the run
    "dropout": tuple(DROPOUT),
    "rows": tuple(ROWS),
    "micro_batches": ("1", "2", "3", "4"),
    "micro_size": ("1", "2"),
    "optimizer": tuple(OPTIMIZERS),
    "matmul": ("compute", "fp8"),
    "frozen": tuple(FROZEN),
    "groups": tuple(GROUPS),
    "stages": tuple(STAGES),
    "rates": tuple(RATES),
    # the model
    "rotation": tuple(ROTATIONS),
    "router": tuple(ROUTERS),
    "balance": ("sequence", "global", "bias", "none"),
    "balance_sequences": ("1", "2"),
    "expert_layers": tuple(EXPERT_LAYERS),
    "kind": ("pangu", "gpt"),
    "norm": ("layernorm", "rmsnorm"),
    "norm_placement": ("pre", "post", "sandwich"),
    "parallel_block": ("false", "true", "shared_norm"),
    "embedding_norm": ("false", "true"),
    "activation": ("gelu_tanh", "gelu", "fast_gelu", "swiglu", "clamped_swiglu", "relu", "squared_relu"),
    "biases": ("true", "false", "qkv", "attention"),
    "qk_norm": ("false", "true"),
    "head_dim": ("null", "6"),
    "tied_head": ("true", "false"),
    "kv_heads": ("null", "4", "2"),  # of 2, each on two of four ranks
    "positions": ("learned", "rope", "alibi", "relative"),
    "latent": tuple(LATENT),
    "window": ("null", "5"),
    "sparse": tuple(SPARSE),
    "residual_scores": ("false", "true"),
    "experts": ("null", "4", "6"),
    "expert_capacity": ("null", "0.8"),
    "shared_experts": ("0", "2"),
    "mtp_layers": ("0", "1", "2"),
    "full_layers": ("null", "2", "[0]"),
    "attention_sinks": ("false", "true"),
    "vocab": ("101", "250"),  # the latter is padded to a multiple of 128, on one rank and on two
}
WIDER = FACTORS | {
    "overlap_chunks": ("1", "2", "3"),
    "data": ("1", "2", "3", "4", "8"),
    "context": ("1", "2", "4", "8"),
    "expert": ("1", "2", "3", "4", "6", "8"),
    "zero_group": ("null", "1", "2", "4"),
    "experts": ("null", "4", "6", "24"),  # of 24 some get no token
    "expert_capacity": ("null", "0.6", "0.8", "1.5"),
}
"""With values for layouts that are drawn at random."""
MODEL = tuple(FACTORS)[tuple(FACTORS).index("kind") :]
"""Options that are keys of `model`."""
HEADS = 12


def among(name: str, *values: str, then: str, needs: tuple[str, ...]) -> Rule:
    """A rule: where `name` is one of the values, `then` must be one of `needs`."""
    return lambda case: name not in case or case[name] not in values or then not in case or case[then] in needs


def zero_group(case: Mapping[str, str]) -> int:
    """Replicas that ZeRO shards over; 0: all, or not decided."""
    value = case.get("zero_group", "null")
    return 0 if value == "null" else int(value)


def devices(case: Mapping[str, str]) -> int:
    """Processes of a case, as far as it is decided; at least as many as what is decided asks for."""
    least = "1" if case.get("context_kind", "auto") == "auto" else "2"
    context = case.get("context", "4" if case.get("context_ulysses") == "2" else least)
    fewest = max(1 + (case.get("zero") in SHARDED), 2 * zero_group(case))
    whole = 1 if case.get("expert_tensor") == "null" else int(case.get("tensor", 4))
    replicas = max(fewest, int(case.get("data", 1)) * int(context), int(case.get("expert", 1)) // whole)
    return int(case.get("tensor", 1)) * int(case.get("pipeline", 1)) * replicas


def shared(case: Mapping[str, str]) -> bool:
    """Whether `expert` ranks can share the experts, as far as they are decided."""
    ranks, experts = int(case.get("expert", 1)), case.get("experts", "24")
    if experts == "null":
        return ranks == 1
    if int(experts) % ranks or replicas(case) is None or not {"tensor", "expert_tensor"} <= case.keys():
        return int(experts) % ranks == 0
    whole = int(case["tensor"]) if case["expert_tensor"] == "1" else 1
    less, more = sorted((ranks, zero_group(case) * whole or ranks))
    return (replicas(case) or 0) * whole % ranks == 0 and more % less == 0


def together(case: Mapping[str, str]) -> bool:
    """Whether sequences of one balance loss are computed at the same time, on ranks that share experts, as far as this
    is decided."""
    whole = int(case.get("tensor", 1)) if case.get("expert_tensor") == "1" else 1
    repeats, expert = int(case.get("context", 1)) * whole, int(case.get("expert", 8))
    halves = case.get("two_batch_overlap") == "true"
    apart = halves or ("expert" in case and expert % repeats)
    number = int(case.get("micro_size", 2)) // (1 + halves) * (1 if apart else expert // repeats)
    return number % int(case.get("balance_sequences", 1)) == 0


def replicas(case: Mapping[str, str]) -> int | None:
    """Those that share the states of weights; None: not decided."""
    return int(case["data"]) * int(case["context"]) if {"data", "context"} <= case.keys() else None


def grouped(case: Mapping[str, str]) -> bool:
    """Whether there are several groups of replicas that ZeRO shards over, all alike."""
    group, count = zero_group(case), replicas(case)
    return not group or count is None or (count > group and count % group == 0)


SHARDED, SEVERAL = ("1", "2", "3"), ("2", "4")
OF_EXPERTS = (
    "expert",
    "expert_tensor",
    "two_batch_overlap",
    "router",
    "balance",
    "balance_sequences",
    "expert_layers",
    "expert_capacity",
    "shared_experts",
)
WIDE = (
    lambda case: devices(case) <= 8,
    lambda case: case.get("zero") not in SHARDED or replicas(case) != 1,
    lambda case: case.get("overlap_chunks", "1") == "1" or not {("tensor", "1"), ("expert", "1")} <= case.items(),
    lambda case: (
        case.get("context_kind") != "ulysses" or HEADS % (int(case.get("tensor", 1)) * int(case.get("context", 2))) == 0
    ),
    grouped,
    shared,
    together,
)
"""Rules that single pairs do not tell."""
RULES = (
    *WIDE,
    among("sequence", "true", then="tensor", needs=SEVERAL),  # 3 does not divide the 16 positions
    among("schedule", "interleaved", "breadth_first", "zb_h1", "zb_v", then="pipeline", needs=("2", "3", "4")),
    among("cut", "uneven", then="pipeline", needs=("2", "3", "4")),
    among("context_kind", "gather", "ring", "ulysses", then="context", needs=("2", "4", "8")),
    among("context_ulysses", "2", then="context", needs=("4", "8")),
    among("context_ulysses", "2", then="context_kind", needs=("ring",)),
    among("context_ulysses", "2", then="tensor", needs=("1", "2", "3")),  # it divides the heads of a rank
    among("zero_group", "1", "2", "4", then="zero", needs=SHARDED),
    among("offload", "parameters", "activations,optimizer,parameters", then="zero", needs=("3",)),
    among("parallel_block", "true", "shared_norm", then="kind", needs=("gpt",)),
    among("parallel_block", "true", "shared_norm", then="norm_placement", needs=("pre",)),
    among("full_layers", "2", "[0]", then="window", needs=("5",)),
    among("rotation", "linear", "yarn", then="positions", needs=("rope",)),
    *(among("latent", "full", "direct", then=key, needs=(value,)) for key, value in LATENT_NEEDS.items()),
    among("latent", "full", "direct", then="rotation", needs=("plain", "yarn")),
    among("optimizer", "muon_clip", then="qk_norm", needs=("false",)),
    among("kv_heads", "4", "2", then="tensor", needs=("1", "2", "4")),
    among("stages", "grow", then="rows", needs=("documents", "one_text", "no_masks")),
    among(
        "stages", "grow", then="context", needs=("1", "2", "4")
    ),  # each of 8 ranks would have two parts of 8 positions
    among("expert_tensor", "1", then="tensor", needs=("2", "3", "4")),
    among("two_batch_overlap", "true", then="expert", needs=WIDER["expert"][1:]),
    among("two_batch_overlap", "true", then="micro_size", needs=("2",)),
    among("two_batch_overlap", "true", then="norm_placement", needs=("pre", "sandwich")),
    among("two_batch_overlap", "true", then="parallel_block", needs=("false",)),
    among("balance_sequences", "2", then="balance", needs=("sequence",)),
    among("expert", "4", then="tensor", needs=("1", "2", "4")),
    among("expert", "4", then="pipeline", needs=("1", "2")),
    among("experts", *WIDER["experts"][1:], then="matmul", needs=("compute",)),
    *(among(name, *WIDER[name][1:], then="experts", needs=WIDER["experts"][1:]) for name in OF_EXPERTS),
    *(among(name, *WIDER[name][1:], then="matmul", needs=("compute",)) for name in OF_EXPERTS),
    # fp16 is refused; in fp32 a rounding more or less may be the next number in fp8, which is far away
    among("matmul", "fp8", then="precision", needs=("bf16",)),
)


def layout_of(case: Case) -> Layout:
    return Layout(
        tensor=int(case["tensor"]),
        pipeline=int(case["pipeline"]),
        data=int(case["data"]),
        zero=int(case["zero"]),
        sequence=case["sequence"] == "true",
        virtual_stages=CHUNKS[case["schedule"]],
        zero_group=zero_group(case),
        context=int(case["context"]),
        expert=int(case["expert"]),
        expert_tensor=0 if case["expert_tensor"] == "null" else 1,
    )


def sequences(*cases: Case) -> int:
    """Size of a global batch that all of them can have."""
    samples = 2 if cases[0].get("stages") == "grow" else 1
    return math.lcm(samples, *(int(c["data"]) * int(c["micro_batches"]) * int(c["micro_size"]) for c in cases))


def first_batch(*cases: Case) -> int:
    """Size of the global batch of a first stage that all of them can have: whole samples, each cut into 2 sequences."""
    return math.lcm(2, *(int(c["data"]) * int(c["micro_size"]) for c in cases))


def keys_of(case: Case, *others: Case) -> tuple[list[str], list[str]]:
    """What one process is told too, and what only the layout is told; the same model and global batch as `others`."""
    layouts = [layout_of(one) for one in (case, *others)]
    chunks = layouts[0].pipeline * layouts[0].virtual_stages
    layers = max(3, *(layout.pipeline * layout.virtual_stages + 1 for layout in layouts))
    of_experts = [f"model.router.{key}={case[key]}" for key in ("balance", "balance_sequences")]
    model = [
        *OVERRIDES,
        *(("train.steps=10", *RATES[case["rates"]].split()) if "rates" in case else ()),
        "model.hidden=48",
        f"model.heads={HEADS}",
        "model.ffn=96",
        f"model.layers={layers}",
        f"batch.global_size={sequences(case, *others)}",
        # one process has to compute as many sequences together
        f"batch.micro_size={math.lcm(int(case['micro_size']), int(case['balance_sequences']))}",
        *OPTIMIZERS[case["optimizer"]].split(),
        f"precision.matmul={case['matmul']}",
        f"train.frozen=[{','.join(FROZEN[case['frozen']])}]",
        *GROUPS[case.get("groups", "none")].split(),
        *((STAGES["grow"] % first_batch(case, *others),) if case.get("stages") == "grow" else ()),
        *DROPOUT[case["dropout"]].split(),
        *ROWS[case["rows"]].split(),
        *(f"model.{name}={VALUES.get(name, {}).get(case[name], case[name])}" for name in MODEL if name in case),
        *(() if case["experts"] == "null" else (*of_experts, "model.expert_ffn=12")),
        *ROTATIONS[case["rotation"]].split(),
        *ROUTERS[case["router"]].split(),
        *EXPERT_LAYERS[case["expert_layers"]].split(),
        *(("model.relative_buckets=6", "model.relative_distance=9") if case["positions"] == "relative" else ()),
    ]
    own = [
        f"parallel.schedule={case['schedule']}",
        f"parallel.overlap={case['overlap']}",
        f"parallel.context_kind={case['context_kind']}",
        f"parallel.context_ulysses={case.get('context_ulysses', '1')}",
        f"parallel.overlap_chunks={case['overlap_chunks']}",
        f"parallel.two_batch_overlap={case.get('two_batch_overlap', 'false')}",
        f"memory.offload=[{case['offload']}]",
        f"loss.chunk={case['loss_chunk']}",
        f"batch.micro_size={case['micro_size']}",
        f"model.attention={case['attention']}",
        "train.check_step=true",
        f"faults.verify_weights={case.get('verified', 'true')}",
        *RECOMPUTE[case["recompute"]].split(),
    ]
    if case["experts"] != "null":
        own.append(f"parallel.fixed_exchange={case.get('exchange', 'false')}")
    if case["cut"] == "uneven":
        own.append(f"parallel.layers=[{','.join(['1'] * (chunks - 2) + [str(layers - chunks + 1), '1'])}]")
    return model, own


def fits(case: Mapping[str, str], rules: Sequence[Rule] = RULES) -> bool:
    """Whether nothing speaks against the values given so far."""
    return all(rule(case) for rule in rules)


def cost(case: Mapping[str, str]) -> float:
    """In new pairs that would pay for it."""
    return 0.1 * devices(case) * (2 + int(case.get("micro_batches", 1)) * int(case.get("data", 1)) / 4)


LOOKS_AT = (
    *("tensor", "overlap_chunks", "pipeline", "data", "context", "context_kind", "zero", "zero_group"),
    *("expert", "expert_tensor", "experts", "two_batch_overlap", "micro_size", "balance_sequences"),
)
"""Options that rules of `WIDE` look at."""
FITS: dict[str, Any] = {"rule": fits, "more": (partial(fits, rules=WIDE), LOOKS_AT), "cost": cost}
"""What a covering array of these options is told."""


def name_of(case: Case) -> str:
    """Values that differ from the first of their option."""
    return " ".join(f"{name}={value}" for name, value in case.items() if value != FACTORS.get(name, ("",))[0])


@contextmanager
def ways_of(case: Case) -> Iterator[None]:
    """On all ranks, lets collectives do what they do on gloo, or not, and products of layers add to the buffers of
    gradients, or not."""
    with (
        patch.object(mesh, "exchanges", lambda device: case["exchange"] == "true"),
        patch.object(step, "fuses_gradient_accumulation", lambda device: case["products"] == "true"),
    ):
        yield


def frozen_of(case: Case, run: Mapping[str, Any]) -> set[str]:
    """Names of the weights that stay."""
    patterns = FROZEN[case["frozen"]]
    frozen = {name for name in run["first"] if any(fnmatchcase(name, pattern) for pattern in patterns)}
    assert bool(frozen) == bool(patterns)
    return frozen


def equals_one_process(ranks: Ranks, case: Case, *more: str) -> None:
    """Two steps in float64, to 1e-12; the ranks are told `more` than one process is."""
    layout, (model, own) = layout_of(case), keys_of(case)
    words = (*model, "precision=fp64")
    one = one_process(2, *words)
    with ways_of(case):
        ours = ranks.run(layout.world, train_layout, layout, 2, *words, *own, *more)
    compare(ours[0], one, 1e-12, frozen_of(case, one))
