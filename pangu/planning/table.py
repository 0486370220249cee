"""Tables of plans, for people. Nothing here needs torch."""

from __future__ import annotations

from rich.table import Table


def make_table(*columns: str) -> Table:
    """A table without lines; columns of numbers are set right."""
    table = Table(box=None, header_style="italic", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in ("calls", "tensor", "sent by each rank") else "left")
    return table
