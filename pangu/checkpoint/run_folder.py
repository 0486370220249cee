"""Run folder: configuration in config.yaml, checkpoints, and a copy of the tokenizer."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from pangu.common.errors import UserError, reading, writing
from pangu.common.files import flush, new_path, refuse_links, remove, write_atomically
from pangu.config.data import DataConfig, TokenizerConfig
from pangu.config.schema import RunConfig
from pangu.data.sources import tokenizer_of

_TOKENIZER_FILE, _TOKENIZER_FOLDER = "tokenizer.model", "tokenizer"
_TOKENIZER_NAMES = (
    *("tokenizer", "tokenization", "vocab", "merges", "special_tokens", "added_tokens", "spiece", "sentencepiece"),
    "chat_template",
)
"""Prefixes of the names of tokenizer files in a Hugging Face folder."""
GENERATION = "transformers.json"
"""File with ids and sampling of a model that came from transformers, for exporting it again."""
CHAT_TEMPLATE = "chat_template.jinja"
"""File in a run folder, and in an export, with the chat template of fine-tuning."""
FOLDERS = ("checkpoints", "data", "plots", "tensorboard", "trackers", "wandb")


def make_run_folder(output: Path) -> None:
    """Create the folder of a run; raises UserError if it is not writable or holds links, which are never followed."""
    with writing(output):
        refuse_links(output / name for name in FOLDERS)
        refuse_links(sorted(output.glob("checkpoints/step-*")))
        (output / "plots").mkdir(parents=True, exist_ok=True)


def flush_figures(output: Path) -> None:
    """Flush metrics.jsonl to disk: a run that continues counts on figures of the steps before. Raises UserError."""
    figures = output / "metrics.jsonl"
    if figures.exists():  # a save outside of a run has none
        with writing(figures):
            flush(figures)


def save_config(folder: Path, config: RunConfig) -> None:
    """Write config.yaml. Raises UserError."""
    content = yaml.dump(asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    with writing(folder):
        write_atomically(folder / "config.yaml", content.encode())


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Return True: never write aliases."""
        return True


def identity(config: RunConfig) -> dict[str, Any]:
    """Return the keys that must not change within a run; the attention kernel may, it computes the same function."""
    model = asdict(replace(config.model, attention="auto", ffn=config.model.ffn_size))
    del model["attention"]
    values = {f"model.{key}": list(value) if isinstance(value, tuple) else value for key, value in model.items()}
    return values | {"optimizer.name": config.optimizer.name, "train.seed": config.train.seed}


def kept_tokenizer(run: Path, data: DataConfig) -> TokenizerConfig | None:
    """Return the tokenizer of a run: the copy in its folder, or else that of its data."""
    tokenizer = tokenizer_of(data)
    copies = [run / name for name in (_TOKENIZER_FILE, _TOKENIZER_FOLDER) if (run / name).exists()]
    return replace(tokenizer, path=str(copies[0])) if tokenizer and copies else tokenizer


def keep_tokenizer(run: Path, tokenizer: TokenizerConfig) -> str:
    """Copy a tokenizer atomically into a run folder; return its name there, empty for one without files.

    Raises UserError if it is missing, or a foreign folder's link leads out of it.
    """
    if not tokenizer.path:
        return ""
    source = Path(tokenizer.path)
    name = _TOKENIZER_FOLDER if source.is_dir() else _TOKENIZER_FILE
    if source.resolve() == (run / name).resolve():
        return name
    if not source.exists():
        raise UserError(f"data.tokenizer.path = {source}: does not exist")
    with writing(run), new_path(run / name) as partial:
        if source.is_dir():
            partial.mkdir()
            # without a class in tokenizer_config.json transformers looks into config.json
            config = source / "config.json"
            for file in [*tokenizer_files(source), *([config] if config.is_file() and not config.is_symlink() else [])]:
                shutil.copy(file, partial)
        else:
            shutil.copy(source, partial)
        for other in (_TOKENIZER_FILE, _TOKENIZER_FOLDER):
            remove(run / other)
    return name


def keep_generation(run: Path, checkpoint: Path) -> None:
    """Copy `GENERATION`, if there is one, from the run folder of the checkpoint whose weights a run begins with."""
    file = checkpoint.resolve().parent.parent / GENERATION
    if file.is_file():
        with writing(run):
            write_atomically(run / GENERATION, file.read_bytes())


def keep_template(run: Path, text: str | None) -> None:
    """Write the chat template of the data into a run folder; None removes that of earlier data. Raises UserError."""
    with writing(run):
        remove(run / CHAT_TEMPLATE)
        if text is not None:
            write_atomically(run / CHAT_TEMPLATE, text.encode())


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file. Raises UserError."""
    with reading(path, UnicodeDecodeError, rule="is not UTF-8"):
        return path.read_text(encoding="utf-8")


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the tokenizer files in a Hugging Face folder. Raises UserError like `require_inside`."""
    files = sorted(file for file in folder.iterdir() if file.name.startswith(_TOKENIZER_NAMES) and file.is_file())
    for file in files:
        require_inside(folder, file)
    return files


def require_inside(folder: Path, file: Path) -> None:
    """Raise UserError for a link out of a foreign folder, as a copy could leak it; Hugging Face's cache may link."""
    target = file.resolve()
    folders = [folder.resolve(), folder.absolute().parent.parent / "blobs"]
    if file.is_symlink() and not any(target.is_relative_to(one.resolve()) for one in folders):
        raise UserError(
            f"{file}: is a link to {target}, outside the folder, so it is not copied; replace it with the file"
        )
