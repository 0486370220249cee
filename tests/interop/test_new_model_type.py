"""The entry of model_types.yaml that docs/extending.md shows is the file's."""

from __future__ import annotations

import re

import pytest
import yaml

from pangu.interop.formats.fields import load_table
from tests.spawn import repository


@pytest.mark.parametrize("page", ["extending.md", "extending.zh.md"])
def test_the_page_shows_an_entry_of_the_file(page: str) -> None:
    docs, table = repository() / "docs", repository() / "pangu" / "interop" / "formats" / "model_types.yaml"
    entry = r"^    --- \S+/model_types\.yaml\n(    \+phi3:\n(?:    \+.*\n)+)"
    (diff,) = re.findall(entry, (docs / page).read_text("utf-8"), re.M)
    lines = "".join(f"{line[5:]}\n" for line in diff.splitlines()).replace("phi3:", "shown:", 1)
    assert yaml.safe_load(table.read_text("utf-8") + lines)["shown"] == load_table("model_types")["phi3"]
