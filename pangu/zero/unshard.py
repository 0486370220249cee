"""Unshards flat parameters: after a step what others updated (stages 1 and 2), around each use at stage 3."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pangu.collectives.reduce import Completion, Handle, start_all_gather
from pangu.models.language_model import ModuleHooks
from pangu.topology.copy_stream import CopyStream
from pangu.topology.mesh import Mesh
from pangu.zero.flat_parameter import FlatParameter
from pangu.zero.grouping import Regions, backward_order


class _Passing(Function):
    """Calls one function when forward passes here, and another when backward does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_forward: Callable[[], None], in_backward: Callable[[], None]) -> Tensor:
        ctx.in_backward = in_backward
        in_forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.in_backward()
        return grads[0], None, None


def _nothing() -> None:
    pass


class Unsharder(ModuleHooks):
    """Unshards the weights before a module uses them.

    At stage 3 a flat parameter is gathered while the module before it computes and resharded after its use, so at most
    two (and a tied word embedding) are whole at a time; backward gathers them again. A chunk that a schedule unshards
    stays whole from its first use until `reshard`.
    """

    def __init__(
        self,
        uses: Mapping[int, Mapping[str, Sequence[FlatParameter]]],
        regions: Regions,
        trained: Collection[str],
        mesh: Mesh,
        stream: CopyStream,
        overlap: bool,
    ) -> None:
        """`uses`: chunk -> module, in the order of forward -> its flat parameters. `trained`: modules whose output has
        a gradient whatever their input is. `stream`: for copies from the host. `overlap` false: gather when needed,
        not before."""
        self.uses = {module: flats for of_chunk in uses.values() for module, flats in of_chunk.items()}
        self.regions, self.trained, self.overlap, self._mesh = regions, trained, overlap, mesh
        self.flat_parameters = list(dict.fromkeys(flat for flats in self.uses.values() for flat in flats))
        self._stream = stream
        self._of_chunk = {
            chunk: {flat for flats in modules.values() for flat in flats} for chunk, modules in uses.items()
        }
        alone = len(uses) == 1
        self.forward = {a: b for names in uses.values() for a, b in pairwise(names) if alone or a != regions.shared}
        """Module -> the next one in forward; none after one that several chunks follow."""

        def order(names: Iterable[str]) -> list[str]:
            return backward_order(list(names), trained, regions)

        self.backward = {a: b for names in uses.values() for a, b in pairwise(order(names))}
        self._handles: dict[FlatParameter, Handle] = {}
        """Gathers and copies in flight."""
        self._whole: set[FlatParameter] = set()
        """Those of stage 3 that are unsharded."""
        self._users = dict.fromkeys(self.flat_parameters, 0)
        self._kept: set[FlatParameter] = set()
        """Those of chunks that a schedule has unsharded."""

    def publish(self, flats: Iterable[FlatParameter]) -> None:
        """Begin to send every rank what the others have updated; gathered weights are out of date."""
        for flat in flats:
            self._finish(flat)
            with self._stream.after_computation():
                flat.publish()
                if flat.sharding.stage == 3:
                    self._reshard(flat)
                elif flat.sharding.size > 1:
                    self._handles[flat] = self._gather(flat, flat.weights, flat.local)
                elif flat.main_on_host:
                    self._handles[flat] = self._copies()
            if not self.overlap:
                self._finish(flat)

    def wait(self, flats: Iterable[FlatParameter] | None = None) -> None:
        """For all that is on its way, or of it for these."""
        for flat in list(self._handles if flats is None else flats):
            self._finish(flat)

    @contextmanager
    def gathered(self, flat: FlatParameter) -> Iterator[Tensor]:
        """Yield the weights of a flat parameter as a step computes with them, outside of any step. The ranks that share
        it call this together."""
        self._start(flat)
        self._finish(flat)
        yield flat.weights
        self._reshard(flat)

    def unshard(self, chunk: int) -> None:
        """Keep the weights of a chunk, once gathered, until `reshard`."""
        self._kept |= self._of_chunk[chunk]

    def reshard(self, chunk: int) -> None:
        self._kept -= self._of_chunk[chunk]
        for flat in self._of_chunk[chunk]:
            self._finish(flat)
            self._reshard(flat)

    def before(self, module: str, x: Tensor) -> Tensor:
        trained = module in self.trained and module not in self.regions.lookups
        if torch.is_grad_enabled() and trained and not x.requires_grad:
            # all below is frozen: backward ends here, but has to come as far as this to end the module's use
            x = x.detach().requires_grad_()
        return _Passing.apply(x, partial(self.begin, module, self.forward), partial(self.end, module, self.backward))

    def after(self, module: str, x: Tensor) -> Tensor:
        goes_on = module == self.regions.last and x.requires_grad  # its backward comes next
        end = partial(self.end, module, self.forward)
        begin = partial(self.begin, module, self.backward, goes_on)
        return _Passing.apply(x, _nothing if goes_on else end, _nothing if module in self.regions.lookups else begin)

    def in_use(self, flat: FlatParameter) -> bool:
        return self._users[flat] > 0

    def begin(self, module: str, following: Mapping[str, str], goes_on: bool = False) -> None:
        """Wait for the weights of a module, and begin to gather those of the next one."""
        # the gather of a module must be behind the computation of the one before it, or the device waits for it:
        #
        #     computing   layers.0      layers.1      layers.2          head
        #     gathering   layers.1      layers.2      head              -
        #     whole       layers.0, 1   layers.1, 2   layers.2, head    head
        for flat in [] if goes_on else self.uses.get(module, ()):
            self._users[flat] += 1
            self._start(flat)
            self._finish(flat)
        for flat in self.uses[following[module]] if self.overlap and module in following else []:
            self._start(flat)

    def end(self, module: str, following: Mapping[str, str]) -> None:
        """Reshard what a module used, unless the next one needs it."""
        next_uses = self.uses[following[module]] if module in following else []
        for flat in self.uses.get(module, ()):
            self._users[flat] -= 1
            if flat not in next_uses:
                self._reshard(flat)

    def _start(self, flat: FlatParameter) -> None:
        if flat.sharding.stage == 3 and flat not in self._whole and flat not in self._handles:
            with self._stream.after_computation():
                # not through the tensor that autograd knows: what it saved of it is still the same weights
                whole, local = flat.allocate().data, flat.local
                if flat.local_on_host:
                    local = whole[flat.span].copy_(local, non_blocking=True)
                gather = self._gather(flat, whole, local)
                self._handles[flat] = self._copies() if flat.sharding.size == 1 else gather

    def _gather(self, flat: FlatParameter, whole: Tensor, local: Tensor) -> Handle:
        return start_all_gather(whole, local, self._mesh.group(flat.sharding.axis("gather")), self._mesh.algorithms)

    def _copies(self) -> Handle:
        return Completion(partial(CopyStream.wait, self._stream.record()))

    def _finish(self, flat: FlatParameter) -> None:
        if flat in self._handles:
            self._handles.pop(flat).wait()
            self._whole.add(flat)

    def _reshard(self, flat: FlatParameter) -> None:
        if flat.sharding.stage == 3 and flat in self._whole and not self._users[flat] and flat not in self._kept:
            self._whole.discard(flat)
            flat.free()
