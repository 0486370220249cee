"""A stand-in for Ascend's devices on a machine without one: `npu` is a device of its own, which really computes.

    pytest -p tests.stand_in_device -n 0 tests/gpu/test_training.py      # as a plug-in of pytest, or
    install()                                                           # before the first backward of a process

What torch_npu registers in C++ is registered here by torch's own means for devices in Python: a tensor of `npu:0` is a
subclass of Tensor that holds a tensor of the CPU, on which each operator computes. It is as strict as a device: tensors
of two devices do not meet in an operator, and where torch_npu's operators and collectives take less than torch's, these
do too (`_fused_adamw_`, which scales and skips nothing; HCCL's sums, which know no fp64). Pages are not pinned, streams
are one, and nothing is asynchronous: `dryrun` looks for races. There is one device; each process has its own.

The setup is an experiment of torch (`_setup_privateuseone_for_python_backend`); `missing()` says whether it is there.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map

from benchmarks.gpu_suite.staged import StagedGroup

NAME = "Ascend910B3"
DEVICE = "npu:0"
_ACROSS = ("copy_", "_to_copy", "_foreach_copy_", "index_put_", "index")
"""Operators of tensors of several devices."""


def missing() -> str | None:
    """Why there can be no stand-in, if so."""
    if hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return None
    return f"torch {torch.__version__} cannot register a device in Python (_setup_privateuseone_for_python_backend)"


class NpuTensor(Tensor):
    raw: Tensor
    """What it holds, of the same sizes and strides."""
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor) -> NpuTensor:
        wrapper = Tensor._make_wrapper_subclass(
            cls, raw.shape, raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=DEVICE
        )
        wrapper.raw = raw
        return wrapper

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    # torch makes tensors of lists where it calls no device in Python
    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_without_lists(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_without_lists(index), value)

    def tolist(self) -> Any:
        return self.raw.tolist()

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def __repr__(self) -> str:
        return f"npu({self.raw!r})"

    __str__ = __repr__

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carry_out(func, args, kwargs or {})


def _carry_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator, on what its tensors hold."""
    given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    on_device = [tensor for tensor in given if isinstance(tensor, NpuTensor)]
    name = func.overloadpacket.__name__
    if func.namespace == "pangu" and on_device:  # an operator of ours: as a device carries it out, by those of torch
        return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
    elsewhere = any(tensor.dim() and not isinstance(tensor, NpuTensor) for tensor in given)
    if on_device and elsewhere and name not in _ACROSS:
        raise RuntimeError(f"{func}: tensors of npu:0 and of cpu")
    if name == "_fused_adamw_":
        kwargs = {**kwargs, "grad_scale": None, "found_inf": None}
    wrappers = {id(tensor.raw): tensor for tensor in on_device}
    device = kwargs.get("device")
    stays = bool(on_device) if device is None else torch.device(device).type == "npu"
    if device is not None:
        kwargs = {**kwargs, "device": "cpu"}
    result = func(*tree_map(_held, args), **tree_map(_held, kwargs))
    if name == "copy_":
        return args[0]

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return wrappers[id(value)] if id(value) in wrappers else NpuTensor(value)

    return tree_map(wrapped, result) if stays else result


def _without_lists(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_without_lists, index))
    return torch.tensor(index, device=DEVICE) if isinstance(index, list) else index


def _held(value: Any) -> Any:
    return value.raw if isinstance(value, NpuTensor) else value


class Stream:
    """The one stream; what is given to it has been done."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = torch.device(DEVICE)

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Event:
    def __init__(self, device: Any = None, **_: Any) -> None:
        self.time_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.time_s = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        assert self.time_s is not None
        assert end.time_s is not None
        return (end.time_s - self.time_s) * 1000


class Module(backend_registration._DummyBackendModule if missing() is None else object):
    """What torch.npu is used for."""

    def get_device_name(self, device: Any = None) -> str:
        return NAME

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name=NAME, total_memory=64 * 2**30)

    def max_memory_allocated(self, device: Any = None) -> int:
        return 2**20

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def is_bf16_supported(self) -> bool:
        return True


class HcclGroup(StagedGroup):
    """Over gloo; refuses what HCCL does."""

    def getBackendName(self) -> str:  # noqa: N802
        return "hccl"

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        return super().allreduce(_of_the_device(tensors, reduced=True), opts)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        return super().reduce_scatter_single(*_of_the_device([output, source], reduced=True), opts=opts)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        return super().all_gather_single(*_of_the_device([output, source]), opts=opts)

    def all_to_all_single(self, output: Tensor, source: Tensor, *sizes: Any) -> Any:
        return super().all_to_all_single(*_of_the_device([output, source]), *sizes)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        return super().send(_of_the_device(tensors), to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        return super().recv(_of_the_device(tensors), source, tag)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _of_the_device(tensors: list[Tensor], reduced: bool = False) -> list[Tensor]:
    for tensor in tensors:
        if tensor.device.type != "npu":
            raise RuntimeError("No backend type associated with device type cpu")
        if reduced and tensor.dtype in (torch.float64, torch.uint8, torch.bool):
            raise RuntimeError(f"HCCL: Unsupported data type {tensor.dtype}")
    return tensors


def pytest_configure(config: Any) -> None:
    """As a plug-in of pytest."""
    install()


def install() -> None:
    """Make `npu` a device of this process, and `hccl` its backend. To be called once, and before the first backward:
    autograd counts the devices then."""
    backend_registration._setup_privateuseone_for_python_backend("npu", Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(_fallback, "PrivateUse1")
    install.libraries = [library]  # type: ignore[attr-defined]  # for the life of the process
    _replace_in_torch()
    dist.Backend.register_backend("hccl", HcclGroup, devices=["npu"])


def _fallback(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _carry_out(func, args, kwargs)


def _replace_in_torch() -> None:
    """What a device in Python cannot be asked: events, pinned memory, generators, tensors of numbers."""
    namespace: Any = torch
    namespace.Stream, namespace.Event = Stream, Event
    stream = Stream()
    torch.accelerator.current_stream = lambda device=None: stream
    torch.accelerator.synchronize = lambda device=None: None
    for name in ("empty", "empty_like", "zeros"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    tensor, generator = torch.tensor, torch.Generator
    torch.tensor = lambda data, *, device=None, **options: tensor(data, **options).to(device or "cpu")

    class OnHost(generator):  # type: ignore[valid-type]
        def __new__(cls, device: Any = "cpu") -> torch.Generator:
            return generator("cpu")

    namespace.Generator = OnHost


def _without_pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return make(*args, **kwargs)

    return made
