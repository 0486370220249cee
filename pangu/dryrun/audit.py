"""Looks on while a step is carried out: memory, launches, products, collectives, synchronizations, copies, races."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from pangu.dryrun.device import FakeDevice
from pangu.dryrun.memory import OWNED, Memory
from pangu.dryrun.operators import (
    COLLECTIVES,
    Operator,
    causal_share,
    count_flops,
    is_causal,
    moved_bytes,
    operator_of,
    size_of,
    tensors_in,
)
from pangu.dryrun.races import HOST, Begun, Clock, OnItsWay, RaceDetector, Stream
from pangu.training.determinism import REFUSED, REPLACED

_PACKAGE = f"{Path(__file__).resolve().parent.parent}/"
_OWN = f"{Path(__file__).resolve().parent}/"
_ANY_ORDER = REPLACED | REFUSED
_FILLS = ("all_gather", "reduce_scatter", "all_to_all", "receive")
"""Collectives that fill a buffer of their own."""
_DEVICE = torch.ops.prim.device.default
"""Asked most often, and answered by the tensor itself."""
_WORKS: tuple[type, ...] = (dist.Work, torch._C._distributed_c10d.FakeWork)


class Scope(NamedTuple):
    """Whom operations are counted for, and memory."""

    action: Any = None
    """What the schedule has the rank do; None: nothing, it begins or ends a step."""
    part: int = 0
    """Place in the log of a recorder (see `spans`)."""
    owner: str = ""
    """Kind of memory (see `memory.KINDS`) of whoever has taken over, such as `gathered`; "": the model computes."""


class Audit(TorchDispatchMode):
    """Counts what is done to the tensors of one device within the block."""

    def __init__(
        self,
        device: torch.device,
        groups: Mapping[str, str],
        fake: FakeDevice | None = None,
        vocab: int = 0,
        share: float = 1.0,
    ) -> None:
        """
        Args:
            device: whose memory and operations are looked at.
            groups: name of a process group -> the axis of the mesh that it lies along.
            fake: what tells streams apart; None: there is one.
            vocab: words of which this rank has logits.
            share: of the scores on and below the diagonal, what a kernel computes that skips those above it.
        """
        super().__init__()
        self.counts: dict[Scope, Counter[tuple[Any, ...]]] = defaultdict(Counter)
        """Scope -> what was counted -> how often, or how much of it."""
        self.scope = Scope()
        self.staying: Counter[str] = Counter()
        """Kind -> bytes that the second micro-batch leaves behind until the step ends."""
        self.findings: Counter[str] = Counter()
        """What must not be: operations across devices, tensors of the host in collectives of the device."""
        self.used_groups: set[str] = set()
        """Names of the process groups that sent something: a backend makes a communicator when it is first used."""
        self.thorough = True
        """Look for races, and note where memory is allocated."""
        self.detector = RaceDetector()
        self.memory = Memory(self._freed)
        self.pinned = Memory(self.detector.forget)
        """Memory of the host that copies read and write beside the computation."""
        self._device, self._groups, self._fake, self._vocab, self._share = device, groups, fake, vocab, share
        self._works: dict[int, OnItsWay] = {}
        self._begun: list[Begun] = []
        """Collectives since the last product."""
        self._answered: object = None
        """The storage that was read last; reading its elements one by one is one copy."""
        self._patches = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks: true would have its compiler told to stay away at every operation, and nothing compiles here."""
        return False

    def __enter__(self) -> Audit:
        waits = [(kind, name) for kind in _WORKS for name in ("wait", "is_completed") if name in vars(kind)]
        for kind, name in waits:
            self._patches.enter_context(patch.object(kind, name, self._watched(getattr(kind, name), name == "wait")))
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self.memory.resize(storage, self.place())
            return result

        self._patches.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    @contextmanager
    def owned(self, kind: str) -> Iterator[None]:
        """Within the block, what is allocated is of this kind, and what is done is counted for its owner."""
        before = self.scope.owner
        self.scope = self.scope._replace(owner=kind)
        try:
            yield
        finally:
            self.scope = self.scope._replace(owner=before)

    def by_action(self) -> dict[Any, Counter[tuple[Any, ...]]]:
        """Action, None for what is done once a step -> what was counted."""
        actions: dict[Any, Counter[tuple[Any, ...]]] = defaultdict(Counter)
        for scope, counts in self.counts.items():
            actions[scope.action].update(counts)
        return actions

    def place(self) -> str:
        """The innermost line of the package that is being run, or the operation of backward."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(_PACKAGE) and not name.startswith(_OWN):
                return f"{name[len(_PACKAGE) :]}:{frame.f_lineno}"
            frame = frame.f_back
        node = torch._C._current_autograd_node()
        return "backward" if node is None else f"backward ({node.name()})"

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is _DEVICE:
            return args[0].device
        if function.namespace == "c10d":
            return self._collective(function, args, kwargs)
        operator = operator_of(function)
        if operator.view:
            return function(*args, **kwargs)
        inputs = list(tensors_in((*args, *kwargs.values())))
        if operator.answers and not (operator.name == "index" and all(t.dtype == torch.int64 for t in inputs[1:])):
            self._answer(inputs)
            if operator.name == "_local_scalar_dense":
                return _one(args[0]) if isinstance(args[0], torch._subclasses.FakeTensor) else function(*args, **kwargs)
        elif operator.launches:
            self._answered = None
            if self._is_mixed(operator, inputs):
                args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(self._device), (args, kwargs))
        result = function(*args, **kwargs)
        outputs = list(tensors_in((result,)))
        for tensor in outputs:
            self._allocated(tensor, kwargs.get("pin_memory", False))
        if operator.launches and (inputs or outputs):
            self._launched(operator, function, args, kwargs, inputs, outputs, result)
        return result

    def _allocated(self, tensor: Tensor, pinned: bool) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type == self._device.type:
            if storage._cdata not in self.memory:
                action, where = self.scope.action, ""
                if self.thorough:
                    place = self.place()
                    where = place if action is None else f"{place}, {action}"
                    self.detector.allocate(storage._cdata, self._stream())
                self.memory.add(storage, self._kind(tensor), where, action and action.micro)
        elif pinned:
            self.pinned.add(storage, "activations", "")

    def _kind(self, tensor: Tensor) -> str:
        if self.scope.owner:
            return self.scope.owner
        return "logits" if self._vocab and tensor.dim() > 1 and tensor.shape[-1] == self._vocab else "activations"

    def _answer(self, inputs: list[Tensor]) -> None:
        on_device = [tensor for tensor in inputs if tensor.device.type == self._device.type != "cpu"]
        for tensor in on_device:
            storage = tensor.untyped_storage()
            if storage is not self._answered:
                self._count("host_sync", self.place())
                self._host_waits(self._stream())
            self._answered = storage

    def _is_mixed(self, operator: Operator, inputs: list[Tensor]) -> bool:
        """Whether tensors of two devices meet other than in a copy; single numbers of the host may."""
        mixed = operator.name not in ("copy_", "_to_copy") and len({t.device.type for t in inputs if t.dim()}) > 1
        if mixed:
            self.findings[f"{self.place()}: {operator.name} of tensors on different devices"] += 1
        return mixed

    def _launched(
        self,
        operator: Operator,
        function: OpOverload,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
        outputs: list[Tensor],
        result: Any,
    ) -> None:
        devices = {tensor.device.type for tensor in (*inputs, *outputs)}
        written = list(tensors_in(args[i] for i in operator.writes if i < len(args)))
        if operator.name in ("copy_", "_to_copy") and len(devices) > 1:
            self._copied(inputs[-1], (written or outputs)[0], kwargs.get("non_blocking", len(args) > 2 and args[2]))
            return
        stream = self._stream() if self._device.type in devices else HOST
        made = written + [tensor for tensor in outputs if all(tensor is not one for one in written)]
        self._touched(stream, inputs, made)
        if stream == HOST:
            return
        self._count("launches")
        if operator.name in _ANY_ORDER and (operator.name != "cumsum" or inputs[0].is_floating_point()):
            self._count("any_order", operator.name)
        if operator.product:
            self.hide(stream)
            # without the sum that a product is added to
            shapes = tuple(tuple(tensor.shape) for tensor in inputs if all(tensor is not made for made in outputs))
            format_ = str(inputs[0].dtype).removeprefix("torch.")
            causal = is_causal(function, args, kwargs)
            computed = self._share * causal_share(operator.name, shapes) if causal else 1.0
            self._count("product", operator.name, shapes, format_, computed)
            flops = count_flops(function, args, kwargs, result)
            self._count("flops", by=round(flops * self._share) if causal else flops)
        else:
            self._count("memory_bound_bytes", by=moved_bytes(operator, inputs, made))

    def _copied(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        """A copy between host and device. One that blocks, or whose memory of the host is pageable, holds the host up
        until it is done."""
        stream, host = self._stream(), source if source.device.type == "cpu" else target
        if host.untyped_storage()._cdata in self.pinned and non_blocking:
            self._touched(stream, [source], [target])
            self._count("copy_bytes", by=source.nbytes)
            return
        if source.device.type != "cpu" or source.dim():
            self._count("blocking_copy", self.place())
        self._touched(stream, [source], [target])
        if source.device.type != "cpu":
            self._host_waits(stream)

    def _collective(self, function: OpOverload, args: Any, kwargs: Any) -> Any:
        self._works = {key: one for key, one in self._works.items() if sys.getrefcount(one.work) > 2}
        kind, read, written = COLLECTIVES[function._schema.name.partition("::")[2]]
        if kind == "all_to_all" and sum(map(bool, args[4])) == 1:
            kind = "send"  # all that a rank has goes to one other
        sources, targets = (list(tensors_in(args[i] for i in places)) for places in (read, written))
        is_group = (isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()) for value in args)
        group = dist.ProcessGroup.unbox(args[list(is_group).index(True)]).group_name
        self.used_groups.add(group)
        axis = self._groups.get(group, "pipeline")
        if kind in _FILLS:
            for tensor in targets:
                self.memory.label(tensor, "communication", unless=OWNED)
        self._count("calls", axis, kind)
        self._count("bytes", axis, kind, by=max(size_of(sources), size_of(targets)))
        if any(tensor.device.type != self._device.type for tensor in (*sources, *targets)):
            self.findings[f"{self.place()}: a tensor of the host in {kind} over {axis}"] += 1
        stream = f"{kind} over {axis}"
        self.detector.order(self._clock(), stream)
        self._touched(stream, sources, targets)
        result = function(*args, **kwargs)
        for tensor in tensors_in((result,)):
            self._allocated(tensor, False)
        work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
        clock, size = dict(self.detector.clock(stream)), max(size_of(sources), size_of(targets))
        self._begun.append(Begun(stream, clock.get(stream, 0), self.scope, axis, kind, size))
        buffers = [tensor.untyped_storage() for tensor in sources + targets]
        self._works[id(work)] = OnItsWay(work, clock, buffers, self._begun[-1])
        return result

    def _watched(self, original: Any, waits: bool) -> Any:
        """`wait` or `is_completed` of a collective: from then on the stream, or the host, knows that it is over. A dry
        run's collectives are over as soon as they are asked."""

        def watched(work: Any, *args: Any) -> Any:
            done = original(work, *args) or isinstance(work, _WORKS[1])
            if done and id(work) in self._works:
                pending = self._works.pop(id(work))
                if not waits and pending.begun in self._begun:  # who asks goes on either way: nothing is held up by it
                    self._begun.remove(pending.begun)
                    self._count_hidden(pending.begun)
                self.detector.order(pending.clock, self._stream() if waits else HOST)
            return done

        return watched

    def hide(self, computing: Stream = 0) -> None:
        """A product hides what has begun and what its stream has not waited for, be it another stream's wait."""
        seen = self.detector.clock(computing)
        for one in self._begun:
            if seen.get(one.stream, 0) < one.tick:
                self._count_hidden(one)
        self._begun.clear()

    def _count_hidden(self, one: Begun) -> None:
        self.counts[one.scope]["hidden_calls", one.axis, one.kind] += 1
        self.counts[one.scope]["hidden_bytes", one.axis, one.kind] += one.size

    def _touched(self, stream: Stream, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        self._follow()
        if not self.thorough:
            self.detector.tick(stream)
            return
        reads, writes = self._keys(read), self._keys(written)
        if reads or writes:
            self.detector.access(stream, reads - writes, writes, self.place)

    def _keys(self, tensors: Iterable[Tensor]) -> set[int]:
        """Buffers that two may touch at a time: the device's, and of the host those that copies touch."""
        keys = {tensor.untyped_storage()._cdata for tensor in tensors}
        return {key for key in keys if key in self.memory or key in self.pinned}

    def _freed(self, key: int) -> None:
        self._follow()
        self.detector.free(key)

    def _stream(self) -> Stream:
        return 0 if self._fake is None else self._fake.current_stream()

    def _clock(self) -> Clock:
        self._follow()
        return self.detector.clock(self._stream())

    def _follow(self) -> None:
        if self._fake is not None:
            self.detector.follow(self._fake.log())

    def _host_waits(self, stream: Stream) -> None:
        self._follow()
        self.detector.order(self.detector.clock(stream), HOST)

    def _count(self, *key: Any, by: int = 1) -> None:
        self.counts[self.scope][key] += by


def _one(tensor: Tensor) -> float | int | bool:
    """What a number without a value is said to be."""
    return 1.0 if tensor.is_floating_point() else tensor.dtype == torch.bool or 1
