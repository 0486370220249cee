"""Static checks that the action lists of a schedule are consistent and do all of the work."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import zip_longest

from pangu.layers.turns import LayerPart, Turn
from pangu.schedule.actions import COMPUTE, MESSAGES, Action, Kind
from pangu.schedule.schedule import Schedule

Message = tuple[Kind, int, int]
"""Kind (RECV_ACTIVATION or RECV_GRADIENT), chunk that uses the message, micro-batch."""


class ScheduleError(Exception):
    """Error for action lists that cannot run or do not do the work, with the stage, the action and the reason."""


def message_of(action: Action) -> Message:
    """Return the message of a SEND_* or RECV_* action, equal for both ends."""
    assert action.micro is not None
    if action.kind is Kind.SEND_ACTIVATION:
        return Kind.RECV_ACTIVATION, action.chunk + 1, action.micro
    if action.kind is Kind.SEND_GRADIENT:
        return Kind.RECV_GRADIENT, action.chunk - 1, action.micro
    return action.kind, action.chunk, action.micro


def source_of(kind: Kind, chunk: int, stage_of: tuple[int, ...]) -> int | None:
    """Return the chunk on another stage whose output a forward or backward pass needs, or None."""
    source = chunk - 1 if kind is Kind.FORWARD else chunk + 1
    alone = kind is Kind.BACKWARD_WEIGHT or not 0 <= source < len(stage_of)
    return None if alone or stage_of[source] == stage_of[chunk] else source


def input_of(action: Action, stage_of: tuple[int, ...]) -> Message | None:
    """Return the message that a forward or backward pass waits for, or None."""
    assert action.micro is not None
    if source_of(action.kind, action.chunk, stage_of) is None:
        return None
    kind = Kind.RECV_ACTIVATION if action.kind is Kind.FORWARD else Kind.RECV_GRADIENT
    return kind, action.chunk, action.micro


def check(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless every stage does all of its work once, in a valid order.

    Also checked: each chunk's gradients are reduced when complete (or after every micro-batch); in two phases each
    chunk is used only between UNSHARD and RESHARD; both ends of every channel (kind of message, source, target) list
    the same messages in the same order; each half of a micro-batch takes all turns in order. Only `simulate` finds
    stages that wait for each other in a circle.
    """
    needed = [Turn(part, half) for half in (0, 1) for part in LayerPart]
    if schedule.turns and sorted(schedule.turns, key=lambda turn: turn.half) != needed:
        found, parts = ", ".join(map(str, schedule.turns)), ", ".join(LayerPart)
        raise ScheduleError(f"turns {found}: halves 0 and 1 of a micro-batch need {parts} once each, in this order")
    sent: dict[tuple[Kind, int, int], list[Message]] = defaultdict(list)
    received: dict[tuple[Kind, int, int], list[Message]] = defaultdict(list)
    for stage, actions in enumerate(schedule.actions):
        _Stage(schedule, stage).check(actions)
        for action in actions:
            if action.peer is not None:
                message = message_of(action)
                if message[0] is action.kind:
                    received[message[0], action.peer, stage].append(message)
                else:
                    sent[message[0], stage, action.peer].append(message)
    for channel in sent.keys() | received.keys():
        _check_channel(*channel, sent[channel], received[channel])


def _check_channel(kind: Kind, source: int, target: int, sent: list[Message], received: list[Message]) -> None:
    def named(message: Message | None) -> str:
        return "nothing" if message is None else f"chunk {message[1]}, micro-batch {message[2]}"

    for index, (send, receive) in enumerate(zip_longest(sent, received)):
        if send != receive:
            raise ScheduleError(
                f"stage {target}: {kind} from stage {source}, message {index}: it receives {named(receive)}, "
                f"but stage {source} sends {named(send)}"
            )


class _Stage:
    # An action is valid once these are done for its micro-batch; `prev` and `next` are the neighboring chunks, on this
    # stage or, if on another, their message posted:
    #
    #    F   F of prev                   send of an activation   F
    #    B   F, and B or I of next       send of a gradient      B or I
    #    I   like B                      W                       I

    def __init__(self, schedule: Schedule, stage: int) -> None:
        self.schedule, self.stage, self.stage_of = schedule, stage, schedule.stage_of
        self.chunks = [chunk for chunk, owner in enumerate(schedule.stage_of) if owner == stage]
        self.done: dict[Kind, set[tuple[int, int]]] = {kind: set() for kind in Kind}
        """Chunk and micro-batch of the actions done so far, by kind."""
        self.unsharded: set[int] = set()
        self.gradients: Counter[int] = Counter()
        """Chunk -> number of micro-batches in its gradients so far."""

    def check(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            problem = self._problem(action) or self._problem_of_reduction(action)
            if problem is not None:
                raise ScheduleError(f"stage {self.stage}: {action}: {problem}")
            if action.micro is not None:
                self.done[action.kind].add((action.chunk, action.micro))
        # sends are left to the comparison of channels: each is received by a step whose presence is checked
        for chunk in self.chunks:
            if (missing := self._missing(chunk)) is not None:
                raise ScheduleError(f"stage {self.stage}: {missing}: missing")

    def _problem(self, action: Action) -> str | None:
        if action.chunk not in self.chunks:
            return f"the stage has only the chunks {self.chunks}"
        if (action.micro is None) == (action.kind in COMPUTE | MESSAGES):
            return "computations and messages need a micro-batch, other actions must not have one"
        if action.micro is None:
            if (action.kind is Kind.UNSHARD) == (action.chunk in self.unsharded):
                return "already unsharded" if action.kind is Kind.UNSHARD else "not unsharded"
            self.unsharded ^= {action.chunk}
            return None
        if not 0 <= action.micro < self.schedule.micro_batches:
            return f"the schedule has {self.schedule.micro_batches} micro-batches"
        if (action.chunk, action.micro) in self.done[action.kind]:
            return "done twice"
        if action.kind in MESSAGES:
            return self._problem_of_message(action, (action.chunk, action.micro))
        return self._problem_of_computation(action, (action.chunk, action.micro))

    def _problem_of_reduction(self, action: Action) -> str | None:
        if action.kind not in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            return "it does not complete any gradients" if action.reduce else None
        self.gradients[action.chunk] += 1
        complete = self.schedule.reduce_each or self.gradients[action.chunk] == self.schedule.micro_batches
        if action.reduce == complete:
            return None
        return "the gradients are complete but not reduced" if complete else "reduced before they are complete"

    def _problem_of_message(self, action: Action, key: tuple[int, int]) -> str | None:
        ahead = action.kind in (Kind.SEND_ACTIVATION, Kind.RECV_GRADIENT)  # the other end is the next chunk
        other = action.chunk + 1 if ahead else action.chunk - 1
        if not 0 <= other < len(self.stage_of) or self.stage_of[other] != action.peer or action.peer == self.stage:
            return "no such message: the neighbouring chunk is not on that stage"
        if action.kind is Kind.SEND_ACTIVATION and key not in self.done[Kind.FORWARD]:
            return "sent before its forward"
        if action.kind is Kind.SEND_GRADIENT and not self._went_back(key):
            return "sent before its backward"
        return None

    def _problem_of_computation(self, action: Action, key: tuple[int, int]) -> str | None:
        done, (chunk, micro) = self.done, key
        if self.schedule.two_phases and chunk not in self.unsharded:
            return "outside UNSHARD and RESHARD of its chunk"
        if action.kind is Kind.BACKWARD_WEIGHT:
            return None if key in done[Kind.BACKWARD_INPUT] else "before its backward for the input"
        message = input_of(action, self.stage_of)
        if message is not None and key not in done[message[0]]:
            return f"no {message[0]} posted before it"
        if action.kind is Kind.FORWARD:
            ready = message is not None or chunk == 0 or (chunk - 1, micro) in done[Kind.FORWARD]
            return None if ready else f"before the forward of chunk {chunk - 1} on this stage"
        if key not in done[Kind.FORWARD]:
            return "before its forward"
        if self._went_back(key):
            return "second backward of the micro-batch"
        ready = message is not None or chunk + 1 == len(self.stage_of) or self._went_back((chunk + 1, micro))
        return None if ready else f"before the backward of chunk {chunk + 1} on this stage"

    def _went_back(self, key: tuple[int, int]) -> bool:
        return key in self.done[Kind.BACKWARD] or key in self.done[Kind.BACKWARD_INPUT]

    def _missing(self, chunk: int) -> Action | None:
        splits = self.schedule.splits_backward
        kinds = [Kind.FORWARD, *([Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT] if splits else [Kind.BACKWARD])]
        for micro in range(self.schedule.micro_batches):
            if (chunk, micro) not in self.done[Kind.BACKWARD]:
                for kind in kinds:
                    if (chunk, micro) not in self.done[kind]:
                        return Action(kind, chunk, micro)
        return Action(Kind.RESHARD, chunk) if chunk in self.unsharded else None
