"""The model type that docs/extending.md adds by an entry of model_types.yaml is read as transformers computes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from pangu.interop.formats.fields import load_table
from pangu.interop.formats.huggingface_config import ModelType, kinds
from tests.interop.test_formats import convert
from tests.interop.test_formats_transformers import our_logits, random_vectors, tokens
from tests.spawn import repository

transformers = pytest.importorskip("transformers")


def added_entry(page: str) -> dict[str, object]:
    """The entry that the page adds to the file, which a copy of the file has behind the others."""
    docs, table = repository() / "docs", repository() / "pangu" / "interop" / "formats" / "model_types.yaml"
    (diff,) = re.findall(r"^    --- \S+/model_types\.yaml\n((?:    \+.*\n)+)", (docs / page).read_text("utf-8"), re.M)
    lines = "".join(f"{line[5:]}\n" for line in diff.splitlines())
    entries: dict[str, dict[str, object]] = yaml.safe_load(table.read_text("utf-8") + lines)
    return entries["phi3"]


def test_both_languages_add_the_same() -> None:
    assert added_entry("extending.md") == added_entry("extending.zh.md")


@pytest.mark.parametrize("window", [None, 5])
def test_an_entry_is_enough_to_read_a_model_type(
    window: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = added_entry("extending.md")
    monkeypatch.setitem(load_table("model_types"), "phi3", entry)
    monkeypatch.setitem(kinds(), "phi3", ModelType("phi3", **entry))  # type: ignore[arg-type]
    sizes = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": window}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.Phi3Config(**sizes, **heads, **ids, max_position_embeddings=24, initializer_range=0.2)
    theirs = random_vectors(transformers.Phi3ForCausalLM, config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        expected = theirs(tokens(67, 24)).logits
    run = convert("huggingface", "pangu", tmp_path / "theirs", tmp_path / "ours")
    torch.testing.assert_close(our_logits(run, tokens(67, 24)), expected, atol=1e-5, rtol=0)
    # the export computes the same as a type that transformers has for it
    back = convert("pangu", "huggingface", run, tmp_path / "back")
    exported = transformers.AutoModelForCausalLM.from_pretrained(back).eval()
    assert exported.config.model_type == ("llama" if window is None else "mistral")
    with torch.no_grad():
        torch.testing.assert_close(exported(tokens(67, 24)).logits, expected, atol=1e-5, rtol=0)
