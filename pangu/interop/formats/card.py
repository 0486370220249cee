"""Model card of an export: its README.md, which says what the model is and how it was trained."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

import pangu
from pangu.common.errors import shown
from pangu.interop.formats.stored import Job, Training
from pangu.models.size import num_parameters

_GROUPS = ("batch", "precision", "optimizer", "lr_schedule", "loss")
"""Groups of keys that a card lists; config.json has the model, others hold paths of a machine, or change no weight."""
_DATA = ("kind", "train", "weights")
BASE_MODEL = "base_model"
"""Key of `WeightSource.generation` with the `name` of the model that was imported."""
HUB_NAME = re.compile(r"[\w-]{1,96}/[\w.-]{1,96}", re.ASCII)
"""Full names of models on the Hugging Face hub."""
_FIGURES = {
    "step": "optimizer steps",
    "tokens": "training tokens",
    "loss": "training loss",
    "validation_loss": "held-out loss",
    "validation_perplexity": "held-out perplexity",
}
"""Fields of metrics.jsonl by their names in a card; of each, the last value before the checkpoint counts."""


def write_card(file: Path, job: Job, kind: str, usage: Iterable[str], front_matter: Iterable[str] = ()) -> None:
    """Write the card of an exported model.

    Args:
        file: Path of the card.
        job: The export.
        kind: Name of the kind of model in the format of the export.
        usage: Lines that say how the files are loaded.
        front_matter: Lines before the title, for programs that read cards.
    """
    size, license_id = num_parameters(job.config.model), job.card.get("license") or "Not stated"
    lines = [
        *front_matter,
        f"# {card_name(job)}",
        "",
        f"Causal language model of type `{kind}` with {size:,} parameters, exported by pangu {pangu.__version__}.",
        "",
        *usage,
        "",
        *(["The weights were converted; how they were trained is not known."] if job.source.training is None else []),
        *([f"Fine-tuned from {_plain(base)}.", ""] if (base := base_of(job)) else []),
        *([] if job.source.training is None else _training(job.source.training)),
        "",
        "## License",
        "",
        f"{license_id}. The licenses of the training data and of the first weights hold as well.",
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


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
    usage = [
        "```python",
        "from transformers import AutoModelForCausalLM",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{card_name(job)}"{", trust_remote_code=True" * bool(code)})',
        "```",
        *(["", f"`trust_remote_code=True` runs code of this folder: {trusted}."] if code else []),
        *([f"Copy {' and '.join(missing)} from the release of this architecture into it first."] if missing else []),
    ]
    front_matter = ("---", yaml.safe_dump(header, sort_keys=False).rstrip(), "---", "")
    write_card(path / "README.md", job, config["model_type"], usage, front_matter)


def _training(training: Training) -> Iterator[str]:
    """Yield the lines about results, data and configuration of a run."""
    last: dict[str, Any] = {}
    for record in training.records:
        scores = record.get("evaluation")
        named = {name: record.get(field) for field, name in _FIGURES.items()}
        named |= {_plain(name): score for name, score in scores.items()} if isinstance(scores, dict) else {}
        last |= {name: value for name, value in named.items() if isinstance(value, int | float)}
    if last:
        rows = (
            f"| {name} | {f'{value:,}' if isinstance(value, int) else f'{value:.4g}'} |" for name, value in last.items()
        )
        yield from ("## Results", "", "| | |", "|---|---:|", *rows, "")
    if isinstance(data := training.config.get("data"), Mapping):
        told = {key: data[key] for key in _DATA if data.get(key) is not None}
        if isinstance(data.get("train"), list):
            # without the folders of a machine, and what signs a URL
            told["train"] = [Path(str(name).partition("?")[0]).name for name in data["train"]]
        yield from ("## Data", "", *_fenced(told), "")
    yield from (
        "## Training configuration",
        "",
        *_fenced({group: training.config[group] for group in _GROUPS if group in training.config}),
    )


def _fenced(values: Mapping[str, Any]) -> Iterator[str]:
    text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True).rstrip()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    yield from (f"{fence}yaml", text, fence)


def _plain(text: str) -> str:
    """Return a text of somebody's file so that Markdown shows it as it is, on one line."""
    return re.sub(r"([!-,;-@[-^`{-~])", r"\\\1", shown(text))
