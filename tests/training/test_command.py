"""What the command line says, before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pangu.config.errors import UserError
from pangu.training.command import compose
from tests.spawn import repository


def sample(prompt: str) -> Any:
    words = ["+config=quickstart", f"sample.prompts=[{prompt}]", f"train.output={Path('a') / 'b'}"]
    return compose(repository() / "configs", words)["sample"]


def test_references_in_prompts() -> None:
    """`${` begins a reference, and `\\${` is the text itself."""
    assert sample("'${train.output}'")["prompts"] == ["a/b"]
    assert sample("'\\${train.output}'")["prompts"] == ["${train.output}"]
    assert sample("'\\${'")["prompts"] == ["${"]
    with pytest.raises(UserError, match=r"Interpolation key 'nowhere' not found; .* is written with \\\$\{") as caught:
        sample("'${nowhere}'")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"sample\.prompts"):
        sample("'${'")
