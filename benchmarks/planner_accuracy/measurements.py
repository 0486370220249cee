"""Published measurements of training steps: reads a table of them and finds out what each row describes."""

from __future__ import annotations

import csv
import math
import re
from collections import ChainMap, Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from benchmarks.planner_accuracy.published import DECODER, DEVICES, OPTIONS, RULES, RUNS, SYSTEMS, Setup, System
from pangu.common.errors import UserError, reading
from pangu.config.cluster import ClusterConfig
from pangu.config.model import LatentConfig, ModelConfig
from pangu.models.size import layer_matrices, num_parameters, training_flops_per_token
from pangu.planning.program import Plan
from pangu.report.clusters import cluster_names, load_cluster

Scope = tuple[str, str, str]
"""Source, device and format of measurements that share coefficients."""
_Item = TypeVar("_Item")
_Key = TypeVar("_Key")
_FOLDER = Path(__file__).resolve().parents[2] / "configs" / "cluster"
CLUSTERS = {name: load_cluster(_FOLDER / f"{name}.yaml") for name in cluster_names(_FOLDER, whole=True)}
"""Clusters by the names of their files, without those of another size."""
_NETWORK = re.compile(r"([1-9]\d{0,4}) NICs x ([1-9]\d{0,4}) ?Gb|([1-9]\d{0,4}) ?Gb(?:ps|/s) (?:inter-node|node-node)")
"""Network of a node, such as `4 NICs x 100Gb` or `800 Gb/s inter-node`."""


def family_of(device: str) -> tuple[str, float, float]:
    """Return the device whose file describes this one, and this one's peak rate and NVLink bandwidth over its."""
    name = re.split(r"[-\s(]", re.sub(r"(?i)nvidia|huawei|(?<=ascend)\s", "", device).strip())[0].upper()
    derived = DEVICES.get(name, {})
    return derived.get("like", name), derived.get("rate", 1.0), derived.get("nvlink", 1.0)


def kind_of(scope: Scope) -> tuple[str, str]:
    """Return the family of devices and the format of a scope."""
    return family_of(scope[1])[0], scope[2]


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Return lists of items by their keys."""
    groups: dict[_Key, list[_Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def _refuse(is_wrong: object, reason: str) -> None:
    if is_wrong:
        raise UserError(reason)


class _Values(defaultdict[str, str]):
    """Texts of a row by column; empty where there is none."""

    def number(self, name: str) -> float | None:
        """Return a positive number, or None if it is not told."""
        try:
            number = float(self[name] or "nan")
        except ValueError:
            raise UserError(f"{name} is no number") from None
        _refuse(number <= 1e-9 or number >= 1e12, f"{name} is not above 0, or beyond what can be")
        return None if math.isnan(number) else number

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number."""
        reason = f"{name} is empty" if name in self else f"there is no column {name}"
        number = self.number(name) or default
        if number is None:
            raise UserError(reason)
        _refuse(number != int(number), f"{name} is no whole number")
        return int(number)


class Row(NamedTuple):
    """A measurement of a training step."""

    source: str
    table: str
    model: str
    device: str
    """Name of the device as it is printed, e.g. `A100-80G`."""
    format: str
    """Format of matmuls: bf16 (or fp16), fp8, fp4."""
    cluster: ClusterConfig
    """Devices and network, before any fitted factor."""
    setups: tuple[Setup, ...]
    """Model and layout; several where the micro-batch is not told: the best of them is meant."""
    seconds: float | None
    """Step time; None: not told."""
    memory: float | None
    """GiB of a device; None: not told."""
    out_of_memory: bool

    @property
    def scope(self) -> Scope:
        """Source, device and format."""
        return self.source, self.device, self.format

    @property
    def nodes(self) -> int:
        """Number of nodes of the run."""
        return self.cluster.devices // self.cluster.node

    @property
    def sweep(self) -> tuple[object, ...]:
        """Key that is equal for measurements that differ in the layout only."""
        batches = {one.plan.micro_size * one.plan.micro_batches * one.plan.data for one in self.setups}
        return *self.scope, self.table, self.cluster.devices, self.setups[0].model, *sorted(batches)


def read_rows(path: Path) -> tuple[list[Row], Counter[str]]:
    """Return the usable rows of a table, and the number of others by what is wrong with them. Raises UserError if the
    file cannot be read, or is no table of measurements."""
    skipped: Counter[str] = Counter()
    rows: list[Row] = []
    rule = "cannot be read as a table of measurements"
    with reading(path, UnicodeDecodeError, csv.Error, rule=rule), path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        names = Counter(reader.fieldnames or ())
        if wrong := [f"there are {count} columns {name}" for name, count in names.items() if name and count > 1]:
            raise UserError(f"{path}: no table of measurements: {'; '.join(wrong)}")
        for values in reader:
            try:
                texts = {name: (value or "").strip() for name, value in values.items() if isinstance(name, str)}
                known = RUNS.get(texts.get("source", ""), {}).get(texts.get("model", ""), {})
                rows.append(_row(_Values(str, {name: texts.get(name) or known.get(name, "") for name in texts})))
            except UserError as error:
                skipped[str(error)] += 1
    return rows, skipped


def _row(values: _Values) -> Row:
    model = _model(values)
    _refuse(not values["source"] or not values["gpu"], "source or gpu is not told")
    devices, tensor, stages = (values.count(name) for name in ("gpus", "tp", "pp"))
    context = values.count("cp", 1)
    data = values.count("dp", max(1, devices // (tensor * stages * context)))
    _refuse(tensor * stages * context * data != devices, "tp x pp x cp x dp is not the number of devices")
    _refuse(model.ffn_size < tensor or model.hidden % tensor, "tp does not divide the model")
    _refuse(stages > model.layers, "there are more stages than layers")
    told, named = values["note"] + values["table"], re.search("schedule (zb-[12]p)", values["table"], re.IGNORECASE)
    zero, splits = values["zero"].removesuffix(".0") or "0", values.count("etp", 1) if model.experts else 0
    _refuse(zero not in ("-1", "0", "1", "2", "3"), "zero is not 0, 1, 2 or 3")
    sharing = context, max(0, int(zero)), values["sp"] == "yes" and tensor > 1, _recompute(values, model, devices)
    plan = Plan(tensor, stages, 1, data, *sharing, 1, 1, named[1].lower() if named else "1f1b")
    plan = plan._replace(expert=values.count("ep", 1), expert_tensor=splits)
    wrong = (model.experts or 1) % plan.expert or tensor * context * data % (plan.expert * (splits or tensor))
    _refuse(wrong or splits not in (0, 1, tensor), "ep and etp do not divide the experts and ranks")
    too_few = model.num_chosen > (model.experts or 2) or model.expert_size < splits
    _refuse(too_few, "there are too few or narrow experts")
    format_, cluster = _format(told), _cluster(values["gpu"], told)
    cluster = replace(cluster, devices=devices, node=values.count("gpus_per_node", 8))
    setups = _setups(values, model, plan, format_ != "bf16", cluster.node)
    seconds, memory = values.number("step_time_s"), values.number("mem_gb")
    failed = bool(re.search(r"\bOOM\b|out of memory", values["note"])) and seconds is None
    seconds = seconds or _seconds(values, setups[0], cluster.matmul.tflops if format_ == "bf16" else None)
    names = values["source"], values["table"], values["model"], values["gpu"], format_
    return Row(*names, cluster, setups, seconds, memory, failed)


def _cluster(device: str, told: str) -> ClusterConfig:
    """Return the cluster of a row, from that of its device's family."""
    family, matmul, nvlink = family_of(device)
    cluster = CLUSTERS.get(f"{family.lower()}_40gb" if "40G" in device else family.lower())
    if cluster is None:
        raise UserError(f"no file of configs/cluster for {device}")
    rates, link, between, memory = cluster.matmul, cluster.inside, cluster.between, cluster.memory
    rate = (rates.tflops_fp8 or rates.tflops) * matmul * (RULES.fp4 if _format(told) == "fp4" else 1.0)
    rates = replace(rates, tflops=rates.tflops * matmul, tflops_fp8=rate)
    if network := _NETWORK.search(told):
        gbits = int(network[3] or int(network[1]) * int(network[2]))
        between = replace(between, gb_s=RULES.reached * gbits / 8 / cluster.nics)
    if "HBM2e" in device and family == "H100":  # six stacks; the H100 PCIe has five and 2,000 GB/s
        memory = replace(memory, gib=94.9, gb_s=2400.0)
    return replace(cluster, matmul=rates, inside=replace(link, gb_s=link.gb_s * nvlink), between=between, memory=memory)


def _model(values: _Values) -> ModelConfig:
    layers, hidden, heads = (values.count(name) for name in ("layers", "hidden", "heads"))
    _refuse(hidden % heads, "hidden is no multiple of heads")
    _refuse(layers > 1000, "there are too many layers")
    kv_heads = values.count("kv_heads", heads)
    _refuse(heads % kv_heads, "heads is no multiple of kv_heads")
    sizes = {"ffn": values.count("ffn", 4 * hidden), "vocab": values.count("vocab"), "sequence": values.count("seq")}
    plain = replace(DECODER, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, **sizes)
    plain = replace(plain, head_dim=values.count("head_dim", hidden // heads))
    if values["experts"]:
        numbers = {name: values.count(name, 0) for name in ("shared_experts", "dense_layers", "mtp_layers")}
        numbers |= {"experts": values.count("experts"), "experts_per_token": values.count("top_k")}
        _refuse(max(numbers.values()) > 1000, "there are too many experts or layers")
        plain = replace(plain, **numbers, expert_ffn=values.count("expert_ffn", plain.ffn_size))
    if values["latent"]:
        _refuse(not re.fullmatch(r"([1-9]\d{0,5} ){4}[1-9]\d{0,5}", values["latent"]), "latent is no five sizes")
        names = "q_rank", "kv_rank", "nope_head_dim", "rope_head_dim", "value_head_dim"
        sizes = dict(zip(names, map(int, values["latent"].split()), strict=True))
        plain = replace(plain, latent=LatentConfig(**sizes))
    llama = bool(plain.experts or re.search(r"llama|mistral|qwen|mixtral", values["model"], re.IGNORECASE))
    told = values.number("params_b")
    # What is not told of the model follows from its size.
    kinds = product((False, True), (True, False)) if told else [(llama, not llama)]
    gated = replace(plain, activation="swiglu", positions="rope")
    options = [replace(gated if is_gated else plain, tied_head=tied) for is_gated, tied in kinds]
    errors = [round(abs(num_parameters(one) / 1e9 / (told or 1.0) - 1), 2) for one in options]
    return min(zip(errors, options, strict=True), key=lambda pair: (pair[0], pair[1].is_gated != llama))[1]


def _recompute(values: _Values, model: ModelConfig, devices: int) -> Literal["none", "selective", "full"]:
    """Return what is told, or else what the printed FLOP rate counts: recomputing the forward pass adds a third."""
    told = values["recompute"]
    if told.startswith("selective"):
        return "selective"
    seconds, rate = values.number("step_time_s"), values.number("tflops_per_gpu")
    if told or seconds is None or rate is None:
        return "full" if told == "full" else "none"
    counted = rate * 1e12 * devices * seconds / _flops(values, model)
    return "full" if counted > (1 + 4 / 3) / 2 else "none"


def _flops(values: _Values, model: ModelConfig) -> float:
    """Return the model FLOPs of a step: no recompute, full attention unless its causal half is said to be counted."""
    counted = replace(model, sequence=model.sequence // (2 if "causal half" in values["note"] else 1))
    return training_flops_per_token(counted) * (values.count("global_batch") * model.sequence)


def _format(told: str) -> str:
    """Return the format of matmuls."""
    # torchtitan's matmuls with one scale per row take as long as those of 16 bits.
    formats = {"rowwise": "bf16", "nvfp4": "fp4", "fp8": "fp8", "float8": "fp8"}
    return next((format_ for word, format_ in formats.items() if word in told.lower()), "bf16")


def _with_options(system: System, kind: str, text: str) -> System:
    """Return the system with what a text says of it."""
    changed = (fields for pattern, fields in OPTIONS[kind].items() if re.search(pattern, text))
    return system._replace(**ChainMap({}, *changed))


def _system(values: _Values, model: ModelConfig, plan: Plan) -> System:
    """Return the system, by its name or else by what it can do."""
    text = f"{values['source']} {values['note']}".lower()
    month = next(iter(re.findall(r"arxiv:(\d{4})", text)), "")
    if plan.zero == 3 or (plan.pipeline == 1 and (plan.zero == 2 or "fsdp" in text)):
        return _with_options(SYSTEMS["fully sharded"], "fully sharded", text)
    if named := [name for name in SYSTEMS if name in text]:
        return SYSTEMS[max(named, key=len)]
    if "zero bubble" in text or plan.schedule != "1f1b":
        return SYSTEMS["deferred gradients"]
    if month >= RULES.since_2023 or family_of(values["gpu"])[0] not in ("A100", "V100", "ASCEND910"):
        return SYSTEMS["megatron-core"]
    if model.is_gated:
        return SYSTEMS["unfused layers"]
    if plan.zero == 1 or "deepspeed" in text:
        return SYSTEMS["deepspeed fp16"] if "fp16" in text else SYSTEMS["deepspeed bf16"]
    newer = plan.recompute == "selective" or values["sp"] == "yes" or month >= RULES.since_2022
    return SYSTEMS["megatron of 2022"] if newer else SYSTEMS["megatron of 2021"]


def _setups(values: _Values, model: ModelConfig, plan: Plan, fp8: bool, node: int) -> tuple[Setup, ...]:
    """Return the setups that a row may mean."""
    system, stages, layers = _system(values, model, plan), plan.pipeline, model.layers
    if model.experts:
        system = _with_options(system, "experts", values["note"].lower())
    each, micro = values.count("global_batch") / plan.data, values.count("micro_batch", 0)
    _refuse(each < 1, "the batch is smaller than the number of replicas")
    # Where only embedding and head make the layers even, the first and last stage have one fewer (Llama 3).
    needs_ends = system.name == "megatron-core" and layers % stages != 0 and (layers + 2) % stages == 0
    counts_ends = needs_ends or bool(re.search("one layer fewer|counted as a layer", values["note"]))
    cut, by_cost = layers + 2 * needs_ends, system is SYSTEMS["nanotron"]
    # The fewest chunks that divide the layers, if all that a paper says is that Megatron interleaves.
    interleaves = "interleaved" in values["note"] and "megatron" in system.name and plan.schedule == "1f1b"
    counts = range(2, cut // stages + 1) if interleaves and stages > 1 else ()
    virtual_stages = values.count("vpp", next((count for count in counts if cut % (stages * count) == 0), 1))
    _refuse((chunks := stages * virtual_stages) > cut, "there are more chunks than layers")
    fewer = int((re.search(r"([1-9]) layers fewer in the last chunk", values["note"]) or "00")[1])
    *parts, last = cut_by_cost(model, chunks) if by_cost else cut_evenly(layers + fewer, chunks, counts_ends)
    _refuse(last < fewer, "the last chunk has too few layers")
    schedule = "interleaved" if virtual_stages > 1 else plan.schedule
    plan = plan._replace(virtual_stages=virtual_stages, schedule=schedule, layers=(*parts, last - fewer))
    sizes = [micro] if micro else [size for size in (1, 2, 4, 8) if round(each) % size == 0]
    plans = [plan._replace(micro_size=size, micro_batches=max(1, round(each / size))) for size in sizes]
    return tuple(Setup(model, system, one, fp8, node) for one in plans)


def cut_evenly(layers: int, chunks: int, counts_ends: bool) -> tuple[int, ...]:
    """Return the layers of each chunk, the larger ones first; embedding and head may count as a layer each."""
    ends = int(counts_ends and chunks > 1)
    parts = np.array_split(np.arange(-ends, layers + ends), chunks)
    return tuple(int(((part >= 0) & (part < layers)).sum()) for part in parts)


def cut_by_cost(model: ModelConfig, chunks: int) -> tuple[int, ...]:
    """Return the layers of each chunk where the head costs its weights: a layer goes to the first chunk that has not
    yet had its share of all weights (nanotron's `build_model`)."""
    each = sum(depth * columns for depth, columns in layer_matrices(model))
    total, cost, chunk, counts = model.layers * each + model.vocab * model.hidden, 0, 0, [0] * chunks
    for _ in range(model.layers):
        counts[chunk] += 1
        cost += each
        chunk += chunk < chunks - 1 and cost > total * (chunk + 1) / chunks
    return tuple(counts)


def _seconds(values: _Values, setup: Setup, peak: float | None) -> float | None:
    """Return the step time from a printed rate; `peak`: TFLOP/s that a printed utilization is a share of."""
    flops = _flops(values, setup.model) / setup.plan.layout.world
    utilization, rate = values.number("mfu_pct"), values.number("tflops_per_gpu")
    if utilization is not None and peak is not None:
        rate = utilization / 100 * peak
    elif rate and setup.plan.recompute == "full" and "model tflops" not in values["note"].lower():
        rate *= 3 / 4  # older papers count recomputed FLOPs
    return flops / (rate * 1e12) if rate else None
