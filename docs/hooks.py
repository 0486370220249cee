"""Gathers the pages of the site: those of this folder; the READMEs, which are its first page; CONTRIBUTING and the page
of benchmarks. Links, which GitHub follows from where a page stands in the repository, become those of the site, the
reference gets its tables of keys, and lines of Chinese text are joined without spaces."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from line_breaks import join_lines
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority

from pangu.common.flat import flatten
from pangu.config.help import reference
from pangu.training.command import compose

OUTSIDE = {
    "README.md": "index.md",
    "README.zh.md": "index.zh.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "vulnerabilities.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages that do not stand in `docs`, and their places in the site."""
GATHERED = TemporaryDirectory()
KEYS = "<!-- keys -->"
"""Where the reference's tables of keys come."""
LINK = re.compile(r"(?<=\]\()(?!https?:|#)[^)#]+")
LANGUAGES = re.compile(r"^(?:English \| \[中文\]\S+|\[English\]\S+ \| 中文)(?: \| |\n)", re.MULTILINE)
"""The link to the other language, for which the site has a menu."""


@event_priority(100)  # before the plug-in that sorts pages by language
def on_config(config: MkDocsConfig) -> None:
    """Write all pages into one folder, from which the site is built."""
    root = Path(config.config_file_path).parent
    folder = Path(GATHERED.name)
    shutil.copytree(root / "docs", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    places = {
        path.relative_to(root).as_posix(): path.relative_to(root / "docs").as_posix()
        for path in (root / "docs").rglob("*.*")
    }
    places |= OUTSIDE
    for source, place in list(places.items()):
        if source.endswith(".md"):
            text = LANGUAGES.sub("", (root / source).read_text(encoding="utf-8"), count=1)
            if KEYS in text:
                text = text.replace(KEYS, reference(_defaults(root / "configs")))
            (folder / place).write_text(_turned(text, PurePosixPath(source), places, root), encoding="utf-8")
    config.docs_dir = str(folder)


def on_page_content(html: str, **_: object) -> str:
    """Return a page without the spaces that line breaks would be in Chinese text."""
    return join_lines(html)


def _defaults(configs: Path) -> dict[str, object]:
    """Return the value of each key in a run that chooses nothing, and of those that it does not have, under the first
    option of their group that has them."""
    groups = ("data", "lr_schedule", "optimizer", "precision")
    options = [f"{group}={path.stem}" for group in groups for path in sorted((configs / group).glob("*.yaml"))]
    values: dict[str, object] = {}
    for words in ([], *([option] for option in options)):
        values = flatten(compose(configs, words)) | values
    return values


def _turned(text: str, source: PurePosixPath, places: dict[str, str], root: Path) -> str:
    """A page with links between places in the site. A file that is no page comes into the site with the link; links to
    nothing stay: a strict build names them."""
    folder = PurePosixPath(places[str(source)]).parent

    def turned(link: re.Match[str]) -> str:
        target = os.path.normpath(source.parent / link[0])
        if target not in places and (root / target).is_file():
            (Path(GATHERED.name) / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / target, Path(GATHERED.name) / target)
            places[target] = target
        return os.path.relpath(places[target], folder) if target in places else link[0]

    return LINK.sub(turned, text)
