"""Journal of a long command's progress on disk: after a kill, it resumes at the last commit."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pangu.common.errors import reading

_CACHE_KIB = 1 << 18  # for the table of seen texts; the rest of it stays on disk


class Journal:
    """State and set of seen texts in one SQLite file with atomic commits. All methods raise UserError."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it, and lock it: one process at a time has it."""
        self._path = path
        with self._errors():
            self._base = sqlite3.connect(path, timeout=0.1, isolation_level=None)
            # A transaction is always open, ready for the next commit; the lock is kept between them
            for line in ("locking_mode=EXCLUSIVE", "synchronous=FULL", f"cache_size=-{_CACHE_KIB}"):
                self._base.execute(f"PRAGMA {line}")
            self._base.execute("BEGIN EXCLUSIVE")
            self._base.execute("CREATE TABLE IF NOT EXISTS state (value TEXT)")
            self._base.execute("CREATE TABLE IF NOT EXISTS texts (digest BLOB PRIMARY KEY) WITHOUT ROWID")
            self._base.execute("CREATE TABLE IF NOT EXISTS bands (band INTEGER PRIMARY KEY)")
            row = self._base.execute("SELECT value FROM state").fetchone()
            self.state: dict[str, Any] | None = None if row is None else json.loads(row[0])
            """Last committed state; None if there is none."""

    def commit(self, state: dict[str, Any]) -> None:
        """Write the state to disk, with all texts seen before."""
        with self._errors():
            self._base.execute("DELETE FROM state")
            self._base.execute("INSERT INTO state VALUES (?)", (json.dumps(state),))
            self._base.execute("COMMIT")
            self._base.execute("BEGIN EXCLUSIVE")
        self.state = state

    def unseen(self, digests: list[bytes]) -> NDArray[np.bool_]:
        """Return which of the digests are new, one by one, and mark them as seen."""
        insert = "INSERT OR IGNORE INTO texts VALUES (?)"
        with self._errors():
            return np.array([self._base.execute(insert, (digest,)).rowcount == 1 for digest in digests], dtype=bool)

    def unlike(self, bands: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows of [documents, bands] share no band with any row that was unlike all before it."""
        find = f"SELECT 1 FROM bands WHERE band IN ({', '.join('?' * bands.shape[1])}) LIMIT 1"
        new = np.zeros(len(bands), dtype=bool)
        with self._errors():
            for number, row in enumerate(bands.tolist()):
                new[number] = self._base.execute(find, row).fetchone() is None
                if new[number]:
                    self._base.executemany("INSERT OR IGNORE INTO bands VALUES (?)", ((band,) for band in row))
        return new

    def _errors(self) -> Any:
        fix = f"make sure that no other command writes there, or remove {self._path.parent} to start over"
        return reading(self._path, sqlite3.Error, ValueError, rule="cannot be used", fix=fix)

    def close(self) -> None:
        """Close the file without a commit."""
        self._base.close()
