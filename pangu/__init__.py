"""pangu: trains GPT and PanGu-α language models from one process to thousands of accelerators.

The names of this module are the public API (docs/library.md); each is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "config.data": "PackingConfig",
    "common.errors": "UserError",
    "data.indexed": "open_indexed",
    "data.loader": "Loader",
    "data.stream": "SampleStream",
    "layers.linear": "ColumnParallelLinear RowParallelLinear",
    "library.checkpoints": "load read_weights save",
    "library.connect": "connect",
    "library.parallel_linear": "column_parallel local_sequence row_parallel",
    "library.pipeline": "Pipeline",
    "library.sharded_model": "ShardedModel Update shard",
    "optim.lamb": "Lamb",
    "prepare.indexed_writer": "IndexedWriter",
    "topology.layout": "Layout",
    "topology.mesh": "Mesh",
}
_MODULE_OF = {name: f"pangu.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'pangu' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULE_OF]
