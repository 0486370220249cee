"""Who sees whom in block-sparse attention, against the papers' definitions written down token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pangu.config.sparse import BigBirdSparsity, FixedSparsity, SparseConfig, StridedSparsity
from pangu.layers.block_pattern import BlockPattern
from pangu.layers.masks import AttentionMask
from pangu.layers.sparse import blocks_seen, computed_share

CPU = torch.device("cpu")
SMALL = st.integers(1, 4)
FIXED = st.builds(FixedSparsity, st.just("fixed"), SMALL, SMALL, SMALL).filter(
    lambda p: p.global_blocks <= p.local_blocks
)
STRIDED = st.builds(StridedSparsity, st.just("strided"), SMALL, SMALL, SMALL)
NATURAL = st.integers(0, 4)
BIGBIRD = st.builds(BigBirdSparsity, st.just("bigbird"), SMALL, SMALL, NATURAL, NATURAL, st.integers(0, 9))
PATTERNS = st.one_of(FIXED, STRIDED, BIGBIRD)
LENGTHS = st.integers(1, 40)


def mask(pattern: SparseConfig, length: int) -> torch.Tensor:
    """bool [length, length]."""
    return AttentionMask(sparse=BlockPattern.of(pattern, length, CPU)).dense(range(length), range(length), CPU)[0, 0]


@given(st.one_of(FIXED, STRIDED), LENGTHS)
def test_fixed_and_strided_are_what_the_paper_defines(pattern: FixedSparsity | StridedSparsity, length: int) -> None:
    """Child et al. 2019, section 4.3, of blocks in place of tokens: A(1) and A(2) together."""
    for query, row in enumerate(mask(pattern, length).tolist()):
        for key, seen in enumerate(row):
            i, j = query // pattern.block, key // pattern.block
            if isinstance(pattern, FixedSparsity):
                size = pattern.local_blocks
                expected = i // size == j // size or j % size >= size - pattern.global_blocks
            else:
                expected = i - j < pattern.local_blocks or (i - j) % pattern.stride == 0
            assert seen == (key <= query and expected)


@given(BIGBIRD, LENGTHS)
def test_bigbird_is_what_the_paper_defines(pattern: BigBirdSparsity, length: int) -> None:
    """Zaheer et al. 2020, section 2: a window, global tokens, and so many others, as far as there are."""
    seen = mask(pattern, length)
    for query in range(length):
        block = query // pattern.block
        near = {j for j in range(block + 1) if block - j < pattern.local_blocks or j < pattern.global_blocks}
        found = {key // pattern.block for key in seen[query].nonzero()[:, 0].tolist()}
        assert near <= found <= set(range(block + 1))
        assert len(found - near) == min(pattern.random_blocks, block + 1 - len(near))
        # a block is seen as a whole, up to the query
        assert seen[query].tolist() == [key // pattern.block in found and key <= query for key in range(length)]


def test_another_seed_draws_other_blocks() -> None:
    pattern = BigBirdSparsity("bigbird", 1, 1, 0, 2, seed=0)
    draws = [[frozenset(blocks_seen(replace(pattern, seed=seed), block)) for block in range(64)] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    # each of the blocks before the last one about equally often: 2 of 62 for each of 300 seeds
    last = [key for seed in range(300) for key in blocks_seen(replace(pattern, seed=seed), 62) - {62}]
    assert len(last) == 600
    assert 0 < min(map(last.count, range(62))) <= max(map(last.count, range(62))) < 30


@given(PATTERNS, LENGTHS, st.integers(1, 40))
def test_a_longer_text_changes_nothing_before(pattern: SparseConfig, length: int, more: int) -> None:
    assert torch.equal(mask(pattern, length + more)[:length, :length], mask(pattern, length))


@given(PATTERNS, st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 9))
def test_each_document_has_the_pattern_that_it_has_alone(
    pattern: SparseConfig, lengths: list[int], window: int
) -> None:
    """The same number may stand for two documents that are no neighbours."""
    total, begin = sum(lengths), 0
    documents = torch.repeat_interleave(torch.arange(len(lengths)) % 2, torch.tensor(lengths))[None]
    sparse = BlockPattern.of(pattern, total, CPU)
    found = AttentionMask(documents, window, None, sparse).dense(range(total), range(total), CPU)[0, 0]
    for length in lengths:
        own = slice(begin, begin + length)
        alone = AttentionMask(None, window, None, sparse).dense(range(length), range(length), CPU)[0, 0]
        assert torch.equal(found[own, own], alone)
        begin += length


@given(PATTERNS, LENGTHS, st.integers(1, 9))
def test_the_share_of_the_tiles_that_are_computed(pattern: SparseConfig, length: int, tile: int) -> None:
    seen = torch.nn.functional.pad(mask(pattern, length), (0, -length % tile, 0, -length % tile))
    tiles = seen.unflatten(0, (-1, tile)).unflatten(2, (-1, tile)).any(1).any(2)
    count = len(tiles)
    assert computed_share(pattern, length, tile) == pytest.approx(int(tiles.sum()) / (count * (count + 1) / 2))
    assert computed_share(pattern, length, length) == 1.0


def test_the_share_of_a_long_text() -> None:
    """64 blocks: each sees the 8 latest, and one of every 8 before them."""
    pattern = StridedSparsity("strided", 128, 8, 8)
    seen = sum(min(row + 1, 8) + row // 8 for row in range(64))
    assert computed_share(pattern, 8192, 128) == seen / (64 * 65 / 2)
