"""Triton kernels of `pangu.layers.triton_attention`: flash attention (Dao 2023, algorithms 1 and 2) with dropout.

The dropout masks are the hash of `pangu.layers.dropout_masks`, computed next to the probability and never stored. Where
tensor cores give a thread all four columns of a word, or two of transposed scores, it computes the word once. A program
has a tile of queries and goes through the keys that they see, or a tile of keys and goes through the queries that see
them: there are no atomic additions, so results are bitwise reproducible. A head of `SIZE` columns is split into the
largest power of two and a smaller one of at least 16: 80 columns into 64 and 16, not 128.

Sizes: `M` queries and `N` keys in a tile, `D` and `E` columns in the parts of a head (`E` is 0 if there is one part).
Places are positions in the sequence, numbers those in the tensors, which may hold a part of it. Scores are in powers of
two: `scale` includes log2(e).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pangu.layers.triton_masks import kept_by_keys, kept_by_queries

LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _places(at, numbers, stride, stop, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Return pointers [numbers, WIDTH] to columns from `FIRST` on, and True for rows < `stop` and columns < `SIZE`."""
    columns = FIRST + tl.arange(0, WIDTH)
    there = numbers[:, None] < stop
    if FIRST + WIDTH > SIZE:
        there = there & (columns[None, :] < SIZE)
    # numbers are not negative, and extending them without a sign is half of the instructions
    return at + numbers[:, None].to(tl.uint32).to(tl.int64) * stride + columns[None, :], there


@triton.jit
def _load(
    at, numbers, stride, stop, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr = True
):
    # without a mask all rows are there
    places, there = _places(at, numbers, stride, stop, FIRST, WIDTH, SIZE)
    return tl.load(places) if not MASKED and FIRST + WIDTH <= SIZE else tl.load(places, mask=there, other=0.0)


@triton.jit
def _store(at, numbers, stride, stop, values, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    places, there = _places(at, numbers, stride, stop, FIRST, WIDTH, SIZE)
    tl.store(places, values.to(at.dtype.element_ty), mask=there)


@triton.jit
def _load_row(at, numbers, stop, MASKED: tl.constexpr):
    return tl.load(at + numbers, mask=numbers < stop, other=0) if MASKED else tl.load(at + numbers)


@triton.jit
def _keys(rows, numbers, stop, place_low, place_high, MASKED: tl.constexpr = True):
    keys = _load_row(rows, numbers, stop, MASKED)
    return keys.to(tl.int32) ^ place_low, ((keys >> 32).to(tl.int32) ^ place_high) | 1


@triton.jit
def _edges(begin, end, whole_begin, whole_end, STEP: tl.constexpr):
    """Split a loop from `begin` to `end` in three; the middle, from `whole_begin` to `whole_end`, needs no mask."""
    # All edges but the end are multiples of `STEP` from `begin` on.
    first = tl.minimum(begin + (tl.maximum(whole_begin - begin, 0) + STEP - 1) // STEP * STEP, end)
    last = first + tl.maximum(tl.minimum(whole_end, end) - first, 0) // STEP * STEP
    return begin, first, last, end


@triton.jit
def _is_seen(places, oldest, numbers, key_at, keys, BOUNDED: tl.constexpr):
    key_places = (key_at + numbers)[None, :]
    seen = (key_places <= places[:, None]) & (numbers < keys)[None, :]
    if BOUNDED:
        seen = seen & (key_places >= oldest[:, None])
    return seen


@triton.jit
def _tile_of_queries(queries, heads, M: tl.constexpr):
    """Return the numbers of this program's first and last query, and its row, head, and both combined."""
    # neighboring programs read the same keys; among them, those that see the most start first
    tiles = tl.cdiv(queries, M)
    first = (tiles - 1 - tl.program_id(0) % tiles) * M
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    return first, tl.minimum(first + M, queries) - 1, pair // heads, pair % heads, pair


@triton.jit
def _query_bounds(
    oldest, rows, batch, pair, numbers, queries, reach_batch, query_at, place_low, place_high,
    BOUNDED: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    begins, low, high = numbers, numbers, numbers
    if BOUNDED:
        begins = tl.load(oldest + batch * reach_batch + query_at + numbers, mask=numbers < queries, other=0)
    if DROPS:
        low, high = _keys(rows + pair * queries, numbers, queries, place_low, place_high)
    return begins, low, high


@triton.jit
def _attend_some(
    sums, sums_e, total, top, query, query_e, key, value, key_stride, value_stride, begin, end, keys,
    places, oldest, key_at, scale, low, high, bound, nothing,
    MASKED: tl.constexpr, BOUNDED: tl.constexpr, DROPS: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Accumulate the output and sums of a tile of queries over keys from `begin` to `end`."""
    # `nothing` is 0, which the compiler does not know: it would select among 16-bit halves of registers
    for start in range(begin, end, N):
        numbers = start + tl.arange(0, N)
        scores = tl.dot(query, tl.trans(_load(key, numbers, key_stride, keys, 0, D, SIZE, MASKED)))
        if E > 0:
            part = _load(key, numbers, key_stride, keys, D, E, SIZE, MASKED)
            scores = tl.dot(query_e, tl.trans(part), scores)
        if MASKED:
            scores = tl.where(_is_seen(places, oldest, numbers, key_at, keys, BOUNDED), scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        finite = higher
        if MASKED:
            # both are -inf for a query that has seen nothing yet, and their difference is nan
            finite = tl.where(higher == float("-inf"), 0.0, higher)
        shares, shrink = tl.exp2(scores * scale - finite[:, None]), tl.exp2(top - finite)
        total = total * shrink + tl.sum(shares, 1)
        top = higher
        if DROPS:
            keep_mask = kept_by_queries(low, high, key_at + start, bound, WORDS, M, N)
            shares = tl.where(keep_mask, shares, nothing)
        part = _load(value, numbers, value_stride, keys, 0, D, SIZE, MASKED)
        shares = shares.to(part.dtype)
        sums = tl.dot(shares, part, sums * shrink[:, None])
        if E > 0:
            part = _load(value, numbers, value_stride, keys, D, E, SIZE, MASKED)
            sums_e = tl.dot(shares, part, sums_e * shrink[:, None])
    return sums, sums_e, total, top


@triton.jit
def _seen_keys(oldest, batch, reach_batch, first, last, query_at, key_at, keys, BOUNDED: tl.constexpr, N: tl.constexpr):
    begin = tl.full([], 0, tl.int32)
    whole = begin
    if BOUNDED:
        places = oldest + batch * reach_batch + query_at
        begin = tl.maximum(tl.load(places + first) - key_at, 0) // N * N
        whole = tl.load(places + last) - key_at
    end = tl.minimum(query_at + last + 1 - key_at, keys)
    return _edges(begin, end, whole, query_at + first + 1 - key_at, N)


@triton.jit(do_not_specialize=["place_low", "place_high", "bound", "query_at", "key_at"])
def attend(
    query, key, value, output, log_sum, oldest, rows,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    output_batch, output_head, output_row,
    heads, group, queries, keys, reach_batch, query_at, key_at, scale, place_low, place_high, bound, rescale,
    BOUNDED: tl.constexpr, DROPS: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute the output and the natural logarithms of the sums of exponentials, -inf for a query that sees nothing."""
    first, last, batch, head, pair = _tile_of_queries(queries, heads, M)
    numbers = first + tl.arange(0, M)
    query += batch * query_batch + head * query_head
    key += batch * key_batch + (head // group) * key_head
    value += batch * value_batch + (head // group) * value_head
    query_tile = _load(query, numbers, query_row, queries, 0, D, SIZE)
    query_tile_e = query_tile
    sums = tl.zeros([M, D], dtype=tl.float32)
    sums_e = sums
    if E > 0:
        query_tile_e = _load(query, numbers, query_row, queries, D, E, SIZE)
        sums_e = tl.zeros([M, E], dtype=tl.float32)
    total, top = tl.zeros([M], dtype=tl.float32), tl.full([M], float("-inf"), dtype=tl.float32)
    places = query_at + numbers
    begins, low, high = _query_bounds(
        oldest, rows, batch, pair, numbers, queries, reach_batch, query_at, place_low, place_high, BOUNDED, DROPS
    )
    edges = _seen_keys(oldest, batch, reach_batch, first, last, query_at, key_at, keys, BOUNDED, N)
    for part in tl.static_range(3):
        sums, sums_e, total, top = _attend_some(
            sums, sums_e, total, top, query_tile, query_tile_e, key, value, key_row, value_row, edges[part],
            edges[part + 1], keys, places, begins, key_at, scale, low, high, bound,
            rescale * 0.0, part != 1, BOUNDED, DROPS, WORDS, SIZE, D, E, M, N,
        )  # fmt: skip
    share = tl.where(total == 0, 0.0, rescale / total)[:, None]  # nan stays nan, dropped or not
    output += batch * output_batch + head * output_head
    _store(output, numbers, output_row, queries, sums * share, 0, D, SIZE)
    if E > 0:
        _store(output, numbers, output_row, queries, sums_e * share, D, E, SIZE)
    tl.store(log_sum + pair * queries + numbers, (top + tl.log2(total)) * LOG_2, mask=numbers < queries)


@triton.jit
def _gradients_of_queries(
    sums, sums_e, query, query_e, grad, grad_e, key, value, key_stride, value_stride, begin, end, keys,
    places, oldest, key_at, scale, low, high, bound, log_sums, means,
    MASKED: tl.constexpr, BOUNDED: tl.constexpr, DROPS: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Accumulate the gradient of a tile of queries over keys from `begin` to `end`."""
    for start in range(begin, end, N):
        numbers = start + tl.arange(0, N)
        part = _load(key, numbers, key_stride, keys, 0, D, SIZE, MASKED)
        part_e = part
        scores = tl.dot(query, tl.trans(part))
        value_tile = _load(value, numbers, value_stride, keys, 0, D, SIZE, MASKED)
        grad_shares = tl.dot(grad, tl.trans(value_tile))
        if E > 0:
            part_e = _load(key, numbers, key_stride, keys, D, E, SIZE, MASKED)
            scores = tl.dot(query_e, tl.trans(part_e), scores)
            value_tile = _load(value, numbers, value_stride, keys, D, E, SIZE, MASKED)
            grad_shares = tl.dot(grad_e, tl.trans(value_tile), grad_shares)
        shares = tl.exp2(scores * scale - log_sums[:, None])
        if MASKED:
            shares = tl.where(_is_seen(places, oldest, numbers, key_at, keys, BOUNDED), shares, 0.0)
        if DROPS:
            keep_mask = kept_by_queries(low, high, key_at + start, bound, WORDS, M, N)
            grad_shares = tl.where(keep_mask, grad_shares, 0.0)
        grad_scores = (shares * (grad_shares - means[:, None])).to(part.dtype)
        sums = tl.dot(grad_scores, part, sums)
        if E > 0:
            sums_e = tl.dot(grad_scores, part_e, sums_e)
    return sums, sums_e


@triton.jit(do_not_specialize=["place_low", "place_high", "bound", "query_at", "key_at"])
def query_gradients(
    query, key, value, grad, output, grad_query, log_sum, mean, oldest, rows,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    grad_batch, grad_head, grad_row, output_batch, output_head, output_row, out_batch, out_head, out_row,
    heads, group, queries, keys, reach_batch, query_at, key_at, scale, place_low, place_high, bound, rescale,
    BOUNDED: tl.constexpr, DROPS: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute query gradients, and each query's mean of probability gradients / `rescale`, for `key_gradients`."""
    first, last, batch, head, pair = _tile_of_queries(queries, heads, M)
    numbers = first + tl.arange(0, M)
    query += batch * query_batch + head * query_head
    key += batch * key_batch + (head // group) * key_head
    value += batch * value_batch + (head // group) * value_head
    output += batch * output_batch + head * output_head
    grad += batch * grad_batch + head * grad_head
    query_tile = _load(query, numbers, query_row, queries, 0, D, SIZE)
    grad_tile = _load(grad, numbers, grad_row, queries, 0, D, SIZE)
    means = tl.sum(grad_tile.to(tl.float32) * _load(output, numbers, output_row, queries, 0, D, SIZE), 1)
    query_tile_e, grad_tile_e = query_tile, grad_tile
    sums = tl.zeros([M, D], dtype=tl.float32)
    sums_e = sums
    if E > 0:
        query_tile_e = _load(query, numbers, query_row, queries, D, E, SIZE)
        grad_tile_e = _load(grad, numbers, grad_row, queries, D, E, SIZE)
        means += tl.sum(grad_tile_e.to(tl.float32) * _load(output, numbers, output_row, queries, D, E, SIZE), 1)
        sums_e = tl.zeros([M, E], dtype=tl.float32)
    offsets = pair * queries + numbers
    # `rescale` multiplies the sums instead of every gradient of a probability
    means = means / rescale
    tl.store(mean + offsets, means, mask=numbers < queries)
    log_sums = tl.load(log_sum + offsets, mask=numbers < queries, other=0.0) / LOG_2
    places = query_at + numbers
    begins, low, high = _query_bounds(
        oldest, rows, batch, pair, numbers, queries, reach_batch, query_at, place_low, place_high, BOUNDED, DROPS
    )
    edges = _seen_keys(oldest, batch, reach_batch, first, last, query_at, key_at, keys, BOUNDED, N)
    for part in tl.static_range(3):
        sums, sums_e = _gradients_of_queries(
            sums, sums_e, query_tile, query_tile_e, grad_tile, grad_tile_e, key, value, key_row, value_row, edges[part],
            edges[part + 1], keys, places, begins, key_at, scale, low, high, bound, log_sums, means,
            part != 1, BOUNDED, DROPS, WORDS, SIZE, D, E, M, N,
        )  # fmt: skip
    grad_query += batch * out_batch + head * out_head
    _store(grad_query, numbers, out_row, queries, sums * (scale * rescale * LOG_2), 0, D, SIZE)
    if E > 0:
        _store(grad_query, numbers, out_row, queries, sums_e * (scale * rescale * LOG_2), D, E, SIZE)


@triton.jit
def _gradients_of_keys(
    grad_key, grad_key_e, grad_value, grad_value_e, key, key_e, value, value_e, query, grad, query_stride, grad_stride,
    begin, end, queries, first, places, newest, query_at, scale, rows, place_low, place_high, bound, nothing,
    log_sum, mean,
    MASKED: tl.constexpr, BOUNDED: tl.constexpr, DROPS: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Accumulate the gradients of a tile of keys and values over queries, with transposed scores."""
    # loads ahead and a mask are more than the registers of threads with whole rows hold
    for start in tl.range(begin, end, M, num_stages=1 if MASKED and not WORDS else None):
        numbers = start + tl.arange(0, M)
        part = _load(query, numbers, query_stride, queries, 0, D, SIZE, MASKED)
        grad_tile = _load(grad, numbers, grad_stride, queries, 0, D, SIZE, MASKED)
        part_e, grad_tile_e = part, grad_tile
        scores = tl.dot(key, tl.trans(part))
        grad_shares = tl.dot(value, tl.trans(grad_tile))
        if E > 0:
            part_e = _load(query, numbers, query_stride, queries, D, E, SIZE, MASKED)
            grad_tile_e = _load(grad, numbers, grad_stride, queries, D, E, SIZE, MASKED)
            scores = tl.dot(key_e, tl.trans(part_e), scores)
            grad_shares = tl.dot(value_e, tl.trans(grad_tile_e), grad_shares)
        log_sums = _load_row(log_sum, numbers, queries, MASKED) / LOG_2
        means = _load_row(mean, numbers, queries, MASKED)
        shares = tl.exp2(scores * scale - log_sums[None, :])
        if MASKED:
            seen = places[:, None] <= (query_at + numbers)[None, :]
            seen = seen & (numbers < queries)[None, :]
            if BOUNDED:
                seen = seen & ((query_at + numbers)[None, :] <= newest[:, None])
            shares = tl.where(seen, shares, 0.0)
        left = shares
        if DROPS:
            low, high = _keys(rows, numbers, queries, place_low, place_high, MASKED)
            keep_mask = kept_by_keys(low, high, first, bound, WORDS, M, N)
            left = tl.where(keep_mask, shares, nothing)
            grad_shares = tl.where(keep_mask, grad_shares, 0.0)
        left = left.to(part.dtype)
        grad_scores = (shares * (grad_shares - means[None, :])).to(part.dtype)
        grad_value = tl.dot(left, grad_tile, grad_value)
        grad_key = tl.dot(grad_scores, part, grad_key)
        if E > 0:
            grad_value_e = tl.dot(left, grad_tile_e, grad_value_e)
            grad_key_e = tl.dot(grad_scores, part_e, grad_key_e)
    return grad_key, grad_key_e, grad_value, grad_value_e


@triton.jit(do_not_specialize=["place_low", "place_high", "bound", "query_at", "key_at"])
def key_gradients(
    query, key, value, grad, grad_key, grad_value, log_sum, mean, newest, rows,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    grad_batch, grad_head, grad_row, grad_key_batch, grad_key_head, grad_key_row,
    grad_value_batch, grad_value_head, grad_value_row,
    heads, group, queries, keys, reach_batch, query_at, key_at, scale, place_low, place_high, bound, rescale,
    BOUNDED: tl.constexpr, DROPS: tl.constexpr, WORDS: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, M: tl.constexpr, N: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of keys and values, from all query heads of their group."""
    first = tl.program_id(0) * N
    last = tl.minimum(first + N, keys) - 1
    kv_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    numbers = first + tl.arange(0, N)
    key += batch * key_batch + kv_head * key_head
    value += batch * value_batch + kv_head * value_head
    key_tile = _load(key, numbers, key_row, keys, 0, D, SIZE)
    value_tile = _load(value, numbers, value_row, keys, 0, D, SIZE)
    key_tile_e, value_tile_e = key_tile, value_tile
    key_sums, value_sums = tl.zeros([N, D], dtype=tl.float32), tl.zeros([N, D], dtype=tl.float32)
    key_sums_e, value_sums_e = key_sums, value_sums
    if E > 0:
        key_tile_e = _load(key, numbers, key_row, keys, D, E, SIZE)
        value_tile_e = _load(value, numbers, value_row, keys, D, E, SIZE)
        key_sums_e, value_sums_e = tl.zeros([N, E], dtype=tl.float32), tl.zeros([N, E], dtype=tl.float32)
    places, ends = key_at + numbers, numbers
    begin = tl.maximum(key_at + first - query_at, 0) // M * M
    end, whole_end = queries, queries
    if BOUNDED:
        reach = newest + batch * reach_batch + key_at
        ends = tl.load(reach + numbers, mask=numbers < keys, other=0)
        end = tl.minimum(tl.load(reach + last) + 1 - query_at, queries)
        whole_end = tl.load(reach + first) + 1 - query_at
    begin, first_whole, last_whole, end = _edges(begin, end, key_at + first + N - 1 - query_at, whole_end, M)
    for head in range(kv_head * group, (kv_head + 1) * group):
        head_query = query + batch * query_batch + head * query_head
        head_grad = grad + batch * grad_batch + head * grad_head
        row_at = (batch * heads + head) * queries
        # both masked edges (step `EDGES`) by one code: first they save instructions, last they save registers
        for step in tl.static_range(2):
            for part in range(2 if step == EDGES else 1):
                start, stop = first_whole, last_whole
                if step == EDGES:
                    start, stop = tl.where(part == 0, begin, last_whole), tl.where(part == 0, first_whole, end)
                key_sums, key_sums_e, value_sums, value_sums_e = _gradients_of_keys(
                    key_sums, key_sums_e, value_sums, value_sums_e, key_tile, key_tile_e, value_tile, value_tile_e,
                    head_query, head_grad, query_row, grad_row, start, stop, queries, key_at + first, places, ends,
                    query_at, scale, rows + row_at, place_low, place_high, bound, rescale * 0.0, log_sum + row_at,
                    mean + row_at, step == EDGES, BOUNDED, DROPS, WORDS, SIZE, D, E, M, N,
                )  # fmt: skip
    grad_key += batch * grad_key_batch + kv_head * grad_key_head
    grad_value += batch * grad_value_batch + kv_head * grad_value_head
    _store(grad_key, numbers, grad_key_row, keys, key_sums * (scale * rescale * LOG_2), 0, D, SIZE)
    _store(grad_value, numbers, grad_value_row, keys, value_sums * rescale, 0, D, SIZE)
    if E > 0:
        _store(grad_key, numbers, grad_key_row, keys, key_sums_e * (scale * rescale * LOG_2), D, E, SIZE)
        _store(grad_value, numbers, grad_value_row, keys, value_sums_e * rescale, D, E, SIZE)
