"""Ledger of one pipeline stage: its modules and flat parameters, and the walk over the actions of a step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from pangu.config.optimizer import UPDATED_AT_ONCE
from pangu.config.schema import RunConfig
from pangu.models.parameters import logical_shapes
from pangu.pipeline.actions import COMPUTE, MESSAGES, SENDS, Action, Kind
from pangu.pipeline.expand import Expansion, StepOp
from pangu.pipeline.spans import Axis, Collective, Span, Trace, Work
from pangu.planning.buffers import Formats, Shards, buffers_of, copied_bytes, lasting_bytes
from pangu.planning.groups import Group
from pangu.planning.ledger import ACTIVATIONS, KINDS, Fold, Meter, Pass
from pangu.zero.stage_parameters import StageParameters

ModuleKinds = Mapping[int, Mapping[str, str]]
HIDDEN = 0.9
"""Fraction of the replica communication in flight during compute that the compute hides."""


@dataclass(frozen=True)
class StageLedger:
    """Memory, communication and work of one rank of a stage in a step."""

    lasting: Mapping[str, int]
    """Bytes that persist across steps: parameters, gradients, optimizer state."""
    peak: int
    """Peak live bytes of tensors."""
    kinds: Mapping[str, int]
    """Transient bytes of each kind at the peak."""
    place: str
    """Operation in which the peak is reached."""
    sent: Mapping[Collective, float]
    """Mapping from the collectives and messages of a step to their counts."""
    groups: int
    """Number of process groups in which the rank communicates."""
    passes: Mapping[tuple[Kind, int], Pass]
    """Mapping from the kind of an action and its chunk to the action's ledger for most micro-batches."""
    besides: Mapping[Collective, float]
    """Counts of the step's collectives besides those of `passes` per micro-batch; negative if there are fewer."""
    update: Work
    """Optimizer step, and the copies between device and host for it."""
    host_update_bytes: float = 0.0
    """Bytes that an optimizer on the host reads and writes."""

    @property
    def collectives(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Calls and bytes per step, by axis and kind of collective."""
        total: dict[str, dict[str, tuple[float, float]]] = {}
        for one, often in self.sent.items():
            calls, nbytes = total.setdefault(one.axis, {}).get(one.kind, (0.0, 0.0))
            often *= one.calls
            total[one.axis][one.kind] = calls + often, nbytes + often * one.bytes
        return total


class StepRun(NamedTuple):
    """Inputs of a stage's step besides its modules and actions."""

    micro_batches: int
    """Number of micro-batches in the actions."""
    more: int
    """Further micro-batches, which repeat the middle round."""
    message: tuple[int, ...]
    """Bytes of the tensors that a chunk sends to the next one."""
    groups: Mapping[Axis, Group]
    """Communication group of each axis."""


class StageActions(NamedTuple):
    """Actions of a stage in a step, with its chunks numbered from 0."""

    distinct: tuple[Action, ...]
    """Distinct actions, regardless of their micro-batch."""
    order: tuple[int, ...]
    """Sequence of the step, as indices into `distinct`."""
    middle: tuple[int, ...]
    """Indices into `order` of the middle round, which represents all rounds like it."""
    period: int
    """Micro-batches per round, after which schedules repeat: the number of stages."""

    @classmethod
    def of(cls, actions: Sequence[Action], chunks: Sequence[int], micro_batches: int, stages: int) -> StageActions:
        """Return the actions of a stage with the given chunks."""
        numbers: dict[Action, int] = {}
        order = [
            numbers.setdefault(action._replace(chunk=chunks.index(action.chunk), micro=None), len(numbers))
            for action in actions
        ]
        period = min(stages, micro_batches)
        first = (micro_batches - period) // 2
        micros = range(first, first + period)
        middle = [place for place, action in enumerate(actions) if action.micro in micros]
        return cls(tuple(numbers), tuple(order), tuple(middle), period)


class StageProgram:
    """Stage whose step can be folded for any list of actions."""

    def __init__(self, config: RunConfig, parameters: StageParameters, kinds: ModuleKinds, trace: Trace) -> None:
        """Create a stage; `kinds` maps a chunk to its modules in forward order, with their kinds (`module_kinds`)."""
        self.config, self.parameters, self.trace, self._kinds = config, parameters, trace, kinds
        self._hidden = HIDDEN if config.parallel.overlap else 0.0
        self.formats = Formats.of(config)
        flats, table = parameters.flats, parameters.table
        self.shards = [Shards.of(flat, table) for flat in flats]
        self.buffers = [
            buffers_of(flat, held.num_tensors, self.formats, parameters.reduce_each)
            for flat, held in zip(flats, self.shards, strict=True)
        ]
        self._flat_of = {name: flat.index for flat in flats for name in flat.names}
        if (words := self._flat_of.get("embedding.word.weight")) is not None:
            self._flat_of.setdefault("head.weight", words)  # a tied head may have been measured without the embedding
        self._expansion = Expansion(parameters, None)
        self._states: list[Any] = [(self._expansion.state, frozenset())]
        """States of the flat parameters between actions; a step begins in the first one."""
        self._passes: dict[tuple[int, Action | None], tuple[Pass, int]] = {}
        """Mapping from a state and an action to the action's ledger, and the state after it."""
        fused = config.optimizer.name == "adam" and config.optimizer.moments == "fp32"
        self.lasting = lasting_bytes(flats, self.shards, self.formats, fused)
        self._lasting = sum(self.lasting.values()) + trace.lasting_bytes

    def ledger(self, stage: StageActions, run: StepRun) -> StageLedger:
        """Return the ledger of a step, folded over its actions."""
        passes, last = self._walk(stage)
        meter, fullest = self._begun(run.micro_batches), _fullest(passes)
        meter.skip(passes[:fullest])
        meter.follow(passes[fullest], stage.distinct[stage.order[fullest]])
        meter.skip(passes[fullest + 1 :])
        meter.follow(last, "adding up gradients")
        meter.follow(Pass.of(self.trace.finish), "adding up losses and norms")
        meter.level[ACTIVATIONS] = self._lasting
        update, host_update_bytes, working = self._update()
        meter.note(working, "the update")
        often = Counter(map(id, [*passes, last]))
        counts = {id(one): (one, often[id(one)]) for one in (*passes, last)}
        messages, rounds = Counter(stage.order), run.more // stage.period
        steady: dict[tuple[Kind, int], Counter[int]] = {}
        left = rounds * stage.period * self.trace.move.end
        for place in stage.middle:
            action, one = stage.distinct[stage.order[place]], passes[place]
            counts[id(one)] = one, counts[id(one)][1] + rounds
            messages[stage.order[place]] += rounds
            left += rounds * sum(one.change)
            if action.kind not in MESSAGES:
                steady.setdefault((action.kind, action.chunk), Counter())[id(one)] += 1
        most = {key: counts[of_key.most_common(1)[0][0]][0] for key, of_key in steady.items()}
        sent: Counter[Collective] = Counter(each for each in self._ending() if run.groups[each.axis].size > 1)
        besides = sent.copy()
        for number, action in enumerate(stage.distinct):
            if action.kind in MESSAGES:
                sent.update({message_of(action.kind, size): messages[number] for size in run.message})
        for one, count in counts.values():
            for each in one.collectives:
                besides[each] += count
                sent[each] += count
            for each in (each for span in one.spans for each in span.work.collectives):
                sent[each] += count
        for one in most.values():
            for each in one.collectives:
                besides[each] -= run.micro_batches + run.more
        channels = {(action.kind, action.peer) for action in stage.distinct if action.kind in MESSAGES}
        axes = {each.axis for each, count in sent.items() if count and not is_message(each)}
        axes |= {each.axis for buffers in self.buffers for each in buffers.gathers}  # frozen weights are gathered once
        kinds = dict(zip(KINDS, meter.kinds, strict=True))
        kinds["activations"] += left - self._lasting
        return StageLedger(
            self.lasting,
            meter.peak + left,
            kinds,
            meter.place,
            sent,
            len(axes) + len(channels),
            most,
            besides,
            update,
            host_update_bytes,
        )

    def _walk(self, stage: StageActions) -> tuple[list[Pass], Pass]:
        """Return the ledger of each action of a step, and that of the step's end."""
        state, passes, known = 0, list[Pass](), self._passes
        for number in stage.order:
            action = stage.distinct[number]
            found = known.get((state, action)) or self._pass(state, action)
            passes.append(found[0])
            state = found[1]
        return passes, self._pass(state, None)[0]

    def _begun(self, micro_batches: int) -> Meter:
        meter = Meter()
        meter.change(ACTIVATIONS, self._lasting)
        for _ in range(micro_batches):
            meter.follow(Pass.of(self.trace.move), "moving a micro-batch to the device")
        meter.follow(Pass.of(self.trace.begin), "the beginning")
        return meter

    def _ending(self) -> Iterator[Collective]:
        """Yield the once-per-step collectives besides gathers and reductions.

        They sum gradients of which several ranks hold copies, losses and norms, and gather updated weights.
        """
        config, formats = self.config, self.formats
        sent: list[Collective] = []
        trained = [
            each for each in zip(self.parameters.flats, self.shards, self.buffers, strict=True) if each[0].trained
        ]
        for flat, held, buffers in trained:
            size = flat.padded // flat.sharding.size * formats.sums
            sent += [Collective("all_reduce", cast(Axis, axis), size) for axis in held.shared]
            sent += [] if buffers.weights else [each._replace(hidden=self._hidden) for each in buffers.gathers]
        partial = sum(held.partial for _, held, _ in trained)
        sent += [Collective("all_reduce", "tensor", partial * formats.sums)] * (partial > 0)
        world = [2 * 8]  # loss and norm
        if config.precision.matmul == "fp8":
            shapes = logical_shapes(config.model).items()
            world.append(3 * 4 * sum(name.startswith("layers.") and len(shape) == 2 for name, shape in shapes))
        if config.model.experts is not None:
            world.append(8 * len(config.model.expert_layers) * (config.model.experts + 3))
        sent += [Collective("all_reduce", "world", nbytes) for nbytes in world]
        sent.append(Collective("all_reduce", "replicas", 8))  # number of targets
        if config.optimizer.name == "lamb":  # squared norms of directions, weights and updates
            counts: Counter[Axis] = Counter(
                "expert_shard" if entry.expert else "shard" for entry in self.parameters.table
            )
            counts["tensor"] = counts.total()
            sent += [
                Collective("all_reduce", axis, 3 * count * formats.sums) for axis, count in counts.items() if count
            ]
        return iter(sent)

    def _update(self) -> tuple[Work, float, int]:
        """Return the work of the optimizer step, the bytes it reads and writes on the host, and its working memory."""
        flats = [flat for flat in self.parameters.flats if flat.trained]
        numels = [held.numels for flat, held in zip(self.parameters.flats, self.shards, strict=True) if flat.trained]
        on_host = any("optimizer" in flat.sharding.offload for flat in flats)
        elements, tensors = sum(map(sum, numels)), sum(map(len, numels))
        moved, launches, working = self.trace.update.at(elements, tensors, UPDATED_AT_ONCE)
        copied = sum(copied_bytes(flat, self.formats) for flat in flats)
        return (
            Work((), moved * (not on_host), launches, host_bytes=copied),
            moved * on_host,
            int(working) * (not on_host),
        )

    def _pass(self, state: int, action: Action | None) -> tuple[Pass, int]:
        """Return the ledger of an action and the state of the flat parameters after it; None: the end of the step."""
        if (state, action) not in self._passes:
            self._expansion.state, begun = self._states[state][0], set(self._states[state][1])
            fold = Fold(self.buffers, self._flat_of, begun, self._hidden)
            if action is None:
                self._expansion.reducing.finish_all()
            else:
                self._expansion.add(action)
            operations = self._expansion.ops
            if action is not None and action.kind in COMPUTE:
                kinds = self._kinds[action.chunk]
                names = [*kinds] if action.kind is Kind.FORWARD else [*reversed([*kinds])]
                spans = self.trace.of_action(action.kind, list(kinds.values()))
                fold_modules(fold, operations, zip(["", *names, ""], spans, strict=True))
            elif action is not None and action.kind in MESSAGES:
                span = self.trace.message(action.kind, list(self._kinds[action.chunk].values()))
                fold.span(action.kind, "", span)
            else:
                fold.operations(operations)
            behind = self._expansion.state, frozenset(begun)
            if behind not in self._states:
                self._states.append(behind)
            self._passes[state, action] = fold.result(), self._states.index(behind)
        return self._passes[state, action]


def _fullest(passes: Sequence[Pass]) -> int:
    level = most = fullest = 0
    for place, one in enumerate(passes):
        if level + one.peak > most:
            most, fullest = level + one.peak, place
        level += sum(one.change)
    return fullest


def fold_modules(
    fold: Fold, operations: Iterable[StepOp], modules: Iterable[tuple[str, tuple[str, Span | None]]]
) -> None:
    """Fold the operations of an action on a chunk, including the compute of its modules, over their spans."""
    left, last, reductions = deque(operations), "", list[StepOp]()
    for module, (kind, span) in modules:
        at = next((place for place, one in enumerate(left) if module and one.module == module), None)
        if at is not None:
            fold.operations(left.popleft() for _ in range(at))
            left.popleft()
            last = module
        while left and left[0].kind.endswith("REDUCE"):
            reductions.append(left.popleft())
        if span is not None:  # a module that begins the backward pass may not end: its work belongs to the end of all
            fold.span(kind, last, span, reductions)
            reductions = []
    fold.operations(reductions)
    fold.operations(left)


def message_of(kind: Kind, nbytes: int) -> Collective:
    """Return the point-to-point message of a tensor between stages."""
    return Collective(cast(Any, "send" if kind in SENDS else "receive"), "pipeline", nbytes)


def is_message(one: Collective) -> bool:
    """Return whether a collective is a message between stages."""
    return one.axis == "pipeline" and one.kind in ("send", "receive")
