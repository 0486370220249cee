"""Upload of an export to the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from pangu.common.errors import UserError, shown

T = TypeVar("T")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
"""Full name of a model on the hub: a repository of a user or an organization."""


class HubRepository:
    """Model repository on the Hugging Face hub that an export goes to."""

    def __init__(self, name: str) -> None:
        """Check that this machine reaches the hub with a token; raise `UserError` if it does not."""
        self._name = name
        try:
            library = import_module("huggingface_hub")
        except ImportError as error:
            raise UserError(f"--push-to-hub {name}: huggingface_hub is missing: pip install huggingface_hub") from error
        if not library.get_token():
            fix = "set HF_TOKEN to one with write access, or run `hf auth login`"
            raise UserError(f"--push-to-hub {name}: no access token for the hub: {fix}")
        self._api: Any = library.HfApi()
        self._ask(self._api.whoami, "the hub does not respond, or rejects the token", "check HF_TOKEN and the network")

    def upload(self, folder: Path, public: bool) -> str:
        """Create the repository unless it exists, private unless `public`, and return its address."""
        fix = f"{folder} is complete: upload it with `hf upload {self._name} {folder}`"
        name, failed = self._name, "the upload failed"
        place = {"repo_id": name, "private": not public, "exist_ok": True}
        address = self._ask(lambda: self._api.create_repo(**place), failed, fix)
        upload = {"repo_id": name, "folder_path": folder, "commit_message": "Upload an export of pangu"}
        self._ask(lambda: self._api.upload_folder(**upload), failed, fix)
        return str(address)

    def _ask(self, action: Callable[[], T], problem: str, fix: str) -> T:
        try:
            return action()
        except Exception as error:  # its HTTP library's errors have no common base
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"--push-to-hub {self._name}: {problem} ({shown(reason)}); {fix}") from error
