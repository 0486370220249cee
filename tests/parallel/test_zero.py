"""ZeRO does not change the maths: not a bit of it where the same numbers are added in the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pangu.topology.layout import Layout
from tests.parallel.harness import OVERRIDES, small_trainer, train_layout, whole
from tests.threads import Ranks

MODEL = (*OVERRIDES, "batch.micro_size=1", "batch.global_size=4")
ONE_EACH = (*OVERRIDES, "batch.micro_size=2", "batch.global_size=4")


def same_bits(ours: dict[str, Any], other: dict[str, Any]) -> None:
    """Results, gradients and weights are equal bit for bit."""
    assert ours["results"] == other["results"]
    for mine, reference in zip(ours["gradients"], other["gradients"], strict=True):
        assert all(torch.equal(mine[name], gradient) for name, gradient in reference.items())
    assert all(torch.equal(ours["weights"][name], weight) for name, weight in other["weights"].items())


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
@pytest.mark.parametrize("data", [2, 4])
def test_stages_are_equal_bit_for_bit_in_fp32(ranks: Ranks, data: int, optimizer: str) -> None:
    """With one micro-batch per rank and step; whatever the bucket, overlapped or not. LAMB's norms are sums over shares
    and Adam's clip norm too, in another order: nothing is clipped here, and LAMB is compared between shardings."""
    overrides = (*OVERRIDES, "batch.micro_size=1", f"batch.global_size={data}", f"optimizer={optimizer}")
    first = None
    for zero, more in [
        *([(0, ())] if optimizer == "adam" else []),
        (1, ()),
        (2, ()),
        (3, ()),
        (2, ("parallel.overlap=false",)),
        (3, ("parallel.overlap=false",)),
    ]:
        layout = Layout(data=data, zero=zero)
        ours = ranks.run(data, train_layout, layout, 2, *overrides, "optimizer.clip=null", *more)[0]
        first = first or ours
        for mine, reference in zip(ours["gradients"], first["gradients"], strict=True):
            assert all(torch.equal(mine[name], gradient) for name, gradient in reference.items())
        assert all(torch.equal(ours["weights"][name], weight) for name, weight in first["weights"].items())


def gradients_after_a_failure(rank: int, world: int, layout: Layout, fails: bool, *overrides: str) -> dict[str, Tensor]:
    """The gradients of a step; if it `fails`, after one that stopped in the middle of the second backward pass."""
    trainer, batches = small_trainer(layout, *overrides)
    if fails:
        calls = []

        def stop(*_: object) -> None:
            calls.append(1)
            if len(calls) == len(parameters) + 1:
                raise MemoryError

        parameters = [p for name, p in trainer.model.named_parameters() if name.endswith("attention_norm.weight")]
        hooks = [parameter.register_hook(stop) for parameter in parameters]
        with pytest.raises(MemoryError):
            trainer.forward_backward(batches)
        for hook in hooks:
            hook.remove()
    trainer.forward_backward(batches)
    return whole(trainer, of_gradients=True)


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        (Layout(), ()),
        (Layout(data=2, zero=1), ()),
        (Layout(data=2, zero=2), ()),
        (Layout(data=2, zero=3), ("memory.recompute=full",)),
        (Layout(), ("parallel.schedule=zb_h1",)),
    ],
    ids=str,
)
def test_a_step_after_one_that_failed_in_backward_computes_the_same(
    ranks: Ranks, layout: Layout, overrides: tuple[str, ...]
) -> None:
    """A caller that runs out of memory may drop the step and go on."""
    first, again = (
        ranks.run(layout.world, gradients_after_a_failure, layout, fails, *OVERRIDES, *overrides)[0]
        for fails in (False, True)
    )
    for name, gradient in first.items():
        assert torch.equal(again[name], gradient), name


def test_magnitudes_of_a_failed_step_set_no_scales_of_fp8() -> None:
    """The failed one has a norm 64 times as large."""
    found = []
    for fails in (False, True):
        trainer, batches = small_trainer(Layout(), *OVERRIDES, "precision=fp8")
        norm = trainer.model.get_parameter("layers.0.attention_norm.weight")
        if fails:

            def stop(*_: object) -> None:
                raise MemoryError

            kept, hook = norm.detach().clone(), norm.register_hook(stop)
            norm.data.mul_(64)
            with pytest.raises(MemoryError):
                trainer.forward_backward(batches)
            hook.remove()
            norm.data.copy_(kept)
        trainer.forward_backward(batches)
        trainer.read(trainer.update())
        assert trainer.scales is not None
        found.append(trainer.scales.scale.clone())
    assert torch.equal(*found)
