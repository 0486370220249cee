"""Dynamic loss scale."""

from __future__ import annotations

import pytest
import torch

from pangu.common.errors import UserError
from pangu.config.optimizer import LossScaleConfig
from pangu.optim.loss_scale import LossScale


def test_halves_on_overflow_and_doubles_after_the_interval() -> None:
    scale = LossScale(LossScaleConfig(initial=8.0, growth_interval=3, minimum=1.0))
    seen = []
    for overflow in [True, False, False, True, False, False, False, False]:
        scale.update(torch.tensor(overflow))
        seen.append(float(scale.scale))
    assert seen == [4, 4, 4, 2, 2, 2, 4, 4]


def test_stops_when_the_smallest_scale_overflows() -> None:
    scale = LossScale(LossScaleConfig(initial=3.0, growth_interval=3, minimum=2.0))
    scale.require_room(float(scale.scale))
    scale.update(torch.tensor(True))
    assert scale.scale == 2.0
    with pytest.raises(UserError, match=r"precision\.loss_scale\.minimum"):
        scale.require_room(float(scale.scale))


def test_other_formats_have_scale_1() -> None:
    scale = LossScale(None)
    scale.update(torch.tensor(True))
    scale.require_room(float(scale.scale))
    assert scale.scale == 1.0
