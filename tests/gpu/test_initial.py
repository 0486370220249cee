"""Initial weights on an accelerator: those of a CPU, although each band is drawn while the one before is copied."""

from __future__ import annotations

import pytest
import torch

from pangu.layers import initial
from pangu.layers.initial import fill
from pangu.topology.launch import Launch, choose_device
from pangu.topology.placement import Placement

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bands_are_not_drawn_over_before_they_are_copied(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = Placement("m", (20 * initial.TILE + 5, 300), 0.02)
    on_host, device = torch.empty(placement.shape), choose_device("auto", Launch())
    fill(on_host, placement, 7)
    monkeypatch.setattr(initial, "BAND", 1)  # one row of tiles at a time
    on_device = torch.zeros(placement.shape, dtype=dtype, device=device)
    if device.type == "cuda":
        torch.cuda._sleep(10**8)  # copies wait, drawing does not
    fill(on_device, placement, 7)
    assert torch.equal(on_device.cpu(), on_host.to(dtype))
