"""Audit of a step: memory, kernel launches, matmuls, collectives, host syncs, copies and data races."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from pangu.dryrun.device import FakeDevice, StreamEntry
from pangu.dryrun.memory import HOST, OWNED, Clock, LiveStorage, Memory, RaceDetector, Stream
from pangu.dryrun.operators import COLLECTIVES, moved_bytes, multiplied, operator_of, size_of, tensors_in
from pangu.schedule.spans import Collective, Matmul, Work
from pangu.training.determinism import REFUSED, REPLACED

_PACKAGE = f"{Path(__file__).resolve().parent.parent}/"
_OWN = f"{Path(__file__).resolve().parent}/"
_NOT_IN_RUNS = (_OWN, "<", *(f"{Path(torch.__file__).parent}/{part}" for part in ("_library", "_subclasses", "_ops")))
"""Code that only tensors without memory call: this package, its named tuples, and torch's handling of such tensors."""
_ANY_ORDER = REPLACED | REFUSED
_COPIES = ("copy_", "_to_copy")
_DEVICE = torch.ops.prim.device.default
"""Most frequent operator, which the tensor itself answers."""
_WORKS: tuple[type, ...] = (dist.Work, torch._C._distributed_c10d.FakeWork)


class _Started(NamedTuple):
    """Collective that has started, and may still be hidden by a matmul."""

    stream: Stream
    tick: int
    """Time of its start on its stream."""
    counts: Counter[tuple[Any, ...]]
    """Counter of the action that started it."""
    name: tuple[str, str, int]
    """Axis, kind and `Collective.ranks`."""
    nbytes: int

    def hide(self) -> None:
        self.counts["hidden_calls", *self.name] += 1
        self.counts["hidden_bytes", *self.name] += self.nbytes


@cache
def is_in_runs(file: str) -> bool:
    """Return whether a file's functions are called in real runs, not only where operators are counted."""
    return not file.startswith(_NOT_IN_RUNS)


class Audit(TorchDispatchMode):
    """Dispatch mode that counts the operations on the tensors of one device within the block."""

    def __init__(
        self,
        device: torch.device,
        groups: Mapping[str, str],
        fake: FakeDevice | None = None,
        vocab: int = 0,
        share: float = 1.0,
        thorough: bool = True,
    ) -> None:
        """Create an audit.

        Args:
            device: device whose memory and operations are audited.
            groups: mapping from the name of a process group to its mesh axis.
            fake: device that tells streams apart; None: there is one stream.
            vocab: vocabulary entries for which this rank has logits.
            share: fraction of the scores on and below the diagonal computed by a kernel that skips those above it.
            thorough: look for races and record where memory is allocated.
        """
        super().__init__()
        self.by_action: dict[Any, Counter[tuple[Any, ...]]] = defaultdict(Counter)
        """Counters of each action of the schedule (None: while the step begins or ends), by event."""
        self.counts = self.by_action[None]
        """Counters of the current action."""
        self.owner_counts: Counter[tuple[Any, ...]] | None = None
        """Counters of events while memory has an owner; None: these count for the action."""
        self.action: Any = None
        self.owner = ""
        """Kind of memory (see `memory.KINDS`) of the current owner, such as `gathered`; "" while the model computes."""
        self.staying: Counter[str] = Counter()
        """Bytes by kind that the second micro-batch keeps until the step ends."""
        self.findings: Counter[str] = Counter()
        """Errors found: operations across devices, and host tensors in collectives of the device."""
        self.used_groups: set[str] = set()
        """Names of the process groups that communicated: a backend creates a communicator on first use."""
        self.detector = RaceDetector(fake, self._waited)
        self.memory = Memory(self.detector.free) if thorough else Memory()
        self._pinned = Memory()
        """Host memory accessed by copies that overlap computation; its allocator waits for them."""
        self._device, self._groups = device, groups
        self._vocab, self._share, self._thorough = vocab, share, thorough
        self._works: dict[int, tuple[Any, Clock, list[torch.UntypedStorage], _Started]] = {}
        """Collectives in flight: handle, clock of their stream when done, and the buffers that NCCL keeps alive until a
        wait, or until the next collective if nobody can wait any more."""
        self._exposed: list[_Started] = []
        """Collectives started since the last matmul."""
        self._answered: object = None
        """Storage read last; reading its elements one by one counts as one copy."""
        self._patches = ExitStack()
        self._counts_calls = False
        self._fake_tensors: Any = None
        """`FakeTensors` if active: the audit calls it directly, which is faster than through torch's dispatcher."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: True would make torch notify its compiler at every operation, and nothing compiles here."""
        return False

    def __enter__(self) -> Audit:
        """Start the audit, and observe storage resizes and waits for collectives."""
        waits = [(kind, name) for kind in _WORKS for name in ("wait", "is_completed") if name in vars(kind)]
        for kind, name in waits:
            self._patches.enter_context(patch.object(kind, name, self._watched(getattr(kind, name), name == "wait")))
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self.memory.resize(storage, self.place())
            return result

        self._patches.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
        for name in ("torch.accelerator.synchronize", "torch.cuda.synchronize"):
            self._patches.enter_context(patch(name, lambda device=None: self.detector.follow([StreamEntry(3, 0, 0)])))
        self._fake_tensors = torch._C._unset_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End the audit."""
        super().__exit__(*error)
        if self._fake_tensors is not None:
            torch._C._set_dispatch_mode(self._fake_tensors)
        self._patches.close()
        self.detector.close()

    @contextmanager
    def counting_calls(self) -> Iterator[None]:
        """Count the Python functions that are called outside of operations, within the block and on any thread."""
        self._counts_calls = True
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._counts_calls = False

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and is_in_runs(frame.f_code.co_filename):
            self._counter()["python_calls",] += 1

    def enter(self, action: Any) -> None:
        """Start to count for an action of the schedule, or for none."""
        self.detector.clock(HOST)  # the log may hold waits of the action before
        self.action, self.counts = action, self.by_action[action]

    def place(self) -> str:
        """Return the innermost line of this package being executed, or the operation of the backward pass."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(_PACKAGE) and not name.startswith(_OWN):
                return f"{name[len(_PACKAGE) :]}:{frame.f_lineno}"
            frame = frame.f_back
        node = torch._C._current_autograd_node()
        return "backward" if node is None else f"backward ({node.name()})"

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count it."""
        if function is _DEVICE:
            return args[0].fake_device
        sys.setprofile(None)
        try:
            return self._dispatch(function, args, kwargs or {})
        finally:
            if self._counts_calls:  # torch may compute the backward pass on a thread of its own
                sys.setprofile(self._called)

    def _dispatch(self, function: Any, args: Any, kwargs: Any) -> Any:
        self._count("operators")
        if function.namespace == "c10d":
            return self._collective(function, args, kwargs)
        operator = operator_of(function)
        if operator.view:
            return self._run(function, args, kwargs)
        inputs = list(tensors_in((*args, *kwargs.values())))
        if operator.answers and not (operator.name == "index" and all(t.dtype == torch.int64 for t in inputs[1:])):
            self._answer(inputs)
            if operator.name == "_local_scalar_dense":
                if not isinstance(args[0], FakeTensor):
                    return function(*args, **kwargs)
                return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1  # it has no value
        elif operator.launches:
            self._answered = None
            # scalar tensors on the host are allowed
            if operator.name not in _COPIES and len({tensor.device.type for tensor in inputs if tensor.dim()}) > 1:
                self.findings[f"{self.place()}: {operator.name} of tensors on different devices"] += 1
                args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(self._device), (args, kwargs))
        result = self._run(function, args, kwargs)
        outputs = list(tensors_in((result,)))
        for tensor in outputs:
            self._allocated(tensor, kwargs.get("pin_memory", False))
        if operator.launches and (inputs or outputs):
            self._launched(function, args, kwargs, inputs, outputs)
        return result

    def _run(self, function: OpOverload, args: Any, kwargs: Any) -> Any:
        fake = self._fake_tensors
        return function(*args, **kwargs) if fake is None else fake.dispatch(function, (), args, kwargs)

    def _allocated(self, tensor: Tensor, pinned: bool) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type == self._device.type:
            if storage._cdata not in self.memory.live:
                action, where, stream = self.action, "", 0
                if self._thorough:
                    where = self.place() if action is None else f"{self.place()}, {action}"
                    stream = self.detector.current
                is_logits = self._vocab and tensor.dim() > 1 and tensor.shape[-1] == self._vocab
                kind = self.owner or ("logits" if is_logits else "activations")
                self.memory.add(storage, kind, where, action and action.micro, stream)
        elif pinned:
            self._pinned.add(storage, "activations")

    def _answer(self, inputs: list[Tensor]) -> None:
        for tensor in inputs:
            if tensor.device.type == self._device.type != "cpu":
                if tensor.untyped_storage() is not self._answered:
                    self._count("host_syncs", self.place())
                    self._host_waits()
                self._answered = tensor.untyped_storage()

    def _launched(
        self, function: OpOverload, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        operator = operator_of(function)
        devices = {tensor.device.type for tensor in (*inputs, *outputs)}
        written = list(tensors_in(args[i] for i in operator.writes if i < len(args)))
        if operator.name in _COPIES and len(devices) > 1:
            self._copied(inputs[-1], (written or outputs)[0], kwargs.get("non_blocking", len(args) > 2 and args[2]))
            return
        stream = self.detector.current if self._device.type in devices else HOST
        made = written + [tensor for tensor in outputs if all(tensor is not one for one in written)]
        self._touched(stream, inputs, made)
        if stream == HOST:
            return
        self._count("launches", by=operator.launches)
        if operator.name in _ANY_ORDER and (operator.name != "cumsum" or inputs[0].is_floating_point()):
            self._count("any_order", operator.name)
        if operator.product:
            self.hide(stream)
            matmuls, flops = multiplied(function, args, kwargs, outputs, self._share)
            for matmul in matmuls:
                self._count("matmul", matmul._replace(calls=1), by=matmul.calls)
            self._count("flops", by=flops)
        else:
            self._count("memory_bound_bytes", by=moved_bytes(operator, inputs, made))

    def _copied(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        """Record a copy between host and device; if blocking or of pageable host memory, it is a host sync."""
        fetches = source.device.type != "cpu"
        host = target if fetches else source
        self._touched(self.detector.current, [source], [target])
        if host.untyped_storage()._cdata in self._pinned.live and non_blocking:
            self._count("copy_bytes", by=source.nbytes)
            return
        self._count("blocking_copies", self.place())
        if fetches:
            self._host_waits()

    def _collective(self, function: OpOverload, args: Any, kwargs: Any) -> Any:
        self._works = {key: one for key, one in self._works.items() if sys.getrefcount(one[0]) > 2}
        kind, read, written = COLLECTIVES[function._schema.name.partition("::")[2]]
        ranks = sum(map(bool, args[4])) if kind == "all_to_all" else 0
        if ranks == 1:
            kind, ranks = "send", 0  # a rank sends all it has to a single peer
        sources, targets = (list(tensors_in(args[i] for i in places)) for places in (read, written))
        is_group = (isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()) for value in args)
        group = dist.ProcessGroup.unbox(args[list(is_group).index(True)]).group_name
        self.used_groups.add(group)
        axis = self._groups.get(group, "pipeline")
        if read != written:  # it fills a separate buffer
            for tensor in targets:
                self.memory.label(tensor, "communication", unless=OWNED)
        nbytes = max(size_of(sources), size_of(targets))
        self._count("calls", axis, kind, ranks)
        self._count("bytes", axis, kind, ranks, by=nbytes)
        if any(tensor.device.type != self._device.type for tensor in (*sources, *targets)):
            self.findings[f"{self.place()}: a host tensor in {kind} over {axis}"] += 1
        stream = f"{kind} over {axis}"
        self.detector.order(self.detector.clock(self.detector.current), stream)
        self._touched(stream, sources, targets)
        result = self._run(function, args, kwargs)
        for tensor in tensors_in((result,)):
            self._allocated(tensor, False)
        work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
        clock = dict(self.detector.clock(stream))
        self._exposed.append(_Started(stream, clock.get(stream, 0), self._counter(), (axis, kind, ranks), nbytes))
        buffers = [tensor.untyped_storage() for tensor in sources + targets]
        self._works[id(work)] = work, clock, buffers, self._exposed[-1]
        return result

    def _watched(self, original: Any, waits: bool) -> Any:
        """Wrap `wait` or `is_completed` of a collective: after it, the stream or the host knows that it is done."""

        def watched(work: Any, *args: Any) -> Any:
            done = original(work, *args) or isinstance(work, _WORKS[1])
            if done and id(work) in self._works:
                _, clock, _, started = self._works.pop(id(work))
                if not waits and started in self._exposed:  # queries do not block
                    self._exposed.remove(started)
                    started.hide()
                self.detector.order(clock, self.detector.current if waits else HOST)
            return done

        return watched

    def hide(self, computing: Stream = 0) -> None:
        """Let a matmul hide the collectives in flight that its own stream has not waited for."""
        seen = self.detector.clock(computing)
        for started in self._exposed:
            if seen.get(started.stream, 0) < started.tick:
                started.hide()
        self._exposed.clear()

    def _touched(self, stream: Stream, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        if not self._thorough:
            self.detector.tick(stream)
            return
        reads, writes = self._buffers(read), self._buffers(written)
        if reads or writes:
            self.detector.access(stream, reads, writes, self.place)

    def _buffers(self, tensors: Iterable[Tensor]) -> set[LiveStorage]:
        """Return the buffers that can race: those of the device, and host buffers used by copies."""
        keys = {tensor.untyped_storage()._cdata for tensor in tensors}
        found = (self.memory.live.get(key) or self._pinned.live.get(key) for key in keys)
        return {buffer for buffer in found if buffer is not None}

    def _waited(self, what: str) -> None:
        """Count an explicit wait of the host, which the log of streams shows at the next operation."""
        self._count("host_syncs", f"wait for {what} before {self.place()}")

    def _host_waits(self) -> None:
        self.detector.order(self.detector.clock(self.detector.current), HOST)

    def _count(self, *key: Any, by: Any = 1) -> None:
        self._counter()[key] += by

    def _counter(self) -> Counter[tuple[Any, ...]]:
        return self.counts if not self.owner or self.owner_counts is None else self.owner_counts


def work_of(counts: Mapping[tuple[Any, ...], int]) -> Work:
    """Return counters in the form that plans use."""
    matmuls = list[Matmul]()
    plain: Counter[str] = Counter()
    collectives: list[Collective] = []
    for (what, *of), amount in counts.items():
        if what == "matmul":
            matmuls.append(of[0]._replace(calls=amount))
        elif what == "calls" and of[0] != "pipeline":  # messages belong to the schedule
            hidden, hidden_bytes = (counts.get((name, *of), 0) for name in ("hidden_calls", "hidden_bytes"))
            exposed = (0.0, amount - hidden, counts["bytes", *of] - hidden_bytes)
            for share, some, nbytes in ((1.0, hidden, hidden_bytes), exposed):
                if some:
                    collectives.append(Collective(of[1], of[0], nbytes / some, some, share, of[2]))
        elif len(of) < 2:
            plain[what] += amount
    moved, launches, copied = (plain[name] for name in ("memory_bound_bytes", "launches", "copy_bytes"))
    waits = plain["host_syncs"] + plain["blocking_copies"]
    on_host = (plain[name] for name in ("operators", "python_calls", "sums", "sum_bytes"))
    return Work(tuple(matmuls), moved, launches, tuple(collectives), copied, waits, *on_host)
