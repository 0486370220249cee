"""Resources of a GPU that our Triton attention kernels take, compiled for it without one.

    python -m benchmarks.attention_kernels --output benchmarks/results/attention_kernels.json

Needs Triton, whose ptxas says how many registers a thread has, how many bytes it keeps elsewhere for want of more, and
how much shared memory a program has, and whose nvdisasm shows the instructions of a loop. The kernels are launched as
training launches them, over documents and with dropout, by a driver that compiles and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from pangu.layers import triton_attention
from pangu.layers.triton_attention import INSTRUCTIONS, tiles_of

KERNELS = ("attend", "query_gradients", "key_gradients")
CAPABILITIES = (80, 90, 100, 120)
HEAD_SIZES = (64, 80, 128, 256)
"""Head sizes of the presets of 350M, 2.6B, and 13B and 200B; the largest one."""


def instruction_of(capability: int) -> str:
    """Return how tensor cores are called on GPUs of `capability` (80: 8.0)."""
    return INSTRUCTIONS.get(capability // 10, "mma")


@contextmanager
def pretending(capability: int) -> Iterator[None]:
    """Make Triton see a GPU of `capability`, on which nothing runs."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    target = GPUTarget("cuda", capability, 32)
    nowhere = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: capability,  # Triton keeps what it compiled by number of a device
        get_current_stream=lambda device: 0,
    )
    with patch.object(driver, "_active", nowhere):
        yield


@contextmanager
def compiling_for(capability: int) -> Iterator[list[Any]]:
    """Launches are compiled for GPUs of `capability` and go to the list instead."""
    from triton.runtime.jit import JITFunction

    run, made = JITFunction.run, []

    def compile_only(self: Any, *args: Any, **options: Any) -> None:
        made.append(run(self, *args, **(options | {"warmup": True})))

    with (
        patch.object(JITFunction, "run", compile_only),
        pretending(capability),
        patch.object(triton_attention, "matmul_instruction", lambda device: instruction_of(capability)),
    ):
        yield made


def compiled(capability: int, size: int, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """The three kernels for heads of `size` columns, as Triton holds what it compiled."""
    length, heads = 256, 4
    joined = torch.zeros(length, 1, 3 * heads * size, dtype=dtype)
    qkv = [part.unflatten(-1, (heads, size)).permute(1, 2, 0, 3) for part in joined.chunk(3, -1)]
    reach = torch.zeros(1, length, dtype=torch.int32)
    rows, place = torch.zeros(1, heads, length, dtype=torch.int64), torch.tensor(12345678901234567)
    with compiling_for(capability) as made:
        output, log_sum = torch.ops.pangu.attend(*qkv, reach, rows, place, 0.1, 0, 0)
        torch.ops.pangu.attend_backward(output, *qkv, output, log_sum, reach, reach, rows, place, 0.1, 0, 0)
    return made


def needs(kernel: Any, capability: int) -> dict[str, int]:
    """Registers of a thread, bytes that it stores elsewhere for want of registers, shared memory, tensor-core products.

    `products` are those that read shared memory (wgmma, tcgen05), `old_products` those that read registers, and
    `loop_instructions` those of a thread for a tile of queries and keys that needs no mask.
    """
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(kernel.asm["ptx"])
        target = f"-arch=sm_{capability}{'a' if capability >= 90 else ''}"
        command = [get_ptxas(capability).path, "-v", target, str(source), "-o", str(source.with_suffix(".o"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None, said
    assert spilled is not None, said
    return {
        "registers": int(registers[1]),
        "spilled_bytes": int(spilled[1]),
        "shared_bytes": kernel.metadata.shared,
        "products": len(re.findall(r"^\s*(?:@\S+ )?(?:wgmma\.mma_async|tcgen05\.mma)", kernel.asm["ptx"], re.M)),
        "old_products": len(re.findall(r"^\s*mma\.sync", kernel.asm["ptx"], re.M)),
        "loop_instructions": min(loops(kernel), default=0),
    }


def loops(kernel: Any) -> list[int]:
    """Instructions of each loop that multiplies matrices and contains no other such loop."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    labels: dict[str, int] = {}
    code: list[str] = []
    for label, instruction in re.findall(r"^\s*(?:(\.L_x_\d+):|/\*[0-9a-f]{4,}\*/\s+(.*?);)", text, re.M):
        if label:
            labels[label] = len(code)
        else:
            code.append(instruction)
    products = [i for i, instruction in enumerate(code) if re.match(r"(@\S+ )?(HGMMA|HMMA|UTC\w*MMA)", instruction)]
    jumps = ((re.search(r"\bBRA\b.*`\((\S+)\)", instruction), i) for i, instruction in enumerate(code))
    spans = [(labels[jump[1]], i) for jump, i in jumps if jump and labels[jump[1]] < i]
    spans = [(a, b) for a, b in spans if any(a <= i <= b for i in products)]
    return [b - a + 1 for a, b in spans if not any((a, b) != (c, d) and a <= c <= d <= b for c, d in spans)]


def main() -> None:
    """Compile every kernel for every head size and GPU, print the rows and write them."""
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--capabilities", type=int, nargs="+", default=CAPABILITIES)
    parser.add_argument("--head-sizes", type=int, nargs="+", default=HEAD_SIZES)
    arguments = parser.parse_args()
    rows = []
    for capability in arguments.capabilities:
        for size in arguments.head_sizes:
            for name, kernel in zip(KERNELS, compiled(capability, size), strict=True):
                tiles = tiles_of(name, size, instruction_of(capability))
                row = {"capability": capability, "head_size": size, "kernel": name, **tiles._asdict()}
                rows.append(row | needs(kernel, capability))
                print(json.dumps(rows[-1]))
    if arguments.output is not None:
        command = f"python -m benchmarks.attention_kernels --output {arguments.output}"
        result = {"command": command, "triton": triton.__version__, "torch": torch.__version__, "rows": rows}
        arguments.output.write_text(f"{json.dumps(result, indent=1)}\n")


if __name__ == "__main__":
    main()
