"""Products in fp8 on an accelerator: the numbers that a CPU emulates, in few kernels, without a host sync."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.gpu_suite.setting import preset
from pangu.common.errors import UserError
from pangu.config.build import build
from pangu.config.schema import RunConfig
from pangu.data.loader import Loader
from pangu.data.sources import open_sources
from pangu.layers.fp8 import cast, require_fp8, scaled_matmul
from pangu.layers.fp8_blocks import BLOCKS
from pangu.topology.launch import Launch, choose_device
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.step import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
HOST = torch.device("cpu")
FORMATS = {448.0: torch.float8_e4m3fn, 57344.0: torch.float8_e5m2}


@pytest.fixture
def device() -> torch.device:
    chosen = choose_device("cuda", Launch())
    try:
        require_fp8("bf16", chosen)
    except UserError as error:
        pytest.skip(str(error))
    return chosen


@pytest.mark.parametrize("limit", [448.0, 57344.0])
def test_casts_are_those_of_a_cpu(device: torch.device, limit: float) -> None:
    """Bit for bit, in each orientation and in both: nothing is added up but sums over rows."""
    x = 30 * torch.randn(256, 160, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, :4] = torch.tensor([math.inf, -math.inf, math.nan, -3e38])
    scale, results, dtype = torch.tensor(8.0), [], FORMATS[limit]
    for place in (HOST, device):
        amax = torch.zeros((), device=place)
        shapes = (((255, 160), None), (None, (160, 256)), ((256, 160), (160, 256)))
        outs = []
        for begin, pair in zip((1, 0, 0), shapes, strict=True):
            out = [None if shape is None else torch.empty(shape, dtype=dtype, device=place) for shape in pair]
            cast(x[begin:].to(place), scale.to(place), amax if begin else amax.clone(), *out, None)
            outs += [one.float().cpu() for one in out if one is not None]
        sums = torch.empty(1 if place == HOST else 2, 160, device=place)
        cast(x[1:].to(place), scale.to(place), amax, torch.empty(shapes[0][0], dtype=dtype, device=place), None, sums)
        results.append((*outs, amax.cpu()))
        torch.testing.assert_close(sums.sum(0).cpu(), x[1:].float().sum(0))
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("left_format", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_products_are_those_of_a_cpu(device: torch.device, dtype: torch.dtype, left_format: torch.dtype) -> None:
    """Sums of 4,096 products in another order, rounded to the format."""
    source = torch.Generator().manual_seed(0)
    left = torch.randn(96, 4096, generator=source).to(left_format)
    right = torch.randn(80, 4096, generator=source).to(torch.float8_e4m3fn)
    bias = torch.randn(80, generator=source).to(dtype)
    inverses = torch.tensor(0.5), torch.tensor(0.125)
    here = scaled_matmul(left, right, inverses, dtype, bias)
    one, other, *scales, added = (tensor.to(device) for tensor in (left, right, *inverses, bias))
    there = scaled_matmul(one, other, (scales[0], scales[1]), dtype, added)
    tolerance = 2e-3 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(there.cpu(), here, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("name", BLOCKS)
def test_products_of_blocks_are_those_of_a_cpu(name: str) -> None:
    """Forward, and the gradients of input and weight, where the device has them."""
    device, blocks, source = choose_device("cuda", Launch()), BLOCKS[name], torch.Generator().manual_seed(0)
    try:
        require_fp8("bf16", device, name)
    except UserError as error:
        pytest.skip(str(error))
    x, weight, grad = (
        torch.randn(shape, generator=source).bfloat16() for shape in ((256, 512), (384, 512), (256, 384))
    )
    results = []
    for place in (HOST, device):
        one, matrix, of_output = (tensor.to(place) for tensor in (x, weight, grad))
        made = (
            blocks.linear(matrix, None)(one),
            blocks.input_gradient(matrix)(of_output),
            blocks.weight_gradient(of_output.t(), one, torch.float32),
        )
        results.append([tensor.float().cpu() for tensor in made])
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there, here, rtol=2**-7, atol=0.25)


def test_steps_in_fp8_stay_near_those_of_a_cpu_and_make_no_host_sync(device: torch.device) -> None:
    """Five steps of a small model, of which all but the first multiply in fp8."""
    config = build(RunConfig, preset("tiny", {"precision.matmul": "fp8"}))
    size, micro = config.batch.global_size, config.batch.micro_size
    losses = []
    for place in (HOST, device):
        trainer = Trainer(config, Mesh(Layout(), 0, place))
        stream = open_sources(config.data, config.model, config.train.seed).train
        with Loader(stream, config.data.packing, size, micro, 0, 1) as loader:
            for step in range(5):
                batches = loader.micro_batches(size * step)
                torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")  # casts are compiled in the second
                try:
                    trainer.forward_backward(batches)
                    pending = trainer.update()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                losses.append(trainer.read(pending).loss)
    assert losses[5:] == pytest.approx(losses[:5], rel=2e-2)
