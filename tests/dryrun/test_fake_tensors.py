"""Searches carry out hundreds of dry runs: operations on fake tensors are cheap, and measurements update no weights."""

from __future__ import annotations

import json

import pytest

from pangu.dryrun import measure
from pangu.dryrun.traces import Way, jobs_of
from pangu.optim import build
from pangu.zero.sharded import ShardedParameters
from tests.dryrun.test_cache import REQUEST
from tests.end_to_end.commands import command

MOST = {"x + x": 25, "x.view(16)": 55, "torch.empty(4, device='cuda')": 21}
"""Most Python functions that are called for an operation like an earlier one; twice as many without our short cuts."""
SCRIPT = """
import json
import sys
import warnings
from pangu.dryrun.device import load_device

fake = load_device()
import torch
from pangu.dryrun.fake_tensors import FakeTensors

def calls(operation):
    count = 0
    def called(frame, event, argument):
        nonlocal count
        count += event == "call"
    for _ in range(2):  # the outputs of the first one are kept
        operation()
    sys.setprofile(called)
    operation()
    sys.setprofile(None)
    return count

with FakeTensors():
    x = torch.empty(4, 4, device="cuda")
    print(json.dumps([calls(lambda: eval(operation)) for operation in sys.argv[1:]]))
    with warnings.catch_warnings(record=True) as warned:
        (x + x).data_ptr()
    assert warned, "nothing tells that all fake tensors have address 0"
"""


def test_an_operation_on_fake_tensors_calls_few_functions() -> None:
    done = command("-c", SCRIPT, *MOST)
    assert done.returncode == 0, done.stderr
    for found, most in zip(json.loads(done.stdout), MOST.values(), strict=True):
        assert most / 2 < found <= most


def test_modules_are_measured_without_an_update_of_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update of tensors of four sizes stands for it: hundreds of experts have thousands of moments."""
    start, started = build.start_moments, []
    monkeypatch.setattr(build, "start_moments", lambda *one: (started.append(one), start(*one)))
    monkeypatch.setattr(ShardedParameters, "update", None)
    ((ways, options),) = jobs_of([(Way.of(REQUEST), REQUEST)])
    assert "traces" in measure.answer("this process has no device", json.loads(ways[0].values), 0, options)
    assert len(started) == 4
