"""Published measurements of training steps: reads a table of them and finds out what each row describes."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from benchmarks.planner_accuracy import published
from benchmarks.planner_accuracy.published import Recompute, Setup, Shape, System
from pangu.common.errors import UserError
from pangu.config.cluster import ClusterConfig
from pangu.planning.clusters import cluster_names, load_cluster
from pangu.topology.layout import Layout

COLUMNS = ("source", "gpu", "gpus", "layers", "hidden", "heads", "vocab", "seq", "tp", "pp", "global_batch")
"""Columns that a table must have."""
SINCE_2022, SINCE_2023 = "2205", "2301"
"""Months of the papers from which on Megatron-LM is that of Korthikanti et al. 2022, and Megatron-Core."""
FORMAT_RATES = {"bf16": 1.0, "fp8": 2.0, "fp4": 4.0}
"""Peak of a format over that of the 16-bit ones: NVIDIA's data sheets."""
NOMINAL = {"a100": 25.0, "h100": 50.0, "h200": 50.0, "v100": 12.5}
"""Nominal GB/s of a network interface, of which a cluster file's `between.gb_s` is what is reached."""
DERIVATIVES = {
    "A800": ("A100", 1.0, 2 / 3),
    "H800": ("H100", 1.0, 4 / 9),
    "B200": ("GB200", 0.9, 1.0),
    "B300": ("GB300", 0.9, 1.0),
}
"""Devices derived from others: the other one, peak rate and NVLink bandwidth over its; NVIDIA's data sheets."""
Scope = tuple[str, str, str]
"""Source, device and format of measurements that share coefficients."""
_Item = TypeVar("_Item")
_Key = TypeVar("_Key")
_ZERO_BUBBLE = re.compile("schedule (zb-[12]p)", re.IGNORECASE)


def load_clusters(folder: Path) -> dict[str, ClusterConfig]:
    """Return the clusters by the names of their files, without those of another size."""
    return {name: load_cluster(folder / f"{name}.yaml") for name in cluster_names(folder, whole=True)}


def family_of(device: str) -> str:
    """Return the device whose file describes this one: itself, or the one it is derived from."""
    return DERIVATIVES.get(_model_of(device), (_model_of(device),))[0]


def kind_of(scope: Scope) -> tuple[str, str]:
    """Return the family of devices and the format of a scope."""
    return family_of(scope[1]), scope[2]


def _model_of(device: str) -> str:
    """Return the name of a device without its maker and the size of its memory."""
    name = re.sub("nvidia|huawei", "", device, flags=re.IGNORECASE).strip()
    return "Ascend910" if name.lower().startswith("ascend") else re.split(r"[-\s(]", name)[0].upper()


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Return lists of items by their keys."""
    groups: dict[_Key, list[_Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


class UnusableRowError(Exception):
    """Something that a prediction needs is missing or makes no sense."""


class _Values(defaultdict[str, str]):
    """Texts of a row by column; empty where there is none."""

    def number(self, name: str) -> float | None:
        """Return a positive number, or None if it is not told."""
        try:
            number = float(self[name] or "nan")
        except ValueError:
            raise UnusableRowError(f"{name} is no number") from None
        if not math.isfinite(number):
            return None
        if not 1e-9 < number < 1e12 and name != "zero":
            raise UnusableRowError(f"{name} is not above 0, or beyond what can be")
        return number

    def count(self, name: str, default: int | None = None) -> int:
        """Return a whole number."""
        number = self.number(name)
        if number is None:
            if default is None:
                raise UnusableRowError(f"{name} is not told")
            return default
        if number != int(number):
            raise UnusableRowError(f"{name} is no whole number")
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
    """Model and layout; several where micro-batch or number of chunks are not told: the best of them is meant."""
    seconds: float | None
    """Step time; None: not told."""
    memory: float | None
    """GiB of a device; None: not told."""
    out_of_memory: bool

    @property
    def scope(self) -> Scope:
        """Its scope."""
        return self.source, self.device, self.format

    @property
    def nodes(self) -> int:
        """Number of nodes of the run."""
        return self.cluster.devices // self.cluster.node

    @property
    def sweep(self) -> tuple[object, ...]:
        """Key that is equal for measurements that differ in the layout only."""
        batches = {setup.micro_size * setup.micro_batches * setup.layout.data for setup in self.setups}
        where = self.source, self.table, self.device, self.format, self.cluster.devices
        return *where, self.setups[0].shape, *sorted(batches)


def read_rows(path: Path, clusters: Mapping[str, ClusterConfig]) -> tuple[list[Row], Counter[str]]:
    """Return the usable rows of a table, and the number of others by what is wrong with them. Raises UserError if the
    file cannot be read, or is no table of measurements."""
    skipped: Counter[str] = Counter()
    rows: list[Row] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            names = Counter(reader.fieldnames or ())
            wrong = [f"there is no column {name}" for name in COLUMNS if name not in names]
            wrong += [f"there are {count} columns {name}" for name, count in names.items() if name and count > 1]
            if wrong:
                raise UserError(f"{path}: no table of measurements: {'; '.join(wrong)}")
            for values in reader:
                try:
                    texts = {name: (value or "").strip() for name, value in values.items() if isinstance(name, str)}
                    rows.append(_row(_Values(str, texts), clusters))
                except UnusableRowError as error:
                    skipped[str(error)] += 1
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as a table of measurements: {error}") from error
    return rows, skipped


def _refuse(is_wrong: object, reason: str) -> None:
    if is_wrong:
        raise UnusableRowError(reason)


def _row(values: _Values, clusters: Mapping[str, ClusterConfig]) -> Row:
    shape = _shape(values)
    devices, tensor, stages = (values.count(name) for name in ("gpus", "tp", "pp"))
    context = values.count("cp", 1)
    data = values.count("dp", max(1, devices // (tensor * stages * context)))
    _refuse(tensor * stages * context * data != devices, "tp x pp x cp x dp is not the number of devices")
    divides = shape.ffn >= tensor and 0 in (shape.heads % tensor, shape.hidden % tensor)
    _refuse(not divides, "tp does not divide the model")
    _refuse(stages > shape.layers, "there are more stages than layers")
    zero = max(0, min(3, int(values.number("zero") or 0)))
    layout = Layout(tensor, stages, data, zero, values["sp"] == "yes" and tensor > 1, context=context)
    setups = _setups(values, shape, layout)
    told, seconds = values["note"] + values["table"], values.number("step_time_s")
    failed = bool(re.search(r"\bOOM\b|out of memory", values["note"])) and seconds is None
    memory = values.number("mem_gb")
    cluster = clusters.get(family_of(values["gpu"]).lower())
    if cluster is None:
        raise UnusableRowError(f"no file of configs/cluster for {values['gpu']}")
    if seconds is None:
        seconds = _seconds(values, setups[0], cluster.matmul.tflops if _format(told) == "bf16" else None)
    cluster = replace(_cluster(values["gpu"], told, cluster), devices=devices, node=values.count("gpus_per_node", 8))
    names = values["source"], values["table"], values["model"], values["gpu"], _format(told)
    return Row(*names, cluster, setups, seconds, memory, failed)


def _cluster(device: str, told: str, cluster: ClusterConfig) -> ClusterConfig:
    """Return the cluster of a row, from that of its device's family."""
    rates, links, between, memory = cluster.matmul, cluster.inside, cluster.between, cluster.memory
    _, matmul, nvlink = DERIVATIVES.get(_model_of(device), ("", 1.0, 1.0))
    rates, links = replace(rates, tflops=rates.tflops * matmul), replace(links, gb_s=links.gb_s * nvlink)
    # a smaller share of a higher peak is reached
    rates = replace(rates, tflops_fp8=rates.tflops * FORMAT_RATES[_format(told)] * 0.9)
    if (network := _network(told)) is not None:
        nominal = NOMINAL.get(cluster.name, between.gb_s) * cluster.nics
        between = replace(between, gb_s=between.gb_s * network / nominal)
    if "40G" in device:  # NVIDIA's data sheet of the A100 of 40 GB
        memory = replace(memory, gib=39.4, gb_s=1555.0)
    if "HBM2e" in device and cluster.name == "h100":  # six stacks; the H100 PCIe has five and 2,000 GB/s
        memory = replace(memory, gib=94.9, gb_s=2400.0)
    return replace(cluster, matmul=rates, inside=links, between=between, memory=memory)


def _shape(values: _Values) -> Shape:
    layers, hidden, heads = (values.count(name) for name in ("layers", "hidden", "heads"))
    _refuse(hidden % heads, "hidden is no multiple of heads")
    _refuse(layers > 1000, "there are too many layers")
    kv_heads = values.count("kv_heads", heads)
    _refuse(heads % kv_heads, "heads is no multiple of kv_heads")
    sizes = values.count("ffn", 4 * hidden), values.count("vocab"), values.count("seq")
    llama = bool(re.search(r"llama|mistral|qwen|mixtral", values["model"], re.IGNORECASE))
    plain = Shape(layers, hidden, heads, kv_heads, *sizes, llama, not llama)
    billions = values.number("params_b")
    if billions is None:
        return plain
    # What is not told of the model follows from its size.
    options = [plain._replace(gated=gated, tied=tied) for gated in (False, True) for tied in (True, False)]
    return min(options, key=lambda one: (round(abs(one.parameters / 1e9 / billions - 1), 2), one.gated != llama))


def _recompute(values: _Values, shape: Shape, devices: int) -> Recompute:
    """Return what is told, or else what the printed FLOP rate counts: recomputing the forward pass adds a third."""
    told = values["recompute"]
    if told == "full" or told.startswith("selective"):
        return "full" if told == "full" else "selective"
    seconds, rate = values.number("step_time_s"), values.number("tflops_per_gpu")
    if told or seconds is None or rate is None:
        return "none"
    counted = rate * 1e12 * devices * seconds / shape.flops(values.count("global_batch"))
    return "full" if counted > (1 + 4 / 3) / 2 else "none"


def _format(told: str) -> str:
    """Return the format of matmuls."""
    # torchtitan's matmuls with one scale per row take as long as those of 16 bits.
    formats = {"rowwise": "bf16", "nvfp4": "fp4", "fp8": "fp8", "float8": "fp8"}
    return next((format_ for word, format_ in formats.items() if word in told.lower()), "bf16")


def _network(told: str) -> float | None:
    """Return the GB/s of a node, from `4 NICs x 100Gb` or `800 Gb/s inter-node`."""
    cards = re.search(r"(\d+) NICs x (\d+) ?Gb", told)
    node = re.search(r"(\d+) ?Gb(?:ps|/s) (?:inter-node|node-node)", told)
    if cards:
        return int(cards[1]) * int(cards[2]) / 8
    return int(node[1]) / 8 if node else None


def _system(values: _Values, recompute: Recompute, gated: bool, layout: Layout) -> System:
    """Return the system, by its name or else by what it can do."""
    text = f"{values['source']} {values['note']}".lower()
    if "nanotron" in text:
        return published.NANOTRON
    zero, year = layout.zero, re.search(r"arxiv:(\d{4})", text)
    if zero == 3 or (layout.pipeline == 1 and (zero == 2 or "fsdp" in text)):
        overlapped = 1.0 if re.search("async ?tp", text) else 0.0
        return replace(published.FSDP, fused="compile" in text or "async" in text, hidden_tensor=overlapped)
    is_older = family_of(values["gpu"]) in ("A100", "V100", "Ascend910")
    named = _ZERO_BUBBLE.search(values["table"])
    if not is_older or (year and year[1] >= SINCE_2023 and not named and "zero bubble" not in text):
        recipes = {"megatron-bridge": published.BRIDGE, "nemo": published.NEMO, "dgxc": published.NEMO}
        return next((system for name, system in recipes.items() if name in text), published.MEGATRON_CORE)
    if gated:
        return published.MEGATRON_UNFUSED
    if zero == 1 or "deepspeed" in text:
        return published.DEEPSPEED if "fp16" in text else published.DEEPSPEED_BF16
    if named:
        return published.ZERO_BUBBLE
    newer = recompute == "selective" or values["sp"] == "yes" or (year and year[1] >= SINCE_2022)
    return published.MEGATRON_2022 if newer else published.MEGATRON_2021


def _setups(values: _Values, shape: Shape, layout: Layout) -> tuple[Setup, ...]:
    """Return the setups that a row may mean."""
    recompute = _recompute(values, shape, layout.world)
    system = _system(values, recompute, shape.gated, layout)
    each, micro = values.count("global_batch") / layout.data, values.count("micro_batch", 0)
    _refuse(each < 1, "the batch is smaller than the number of replicas")
    named, fp8 = _ZERO_BUBBLE.search(values["table"]), _format(values["note"] + values["table"]) != "bf16"
    # Where only embedding and head make the layers even, the first and last stage have one fewer (Llama 3).
    needs_ends = system.name == "megatron-core" and shape.layers % layout.pipeline != 0
    needs_ends &= (shape.layers + 2) % layout.pipeline == 0
    counts_ends = needs_ends or bool(re.search("one layer fewer|counted as a layer", values["note"]))
    virtuals = [1] if named else _virtuals(values, system, layout.pipeline, shape.layers + 2 * needs_ends)
    _refuse(layout.pipeline * min(virtuals) > shape.layers, "there are more chunks than layers")
    setups = []
    for size in [micro] if micro else [size for size in (1, 2, 4, 8) if round(each) % size == 0]:
        for virtual_stages in virtuals:
            schedule = named[1].lower() if named else "interleaved" if virtual_stages > 1 else "1f1b"
            chunks, by_cost = layout.pipeline * virtual_stages, system is published.NANOTRON
            layers = cut_by_cost(shape, chunks) if by_cost else cut_evenly(shape.layers, chunks, counts_ends)
            one, times = replace(layout, virtual_stages=virtual_stages), max(1, round(each / size))
            setups.append(Setup(shape, system, one, recompute, size, times, schedule, layers, fp8))
    return tuple(setups)


def _virtuals(values: _Values, system: System, stages: int, layers: int) -> list[int]:
    """Return the chunks per stage that a row may mean: as told, or with Megatron any that divide the layers. Its papers
    of 2021 and 2022 say only that they interleave, which means the fewest; since then as many as are fastest."""
    virtual_stages = values.count("vpp", 0)
    if virtual_stages or stages == 1:
        return [virtual_stages or 1]
    more = [count for count in range(2, layers // stages + 1) if layers % (stages * count) == 0]
    if system.name == "megatron-core":
        return [1, *more]
    return more[:1] if more and "interleaved" in values["note"] and "megatron" in system.name else [1]


def cut_evenly(layers: int, chunks: int, counts_ends: bool) -> tuple[int, ...]:
    """Return the layers of each chunk, the larger ones first; embedding and head may count as a layer each."""
    ends = int(counts_ends and chunks > 1)
    each, rest = divmod(layers + 2 * ends, chunks)
    counts = [each + (chunk < rest) for chunk in range(chunks)]
    counts[0] -= ends
    counts[-1] -= ends
    return tuple(counts)


def cut_by_cost(shape: Shape, chunks: int) -> tuple[int, ...]:
    """Return the layers of each chunk where the head costs its weights: a layer goes to the first chunk that has not
    yet had its share of all weights (nanotron's `build_model`)."""
    total, cost, chunk = shape.layers * shape.layer_matrices + shape.vocab * shape.hidden, 0, 0
    counts = [0] * chunks
    for _ in range(shape.layers):
        counts[chunk] += 1
        cost += shape.layer_matrices
        chunk += chunk < chunks - 1 and cost > total * (chunk + 1) / chunks
    return tuple(counts)


def _seconds(values: _Values, setup: Setup, peak: float | None) -> float | None:
    """Return the step time from a printed rate; `peak`: TFLOP/s that a printed utilization is a share of."""
    flops = setup.shape.flops(values.count("global_batch")) / setup.layout.world
    utilization, rate = values.number("mfu_pct"), values.number("tflops_per_gpu")
    if utilization is not None and peak is not None:
        return flops / (utilization / 100 * peak * 1e12)
    if rate is None:
        return None
    if setup.recompute == "full" and "model tflops" not in values["note"].lower():
        flops *= 4 / 3  # older papers count recomputed FLOPs
    return flops / (rate * 1e12)
