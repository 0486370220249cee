"""Processor time of an update of Muon: ours beside torch.optim.Muon and the one that Megatron-Core uses.

    python -m benchmarks.muon_update --output benchmarks/results/muon_update.json

The tensors are the matrices of two layers of the plain model in fp32, on one thread. At 512 columns the iterations are
nearly all of the time; at 16 columns it is host time, of which a GPU sees the launches. Each repeat takes the peers in
another order, and a row is the median over repeats of the ratio to torch's time of the same repeat (below 1: less than
torch's), with quartiles. All iterate in bf16, and ours in fp32 too. `emerging_optimizers`, Megatron-Core's library for
`--optimizer muon`, is measured if it can be imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from benchmarks.side_by_side import SHAPE, machine
from pangu.optim.muon import Muon

OPTIONS: dict[str, Any] = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.1, "nesterov": True}
PEERS = ("torch", "pangu", "pangu, fp32", "emerging_optimizers")


def matrices(layers: int, hidden: int) -> list[Tensor]:
    """Return the matrices of layers, with gradients: queries, keys, values, output and both of the feed-forward."""
    source = torch.Generator().manual_seed(0)
    shapes = [*[(hidden, hidden)] * 4, (4 * hidden, hidden), (hidden, 4 * hidden)] * layers
    found = [torch.randn(shape, generator=source) for shape in shapes]
    for one in found:
        one.grad = torch.randn(one.shape, generator=source)
    return found


def make(peer: str, layers: int, hidden: int) -> Callable[[], Any]:
    """Return an update of a peer, each with the scale of Moonlight."""
    tensors = matrices(layers, hidden)
    if peer == "torch":
        return torch.optim.Muon(tensors, adjust_lr_fn="match_rms_adamw", **OPTIONS).step
    if peer == "emerging_optimizers":
        from emerging_optimizers.orthogonalized_optimizers import Muon as Megatrons

        return Megatrons(tensors, extra_scale_factor=0.2, **OPTIONS).step
    return Muon(tensors, dtype=None if peer.endswith("fp32") else torch.bfloat16, **OPTIONS).step


def processor_seconds(peers: tuple[str, ...], layers: int, hidden: int, repeats: int) -> dict[str, list[float]]:
    """Return processor seconds of each peer's updates."""
    steps = {peer: make(peer, layers, hidden) for peer in peers}
    seconds: dict[str, list[float]] = {peer: [] for peer in peers}
    for repeat in range(1 + repeats):
        for peer in Random(repeat).sample(peers, len(peers)):
            began = time.process_time()
            steps[peer]()
            if repeat:
                seconds[peer].append(time.process_time() - began)
    return seconds


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, nargs="+", default=[16, SHAPE["hidden"]])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    peers = PEERS if importlib.util.find_spec("emerging_optimizers") else PEERS[:-1]
    rows = []
    for hidden in arguments.hidden:
        seconds = processor_seconds(peers, arguments.layers, hidden, arguments.repeats)
        for peer in peers:
            ratios = [own / base for base, own in zip(seconds["torch"], seconds[peer], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            figures = {"against_torch": middle, "lower_quartile": low, "upper_quartile": high}
            figures |= {"milliseconds": 1000 * statistics.median(seconds[peer])}
            row = {"peer": peer, "layers": arguments.layers, "hidden": hidden}
            rows.append({**row, **{key: round(value, 3) for key, value in figures.items()}})
            print(json.dumps(rows[-1]), flush=True)
    if arguments.output:
        words = {"command": "python -m benchmarks.muon_update", "repeats": arguments.repeats}
        text = json.dumps({**words, "machine": machine(), "rows": rows}, indent=1)
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
