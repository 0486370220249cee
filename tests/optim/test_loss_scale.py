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


@pytest.mark.parametrize("consecutive", [False, True])
def test_hysteresis_counts_as_megatron_and_deepspeed_do(consecutive: bool) -> None:
    """Overflows are forgotten when the scale grows, or at each step without one; the last one counted stays counted."""
    config = LossScaleConfig(initial=64.0, growth_interval=3, minimum=1.0, hysteresis=2, consecutive=consecutive)
    scale = LossScale(config)
    #        o      .      o     o     .      .      .      o     .      o     .      .      o
    steps = [True, False, True, True, False, False, False, True, False, True, False, False, True]
    seen = []
    for overflow in steps:
        saved = scale.state()
        scale = LossScale(config)  # a run that is continued after every step
        scale.restore(saved)
        scale.update(torch.tensor(overflow))
        seen.append(float(scale.scale))
    by_growth = [64, 64, 32, 16, 16, 16, 32, 32, 32, 16, 16, 16, 8]
    in_a_row = [64, 64, 64, 32, 32, 32, 64, 64, 64, 64, 64, 64, 64]
    assert seen == (in_a_row if consecutive else by_growth)


def test_hysteresis_tolerates_overflows_at_the_smallest_scale() -> None:
    scale = LossScale(LossScaleConfig(initial=2.0, growth_interval=3, minimum=2.0, hysteresis=2))
    scale.update(torch.tensor(True))
    scale.require_room(2.0)
    scale.update(torch.tensor(True))
    with pytest.raises(UserError, match=r"precision\.loss_scale\.minimum"):
        scale.require_room(2.0)


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
