"""Every export has a card that says what it is and how it was trained."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from pangu.checkpoint.files import amend
from pangu.checkpoint.index import read_index
from pangu.interop.formats.card import write_hub_card
from pangu.interop.formats.huggingface_config import write_model
from pangu.interop.formats.stored import Job
from tests.configs import config
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


@pytest.mark.parametrize(
    ("folder", "named", "base"),
    [
        ("", "", "run"),
        ("Small-1", "", "Small-1"),
        ("Small-1", "lab/Small-1B", "lab/Small-1B"),
        ("Small-1", "/home/me/model", "Small-1"),
        ("models--lab--Small/snapshots/0f3a", "", "lab/Small"),
        ("a model", "x/" + "y" * 300, "a model"),
    ],
)
def test_a_card_names_the_model_that_was_fine_tuned(tmp_path: Path, folder: str, named: str, base: str) -> None:
    """By its name on the hub or of its folder, not by a path; runs of ours have the name of their folder."""
    train(tmp_path / "run", 1)
    source = tmp_path / "run"
    if folder:
        imported, source = tmp_path / folder, tmp_path / "imported"
        imported.parent.mkdir(parents=True, exist_ok=True)
        words = ["--from", "pangu", "--to", "huggingface", "--input", str(tmp_path / "run"), "--output", str(imported)]
        assert main(words) == 0
        values = json.loads((imported / "config.json").read_text())
        (imported / "config.json").write_text(json.dumps({**values, "_name_or_path": named}))
        assert main(["--from", "huggingface", "--to", "pangu", "--input", str(imported), "--output", str(source)]) == 0
        assert "Fine-tuned" not in (source / "README.md").read_text()
    (checkpoint,) = (source / "checkpoints").glob("step-*")
    train(tmp_path / "tuned", 1, f"checkpoint.init_from={checkpoint}")
    (checkpoint,) = (tmp_path / "tuned" / "checkpoints").glob("step-*")
    train(tmp_path / "again", 1, f"checkpoint.init_from={checkpoint}")
    # The card of a second fine-tuning does not say that it began with the weights of the published model
    header, text = card_of(tmp_path / ("again" if folder else "tuned"), "--license", "mit")
    assert header.get("base_model") == (base if "/" in base else None), "on the hub, another model may have that name"
    assert f"\nFine-tuned from {base}.\n" in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize("name", ["MIT License", "", "a\nb", "-x"])
def test_a_license_is_an_identifier(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--from", "pangu", "--input", str(tmp_path), "--output", str(tmp_path / "out"), f"--license={name}"]
    assert main([*words, "--to", "huggingface"]) == 2
    assert "must be an identifier of the Hugging Face hub" in capsys.readouterr().err


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
    header, text = card_of(tmp_path / "run")
    assert "| afqmc/accuracy | 0.75 |\n" in text
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == ["# export-0", "## Results", "## Data", "## Training configuration", "## License"]
    assert text.count("````") == 2
    assert "base_model" not in header
    assert "private" not in text
    assert "X-Amz-Signature" not in text


@pytest.mark.parametrize(
    ("options", "usage"),
    [
        (["--to", "pangu"], "`pangu generate export --prompt TEXT`"),
        (["--to", "mindspore"], '`mindspore.load_checkpoint("export.ckpt")`'),
        (["--to", "megatron", "--tensor", "2"], "Megatron 1.1 loads it with `--load export --model-parallel-size 2 "),
    ],
)
def test_every_format_has_a_card(tmp_path: Path, options: list[str], usage: str) -> None:
    train(tmp_path / "run", 2, "model.positions=learned")
    output = tmp_path / f"export{'.ckpt' * ('mindspore' in options)}"
    words = ["--from", "pangu", "--input", str(tmp_path / "run"), "--output", str(output), "--license", "mit"]
    assert main([*words, *options]) == 0
    text = (output / "README.md" if output.is_dir() else tmp_path / "export.ckpt.md").read_text()
    assert usage in text
    assert "| optimizer steps | 2 |\n" in text
    assert "kind: synthetic" in text
    assert "## License\n\nmit." in text


@pytest.mark.parametrize(
    ("preset", "files"),
    [
        ("pangu_pro_moe", "`configuration_pangu_moe.py` and `modeling_pangu_moe.py`"),
        ("openpangu_ultra_moe_718b", "`configuration_openpangu_moe.py` and `modeling_openpangu_moe.py`"),
        ("pangu_350m", ""),
        ("qwen3_8b", ""),
    ],
)
def test_a_card_names_code_that_is_trusted_and_code_that_is_missing(tmp_path: Path, preset: str, files: str) -> None:
    recipe = config(f"+config={preset}")
    source: Any = SimpleNamespace(training=None, generation={})
    job = Job(recipe, None, tmp_path / "export", 1, (), (), iter(()), source, None, {})
    (tmp_path / "modeling_pangu.py").touch()
    write_hub_card(tmp_path, job, write_model(recipe.model))
    text = (tmp_path / "README.md").read_text()
    assert ('from_pretrained("export", trust_remote_code=True)' in text) == (preset != "qwen3_8b")
    assert ("runs code of this folder: `modeling_pangu.py`." in text) == (preset == "pangu_350m")
    assert (f"Copy {files} from the release" in text) == bool(files)


def test_a_checkpoint_that_tells_no_step_is_exported(tmp_path: Path) -> None:
    train(tmp_path / "run", 1)
    path = tmp_path / "run/checkpoints/step-00000001"
    amend(path, {key: value for key, value in read_index(path).items() if key != "step"})
    _, text = card_of(tmp_path / "run")
    assert "how they were trained is not known" in text
