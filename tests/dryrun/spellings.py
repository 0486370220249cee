"""Spellings of host syncs and blocking copies, and of work that looks like one, in a process with the fake device."""

from pangu.dryrun.device import load_device

FAKE = load_device()  # before torch is imported

import json  # noqa: E402
from contextlib import suppress  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException  # noqa: E402

from pangu.dryrun.audit import Audit  # noqa: E402
from pangu.dryrun.run import on_fake_tensors  # noqa: E402

BLOCKING = """
x[0].item() | x.tolist() | float(x[0]) | int(x[0]) | bool(x[0]) | 1 if x[0] > 0 else 2 | [float(one) for one in x]
max(x) | 3.0 in x | bool(x.isnan().any()) | torch.allclose(x, x) | torch.equal(x, x) | torch.arange(int(n[0]), device=d)
x.nonzero() | x[x > 0] | torch.masked_select(x, x > 0) | torch.where(x > 0) | torch.unique(x) | torch.bincount(n)
torch.repeat_interleave(x, n) | F.one_hot(n) | x[n[0]] | x[: n[0]] | torch.multinomial(x, 1) | torch.linalg.inv(m)
x.cpu() | x.to("cpu") | x.to("cpu", non_blocking=True) | host.copy_(x) | x.copy_(host)
x.copy_(host, non_blocking=True) | host.to(d) | host.cuda() | torch.tensor(3.0, device=d)
torch.tensor([1.0, 2.0], device=d) | x.new_tensor([1.0])
torch.as_tensor([1.0], device=d) | x[[0, 1]] | x[index] | x.__setitem__(0, 1.0)
event.synchronize() | torch.Stream(d).synchronize() | torch.accelerator.synchronize() | torch.cuda.synchronize()
torch.cuda.synchronize(device=d)
"""
QUEUED = """
x + 2.0 | x + torch.tensor(2.0) | x.fill_(2.0) | torch.full((3,), 2.0, device=d) | torch.scalar_tensor(3.0, device=d)
x.masked_fill(x > 0, torch.tensor(1.0)) | x.__setitem__(x > 0, 1.0) | x.__setitem__(slice(1, 3), 1.0)
torch.where(x > 0, x, torch.tensor(1.0)) | x[n] | x.index_select(0, n) | x.topk(2) | x.sort() | x.argmax()
x.cumsum(0) | F.one_hot(n, 5) | torch.nn.utils.get_total_norm([x]) | torch.randperm(3, device=d)
torch.linspace(0, 1, 3, device=d) | pinned.copy_(x, non_blocking=True) | x.copy_(pinned, non_blocking=True)
torch.Event(d).record() | x[1:] | x.view(1, -1)
"""


def counted(code: str) -> int:
    """Return how often the host waits in an expression."""
    assert not isinstance(FAKE, str), FAKE
    d = torch.device("cuda", 0)
    with on_fake_tensors(0, 1), Audit(d, {}, FAKE) as audit:
        names: dict[str, Any] = {
            **{"torch": torch, "F": torch.nn.functional, "d": d, "event": torch.Event(d)},
            **{"x": torch.zeros(3, device=d), "n": torch.zeros(3, device=d, dtype=torch.int64)},
            **{"m": torch.zeros(3, 3, device=d), "index": torch.tensor([0, 1])},
            **{"host": torch.zeros(3), "pinned": torch.empty(3, pin_memory=True)},
        }
        names["event"].record()
        with suppress(DataDependentOutputException, DynamicOutputShapeException):
            eval(code, names)
        names["x"].neg_()  # audits look at streams when they see an operation
        kinds = ("host_syncs", "blocking_copies")
        return sum(number for (kind, *_), number in audit.counts.items() if kind in kinds) + audit.findings.total()


def main() -> None:
    found = [
        {code: counted(code) for code in filter(None, (one.strip() for one in text.replace("\n", "|").split("|")))}
        for text in (BLOCKING, QUEUED)
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
