"""Interchangeable algorithms of a collective, and a trial of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from pangu.collectives.reduce import start_all_gather, start_reduce_scatter
from pangu.topology.mesh import Algorithms
from pangu.topology.recorder import AxisGroup


class RepeatedCollective(NamedTuple):
    """All-gather or reduce-scatter that a group repeats, with its message size."""

    kind: str
    """Kind of the collective: `gather` or `scatter`."""
    group: AxisGroup
    numel: int
    """Number of elements of the full tensor, a multiple of the group size."""
    dtype: torch.dtype

    @property
    def algorithms(self) -> list[str]:
        """Names of the algorithms that give bitwise equal results, the preferred one first.

        All add in rank order: an element's offset in a message must not change its sum. gloo's own reduce-scatter adds
        in ring order, which is the same for two ranks only.
        """
        if dist.get_backend(self.group.process_group) != "gloo":
            return ["own"]
        return ["exchange", "own"] if self.kind == "gather" or self.group.size == 2 else ["exchange"]

    def trial(self, algorithm: str) -> Callable[[], object]:
        """Return a function that runs the collective once, on CPU tensors."""
        whole = torch.zeros(self.numel, dtype=self.dtype)
        part = torch.zeros(self.numel // self.group.size, dtype=self.dtype)
        if self.kind == "gather":
            return lambda: start_all_gather(whole, part, self.group, Algorithms(gather=algorithm)).wait()
        return lambda: start_reduce_scatter(part, whole, self.group, Algorithms(scatter=algorithm)).wait()
