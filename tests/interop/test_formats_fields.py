"""No field of a foreign configuration is passed over."""

from __future__ import annotations

import pytest
import torch

from pangu.common.errors import MOST_SHOWN, UserError, shown
from pangu.interop.formats.fields import check_fields


def check(**config: object) -> None:
    only = {"rotary_percent": [1.0], "window": [None, [-1, 0]], "scaling": [{"factor": 1}]}
    check_fields(config, "in.json", used={"layers"}, harmless=("seed", "wandb_*"), only=only)


def test_what_is_used_harmless_or_computed_passes() -> None:
    check(
        layers="any", seed=torch.ones(2), wandb_entity=object(), rotary_percent=1, window=(-1, 0), scaling={"factor": 1}
    )
    check(window=None)


def test_everything_else_is_refused_by_name_at_once() -> None:
    with pytest.raises(UserError) as error:
        check(seed=1, rotary_percent=0.5, window=torch.ones(2), scaling={"factor": 2}, wandb="x", my_option=True)
    said = str(error.value)
    assert said.startswith("in.json:\n")
    assert "rotary_percent = 0.5: is not supported; use 1.0" in said
    assert "window = tensor([1., 1.]): is not supported; use null or [-1, 0]" in said
    assert "scaling = {factor: 2}: is not supported; use {factor: 1}" in said
    assert "wandb = x: is unknown" in said
    assert "my_option = true: is unknown" in said
    assert "seed" not in said


def test_foreign_values_are_shown_in_one_short_line() -> None:
    deep: list[object] = []
    for _ in range(10**5):
        deep = [deep]
    for value in ("\x1b[2J\n", "x" * 10**6, list(range(10**6)), deep, {"a": {"b": {"c": "\x07"}}}):
        assert shown(value).isprintable()
        assert len(shown(value)) <= MOST_SHOWN + 3
    assert shown("relu") == "relu"
