"""Script of a run in which ranks die at marked points, one after the other."""

from __future__ import annotations

from tests.spawn import repository

HOLDS_AFTER = 6
"""Step that a run waits in, once it has met again, while there is a file `holds`."""
CONNECTING = "while groups are made"
"""Point after another kill at which a rank dies: others know its address, but have not connected to it yet."""
KEEPING = "training.survivors:write_own"
"""Point after another kill at which a rank dies: it has written what it keeps, but has not said so."""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
DEAF = "deaf"
"""File with the rank that does not hear the sum of the step in which the first of the others is killed."""
SCRIPT = f"""
import json
import importlib
import os
import signal
import time
from pathlib import Path

import torch.distributed as dist

from pangu.common.errors import LocalError
from pangu.pretrain import pretrain
from pangu.topology import backends

FOLDER = Path(__file__).parent
KILLS = json.loads((FOLDER / "kills").read_text())
NODE = min(2, 2 * int(os.environ["RANK"]) // int(os.environ["WORLD_SIZE"]))  # 2: that of the spare
os.environ.setdefault("PANGU_MEMORY", f"{{FOLDER}}/memory/{{NODE}}")


def replace(place, action):
    module, _, names = place.partition(":")
    *path, name = names.split(".")
    owner = importlib.import_module(f"pangu.{{module}}")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **keys: action(original, *arguments, **keys))


def begin(original, loop):
    with (FOLDER / "processes").open("a") as file:
        print(os.environ["RANK"], os.getpid(), loop.trainer.step, file=file)
    current.append(loop)
    past.append(loop)
    began.append(loop.trainer.step)
    try:
        return original(loop)
    finally:
        current.clear()  # nobody dies while copies come from the buddy: two nodes would be lost at once


def hold(original, trainer, *arguments, **keys):
    while (FOLDER / "holds").exists() and began[-1] and trainer.step >= {HOLDS_AFTER}:  # once it has met again
        time.sleep(0.05)
    return original(trainer, *arguments, **keys)


def die(place, original, *arguments, **keys):
    number = len(list(FOLDER.glob("killed-*")))
    point, dies, after = [*KILLS, ["", -1, 0]][number]
    loops = past[-1:] if place == "{KEEPING}" else current
    trainers = [loop.trainer for loop in loops if loop.trainer.step >= after]
    is_due = trainers and point == place and int(os.environ["RANK"]) == dies
    result = original(*arguments, **keys)
    if is_due and number == len(list(FOLDER.glob("killed-*"))):
        (FOLDER / f"killed-{{number}}").write_text(str(trainers[-1].step))
        ACTION
    return result


class Dying(dist.Store):
    def __init__(self, store, number, after):
        super().__init__()
        self._store, self._number, self._left = store, number, after

    def set(self, key, value):
        self._store.set(key, value)
        if "//cpu//" in key:  # an address
            self._left -= 1
        if self._left < 0:
            (FOLDER / f"killed-{{self._number}}").touch()
            os.kill(os.getpid(), signal.SIGKILL)


for name in ("add", "append", "check", "compare_set", "get", "has_extended_api", "multi_get", "multi_set", "wait"):
    setattr(Dying, name, lambda self, *arguments, _name=name: getattr(self._store, _name)(*arguments))


def open_store(original, *arguments):
    store, rank, world = original(*arguments)
    number = len(list(FOLDER.glob("killed-*")))
    point, dies, after = [*KILLS, ["", -1, 0]][number]
    if (point, dies) == ("{CONNECTING}", rank):
        store = Dying(store, number, after)
        stores.append(store)  # torch keeps its part in C++ only
    return store, rank, world


def listen(original, *arguments, **keys):
    result = original(*arguments, **keys)
    file = FOLDER / "{DEAF}"
    if file.exists() and file.read_text() == os.environ["RANK"] and not began[-1] and current:
        if current[-1].trainer.step == KILLS[0][2]:
            raise RuntimeError("/gloo/ Connection closed by peer, as if its last message was lost")
    return result


def late(original, *arguments, **keys):
    time.sleep(4)
    return original(*arguments, **keys)


current, past, began, stores = [], [], [], []
if __name__ == "__main__":
    replace("training.loop:Loop.run", begin)
    replace("training.step:Trainer.update", hold)
    replace("topology.mesh:_open_store", open_store)
    replace("zero.sharded:norm_and_loss", listen)
    backends.CONNECT_SECONDS = 2.0
    for place in {{point for point, *_ in KILLS}} - {{"{CONNECTING}"}}:
        replace(place, lambda *arguments, _place=place, **keys: die(_place, *arguments, **keys))
    if "LocalError" in "ACTION" and int(os.environ["RANK"]) != KILLS[0][1]:
        replace("training.memory_checkpoints:exchange_bytes", late)
    pretrain(Path({str(repository())!r}) / "configs")
"""
