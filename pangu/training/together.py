"""Work that only some processes do, with errors that all of them learn of: nobody waits for a process that gave up."""

from __future__ import annotations

from collections.abc import Callable

from pangu.collectives.reduce import gather_objects
from pangu.config.errors import UserError
from pangu.topology.mesh import Mesh


def together(mesh: Mesh, action: Callable[[], object], *, here: bool) -> None:
    """Run `action` on the processes where `here` is true; all return when all have finished.

    Raises:
        UserError: on every process, with the first message, if `action` raised one on any.
    """
    message = None
    if here:
        try:
            action()
        except UserError as error:
            message = str(error)
    messages = [text for text in gather_objects(message, mesh.group("world")) if text is not None]
    if messages:
        raise UserError(messages[0])
