"""Check that `pangu` is this package, which every program imports first, and the entry point of the command `pangu`.

A foreign package of that name, such as PyPI's library for text spacing, would end them in a traceback.
"""

import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    """Run the command `pangu`."""
    from pangu.cli import main  # noqa: PLC0415 - may be a foreign package's until the check below

    main()


_spec = find_spec("pangu")
if _spec is not None and Path(_spec.origin or "").resolve() != Path(__file__).resolve().parent / "pangu/__init__.py":
    _place = _spec.origin or ", ".join(_spec.submodule_search_locations or ())
    _fix = "uninstall it (pip uninstall pangu), or remove its folder from PYTHONPATH"
    print(f"{Path(sys.argv[0]).name}: error: {_place} is another package named pangu: {_fix}", file=sys.stderr)
    sys.exit(2)
