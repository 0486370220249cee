"""Command `python -m pangu`, the same as `pangu`."""

from pangu.cli import main

main()
