"""Folders saved by the library datasets (`save_to_disk`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pangu.common.errors import UserError, shown
from pangu.common.files import read_json_object


def saved_dataset(folder: Path, folders: Sequence[str]) -> list[Path] | None:
    """Return the data files of a saved dataset in order, [] if its splits are in `folders`, None for other folders.

    Other files of the library, e.g. results of `map`, are excluded. Raises UserError for several splits, or for a
    selection of rows that is stored separately.
    """
    if (folder / "dataset_dict.json").is_file():
        if len(folders) > 1:
            raise UserError(f"{folder}: has the splits {', '.join(folders)}; name one, e.g. {folder / folders[0]}")
        return []
    state = read_json_object(folder / "state.json")
    files = state.get("_data_files")
    if not isinstance(files, list):
        return None
    if any(state.get(key) for key in ("_indices_files", "_indices_data_files")):
        raise UserError(f"{folder}: stores the order of its rows separately; save it again after flatten_indices()")
    names = [file.get("filename") if isinstance(file, dict) else None for file in files]
    if wrong := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise UserError(f"{folder / 'state.json'}: {shown(wrong[0])} is not the name of a data file")
    return [folder / name for name in names if isinstance(name, str)]
