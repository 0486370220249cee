"""Model card of an export: its README.md, which says what the model is and how it was trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment

import pangu
from pangu.common.errors import shown
from pangu.interop.formats.stored import Job, Training
from pangu.interop.hub import HUB_NAME
from pangu.models.size import num_parameters

_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_GROUPS = ("batch", "precision", "optimizer", "lr_schedule", "loss")
"""Groups of keys that a card lists; config.json has the model, others hold paths of a machine, or change no weight."""
_DATA = ("kind", "train", "weights")
BASE_MODEL = "base_model"
"""Key of `WeightSource.generation` with the `name` of the model that was imported."""
_FIGURES = {
    "step": "optimizer steps",
    "tokens": "training tokens",
    "loss": "training loss",
    "validation_loss": "held-out loss",
    "validation_perplexity": "held-out perplexity",
}
"""Fields of metrics.jsonl by their names in a card; of each, the last value before the checkpoint counts."""


def write_card(file: Path, job: Job, kind: str, usage: str, header: str = "") -> None:
    """Write the card of an exported model.

    Args:
        file: Path of the card.
        job: The export.
        kind: Name of the kind of model in the format of the export.
        usage: How the files are loaded.
        header: YAML before the title, for programs that read cards.
    """
    training, environment = job.source.training, Environment(trim_blocks=True, keep_trailing_newline=True)
    text = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        header=header,
        name=card_name(job),
        kind=kind,
        size=num_parameters(job.config.model),
        version=pangu.__version__,
        usage=usage,
        base=_plain(base) if (base := base_of(job)) else "",
        license=job.card.get("license") or "Not stated",
        **({} if training is None else _facts(training)),
    )
    file.write_text(text, encoding="utf-8")


def card_name(job: Job) -> str:
    """Return the name of an export on its card: its repository, or else its folder or file."""
    return job.card.get("name") or job.output.name


def base_of(job: Job) -> str:
    """Return the name of the imported model, or else of the run, that was fine-tuned, perhaps in several runs."""
    checkpoint = None if job.source.training is None else job.source.training.config.get("checkpoint")
    began = checkpoint.get("init_from") if isinstance(checkpoint, Mapping) else None
    if not isinstance(began, str):
        return ""
    path = Path(began)
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    return str(job.source.generation.get(BASE_MODEL, {}).get("name") or run.name)


def write_hub_card(path: Path, job: Job, config: Mapping[str, Any]) -> None:
    """Write the card of a folder for transformers with this config.json and all other files but the weights.

    Its front matter is that of https://huggingface.co/docs/hub/model-cards.
    """
    header = {
        "library_name": "transformers",
        "license": job.card.get("license") or "unknown",
        "pipeline_tag": "text-generation",
        "tags": ["pangu"],
    }
    if HUB_NAME.fullmatch(base := base_of(job)):
        header["base_model"] = base
    code = sorted({f"{place.partition('.')[0]}.py" for place in config.get("auto_map", {}).values()})
    missing = [f"`{file}`" for file in code if not (path / file).is_file()]
    code += ["tokenization_pangu.py"] if (path / "tokenization_pangu.py").is_file() else []
    trusted = ", ".join(f"`{file}`" for file in code)
    call = f'AutoModelForCausalLM.from_pretrained("{card_name(job)}"{", trust_remote_code=True" * bool(code)})'
    usage = f"```python\nfrom transformers import AutoModelForCausalLM\n\nmodel = {call}\n```"
    if code:
        usage += f"\n\n`trust_remote_code=True` runs code of this folder: {trusted}."
    if missing:
        usage += f"\nCopy {' and '.join(missing)} from the release of this architecture into it first."
    write_card(path / "README.md", job, config["model_type"], usage, yaml.safe_dump(header, sort_keys=False).rstrip())


def _facts(training: Training) -> dict[str, Any]:
    """Return what a card says about results, data and configuration of a run."""
    last: dict[str, Any] = {}
    for record in training.records:
        scores = record.get("evaluation")
        named = {name: record.get(field) for field, name in _FIGURES.items()}
        named |= {_plain(name): score for name, score in scores.items()} if isinstance(scores, dict) else {}
        last |= {name: value for name, value in named.items() if isinstance(value, int | float)}
    data = training.config.get("data")
    listed = {key: data[key] for key in _DATA if data.get(key) is not None} if isinstance(data, Mapping) else None
    if listed and isinstance(listed.get("train"), list):
        # without the folders of a machine, and what signs a URL
        listed["train"] = [Path(str(name).partition("?")[0]).name for name in listed["train"]]
    return {
        "results": {name: f"{v:,}" if isinstance(v, int) else f"{v:.4g}" for name, v in last.items()},
        "data": "" if listed is None else _fenced(listed),
        "recipe": _fenced({group: training.config[group] for group in _GROUPS if group in training.config}),
    }


def _fenced(values: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True).rstrip()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}yaml\n{text}\n{fence}"


def _plain(text: str) -> str:
    """Return a text of somebody's file so that Markdown shows it as it is, on one line."""
    return re.sub(r"([!-,;-@[-^`{-~])", r"\\\1", shown(text))
