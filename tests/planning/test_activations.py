"""What layers really keep for backward is what Korthikanti et al. 2022 say and what the planner predicts."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from pangu.collectives.regions import TensorRegion
from pangu.config.schema import RunConfig
from pangu.data.batch import make_batch
from pangu.layers.builder import DTYPES, Builder
from pangu.layers.dropout import DropoutKeys
from pangu.layers.loss import Head
from pangu.models.language_model import Options, build_model
from pangu.planning.activations import head_peak, layer_activations
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.topology.placement import PlacementTable
from tests.configs import tiny
from tests.memory import LiveBytes
from tests.spawn import Pool
from tests.weights import materialise, whole_loss

USUAL = ("model.kind=gpt", "model.ffn=80", "model.dropout=0.1", "model.attention_dropout=0.1", "precision=bf16")
SELECTIVE = "memory.recompute=selective"
MODES = [
    ("memory.recompute=none",),
    (SELECTIVE, "memory.selective=[attention]"),
    (SELECTIVE, "memory.selective=[activation]"),
    (SELECTIVE, "memory.selective=[norm]"),
    (SELECTIVE,),
    ("memory.recompute=full",),
]


def kept(rank: int, world: int, kernel: str, configs: list[RunConfig]) -> list[tuple[int, int]]:
    """For each model: bytes of the memory that autograd's hooks see saved, and that is alive, after a forward pass."""
    parallel = configs[0].parallel
    mesh = Mesh.connect(Layout(tensor=parallel.tensor, sequence=parallel.sequence), torch.device("cpu"))
    gc.freeze()  # what is older than the models need not be looked through again and again
    try:
        return [kept_by_one(config, kernel, mesh) for config in configs]
    finally:
        gc.unfreeze()


def kept_by_one(config: RunConfig, kernel: str, mesh: Mesh) -> tuple[int, int]:
    """`kept` of one model."""
    build = Builder(PlacementTable(), region=TensorRegion.of(mesh))
    model, table = build_model(config.model, Options.of(config, kernel), build)
    materialise(model, table, 1, DTYPES[config.precision.compute])
    rows, columns = config.batch.micro_size, config.model.sequence + 1
    tokens = np.arange(rows * columns, dtype=np.int64).reshape(rows, columns) % config.model.vocab
    batch = make_batch(tokens, tuple(range(rows)), config.data.packing)
    given = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), batch.tokens, batch.positions)}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # Python's numbers are saved as tensors without a dimension
        if tensor.dim() and storage.data_ptr() not in given:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = (batch.tokens, batch.positions, batch.labels, batch.weights)
    with LiveBytes(*model.parameters(), *inputs) as live, saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = whole_loss(model, batch, DropoutKeys(1, 0, batch.samples))
        if mesh.layout.tensor > 1:
            time.sleep(0.05)  # until gloo's threads have let go of what they sent
        gc.collect()
        assert loss.requires_grad
    return sum(saved.values()), live.bytes


def check_layer(pool: Pool, kernel: str, modes: Sequence[tuple[str, ...]], *overrides: str) -> None:
    """One layer more keeps what is predicted, and so does a query layer on top."""
    configs = [tiny(*USUAL, *overrides, *mode) for mode in modes]
    models = [
        replace(config, model=replace(config.model, kind=kind, layers=layers))
        for config in configs
        for kind, layers in (("gpt", 1), ("gpt", 2), ("pangu", 2))
    ]
    world = configs[0].parallel.tensor
    measured = iter(pool.run(world, kept, kernel, models)[0] if world > 1 else kept(0, 1, kernel, models))
    for config, mode in zip(configs, modes, strict=True):
        one, two, query = next(measured), next(measured), next(measured)
        full = config.memory.recompute == "full"
        # recomputed norms have hooks of their own, which hide what they keep from these
        for way in (1,) if "norm" in config.memory.recomputed_parts else (0, 1):
            for more, query_layer in ((two, False), (query, True)):
                terms = layer_activations(config, kernel, recomputed=full, query_layer=query_layer, device="cpu")
                assert more[way] - one[way] == sum(terms.values()), (mode, query_layer, terms)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_every_part_recomputed(pool: Pool, precision: str) -> None:
    shape = ("model.hidden=48", "model.sequence=20", "batch.micro_size=3")
    check_layer(pool, "reference", MODES, f"precision={precision}", *shape)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_single_sequence(pool: Pool, precision: str) -> None:
    check_layer(pool, "reference", MODES[:2], f"precision={precision}", "batch.micro_size=1")


@pytest.mark.parametrize("sequence", ["false", "true"])
def test_under_tensor_parallelism(pool: Pool, sequence: str) -> None:
    check_layer(pool, "reference", MODES, "parallel.tensor=2", f"parallel.sequence={sequence}")


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
@pytest.mark.parametrize(
    "variant",
    [
        "model.activation=swiglu",
        "model.activation=fast_gelu",
        "model.norm=rmsnorm",
        "model.norm=rmsnorm precision=fp32",
        "model.norm_placement=post",
        "model.dropout=0 precision=fp32",
        "model.biases=false",
        "model.heads=1",
        "model.kv_heads=2",
        "model.kv_heads=2 batch.micro_size=1",
        "model.positions=rope",
        "model.positions=rope batch.micro_size=1",
        "model.positions=rope model.kv_heads=2 data.packing.eod=3 data.packing.reset_mask=true",
        "model.kv_heads=2 data.packing.eod=3 data.packing.reset_mask=true",
        "model.qk_norm=true model.head_dim=6",
        "model.qk_norm=true model.norm=rmsnorm model.positions=rope model.kv_heads=2",
    ],
)
def test_every_variant(pool: Pool, variant: str, kernel: str) -> None:
    # on a CPU only explicit scores have probabilities that can be dropped
    dropout = f"model.attention_dropout={0 if kernel != 'reference' or 'dropout' in variant else 0.1}"
    check_layer(pool, kernel, [MODES[0], MODES[4]], dropout, *variant.split())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_chunks_shrink_the_head_and_the_loss_as_predicted(precision: str) -> None:
    """Vocabulary 40,000; 1 % for what a token needs beside its logits. Without chunks 2 or 4 bytes a logit exist."""
    peaks = []
    for chunk in ("null", "64", "32"):
        config = tiny(
            *("model.vocab=40000", "model.sequence=64", "model.hidden=32", "batch.micro_size=4"),
            *(f"precision={precision}", f"loss.chunk={chunk}"),
        )
        peaks.append(measured_head_peak(config))
        assert peaks[-1] == pytest.approx(head_peak(config), rel=0.01)
    assert peaks[0] > 2 * peaks[1] > 2.5 * peaks[2]


def measured_head_peak(config: RunConfig) -> int:
    """The most bytes alive in forward and backward of the head and the loss."""
    dtype, shape = DTYPES[config.precision.compute], (config.model.sequence, config.batch.micro_size)
    source = torch.Generator().manual_seed(1)
    hidden, table = (
        torch.randn(*sizes, config.model.hidden, generator=source).to(dtype).requires_grad_()
        for sizes in (shape, (config.model.vocab,))
    )
    labels, weights = torch.zeros(shape[::-1], dtype=torch.int64), torch.ones(shape[::-1])
    head = Head(Builder(PlacementTable()), config.model.vocab, config.loss.chunk)
    with LiveBytes(hidden, table, labels, weights) as live:
        head.loss(hidden, table, labels, weights).backward()
    return live.peak


def papers_formula(config: RunConfig) -> float:
    """Korthikanti et al. 2022, table 2."""
    model, t = config.model, config.parallel.tensor
    unit, pairs = model.sequence * config.batch.micro_size * model.hidden, 5 * model.heads * model.sequence
    attention = 0 if "attention" in config.memory.recomputed_parts else pairs / model.hidden / t
    if config.memory.recompute == "full":
        return unit * 2 / (t if config.parallel.sequence else 1)
    return unit * ((34 / t if config.parallel.sequence else 10 + 24 / t) + attention)


@pytest.mark.parametrize("mode", [MODES[0], MODES[1], MODES[5]], ids=str)
@pytest.mark.parametrize(("tensor", "sequence"), [(1, "false"), (2, "false"), (8, "false"), (2, "true"), (8, "true")])
def test_what_is_left_without_the_differences_is_the_papers_table(
    tensor: int, sequence: str, mode: tuple[str, ...]
) -> None:
    """At GPT-3's size: the statistics and half of the fp32 softmax are ours (see `planning.activations`)."""
    config = tiny(
        *USUAL,
        *("model.hidden=12288", "model.heads=96", "model.ffn=null", "model.sequence=2048", "batch.micro_size=1"),
        *(f"parallel.tensor={tensor}", f"parallel.sequence={sequence}", *mode),
    )
    terms = layer_activations(config, "reference", recomputed=config.memory.recompute == "full")
    ours = sum(terms.values()) - terms.get("statistics of norms", 0)
    assert ours - terms.get("softmax", 0) / 2 == papers_formula(config)


def test_what_the_parts_save_at_gpt_3s_size() -> None:
    """Of 34·s·b·h, the outputs of norms are 4 and the activation's output is 8."""
    shape = ("model.hidden=12288", "model.heads=96", "model.ffn=null", "model.sequence=2048", "batch.micro_size=1")

    def total(*mode: str) -> int:
        return sum(layer_activations(tiny(*USUAL, *shape, *mode), "sdpa").values())

    assert total() - total(SELECTIVE, "memory.selective=[norm]") == 4 * 2048 * 12288
    assert total() - total(SELECTIVE, "memory.selective=[activation]") == 8 * 2048 * 12288
