"""Published measurements of training steps: reads a table of them and finds out what each row describes."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.planner_accuracy.published import (
    DEEPSPEED,
    DEEPSPEED_BF16,
    FSDP,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_CORE,
    MEGATRON_UNFUSED,
    NANOTRON,
    ZERO_BUBBLE,
)
from pangu.config.cluster import ClusterConfig
from pangu.config.errors import UserError
from pangu.planning.cluster import cluster_names, load_cluster
from pangu.planning.layout_work import Plan, Recompute, Shape, System

COLUMNS = ("source", "gpu", "gpus", "layers", "hidden", "heads", "vocab", "seq", "tp", "pp", "global_batch")
"""That a table must have."""
SINCE_2022 = "2205"
"""Month of the paper from which on Megatron-LM is that of Korthikanti et al. 2022."""
PEAKS = {"A100": 312.0, "H100": 989.0, "H200": 989.0, "V100": 125.0, "Ascend910": 256.0}
"""TFLOP/s of the dense 16-bit formats, of which printed utilisations are shares: NVIDIA's and Huawei's data sheets."""


class Alike(NamedTuple):
    """A device that was made from another one."""

    family: str
    products: float
    """Its peak rate over the other's."""
    links: float
    """Its NVLink over the other's."""


ALIKE = {
    "A800": Alike("A100", 1.0, 2 / 3),
    "H800": Alike("H100", 1.0, 4 / 9),
    "B200": Alike("GB200", 0.9, 1.0),
    "B300": Alike("GB300", 0.9, 1.0),
}
"""NVIDIA's data sheets."""


def word_of(device: str) -> str:
    """The name of a device without its maker and the size of its memory."""
    name = re.sub("nvidia|huawei", "", device, flags=re.IGNORECASE).strip()
    return "Ascend910" if name.lower().startswith("ascend") else re.split(r"[-\s(]", name)[0].upper()


def family_of(device: str) -> str:
    """Whose file describes a device: its own, or that of the one it was made from."""
    word = word_of(device)
    return ALIKE[word].family if word in ALIKE else word


class UnusableRowError(Exception):
    """Something that a prediction needs is missing or makes no sense."""


class Row(NamedTuple):
    """A measurement."""

    source: str
    table: str
    model: str
    device: str
    """As it is printed, e.g. `A100-80G`."""
    format: str
    """Of numbers in products: bf16 (or fp16), fp8, fp4."""
    network: float | None
    """GB/s between nodes, of all interfaces of a node; None: not told."""
    devices: int
    node: int
    shape: Shape
    system: System
    plans: tuple[Plan, ...]
    """The layout; several where the micro-batch or the number of chunks is not told: the best of them is meant."""
    seconds: float | None
    """Of a step; None: not told."""
    memory: float | None
    """GiB of a device."""
    out_of_memory: bool

    @property
    def family(self) -> str:
        """Of its device."""
        return family_of(self.device)

    @property
    def sweep(self) -> tuple[object, ...]:
        """Equal for measurements that differ in the layout only."""
        sequences = {plan.micro_size * plan.micro_batches * plan.data for plan in self.plans}
        return self.source, self.table, self.device, self.format, self.devices, self.shape, *sorted(sequences)


def read_rows(path: Path) -> tuple[list[Row], Counter[str]]:
    """The usable rows of a table, and how many others there are by what is wrong with them.

    Raises:
        UserError: if the file cannot be read, or is no table of measurements.
    """
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
                    rows.append(_row({key: value or "" for key, value in values.items() if isinstance(key, str)}))
                except UnusableRowError as error:
                    skipped[str(error)] += 1
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as a table of measurements: {error}") from error
    return rows, skipped


def _number(values: Mapping[str, str], name: str) -> float | None:
    text = values.get(name, "").strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        raise UnusableRowError(f"{name} is no number") from None
    if not math.isfinite(number):
        return None
    if not 1e-9 < number < 1e12 and name != "zero":
        raise UnusableRowError(f"{name} is not above 0, or beyond what can be")
    return number


def _count(values: Mapping[str, str], name: str, default: int | None = None) -> int:
    number = _number(values, name)
    if number is None:
        if default is None:
            raise UnusableRowError(f"{name} is not told")
        return default
    if number != int(number):
        raise UnusableRowError(f"{name} is no whole number")
    return int(number)


def _row(values: Mapping[str, str]) -> Row:
    """A row. Raises UnusableRowError."""
    note = values.get("note", "")
    shape = _shape(values)
    devices, tensor, stages = (_count(values, name) for name in ("gpus", "tp", "pp"))
    context = _count(values, "cp", 1)
    data = _count(values, "dp", max(1, devices // (tensor * stages * context)))
    if tensor * stages * context * data != devices:
        raise UnusableRowError("tp x pp x cp x dp is not the number of devices")
    if shape.heads % tensor and shape.hidden % tensor:
        raise UnusableRowError("tp does not divide the model")
    if shape.ffn < tensor:
        raise UnusableRowError("tp does not divide the model")
    if stages > shape.layers:
        raise UnusableRowError("there are more stages than layers")
    zero = _number(values, "zero") or 0
    recompute = _recompute(values, shape, devices)
    memory = _number(values, "mem_gb")
    row = Row(
        values["source"].strip(),
        values.get("table", ""),
        values.get("model", ""),
        values["gpu"].strip(),
        _format(note + values.get("table", "")),
        _network(note + values.get("table", "")),
        devices,
        _count(values, "gpus_per_node", 8),
        shape,
        _system(values, recompute, shape.gated),
        (),
        None,
        memory,
        bool(re.search(r"\bOOM\b|out of memory", note)) and _number(values, "step_time_s") is None,
    )
    sizes = {"tensor": tensor, "pipeline": stages, "data": data, "context": context, "zero": max(0, min(3, int(zero)))}
    plans = _plans(values, row, sizes, recompute)
    return row._replace(plans=plans, seconds=_seconds(values, row, plans[0], note))


def _recompute(values: Mapping[str, str], shape: Shape, devices: int) -> Recompute:
    """What is told, or else what the printed rate of FLOPs counts: a forward that backward repeats is a third more."""
    words = values.get("recompute", "").strip()
    if words == "full" or words.startswith("selective"):
        return "full" if words == "full" else "selective"
    seconds, rate = _number(values, "step_time_s"), _number(values, "tflops_per_gpu")
    if words or seconds is None or rate is None:
        return "none"
    counted = rate * 1e12 * devices * seconds / shape.flops(_count(values, "global_batch"))
    return "full" if counted > (1 + 4 / 3) / 2 else "none"


def _format(note: str) -> str:
    """The format of products."""
    # torchtitan's products with a scale for each row take as long as those of 16 bits
    formats = {"rowwise": "bf16", "nvfp4": "fp4", "fp8": "fp8", "float8": "fp8"}
    return next((format_ for word, format_ in formats.items() if word in note.lower()), "bf16")


def _network(note: str) -> float | None:
    """GB/s of a node, from `4 NICs x 100Gb` or `800 Gb/s inter-node`."""
    cards = re.search(r"(\d+) NICs x (\d+) ?Gb", note)
    whole = re.search(r"(\d+) ?Gb(?:ps|/s) (?:inter-node|node-node)", note)
    if cards:
        return int(cards[1]) * int(cards[2]) / 8
    return int(whole[1]) / 8 if whole else None


def _shape(values: Mapping[str, str]) -> Shape:
    layers, hidden, heads = (_count(values, name) for name in ("layers", "hidden", "heads"))
    if layers > 1000 or hidden % heads:
        raise UnusableRowError("hidden is no multiple of heads" if hidden % heads else "there are too many layers")
    kv_heads = _count(values, "kv_heads", heads)
    if heads % kv_heads:
        raise UnusableRowError("heads is no multiple of kv_heads")
    plain = Shape(
        layers,
        hidden,
        heads,
        kv_heads,
        _count(values, "ffn", 4 * hidden),
        _count(values, "vocab"),
        _count(values, "seq"),
    )
    billions = _number(values, "params_b")
    options = [plain._replace(gated=gated, tied=tied) for gated in (False, True) for tied in (True, False)]
    llama = bool(re.search(r"llama|mistral|qwen|mixtral", values.get("model", ""), re.IGNORECASE))
    if billions is None:
        return plain._replace(gated=llama, tied=not llama)
    # what is not told of the model follows from its size
    return min(options, key=lambda one: (round(abs(one.parameters / 1e9 / billions - 1), 2), one.gated != llama))


def _system(values: Mapping[str, str], recompute: str, gated: bool) -> System:
    """Which program it was, by its name or else by what it can do."""
    text = f"{values['source']} {values.get('note', '')}".lower()
    zero = values.get("zero", "").strip()
    if "nanotron" in text:
        return NANOTRON
    if "fsdp" in text or zero in ("2", "3", "2.0", "3.0"):
        beside = 1.0 if re.search("async ?tp", text) else 0.0
        return replace(FSDP, fused="compile" in text or "async" in text, hidden_tensor=beside)
    older = family_of(values["gpu"]) in ("A100", "V100", "Ascend910")
    year = re.search(r"arxiv:(\d{4})", text)
    newer = recompute == "selective" or values.get("sp", "").strip() == "yes" or (year and year[1] >= SINCE_2022)
    if older and gated:
        return MEGATRON_UNFUSED
    if older and (zero in ("1", "1.0") or "deepspeed" in text):
        return DEEPSPEED if "fp16" in text else DEEPSPEED_BF16
    if older:
        late = _ZERO_BUBBLE.search(values.get("table", ""))
        return ZERO_BUBBLE if late else MEGATRON_2022 if newer else MEGATRON_2021
    return MEGATRON_CORE


_ZERO_BUBBLE = re.compile("schedule (zb-[12]p)", re.IGNORECASE)


def _plans(values: Mapping[str, str], row: Row, sizes: Mapping[str, int], recompute: Recompute) -> tuple[Plan, ...]:
    """The layouts that a row may mean."""
    batch, stages, layers = _count(values, "global_batch"), sizes["pipeline"], row.shape.layers
    if batch < sizes["data"]:
        raise UnusableRowError("the batch is smaller than the number of replicas")
    micro = _count(values, "micro_batch", 0)
    each = batch / sizes["data"]
    micros = [micro] if micro else [size for size in (1, 2, 4, 8) if round(each) % size == 0]
    virtuals = _virtuals(values, row.system, stages, layers)
    named = _ZERO_BUBBLE.search(values.get("table", ""))
    plans = []
    for size in micros or [1]:
        for chunks in virtuals:
            schedule = named[1].lower() if named else "interleaved" if chunks > 1 else "1f1b"
            times = max(1, round(each / size))
            plans.append(
                Plan(
                    sizes["tensor"], stages, chunks, sizes["data"], sizes["context"], sizes["zero"],
                    values.get("sp", "").strip() == "yes" and sizes["tensor"] > 1, recompute, size, times, schedule,
                    bool(re.search("one layer fewer|counted as a layer", values.get("note", ""))),
                    cut_by_cost(row.shape, stages) if row.system is NANOTRON else (),
                )
            )  # fmt: skip
    if min(plan.pipeline * plan.virtual for plan in plans) > layers:
        raise UnusableRowError("there are more chunks than layers")
    return tuple(plans)


def _virtuals(values: Mapping[str, str], system: System, stages: int, layers: int) -> list[int]:
    """Chunks of a stage that a row may mean: as told, or with Megatron any that divide the layers. Its papers of 2021
    and 2022 say only that they interleave, which means the fewest; since then as many as are fastest."""
    virtual = _count(values, "vpp", 0)
    if virtual or stages == 1:
        return [virtual or 1]
    more = [count for count in range(2, layers // stages + 1) if layers % (stages * count) == 0]
    if system is MEGATRON_CORE:
        return [1, *more]
    return more[:1] if more and "interleaved" in values.get("note", "") and "megatron" in system.name else [1]


def cut_by_cost(shape: Shape, stages: int) -> tuple[int, ...]:
    """Layers of each stage where the head counts as its weights: a layer goes to the first stage that has not yet had
    its share of all weights (nanotron's `build_model`)."""
    costs = [shape.layer_matrices] * shape.layers
    whole, done, stage = sum(costs) + shape.vocab * shape.hidden, 0, 0
    counts = [0] * stages
    for cost in costs:
        counts[stage] += 1
        done += cost
        stage += stage < stages - 1 and done > whole * (stage + 1) / stages
    return tuple(counts)


def _seconds(values: Mapping[str, str], row: Row, plan: Plan, note: str) -> float | None:
    """Time of a step, as told or from a rate of FLOPs."""
    seconds = _number(values, "step_time_s")
    if seconds is not None:
        return seconds
    flops = row.shape.flops(_count(values, "global_batch"))
    utilisation, rate = _number(values, "mfu_pct"), _number(values, "tflops_per_gpu")
    if utilisation is not None and row.family in PEAKS and row.format == "bf16":
        return flops / (utilisation / 100 * PEAKS[row.family] * 1e12 * row.devices)
    if rate is None:
        return None
    if plan.recompute == "full" and "model tflops" not in note.lower():
        flops *= 4 / 3  # what older papers count: the forward that backward repeats is work done
    return flops / (rate * 1e12 * row.devices)


def load_clusters(folder: Path) -> dict[str, ClusterConfig]:
    """Return the clusters by the names of their files, without those of another size."""
    return {name: load_cluster(folder / f"{name}.yaml") for name in cluster_names(folder, whole=True)}
