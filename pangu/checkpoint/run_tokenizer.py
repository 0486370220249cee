"""The copy of its tokenizer that a run folder keeps, so that it can be moved and used from anywhere."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from pangu.config.data import DataConfig, TokenizerConfig
from pangu.config.errors import UserError, writing
from pangu.config.files import new_path, remove
from pangu.data.sources import tokenizer_of

_FILE, _FOLDER = "tokenizer.model", "tokenizer"
_BEGINNINGS = (
    *("tokenizer", "tokenization", "vocab", "merges", "special_tokens", "added_tokens", "spiece", "sentencepiece"),
    "chat_template",
)


def kept_tokenizer(run: Path, data: DataConfig) -> TokenizerConfig | None:
    """The tokenizer of a run: the copy in its folder or, where there is none, the one that its data names."""
    tokenizer = tokenizer_of(data)
    copies = [run / name for name in (_FILE, _FOLDER) if (run / name).exists()]
    return replace(tokenizer, path=str(copies[0])) if tokenizer and copies else tokenizer


def keep_tokenizer(run: Path, tokenizer: TokenizerConfig) -> str:
    """Copy a tokenizer into a run folder, whole or not at all; returns its name there.

    Raises UserError if it is not there, or a foreign folder's link leads out of it.
    """
    source = Path(tokenizer.path)
    name = _FOLDER if source.is_dir() else _FILE
    if source.resolve() == (run / name).resolve():
        return name
    if not source.exists():
        raise UserError(f"the tokenizer {source} does not exist")
    with writing(run), new_path(run / name) as partial:
        if source.is_dir():
            partial.mkdir()
            # without a class in tokenizer_config.json transformers looks into config.json
            own = source / "config.json"
            for file in [*tokenizer_files(source), *([own] if own.is_file() and not own.is_symlink() else [])]:
                shutil.copy(file, partial)
        else:
            shutil.copy(source, partial)
        for other in (_FILE, _FOLDER):
            remove(run / other)
    return name


def tokenizer_files(folder: Path) -> list[Path]:
    """What of a Hugging Face folder belongs to its tokenizer. Raises UserError as `require_inside`."""
    found = sorted(file for file in folder.iterdir() if file.name.startswith(_BEGINNINGS) and file.is_file())
    for file in found:
        require_inside(folder, file)
    return found


def require_inside(folder: Path, file: Path) -> None:
    """Raise UserError for a link that leads out of a foreign folder: a copy would give away any file of this machine.

    Hugging Face's cache, whose snapshots are links into the folder of blobs beside them, is no danger.
    """
    target = file.resolve()
    homes = [folder.resolve(), folder.absolute().parent.parent / "blobs"]
    if file.is_symlink() and not any(target.is_relative_to(home.resolve()) for home in homes):
        raise UserError(
            f"{file}: is a link to {target}, out of the folder, and is not copied; put the file there itself"
        )
