"""The algorithms of a collective, which give the same result, and a trial of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from pangu.collectives.reduce import start_all_gather, start_reduce_scatter
from pangu.topology.mesh import Algorithms
from pangu.topology.recorder import AxisGroup


class Collective(NamedTuple):
    """An all-gather or a reduce-scatter that a group repeats."""

    kind: str
    """`gather` or `scatter`."""
    group: AxisGroup
    numel: int
    """Elements of all ranks together, a multiple of their number."""
    dtype: torch.dtype

    @property
    def algorithms(self) -> list[str]:
        """The preferred one first. All add up in the order of the ranks: an element's offset in a message must not
        change its sum. gloo's own reduce-scatter adds up in ring order, which is the same for two ranks only."""
        if dist.get_backend(self.group.process_group) != "gloo":
            return ["own"]
        return ["exchange", "own"] if self.kind == "gather" or self.group.size == 2 else ["exchange"]

    def trial(self, algorithm: str) -> Callable[[], object]:
        """The collective once, on a CPU."""
        whole = torch.zeros(self.numel, dtype=self.dtype)
        part = torch.zeros(self.numel // self.group.size, dtype=self.dtype)
        if self.kind == "gather":
            return lambda: start_all_gather(whole, part, self.group, Algorithms(gather=algorithm)).wait()
        return lambda: start_reduce_scatter(part, whole, self.group, Algorithms(scatter=algorithm)).wait()
