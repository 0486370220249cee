"""Work that only some processes do, with errors that all of them learn of: nobody waits for a process that gave up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pangu.collectives.reduce import gather_objects
from pangu.config.errors import UserError
from pangu.topology.mesh import Mesh

T = TypeVar("T")


def together(mesh: Mesh, action: Callable[[], T], *, here: bool) -> list[T | None]:
    """Run `action` on the processes where `here` is true; all return when all have finished.

    Returns:
        On every process what `action` returned on each, in rank order; None where it did not run.

    Raises:
        UserError: on every process, with the first message, if `action` raised one on any.
    """
    result, message = None, None
    if here:
        try:
            result = action()
        except UserError as error:
            message = str(error)
    answers = gather_objects((result, message), mesh.group("world"))
    messages = [text for _, text in answers if text is not None]
    if messages:
        raise UserError(messages[0])
    return [value for value, _ in answers]
