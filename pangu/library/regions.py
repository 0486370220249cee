"""Regions of any module, which ZeRO-3 unshards one after the other, and the hooks that do so.

A region is a submodule whose forward uses its parameters. By default the children are regions; lists of layers, and
children that hold such lists, are taken apart, and so is everything without a forward:

    GPT(wte=Embedding, blocks=ModuleList(Block, Block), norm=LayerNorm)  ->  wte, blocks.0, blocks.1, norm

A module may define others: a method `zero_regions()` that returns names of submodules in the order of forward.
Parameters outside of all regions form one more, which stays gathered throughout forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function, Variable
from torch.utils._pytree import tree_flatten, tree_unflatten

from pangu.common.errors import UserError
from pangu.zero.flat_parameter import FlatParameter
from pangu.zero.grouping import Regions
from pangu.zero.sharded import ShardedParameters
from pangu.zero.unshard import Unsharder

T = TypeVar("T", bound=Tensor)
Names = Mapping[int, Sequence[str]]


def regions_of(model: nn.Module, chunks: Mapping[int, str], names: Names | None = None) -> Regions:
    """Return the regions of the modules `chunks`, given their paths, by chunk.

    `names`: submodules that are regions, by chunk; other chunks have the default ones. Raises UserError unless they are
    separate submodules with a forward.
    """
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    uses: dict[int, dict[str, list[str]]] = {}
    lookups = set()
    for chunk, path in chunks.items():
        module, inside = model.get_submodule(path), set()
        used: dict[str, list[str]] = {}
        for name in _names(module, (names or {}).get(chunk)):
            region, full_name = module.get_submodule(name), f"{path}.{name}" if path else name
            if parameters := list(region.parameters()):
                used[full_name] = [name_of[parameter] for parameter in parameters]
                inside.update(parameters)
            if type(region) is nn.Embedding:
                lookups.add(full_name)
        rest = [name_of[parameter] for parameter in module.parameters() if parameter not in inside]
        uses[chunk] = {path: rest, **used} if rest else used
    # what is not the first chunk has inputs with a gradient
    return Regions(uses, lookups, chunks[min(chunks)], bottom=next(iter(uses.get(0, ())), ""))


def _names(module: nn.Module, names: Sequence[str] | None) -> list[str]:
    """Return the names of the submodules that are regions, in the order of forward."""
    if names is None:
        names = module.zero_regions() if hasattr(module, "zero_regions") else list(_default(module))  # type: ignore[operator]
    known = dict(module.named_modules())
    for name in names:
        if name not in known or not name:
            near = ", ".join(child for child, _ in module.named_children())
            raise UserError(f"regions: {name!r} is not a submodule of {type(module).__name__}; its children are {near}")
        if _is_container(known[name]):
            raise UserError(
                f"regions: {name} is {type(known[name]).__name__}, which has no forward; name the modules inside it"
                " (parameters outside all regions are gathered throughout forward and backward)"
            )
        if inner := next((other for other in names if other.startswith(f"{name}.")), None):
            raise UserError(f"regions: {inner} lies inside {name}; a module belongs to one region")
    return list(names)


def _is_container(module: nn.Module) -> bool:
    """Return whether a module has no forward of its own: lists and dictionaries of modules or parameters."""
    return type(module).forward is nn.Module.forward


def _default(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        # the layers of a list are regions, whatever they hold
        inner = () if _is_container(module) else child.modules()
        holds_lists = any(_is_container(m) and next(m.children(), None) is not None for m in inner)
        if _is_container(child) or type(child) is nn.Sequential or holds_lists:
            yield from _default(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in a module's inputs or outputs: tensors, and sequences, mappings and dataclasses of such."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple, set)):
        for part in value:
            yield from tensors_in(part)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in(vars(value))


class _Ending(Function):
    """Autograd function that calls back when backward has computed the gradients of all inputs of a region."""

    @staticmethod
    def forward(ctx: Any, ended: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.ended = ended
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.ended()
        return None, *grads


COPIES = (
    "a sharded model cannot be copied or pickled; use `pangu.save`, or copy.deepcopy(sharded.model) in "
    "`with sharded.full_parameters():` for a plain module"
)


@dataclass(eq=False)
class Hook:
    """Hook of a sharded module; a deep copy of the module, which is no longer sharded, gets one that does nothing."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        """Return a hook that does nothing."""
        return nothing

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled with UserError."""
        raise UserError(COPIES)


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


@dataclass(eq=False)
class _Use:
    """Use of a region in one forward; in backward it is open from an output's gradient to those of all inputs."""

    name: str


def hiding(kind: type[T], is_pending: Callable[[], bool], **members: Any) -> type[T]:
    """Return a tensor class whose `grad` must not be read while gradients wait for `ShardedModel.step`.

    `torch.nn.utils.clip_grad_norm_` and others would find none, or this rank's shard of the sum over the replicas.
    """

    def read(tensor: Tensor) -> Tensor | None:
        if is_pending():
            raise UserError(
                "grad: gradients of a sharded model are kept as each rank's part of their sum until "
                "`sharded.step(optimizer, clip=...)`, which clips by the global norm and returns it; "
                "`clip_grad_norm_` and the like would see only a part of them, or none"
            )
        return stored.__get__(tensor)

    stored: Any = Tensor.grad
    gradient = property(read, stored.__set__, stored.__delete__)
    plain = {"__torch_function__": torch._C._disabled_torch_function_impl}
    return type(f"Sharded{kind.__name__}", (kind,), {"grad": gradient, **plain, **members})


def guarded(unsharder: Unsharder, is_pending: Callable[[], bool]) -> type[nn.Parameter]:
    """Return the class of a model's weights while they are sharded or in flight.

    Torch would read memory that is not there yet, or no longer. Weights in flight are waited for; sharded ones are
    refused by name.
    """
    owners = {
        id(parameter): (flat, name)
        for flat in unsharder.flat_parameters
        for (parameter, _), (name, _) in zip(flat.parameters, flat.tensors, strict=True)
    }

    def copied(parameter: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(parameter)] = copy = nn.Parameter(parameter.data.clone(), parameter.requires_grad)
        return copy

    def called(_: type, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            is_property = function.__name__ == "__get__"
            property_name = getattr(getattr(function, "__self__", None), "__name__", "")
            name_read = property_name if is_property else function.__name__
            if name_read in _VIEWS if is_property else name_read not in _HARMLESS:
                for tensor in tensors_in((args, kwargs or {})):
                    flat, name = owners.get(id(tensor), (None, ""))
                    if flat is not None and flat.sharding.stage < 3:
                        unsharder.wait()
                    elif flat is not None and not unsharder.in_use(flat):
                        raise UserError(
                            f"{name} is used outside the forward of its region, where it is sharded; `with "
                            "sharded.full_parameters():` on all ranks gathers it, and regions=[...] of `shard` "
                            "without that module, or a method zero_regions(), keeps it whole"
                        )
            return function(*args, **(kwargs or {}))

    return hiding(nn.Parameter, is_pending, __deepcopy__=copied, __torch_function__=classmethod(called))


_VIEWS = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Properties that read the weights; others are metadata."""
_HARMLESS = {
    *("__set__", "__hash__", "size", "dim", "numel", "nelement", "stride", "is_floating_point", "is_complex"),
    *("is_contiguous", "requires_grad_", "backward"),
    *("register_hook", "register_post_accumulate_grad_hook", "untyped_storage"),
}
"""Functions that read no weights."""


class RegionHooks:
    """Hooks that unshard the regions of a model around their forward and backward."""

    def __init__(
        self,
        model: nn.Module,
        chunks: Mapping[int, str],
        parameters: ShardedParameters,
        begins: Callable[[], None],
        ends: Callable[[], None],
        turns: bool,
    ) -> None:
        """Register the hooks of the modules `chunks` (their paths); `begins` and `ends` are called around backward.

        `turns`: backward starts with the last chunk as soon as its forward ends.
        """
        regions, unsharder = parameters.stage.regions, parameters.unsharder if parameters.unshards else None
        self._regions, self._unsharder, self._begins, self._ends = regions, unsharder, begins, ends
        self._stack: list[_Use] = []
        """Uses whose forward is running."""
        self.failed = False
        """True if an error has ended a pipeline's forwards and backwards."""
        self._open: dict[_Use, None] = {}
        self._in_backward = False
        self._flats, self.is_pending = parameters.flat_parameters, False
        """True while gradients wait for the step."""

        def is_pending() -> bool:
            return self.is_pending

        self._hiding = hiding(nn.Parameter, is_pending)
        self._guarded = None if unsharder is None else guarded(unsharder, is_pending)
        for shard in parameters.trained_shards:
            shard.main.__class__ = hiding(Tensor, is_pending)
        self._chunks = set(chunks.values())
        last = max(chunks)
        self._turns = {chunks[last], *list(regions.uses[last])[-1:]} if turns else set()
        """Names of the modules that backward needs first, right after forward."""
        used = {name for chunk_uses in regions.uses.values() for name in chunk_uses} if unsharder else set()
        for name in sorted(used | self._chunks):
            module = model.get_submodule(name)
            module.register_forward_pre_hook(Hook(self._before(name)), prepend=True, with_kwargs=True)
            module.register_forward_hook(Hook(self._after), with_kwargs=True, always_call=True)
        self.guard()

    def _before(self, name: str) -> Callable[..., Any]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            use = _Use(name)
            self._stack.append(use)
            self.require_ended()
            self.begin(name, {} if self._in_backward else None)
            if name in self._chunks:
                self.is_pending &= not torch.is_grad_enabled()
                return None
            leaves, structure = tree_flatten((args, kwargs))
            places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
            if not (places and torch.is_grad_enabled()):
                return None
            close = partial(self.close, use)
            for place, x in zip(places, _Ending.apply(close, *(leaves[i] for i in places)), strict=True):
                leaves[place] = x
            return tree_unflatten(leaves, structure)

        return before

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        use = self._stack.pop()
        name = use.name
        outputs = [x for x in tensors_in(output) if x.requires_grad] if torch.is_grad_enabled() else []
        following: dict[str, str] | None = None
        if outputs and name in self._turns:
            following = {name: name}
        elif self._in_backward or name in self._chunks:  # what is computed again in backward is in use anyhow
            following = {}
        self.end(name, following)
        if name not in self._regions.lookups:
            for x in outputs:
                x.register_hook(lambda _: self.open(use))
            if torch.is_grad_enabled() and output is not None and next(tensors_in(output), None) is None:
                raise UserError(
                    f"{name or type(module).__name__}: its forward returns {type(output).__name__}, which has no "
                    "tensors; return tensors, or lists, tuples, dictionaries or dataclasses of them"
                )

    def require_ended(self) -> None:
        """Raise UserError after a backward that an error has ended."""
        if self.failed or (self._in_backward and torch._C._current_graph_task_id() == -1):
            raise UserError(
                "the last backward pass failed and left partial gradients; continue from a checkpoint with a "
                "newly sharded module"
            )

    def open(self, use: _Use) -> None:
        """Start a region's backward."""
        if not self._in_backward:
            self._in_backward, self.is_pending = True, False
            Variable._execution_engine.queue_callback(self._finish)
            self._begins()
        if use not in self._open:
            self._open[use] = None
            self.begin(use.name, self._unsharder.backward if self._unsharder else {})

    def close(self, use: _Use) -> None:
        """End a region's backward."""
        if use in self._open:
            del self._open[use]
            self.end(use.name, self._unsharder.backward if self._unsharder else {})

    def _finish(self) -> None:
        """End backward, and regions without an input gradient."""
        for use in list(self._open):
            self.close(use)
        self._in_backward = False
        self._ends()

    def begin(self, name: str, following: Mapping[str, str] | None) -> None:
        """Unshard a region. `following`: next region by region, for prefetch; None: the order of forward."""
        if self._unsharder is not None and name in self._unsharder.uses:
            self._unsharder.begin(name, self._unsharder.forward if following is None else following)
            _become(nn.Parameter, self._unsharder.uses[name])

    def end(self, name: str, following: Mapping[str, str] | None) -> None:
        """Reshard a region, unless the next one needs it."""
        if self._unsharder is not None and name in self._unsharder.uses:
            self._unsharder.end(name, self._unsharder.forward if following is None else following)
            self.guard([flat for flat in self._unsharder.uses[name] if flat.sharding.stage == 3])

    def guard(self, flats: Sequence[FlatParameter] | None = None) -> None:
        """Guard weights (None: all) that are not in use, because they are sharded, or being updated."""
        if self._unsharder is not None and self._guarded is not None:
            flats = self._flats if flats is None else flats
            _become(self._guarded, [flat for flat in flats if not self._unsharder.in_use(flat)])
        elif flats is None:
            _become(self._hiding if self.is_pending else nn.Parameter, self._flats)

    def hide_gradients(self, is_pending: bool) -> None:
        """Refuse to show gradients that wait for the step."""
        self.is_pending = is_pending
        self.guard()


def _become(kind: type[nn.Parameter], flats: Sequence[FlatParameter]) -> None:
    for flat in flats:
        for parameter, _ in flat.parameters:
            parameter.__class__ = kind
