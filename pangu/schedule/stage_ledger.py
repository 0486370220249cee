"""Ledger of one pipeline stage: its modules and flat parameters, and the walk over the actions of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, cast

from pangu.config.optimizer import UPDATED_AT_ONCE, qk_clip_of
from pangu.config.parallelism import ulysses_size
from pangu.config.schema import RunConfig
from pangu.models.parameters import logical_shapes
from pangu.models.size import hidden_state_shapes
from pangu.schedule.actions import COMPUTE, MESSAGES, SENDS, Action, Kind
from pangu.schedule.buffers import Shards, allocated, buffers_of, copied_bytes, lasting_bytes
from pangu.schedule.expand import Expansion
from pangu.schedule.groups import Group
from pangu.schedule.ledger import Fold, Pass
from pangu.schedule.schedule import Schedule
from pangu.schedule.spans import Axis, Collective, Matmul, Span, Trace, Work
from pangu.topology.placement import TensorRank, in_fp8
from pangu.zero.grouping import COPY_AXES, COPY_PARTS
from pangu.zero.muon_schedule import exchanges, matrix_rounds, working_bytes
from pangu.zero.stage_parameters import StageParameters
from pangu.zero.states import BYTES, Formats

ModuleKinds = Mapping[int, Mapping[str, str]]
HIDDEN = 0.9
"""Fraction of the replica communication in flight during compute that the compute hides."""


Window = tuple[tuple[tuple[Kind, int] | None, tuple[Collective, ...]], ...]
"""Computations in order, by kind and chunk (None: the end of the step, which takes no time), and their collectives."""


@dataclass(frozen=True)
class StageLedger:
    """Memory, communication and work of one rank of a stage in a step."""

    lasting: int
    """Bytes that persist across steps: parameters, gradients, optimizer state."""
    peak: int
    """Peak live bytes of tensors."""
    sent: Mapping[Collective, float]
    """Mapping from the collectives and messages of a step to their counts."""
    groups: int
    """Number of process groups in which the rank communicates."""
    passes: Mapping[tuple[Kind, int], Pass]
    """Mapping from the kind of an action and its chunk to the action's ledger for most micro-batches."""
    gathers: Mapping[int, tuple[Collective, ...]]
    """Gathers of updated weights, by the chunk that needs them first."""
    reductions: Mapping[int, tuple[Collective, ...]]
    """Reductions once per step, last one first, by the chunk that completes them; -1: those at the end of the step."""
    other_collectives: Mapping[Collective, float]
    """Counts of the step's collectives besides these and those of `passes`; negative if `passes` have too many."""
    update: Work
    """Optimizer step, and the copies between device and host for it."""
    host_update_bytes: float
    """Bytes that an optimizer on the host reads and writes."""

    def windows(self, stage: StageActions) -> tuple[Window, Window]:
        """Return computations in order with the gathers that they need, and from the end with reductions they start."""
        actions = [action for action in map(stage.distinct.__getitem__, stage.order) if action.kind in COMPUTE]
        last = dict(self.reductions)
        reductions = (None, last.pop(-1, ())), *_window(reversed(actions), last)
        return tuple(_window(actions, dict(self.gathers))), reductions


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
    micro_batches: int


@lru_cache(maxsize=1000)
def stage_actions(schedule: Schedule, stage: int) -> StageActions:
    """Return the actions of a stage."""
    period = min(schedule.stages, schedule.micro_batches)
    first = (schedule.micro_batches - period) // 2
    micros, numbers = range(first, first + period), dict[Action, int]()
    actions, chunks = schedule.actions[stage], [chunk for chunk, held in enumerate(schedule.stage_of) if held == stage]
    generic_actions = (action._replace(chunk=chunks.index(action.chunk), micro=None) for action in actions)
    order = tuple(numbers.setdefault(action, len(numbers)) for action in generic_actions)
    middle = tuple(place for place, action in enumerate(actions) if action.micro in micros)
    return StageActions(tuple(numbers), order, middle, period, schedule.micro_batches)


def _window(actions: Iterable[Action], left: dict[Any, tuple[Collective, ...]]) -> Iterator[Any]:
    """Yield each action until no collectives are left, with those of its chunk if it is the first one of it."""
    for action in actions:
        if not left:
            break
        yield (action.kind, action.chunk), left.pop(action.chunk, ())


class StageProgram:
    """Stage whose step can be folded for any list of actions."""

    def __init__(
        self, config: RunConfig, parameters: StageParameters, kinds: ModuleKinds, trace: Trace, split: bool
    ) -> None:
        """Create a stage.

        Args:
            config: configuration of the run.
            parameters: parameters of the stage.
            kinds: modules of each chunk in forward order, with their kinds (`module_kinds`).
            trace: measured spans of the modules.
            split: whether the schedule computes weight gradients apart.
        """
        self._config, self._trace, self._kinds, self._split = config, trace, kinds, split
        self._hidden = HIDDEN if config.parallel.overlap else 0.0
        self._formats = formats = Formats.of(config)
        flats, table = parameters.flats, parameters.table
        shards = [Shards.of(flat, table) for flat in flats]
        self._buffers = [
            buffers_of(flat, held.num_tensors, formats, parameters.reduce_each)
            for flat, held in zip(flats, shards, strict=True)
        ]
        self._trained = [each for each in zip(flats, shards, self._buffers, strict=True) if each[0].trained]
        self._gathers: dict[int, tuple[Collective, ...]] = {}
        self._reductions: dict[int, tuple[Collective, ...]] = {}
        for flat, _, buffers in self._trained:
            if not buffers.weights:
                self._add(self._gathers, max(flat.chunk, 0), buffers.gathers)
            if flat.chunk < 0 or not parameters.reduce_each:
                self._add(self._reductions, flat.chunk, buffers.reductions[::-1])
        summed = flats if config.faults.verify_weights else ()
        self._compared = len(summed), float(formats.weights * sum(flat.padded for flat in summed))
        """Flat parameters whose weights are summed once per step, and the bytes of these."""
        self._flat_of = {name: flat.index for flat in flats for name in flat.names}
        self._in_fp8 = [name for flat in flats for name in flat.fp8]
        if (words := self._flat_of.get("embedding.word.weight")) is not None:
            for copy in ("head.weight", "mtp.lookup"):  # they may have been measured without the embedding
                self._flat_of.setdefault(copy, words)
        self._expansion = Expansion(parameters, None)
        self._states: list[Any] = [(self._expansion.state, frozenset())]
        """States of the flat parameters between actions; a step begins in the first one."""
        self._spans: dict[tuple[Kind, int], list[Span | None]] = {}
        self._passes: dict[tuple[int, Action | None], tuple[Pass, int]] = {}
        """Mapping from a state and an action to the action's ledger, and the state after it."""
        updated = sum(len(held.numels) for flat, held, _ in self._trained if not flat.main_on_host)
        # each tensor has its own step count in fused Adam
        fused = config.optimizer.name == "adam" and config.optimizer.moments == "fp32"
        moments = ((*held.numels, *(held.others if formats.matrix_moments == 1 else held.numels)) for held in shards)
        lasting = sum(lasting_bytes(flat, numels, formats) for flat, numels in zip(flats, moments, strict=True))
        muon = config.optimizer if config.optimizer.name == "muon" else None
        self._rounds = matrix_rounds(parameters, muon.split_heads) if muon else {}
        self._lasting = lasting + allocated(1) * (updated if fused else min(updated, 1))
        self._update, self._host_update_bytes, self._working = self._updated()
        self._ending = self._sent_once(["expert_shard" if entry.expert else "shard" for entry in table])

    def ledger(self, stage: StageActions, extra_micro_batches: int, groups: Mapping[Axis, Group]) -> StageLedger:
        """Return the ledger of a step, folded over its actions.

        Args:
            stage: actions of the step.
            extra_micro_batches: number of further micro-batches, which repeat the middle round.
            groups: communication group of each axis.
        """
        passes, trace, rounds = self._walk(stage), self._trace, extra_micro_batches // stage.period
        distinct_passes, counts = {id(entry): entry for entry in passes}, Counter(map(id, passes))
        steady: dict[tuple[Kind, int], Counter[int]] = {}
        growth_bytes = rounds * stage.period * trace.move.end
        for place in stage.middle:
            action, entry = stage.distinct[stage.order[place]], passes[place]
            counts[id(entry)] += rounds
            growth_bytes += rounds * entry.change
            if action.kind in COMPUTE:
                steady.setdefault((action.kind, action.chunk), Counter())[id(entry)] += 1
        typical = {key: distinct_passes[histogram.most_common(1)[0][0]] for key, histogram in steady.items()}
        if not self._expansion.parameters.reduce_each:  # the last micro-batch reduces, also if it is the only one
            typical = {
                key: one._replace(collectives=tuple(each for each in one.collectives if each.kind == "all_gather"))
                for key, one in typical.items()
            }
        moves = [trace.move] * stage.micro_batches
        levels = chain(
            ((span.peak, span.end) for span in (*moves, trace.begin)),
            ((entry.peak, entry.change) for entry in passes),
            [(trace.finish.peak, trace.finish.end)],
        )
        peak = max(_highest(levels), sum(entry.buffers for entry in passes) + self._working)
        sent = Counter(collective for collective in self._ending if groups[collective.axis].size > 1)
        other_collectives = sent.copy()
        for key, entry in distinct_passes.items():
            for collective in chain(entry.collectives, *(span.work.collectives for span in entry.spans)):
                sent[collective] += counts[key]
        repeated = [(entry, -stage.micro_batches - extra_micro_batches) for entry in typical.values()]
        for entry, count in [*((entry, counts[key]) for key, entry in distinct_passes.items()), *repeated]:
            for collective in entry.collectives:
                other_collectives[collective] += count * (collective.kind == "all_gather")
        sent.update(chain.from_iterable(self._gathers.values()))
        channels = {(action.kind, action.peer) for action in stage.distinct if action.kind in MESSAGES}
        axes = {each.axis for each in sent if each.axis != "pipeline" or each.kind not in ("send", "receive")}
        axes |= {each.axis for buffers in self._buffers for each in buffers.gathers}  # frozen weights are gathered once
        return StageLedger(
            self._lasting,
            self._lasting + trace.lasting_bytes + peak + growth_bytes,
            sent,
            len(axes) + len(channels),
            typical,
            self._gathers,
            self._reductions,
            other_collectives,
            self._update,
            self._host_update_bytes,
        )

    def _add(self, sums: dict[int, tuple[Collective, ...]], chunk: int, sent: Collection[Collective]) -> None:
        sums[chunk] = sums.get(chunk, ()) + tuple(each._replace(hidden=self._hidden) for each in sent)

    def _walk(self, stage: StageActions) -> list[Pass]:
        """Return the ledger of each action of a step, and that of the step's end."""
        state, passes, known = 0, list[Pass](), self._passes
        for number in stage.order:
            action = stage.distinct[number]
            entry, state = known.get((state, action)) or self._pass(state, action)
            passes.append(entry)
        return [*passes, (known.get((state, None)) or self._pass(state, None))[0]]

    def _sent_once(self, shard_axes: list[Axis]) -> list[Collective]:
        """Return the once-per-step collectives besides gathers and reductions.

        They sum gradients of which several ranks hold copies, losses and norms, and gather updated weights.
        `shard_axes`: axis along which each tensor is sharded.
        """
        config, width = self._config, self._formats.sums
        sent: list[Collective] = []
        for flat, held, _ in self._trained:
            size = flat.padded // flat.sharding.size * width
            sent += [Collective("all_reduce", cast(Axis, axis), size) for axis in held.shared]
        partial = sum(held.partial for _, held, _ in self._trained)
        sent += [Collective("all_reduce", "tensor", partial * width)] * (partial > 0)
        compared = len(COPY_AXES) * COPY_PARTS * config.faults.verify_weights
        world = [8 * (2 + (config.model.mtp_layers > 0) + compared)]  # norm and losses
        if config.precision.matmul == "fp8":
            shapes = logical_shapes(config.model).items()
            world.append(3 * 4 * sum(in_fp8(name, shape) for name, shape in shapes))
        if config.model.experts is not None:
            world.append(8 * len(config.model.expert_layers) * (config.model.experts + 3))
        if qk_clip_of(config.optimizer) is not None:
            world.append(width * config.model.num_blocks * config.model.heads)
        sent += [Collective("all_reduce", "world", nbytes) for nbytes in world]
        sent.append(Collective("all_reduce", "replicas", 8 * (1 + config.model.mtp_layers)))  # numbers of targets
        if config.optimizer.name == "lamb":  # squared norms of directions, weights and updates
            counts: Counter[Axis] = Counter(shard_axes)
            counts["tensor"] = counts.total()
            sent += [Collective("all_reduce", axis, 3 * count * width) for axis, count in counts.items()]
        return sent + list(self._exchanged())

    def _exchanged(self) -> Iterator[Collective]:
        """Yield the exchanges of Muon's matrices, there and back."""
        experts = {id(one) for one in self._rounds.get(True, ())}
        for one, name, sent, received, hidden in exchanges([*chain.from_iterable(self._rounds.values())]):
            kind: Any = "send" if sum(map(bool, sent)) == 1 else "all_to_all"
            axis = cast(Axis, "expert_" * (id(one) in experts and name == "shard") + name)
            nbytes = max(sum(sent), sum(received)) * self._formats.weights
            yield Collective(kind, axis, nbytes, hidden=float(hidden))

    def _updated(self) -> tuple[Work, float, int]:
        """Return the work of the optimizer step, the bytes it reads and writes on the host, and its working memory."""
        trace, formats = self._trace.update, self._formats
        numels = [numel for _, held, _ in self._trained for numel in held.numels]
        one_by_one = numels if not self._rounds else [n for _, held, _ in self._trained for n in held.others]
        moved, launches, working = trace.at(sum(one_by_one), len(one_by_one), UPDATED_AT_ONCE)
        moved += trace.bytes_of_matrix * (sum(numels) - sum(one_by_one))
        launches += trace.launches_of_matrix * (len(numels) - len(one_by_one))
        rounds = [one for kind_rounds in self._rounds.values() for one in kind_rounds]
        alias, wide = formats.weights == formats.sums, min(sum(numels) - sum(one_by_one), UPDATED_AT_ONCE)
        widened = wide * formats.sums * (formats.moments < formats.sums)
        working = max(working, widened, working_bytes(rounds, formats.weights, alias))
        shapes = sum((one.shapes for one in rounds), Counter())
        matmuls = tuple(each for shape, count in shapes.items() for each in _iterations(self._config, shape, count))
        copied = sum(copied_bytes(flat, formats) for flat, *_ in self._trained)
        launches += self._compared[0]
        if any(flat.main_on_host for flat, *_ in self._trained):
            on_device = Work(matmuls, self._compared[1], launches, host_bytes=copied)
            return on_device, moved, int(working) * bool(rounds)
        return Work(matmuls, moved + self._compared[1], launches, host_bytes=copied), 0.0, int(working)

    def _pass(self, state: int, action: Action | None) -> tuple[Pass, int]:
        """Return the ledger of an action and the state of the flat parameters after it; None: the end of the step."""
        if state and action is not None and action.kind in MESSAGES:  # a message leaves all flat parameters as they are
            entry, _ = self._passes.get((0, action)) or self._pass(0, action)
            return self._passes.setdefault((state, action), (entry, state))
        expansion, trace = self._expansion, self._trace
        expansion.state, begun = self._states[state][0], set(self._states[state][1])
        fold = Fold(self._buffers, self._flat_of, self._in_fp8, begun, self._hidden)
        if action is None:
            expansion.reducing.finish_all()
            fold.operations(expansion.ops)
        elif action.kind in MESSAGES:
            span = trace.message(self._split, action.kind, list(self._kinds[action.chunk].values()))
            kind = cast(Any, "send" if action.kind in SENDS else "receive")
            sent = tuple(Collective(kind, "pipeline", nbytes) for nbytes in message_bytes(self._config))
            fold.span("", replace(span, work=replace(span.work, collectives=sent)))
        elif action.kind in COMPUTE:
            expansion.add(action)
            kinds = self._kinds[action.chunk]
            names = [*kinds] if action.kind is Kind.FORWARD else [*reversed([*kinds])]
            if (key := (action.kind, action.chunk)) not in self._spans:
                self._spans[key] = [span for _, span in trace.of_action(action.kind, list(kinds.values()))]
            fold.modules(expansion.ops, zip(["", *names, ""], self._spans[key], strict=True))
        else:
            expansion.add(action)
            fold.operations(expansion.ops)
        after = expansion.state, frozenset(begun)
        if after not in self._states:
            self._states.append(after)
        return self._passes.setdefault((state, action), (fold.result(), self._states.index(after)))


def _iterations(config: RunConfig, shape: tuple[int, ...], count: int) -> Iterator[Matmul]:
    """Yield the matmuls that orthogonalize `count` matrices of a shape."""
    assert config.optimizer.name == "muon"
    (short, long), steps = sorted(shape), config.optimizer.ns_steps
    for columns, depth in ((short, long), (short, short), (long, short)):
        yield Matmul(short, columns, depth, count, steps)


def _highest(levels: Iterable[tuple[int, int]]) -> int:
    """Return the peak of actions that follow each other, each with its peak and its net change."""
    level = most = 0
    for peak, change in levels:
        if level + peak > most:
            most = level + peak
        level += change
    return most


def message_bytes(config: RunConfig) -> tuple[int, ...]:
    """Return the bytes of the tensors that a chunk sends to the next one for a micro-batch."""
    parallel, model = config.parallel, config.model
    rank, length = TensorRank(0, parallel.tensor, parallel.sequence), model.sequence // parallel.context
    shapes = hidden_state_shapes(model, rank, config.batch.micro_size, length, model.sequence, ulysses_size(config))
    return tuple(BYTES[config.precision.compute] * math.prod(shape) for shape in shapes)
