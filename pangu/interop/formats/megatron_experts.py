"""Megatron-Core's options and tensors of experts, their routers and shared experts, and lists of expert layers."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pangu.common.errors import Problem
from pangu.config.model import MOST_LAYERS, ModelConfig, RouterConfig
from pangu.interop.formats.fields import read_fields, wrong_field
from pangu.interop.formats.megatron_latent import Options, Shapes
from pangu.interop.formats.stored import ABSENT

_SHARED = "moe_shared_expert_intermediate_size"
_GROUPS = {"groups": "moe_router_num_groups", "groups_per_token": "moe_router_group_topk"}
"""Options of groups of experts, by keys of `RouterConfig`."""


def expert_of(shapes: Shapes) -> str:
    """Return the name of an expert's second matrix. Raises KeyError if there is none."""
    name = next((name for name in shapes if re.search(r"local_experts\.0\.linear_fc2\.weight$", name)), None)
    if name is None:
        raise KeyError("mlp.linear_fc2.weight")
    return name


def read_experts(options: Options, shapes: Shapes, ranks: int, numbers: dict[str, Any]) -> dict[str, Any]:
    """Return keys of `ModelConfig`; takes `experts_per_token` out of `numbers`. Raises UserError."""
    chosen = numbers.pop("experts_per_token", 2 if options else ABSENT)
    routers = {
        int(found[1]): shape
        for name, shape in shapes.items()
        if (found := re.fullmatch(r"decoder\.layers\.(\d+)\.mlp\.router\.weight", name))
    }
    if not routers:
        return {"experts": None}
    dense, every = expert_interval(_has_experts(shapes)) or (0, 1)
    width = shapes[expert_of(shapes)][1] * ranks
    down = "mlp.shared_experts.linear_fc2.weight"
    shared = ranks * max((shape[1] for name, shape in shapes.items() if name.endswith(down)), default=0)
    if shared % width:
        raise wrong_field("args", _SHARED, shared, f"must be a multiple of moe_ffn_hidden_size = {width}")
    keys = {
        "experts": routers[min(routers)][0],
        "experts_per_token": chosen,
        "expert_ffn": width,
        "expert_every": every,
        "dense_layers": dense,
        "shared_experts": shared // width,
        "router.learned_bias": False,
        "router.learned_scale": False,
    }
    if any(name.endswith(".router.expert_bias") for name in shapes):
        keys["router.balance"] = "bias"
    return keys | (_router(options, chosen) if options else dict.fromkeys(_ROUTER, ABSENT))


_ROUTER = ("router.normalised", "router.score", "router.scale", "router.selection")


def _router(options: Options, chosen: int) -> dict[str, Any]:
    score, pre = options.get("moe_router_score_function", "softmax"), options.get("moe_router_pre_softmax") is True
    names = _GROUPS | {"scale": "moe_router_topk_scaling_factor"}
    router = read_fields(RouterConfig, options, names, "args")
    keys = {
        # Megatron-Core divides sigmoids by their sum, unless there is only one
        "router.normalised": not pre if score == "softmax" else chosen > 1,
        "router.score": score,
        "router.scale": router.get("scale", 1.0),
        "router.selection": "top",
    }
    # one group limits nothing
    if (limit := router.get("groups_per_token")) and router.get("groups") != 1:
        if "groups" not in router:
            raise wrong_field("args", _GROUPS["groups_per_token"], limit, "needs moe_router_num_groups")
        if score == "softmax" and not pre:
            raise wrong_field("args", _GROUPS["groups_per_token"], limit, "needs moe_router_pre_softmax with softmax")
        # the score of a group is the sum of this number of its best scores
        selection = {1: "group_limited_best", 2: "group_limited"}.get(chosen // limit)
        if selection is None:
            rule = f"is not supported with moe_router_topk = {chosen}"
            raise wrong_field("args", _GROUPS["groups_per_token"], limit, rule, "use all or half as many")
        keys |= {"router.selection": selection, "router.groups": router["groups"], "router.groups_per_token": limit}
    return keys


def _has_experts(shapes: Shapes) -> list[int]:
    numbers = [int(found[1]) for name in shapes if (found := re.search(r"layers\.(\d+)\.mlp\.", name))]
    return [int(f"decoder.layers.{layer}.mlp.router.weight" in shapes) for layer in range(max(numbers) + 1)]


def experts_agree(options: Options, keys: Mapping[str, Any], shapes: Shapes) -> dict[str, Sequence[Any]]:
    """Return options of experts that the tensors imply, too; raises UserError for an unsupported pattern of layers."""
    has = _has_experts(shapes)
    if expert_interval(has) is None:
        rule = "is not supported; use some dense layers, then experts in every n-th layer counted from the n-th"
        raise wrong_field("args", "moe_layer_freq", options.get("moe_layer_freq", has), rule)
    frequency = options.get("moe_layer_freq", 1)
    same = isinstance(frequency, int) and frequency > 0 and has == [int(i % frequency == 0) for i in range(len(has))]
    shared = keys["shared_experts"] * keys["expert_ffn"]
    pre = [not keys["router.normalised"]] if keys["router.score"] == "softmax" else [False, True]
    return {
        "moe_layer_freq": [has, *([frequency] if same else [])],
        "moe_ffn_hidden_size": [keys["expert_ffn"], *([None] if keys["expert_ffn"] == keys["ffn"] else [])],
        "moe_router_pre_softmax": pre,
        "moe_router_enable_expert_bias": [keys.get("router.balance") == "bias"],
        _SHARED: [shared] if shared else [None, 0],
    }


def as_stored(model: ModelConfig, keys: Mapping[str, Any]) -> ModelConfig:
    """Return a model whose routers have biases if the files with these `keys` have some, however it is trained."""
    return replace(model, router=replace(model.router, balance=keys.get("router.balance", "none")))


def write_experts(model: ModelConfig, ranks: int, grouped: bool) -> dict[str, Any]:
    """Return Megatron's options of the experts of a model; see `write_options`."""
    if model.experts is None:
        return {}
    has = [int(model.has_experts(layer)) for layer in range(model.layers)]
    losses = {"sequence": "seq_aux_loss", "global": "global_aux_loss"}
    router = model.router
    limited = router.selection != "top"
    return {
        "moe_layer_freq": 1 if all(has) else has,
        "moe_ffn_hidden_size": model.expert_size,
        _SHARED: model.shared_experts * model.expert_size or None,
        "moe_router_pre_softmax": router.score == "softmax" and not router.normalised,
        "moe_router_score_function": router.score,
        "moe_router_topk_scaling_factor": None if router.scale == 1 else router.scale,
        "moe_router_num_groups": router.groups if limited else None,
        "moe_router_group_topk": router.groups_per_token if limited else None,
        "moe_router_enable_expert_bias": router.balance == "bias",
        "moe_router_bias_update_rate": router.bias_rate,
        "moe_router_load_balancing_type": losses.get(router.balance, "none"),
        "moe_aux_loss_coeff": router.balance_weight,
        "moe_grouped_gemm": grouped,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": ranks,
    }


def inexpressible_router(model: ModelConfig) -> list[Problem]:
    """Return a problem for each key of a router that Megatron-Core computes otherwise."""
    router, chosen, problems = model.router, model.num_chosen, []
    if model.experts is None:
        return []
    if router.score == "sigmoid" and router.normalised != (chosen > 1):
        rule = f"Megatron-Core {'divides' if chosen > 1 else 'does not divide'} the sigmoids of {chosen} by their sum"
        problems.append(Problem("model.router.normalised", router.normalised, rule, f"use {str(chosen > 1).lower()}"))
    if router.groups_per_token is not None:
        counted, needed = chosen // router.groups_per_token, 1 if router.selection == "group_limited_best" else 2
        if counted != needed:
            rule = f"Megatron-Core adds up the best {counted} of a group, experts_per_token / groups_per_token"
            problems.append(Problem("model.router.selection", router.selection, rule))
        if router.score == "softmax" and router.normalised:
            rule = "Megatron-Core then limits groups by their logits"
            problems.append(Problem("model.router.normalised", True, rule, "use false"))
    return problems


def layer_pattern(frequency: Any, layers: int, dense: int = 0) -> list[int]:
    """Return 0 or 1 (experts) for each layer; empty if unreadable.

    N or -N has experts in layers 0, N, 2N etc. except the first `dense`; lists and sums of them have 0 or 1 per layer.
    """
    layers = min(layers, MOST_LAYERS)
    if isinstance(frequency, int) and frequency != 0:
        return [int(n >= dense and n % frequency == 0) for n in range(layers)]
    try:
        values = _listed(ast.parse(str(frequency)[:10_000].strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return []
    return values if isinstance(values, list) and len(values) == layers else []


def expert_interval(pattern: Sequence[int]) -> tuple[int, int] | None:
    """Return `model.dense_layers` and `model.expert_every` of a pattern; None if it has none."""
    first = next((n for n, has_experts in enumerate(pattern) if has_experts), -1)
    for dense, every in ((dense, first - dense + 1) for dense in range(first + 1)):
        if list(pattern) == [int(n >= dense and (n - dense) % every == every - 1) for n in range(len(pattern))]:
            return dense, every
    return None


def _listed(node: ast.expr) -> Any:
    """Return the value of sums and multiples of short lists, as Megatron takes them: `([0]*1+[1]*47)`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and 0 <= node.value <= MOST_LAYERS:
        return node.value
    if isinstance(node, ast.List):
        return [_listed(one) for one in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _listed(node.left), _listed(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        times = isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int)
        if times and len(left) * right <= MOST_LAYERS:
            return left * right
    raise ValueError("not a list of layers")
