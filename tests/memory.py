"""Counts the bytes of live tensors, for tests."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that were made within the block and are still alive, and the most there ever were."""

    def __init__(self, *older: torch.Tensor) -> None:
        """`older`: tensors from before the block, whose views are not counted either."""
        super().__init__()
        self.bytes = 0
        self.peak = 0
        self._older = [tensor.untyped_storage() for tensor in older]
        self._seen = {storage._cdata for storage in self._older}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.bytes)
        return result

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.bytes -= size
