"""Keys and values of tokens that were computed before, so that a text grows by one token at the cost of one."""

from __future__ import annotations

from torch import Tensor, nn

from pangu.layers.kernels import QKV


class KVCache:
    """What the attention layers of one rank keep of the tokens of one micro-batch."""

    def __init__(self, room: int) -> None:
        """
        Args:
            room: most tokens of a sequence.
        """
        self._room = room
        self._kept: dict[nn.Module, list[Tensor]] = {}
        """By layer, keys and values: [batch, heads, room, head size]."""

    def append(self, layer: nn.Module, heads: QKV, first: int) -> QKV:
        """Keep the keys and values of some tokens of a layer.

        Args:
            layer: who attends.
            heads: of these tokens.
            first: place of the first of them in the sequence; what is kept from there on is replaced.

        Returns:
            The queries as they are, with the keys and values of all tokens up to the last of these.
        """
        here = (heads.key, heads.value)
        if layer not in self._kept:
            batch, count, _, size = heads.key.shape
            self._kept[layer] = [part.new_empty(batch, count, self._room, size) for part in here]
        stop = first + heads.key.shape[2]
        for kept, part in zip(self._kept[layer], here, strict=True):
            kept[:, :, first:stop] = part
        key, value = (kept[:, :, :stop] for kept in self._kept[layer])
        return QKV(heads.query, key, value)
