"""An export for transformers says on its card what it is and how it was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pangu.checkpoint.files import amend
from pangu.checkpoint.index import read_index
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


def test_texts_of_a_run_neither_break_a_card_nor_tell_secrets(tmp_path: Path) -> None:
    train(tmp_path / "run", 1)
    evil = "x\n```\n## License\n\nMIT |"
    scores = {"step": 1, "evaluation": {evil: 0.5, "\ud800": 0.25, "afqmc/accuracy": 0.75}}
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write(f"[]\n3\n{json.dumps(scores)}\n")
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    sources = {"train": ["/private/a", "s3://b/c?X-Amz-Signature=key"], "weights": None, "validation": []}
    config["data"] = {"kind": "indexed", **sources, "tokenizer": None, "packing": config["data"]["packing"]}
    config["batch"]["by"] = config["checkpoint"]["init_from"] = evil
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(config))
    _, text = card_of(tmp_path / "run")
    assert "| afqmc/accuracy | 0.75 |\n" in text
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == ["# export-0", "## Results", "## Data", "## Training configuration", "## License"]
    assert text.count("````") == 2
    assert "private" not in text
    assert "X-Amz-Signature" not in text


def test_a_checkpoint_that_tells_no_step_is_exported(tmp_path: Path) -> None:
    train(tmp_path / "run", 1)
    path = tmp_path / "run/checkpoints/step-00000001"
    amend(path, {key: value for key, value in read_index(path).items() if key != "step"})
    _, text = card_of(tmp_path / "run")
    assert "how they were trained is not known" in text
