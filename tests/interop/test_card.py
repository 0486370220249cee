"""An export for transformers says on its card what it is and how it was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.training.test_resume import metrics, train
from tools.convert_checkpoint import main


def card_of(source: Path, *options: str) -> tuple[dict[str, object], str]:
    """Metadata and text of the card of an export."""
    output = source.parent / f"export-{len(options)}"
    assert (
        main(["--from", "pangu", "--to", "huggingface", "--input", str(source), "--output", str(output), *options]) == 0
    )
    _, header, text = (output / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), text


def test_a_card_tells_results_and_recipe_of_the_exported_step(tmp_path: Path) -> None:
    train(tmp_path / "run", 3)
    header, text = card_of(tmp_path / "run/checkpoints/step-00000002", "--license", "apache-2.0")
    assert header == {
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["pangu"],
    }
    loss = metrics(tmp_path / "run")[1]["loss"]
    assert "| optimizer steps | 2 |\n" in text
    assert f"| training loss | {loss:.4g} |" in text
    assert "kind: synthetic" in text
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    recipe = yaml.safe_load(text.split("```yaml")[-1].split("```")[0])
    assert recipe["optimizer"] == config["optimizer"]
    assert str(tmp_path) not in text, "paths of a machine are nobody's business"
    header, text = card_of(tmp_path / "run")
    assert header["license"] == "unknown"
    assert "| optimizer steps | 3 |" in text


@pytest.mark.parametrize("name", ["MIT License", "", "a\nb", "-x"])
def test_a_license_is_an_identifier(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--from", "pangu", "--input", str(tmp_path), "--output", str(tmp_path / "out"), f"--license={name}"]
    assert main([*words, "--to", "huggingface"]) == 2
    assert "must be an identifier of the Hugging Face hub" in capsys.readouterr().err
    assert main([*words, "--to", "mindspore"]) == 2
    assert "needs --to huggingface" in capsys.readouterr().err
