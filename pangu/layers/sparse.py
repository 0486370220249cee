"""Patterns of block-sparse attention, functions of two block numbers that no layout changes, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from pangu.config.sparse import BigBirdSparsity, FixedSparsity, SparseConfig
from pangu.topology.random import random_key

FLEX_TILE = 128
"""Size of the tiles of queries and keys of which FlexAttention computes all scores or none."""


def blocks_seen(pattern: SparseConfig, block: int) -> set[int]:
    """Return the blocks that a block sees: itself and earlier ones."""
    # rows see columns; `local_blocks` 3, `global_blocks` 1, `stride` 4, `random_blocks` 1 (seed 0)
    #
    #     fixed       strided     bigbird
    #     #           #           #
    #     ##          ##          ##
    #     ###         ###         ###
    #     ..##        .###        ####
    #     ..###       #.###       #####
    #     ..####      .#.###      ##.###
    #     ..#..##     ..#.###     ##..###
    #     ..#..###    ...#.###    #..#.###
    #     ..#..####   #...#.###   ##....###
    if isinstance(pattern, FixedSparsity):
        size, last = pattern.local_blocks, range(pattern.local_blocks - pattern.global_blocks, pattern.local_blocks)
        begins = block // size * size
        return {*range(begins, block + 1), *(group + place for group in range(0, begins, size) for place in last)}
    recent = set(range(max(0, block - pattern.local_blocks + 1), block + 1))
    if isinstance(pattern, BigBirdSparsity):
        return recent | set(range(min(pattern.global_blocks, block))) | set(_drawn(pattern, block))
    return recent | set(range(block % pattern.stride, block, pattern.stride))


def _drawn(pattern: BigBirdSparsity, block: int) -> Iterator[int]:
    """Yield distinct random blocks between the first and the latest ones."""
    left = list(range(pattern.global_blocks, block - pattern.local_blocks + 1))
    for number in range(min(pattern.random_blocks, len(left))):
        yield left.pop(random_key(pattern.seed, "random block", block, number) % len(left))


@lru_cache
def computed_share(pattern: SparseConfig, length: int, tile: int) -> float:
    """Return the fraction of causal tiles of `tile` x `tile` scores that the pattern needs in `length` tokens."""
    begins = range(0, length, pattern.block)
    tiles = [range(begin // tile, (min(length, begin + pattern.block) - 1) // tile + 1) for begin in begins]
    count = -(-length // tile)
    computed: list[set[int]] = [set() for _ in range(count)]
    for block, queries in enumerate(tiles):
        keys = {key for seen in blocks_seen(pattern, block) for key in tiles[seen]}
        for query in queries:
            computed[query] |= keys
    below = sum(sum(key <= query for key in keys) for query, keys in enumerate(computed))
    return below / (count * (count + 1) / 2)


def in_words(pattern: SparseConfig, length: int) -> str:
    """Describe what a pattern sees in a text of `length` tokens, and what kernels compute of it."""
    blocks = f"{computed_share(pattern, length, pattern.block):.1%} of the causal blocks of {pattern.block} tokens"
    tiles = f"{computed_share(pattern, length, FLEX_TILE):.1%} in tiles of {FLEX_TILE}"
    return f"{pattern.kind}: sees {blocks}; FlexAttention computes {tiles}, other kernels all"
