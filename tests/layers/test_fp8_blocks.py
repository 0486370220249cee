"""Products in fp8 with a scale per block: their numbers, what torch's kernels take, and that no layout changes them."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pangu.common.errors import UserError
from pangu.data.batch import make_batch
from pangu.layers.fp8 import require_fp8
from pangu.layers.fp8_blocks import BLOCKS, CastBlocks
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.step import Trainer
from tests.configs import tiny
from tests.parallel.harness import parallel_keys, whole
from tests.threads import Ranks

SHAPES = [(256, 384, 640), (128, 128, 128)]


@pytest.mark.parametrize("name", BLOCKS)
def test_the_largest_number_of_a_block_decides_its_scale(name: str) -> None:
    """447 has the exponent of 448, which fits; 449 takes the next one, but in MX, where 500 is cut off at 448."""
    blocks = BLOCKS[name]
    x = torch.zeros(blocks.height, 3 * blocks.width)
    x[0, 0], x[-1, 1], x[0, blocks.width], x[0, 2 * blocks.width] = 447.0, -3.0, 500.0, 500 * 2.0**-40
    cast = blocks.cast(x, blocks.height)
    assert cast.exponents.tolist() == [[127, *([127] if name == "mxfp8" else [128]), 127 - 40 + (name != "mxfp8")]]
    restored = cast.restored(torch.float64)
    cut = 448.0 if name == "mxfp8" else 512.0  # 500 lies between 480 and 512, in steps of 32
    assert (restored[0, 0], restored[-1, 1]) == (448.0, -3.0)
    assert (restored[0, blocks.width], restored[0, 2 * blocks.width]) == (cut, cut * 2.0**-40)


@pytest.mark.parametrize("name", BLOCKS)
def test_casts_round_by_a_sixteenth_at_most_and_show_what_is_not_finite(name: str) -> None:
    blocks, source = BLOCKS[name], torch.Generator().manual_seed(0)
    x = torch.randn(256, 256, generator=source) * torch.logspace(-30, 30, 256)[:, None]
    for height in {1, blocks.height}:
        largest = x.abs().unflatten(1, (-1, blocks.width)).unflatten(0, (-1, height)).amax((1, 3), keepdim=True)
        limit = largest.expand(-1, height, -1, blocks.width).reshape(256, 256) * (1 / 8 if blocks.saturates else 1 / 16)
        assert ((blocks.cast(x, height).restored(torch.float32) - x).abs() <= limit).all()
    for value in (math.inf, -math.inf, math.nan):
        x[0, 0] = value
        assert blocks.cast(x).values.float().isnan().nonzero().tolist() == [[0, 0]]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("rows", "outputs", "depth"), SHAPES)
def test_torchs_kernels_take_the_casts(name: str, rows: int, outputs: int, depth: int) -> None:
    """Their checks of shapes and strides, on tensors without memory; on a CPU the product is that of the numbers.

    Operands are cast as they lie in memory and, as in the backward pass, as transposes.
    """
    blocks = BLOCKS[name]
    for height, transposed in itertools.product({1, blocks.height}, (False, True)):
        left, right = (
            torch.randn(depth, size).t() if transposed else torch.randn(size, depth) for size in (rows, outputs)
        )
        casts = blocks.cast(left), blocks.cast(right, height)
        expected = F.linear(*(one.restored(torch.float32) for one in casts))
        assert torch.equal(blocks._matmul(*casts, torch.float32), expected)
        meta = [CastBlocks(*(part.to("meta") for part in one)) for one in casts]
        for dtype in (torch.bfloat16, torch.float32):
            value = blocks._matmul(meta[0], meta[1], dtype)
            assert (value.shape, value.dtype) == ((rows, outputs), dtype)


def test_scales_for_mx_kernels_lie_in_tiles() -> None:
    """Row r and block c of a tile of 128 x 4 at 16 (r mod 32) + 4 (r div 32) + c (cuBLAS, 1D block scaling)."""
    exponents = torch.arange(256 * 8, dtype=torch.int32).view(256, 8) % 251
    scales, _ = BLOCKS["mxfp8"]._for_kernel(CastBlocks(torch.zeros(256, 256), exponents))
    stored = scales.view(torch.uint8)
    for row, block in ((0, 0), (31, 3), (32, 0), (127, 3), (128, 4), (200, 7)):
        tile = row // 128 * 2 + block // 4
        assert stored[512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + block % 4] == exponents[row, block]


def step(rank: int, world: int, layout: Layout, *words: str) -> dict[str, Tensor]:
    """The gradients of a step of four sequences."""
    config = tiny("precision=fp64", "parallel.bucket_mib=0.1", *words, *parallel_keys(layout))
    trainer = Trainer(config, Mesh.connect(layout, torch.device("cpu")))
    size, replica = config.batch.micro_size, trainer.mesh.at.data
    tokens = np.random.default_rng(0).integers(3, config.model.vocab, size=(4, config.model.sequence + 1))
    first, last = 4 // layout.data * replica, 4 // layout.data * (replica + 1)
    trainer.forward_backward(
        [make_batch(tokens[i : i + size], range(i, i + size), config.data.packing) for i in range(first, last, size)]
    )
    return whole(trainer, of_gradients=True)


@cache
def one_process(*words: str) -> dict[str, Tensor]:
    return step(0, 1, Layout(), *words)


SIZES = {
    "fp8_blockwise": ("model.hidden=256", "model.ffn=256", "model.sequence=128"),
    "mxfp8": ("model.hidden=64", "model.ffn=128", "model.sequence=128"),
}
COMMON = ("model.layers=2", "model.heads=4", "batch.global_size=4", "batch.micro_size=2")
LAYOUTS: list[tuple[str, Layout, tuple[str, ...]]] = [
    ("fp8_blockwise", Layout(), ("batch.micro_size=1", "memory.recompute=full")),
    ("fp8_blockwise", Layout(tensor=2, sequence=True), ("parallel.overlap_chunks=2",)),
    ("fp8_blockwise", Layout(pipeline=2), ("parallel.schedule=zb_h1", "batch.micro_size=1")),
    ("mxfp8", Layout(tensor=2), ("memory.recompute=selective",)),
    ("mxfp8", Layout(context=2), ()),
    ("mxfp8", Layout(data=2, zero=3), ("batch.micro_size=1",)),
]


@pytest.mark.parametrize(("name", "layout", "words"), LAYOUTS, ids=str)
def test_no_layout_changes_a_number(ranks: Ranks, name: str, layout: Layout, words: tuple[str, ...]) -> None:
    """All gradients to 1e-12, in which those of the compute format differ by more than 1 %."""
    model = (*COMMON, *SIZES[name])
    one, plain = (one_process(*model, f"precision.matmul={matmul}") for matmul in (name, "compute"))
    ours: dict[str, Tensor] = ranks.run(layout.world, step, layout, *model, f"precision.matmul={name}", *words)[0]
    largest = max(gradient.abs().max().item() for gradient in one.values())  # those of the keys' biases are 0
    for key, gradient in one.items():
        torch.testing.assert_close(ours[key], gradient, rtol=1e-12, atol=1e-12 * largest)
        if key.startswith("layers.") and gradient.dim() == 2:
            assert 0.01 < (gradient - plain[key]).norm() / plain[key].norm() < 0.25, key


@pytest.mark.parametrize(
    ("matmul", "capability", "says"),
    [
        ("fp8_blockwise", (9, 0), None),
        ("fp8_blockwise", (10, 0), r"of compute capability Hopper \(9.0\); set"),
        ("mxfp8", (9, 0), r"mxfp8: NVIDIA X lacks such matmuls; .* Blackwell \(10.0\); set precision=fp8"),
        ("mxfp8", (10, 0), None),
    ],
)
def test_devices_without_such_products_are_refused(matmul: str, capability: tuple[int, int], says: str | None) -> None:
    device: Any = torch.device("cuda", 0)
    with (
        patch.object(torch.version, "cuda", "12.9"),
        patch.object(torch.cuda, "get_device_name", lambda _: "NVIDIA X"),
        patch.object(torch.cuda, "get_device_capability", lambda _: capability),
    ):
        if says is None:
            assert "scaled_mm" in require_fp8("bf16", device, matmul)
        else:
            with pytest.raises(UserError, match=says):
                require_fp8("bf16", device, matmul)
