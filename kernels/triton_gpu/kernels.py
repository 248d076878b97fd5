"""The Triton kernels: flash attention forward, and backward in two kernels.

A program owns a tile of rows and visits the live tiles across: first the partial ones,
so that every row has a maximum when the many full tiles come, which need no mask.

Backward, one kernel owns key tiles and adds up dk and dv over the query heads that
share them; another owns query tiles and adds up dq. That is seven products a tile where
one kernel has five, but nothing is added atomically: results are the same every time.

`triton_gpu` imports this file, which imports triton, when a kernel is wanted. What the
kernels take are the arrays that `reference` names, each (B, T, H, D) or (B, H, T) as it
lies in memory; rows of operands (q, k, v, d_out) are padded with zeros to `block_d`
numbers, those of float32 results are not. Beside them:

  bounds: int32 (2, M, T), start and stop of M rows, 1 or B.
  ranges: int32 (4, M, tiles), the tiles across for each tile, as in `tiles`.
  sizes: `triton_gpu.Sizes`, all constants of the problem and its tiles. What it says of
    rows has a name before it is passed on, or triton 3.6 takes it for no constant.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def forward(
    q, k, v, bounds, ranges, carry_out, carry_lse, out, lse, sizes: tl.constexpr
):
    """One query tile of one head, the heaviest (causal) first.

    carry_out, carry_lse: read if `sizes.has_carry`.
    """
    query_rows: tl.constexpr = sizes.query_rows
    key_rows: tl.constexpr = sizes.key_rows
    batch, head, tile = query_place(sizes)
    kv_head = head // sizes.group
    first = tile * sizes.block_q
    q_i = load_tile(q, batch, head, first, True, query_rows)
    start, stop = load_bounds(bounds, batch, first, sizes)
    begin, full_begin, full_end, end = load_ranges(
        ranges, batch, tile, sizes.query_tiles, sizes
    )
    if sizes.has_carry:
        # A result over other keys is the state in which they left the softmax.
        m = load_numbers(carry_lse, batch, head, first, float("-inf"), sizes) * LOG2_E
        l = tl.where(m == float("-inf"), 0.0, 1.0)
        acc = load_result(carry_out, batch, head, first, query_rows)
    else:
        m = tl.full((sizes.block_q,), float("-inf"), tl.float32)
        l = tl.full((sizes.block_q,), 0.0, tl.float32)
        acc = tl.full((sizes.block_q, sizes.block_d), 0.0, tl.float32)
    full = full_end - full_begin
    for n in range(begin, end - full):
        first_key = (n + tl.where(n < full_begin, 0, full)) * sizes.block_k
        k_j = load_tile(k, batch, kv_head, first_key, True, key_rows)
        v_j = load_tile(v, batch, kv_head, first_key, True, key_rows)
        seen = sees(start, stop, first_key, sizes)
        m, l, acc = attend(m, l, acc, q_i, k_j, v_j, seen, True, sizes)
    for j in range(full_begin, full_end):
        k_j = load_tile(k, batch, kv_head, j * sizes.block_k, False, key_rows)
        v_j = load_tile(v, batch, kv_head, j * sizes.block_k, False, key_rows)
        m, l, acc = attend(m, l, acc, q_i, k_j, v_j, None, False, sizes)
    has_seen = l != 0  # also where it is nan, which must show
    l = tl.where(has_seen, l, 1.0)
    out_i = acc / l[:, None]
    store_result(out, out_i, batch, head, first, query_rows)
    lse_i = tl.where(has_seen, (m + tl.log2(l)) * LN_2, float("-inf"))
    store_numbers(lse, lse_i, batch, head, first, sizes)


@triton.jit
def attend(m, l, acc, q, k, v, seen, is_partial: tl.constexpr, sizes: tl.constexpr):
    """The online softmax (FlashAttention-2, 2307.08691, algorithm 1) of a key tile.

    A query tile has a maximum m, in powers of 2, a sum l, and weighted values acc.
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if is_partial:
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * sizes.scale2)
    m_safe = m_new
    if is_partial:
        # A row that has seen nothing yet: any finite number will do.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * sizes.scale2 - m_safe[:, None])
    decay = tl.exp2(m - m_safe)
    l = l * decay + tl.sum(p, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return m_new, l, acc


@triton.jit
def backward_keys(
    q, k, v, d_out, lse, delta, bounds, ranges, dk, dv, sizes: tl.constexpr
):
    """dk and dv of one key tile of one key/value head, the heaviest (causal) first."""
    query_rows: tl.constexpr = sizes.query_rows
    key_rows: tl.constexpr = sizes.key_rows
    place = tl.program_id(0)
    tile = place % sizes.key_tiles
    kv_head = place // sizes.key_tiles % sizes.kv_heads
    batch = place // (sizes.key_tiles * sizes.kv_heads)
    first_key = tile * sizes.block_k
    k_j = load_tile(k, batch, kv_head, first_key, True, key_rows)
    v_j = load_tile(v, batch, kv_head, first_key, True, key_rows)
    begin, full_begin, full_end, end = load_ranges(
        ranges, batch, tile, sizes.key_tiles, sizes
    )
    dk_j = tl.full((sizes.block_k, sizes.block_d), 0.0, tl.float32)
    dv_j = tl.full((sizes.block_k, sizes.block_d), 0.0, tl.float32)
    full = full_end - full_begin
    for head in range(kv_head * sizes.group, (kv_head + 1) * sizes.group):
        for n in range(begin, end - full):
            first = (n + tl.where(n < full_begin, 0, full)) * sizes.block_q
            q_i = load_tile(q, batch, head, first, True, query_rows)
            d_out_i = load_tile(d_out, batch, head, first, True, query_rows)
            # Rows after the end have no weight, as exp(-inf) is 0.
            lse_i = load_numbers(lse, batch, head, first, float("inf"), sizes)
            delta_i = load_numbers(delta, batch, head, first, 0.0, sizes)
            start, stop = load_bounds(bounds, batch, first, sizes)
            seen = tl.trans(sees(start, stop, first_key, sizes))
            dk_j, dv_j = add_to_keys(
                dk_j, dv_j, k_j, v_j, q_i, d_out_i, lse_i, delta_i, seen, True, sizes
            )
        for i in range(full_begin, full_end):
            first = i * sizes.block_q
            q_i = load_tile(q, batch, head, first, False, query_rows)
            d_out_i = load_tile(d_out, batch, head, first, False, query_rows)
            lse_i = load_numbers(lse, batch, head, first, None, sizes)
            delta_i = load_numbers(delta, batch, head, first, None, sizes)
            dk_j, dv_j = add_to_keys(
                dk_j, dv_j, k_j, v_j, q_i, d_out_i, lse_i, delta_i, None, False, sizes
            )
    dk_j *= sizes.scale
    store_result(dk, dk_j, batch, kv_head, first_key, key_rows)
    store_result(dv, dv_j, batch, kv_head, first_key, key_rows)


@triton.jit
def add_to_keys(
    dk,
    dv,
    k,
    v,
    q,
    d_out,
    lse,
    delta,
    seen,
    is_partial: tl.constexpr,
    sizes: tl.constexpr,
):
    """Adds what a query tile contributes. Scores are transposed: keys by queries."""
    s = tl.dot(k, tl.trans(q), input_precision="ieee")
    p = tl.exp2(s * sizes.scale2 - (lse * LOG2_E)[None, :])
    if is_partial:
        p = tl.where(seen, p, 0.0)
    dv = tl.dot(p.to(q.dtype), d_out, dv, input_precision="ieee")
    dp = tl.dot(v, tl.trans(d_out), input_precision="ieee")
    ds = (p * (dp - delta[None, :])).to(q.dtype)
    return tl.dot(ds, q, dk, input_precision="ieee"), dv


@triton.jit
def backward_queries(
    q, k, v, d_out, lse, delta, bounds, ranges, dq_before, dq, sizes: tl.constexpr
):
    """dq of one query tile of one head, the heaviest (causal) first."""
    query_rows: tl.constexpr = sizes.query_rows
    key_rows: tl.constexpr = sizes.key_rows
    batch, head, tile = query_place(sizes)
    kv_head = head // sizes.group
    first = tile * sizes.block_q
    q_i = load_tile(q, batch, head, first, True, query_rows)
    d_out_i = load_tile(d_out, batch, head, first, True, query_rows)
    lse_i = load_numbers(lse, batch, head, first, float("inf"), sizes) * LOG2_E
    delta_i = load_numbers(delta, batch, head, first, 0.0, sizes)
    start, stop = load_bounds(bounds, batch, first, sizes)
    begin, full_begin, full_end, end = load_ranges(
        ranges, batch, tile, sizes.query_tiles, sizes
    )
    acc = tl.full((sizes.block_q, sizes.block_d), 0.0, tl.float32)
    full = full_end - full_begin
    for n in range(begin, end - full):
        first_key = (n + tl.where(n < full_begin, 0, full)) * sizes.block_k
        k_j = load_tile(k, batch, kv_head, first_key, True, key_rows)
        v_j = load_tile(v, batch, kv_head, first_key, True, key_rows)
        seen = sees(start, stop, first_key, sizes)
        acc = add_to_queries(
            acc, q_i, d_out_i, lse_i, delta_i, k_j, v_j, seen, True, sizes
        )
    for j in range(full_begin, full_end):
        k_j = load_tile(k, batch, kv_head, j * sizes.block_k, False, key_rows)
        v_j = load_tile(v, batch, kv_head, j * sizes.block_k, False, key_rows)
        acc = add_to_queries(
            acc, q_i, d_out_i, lse_i, delta_i, k_j, v_j, None, False, sizes
        )
    dq_i = load_result(dq_before, batch, head, first, query_rows)
    dq_i += acc * sizes.scale
    store_result(dq, dq_i, batch, head, first, query_rows)


@triton.jit
def add_to_queries(
    acc,
    q,
    d_out,
    lse,
    delta,
    k,
    v,
    seen,
    is_partial: tl.constexpr,
    sizes: tl.constexpr,
):
    """Adds what a key tile contributes; lse in powers of 2."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    p = tl.exp2(s * sizes.scale2 - lse[:, None])
    if is_partial:
        p = tl.where(seen, p, 0.0)
    dp = tl.dot(d_out, tl.trans(v), input_precision="ieee")
    ds = (p * (dp - delta[:, None])).to(q.dtype)
    return tl.dot(ds, k, acc, input_precision="ieee")


@triton.jit
def query_place(sizes: tl.constexpr):
    """Batch row, head and query tile of this program.

    Programs of a head are next to each other, so that its keys stay in the cache.
    """
    place = tl.program_id(0)
    tile = sizes.query_tiles - 1 - place % sizes.query_tiles
    head = place // sizes.query_tiles % sizes.heads
    return place // (sizes.query_tiles * sizes.heads), head, tile


@triton.jit
def sees(start, stop, first_key, sizes: tl.constexpr):
    """(block_q, block_k), which rows see which keys."""
    slot = (first_key + tl.arange(0, sizes.block_k))[None, :]
    return (start[:, None] <= slot) & (slot < stop[:, None])


@triton.jit
def load_tile(array, batch, head, first, is_partial: tl.constexpr, rows: tl.constexpr):
    """(tile, block_d) of an operand; zeros after the last row if partial."""
    places = tile_places(array, batch, head, first, rows.block_d, rows)
    if is_partial and rows.length % rows.tile:
        x = tl.load(places, mask=are_rows(first, rows), other=0.0)
    else:
        x = tl.load(places)
    return x


@triton.jit
def load_result(array, batch, head, first, rows: tl.constexpr):
    """(tile, block_d) of an array like a result; zeros where it has no numbers."""
    places = tile_places(array, batch, head, first, rows.depth, rows)
    return tl.load(places, mask=are_rows(first, rows) & are_columns(rows), other=0.0)


@triton.jit
def store_result(array, x, batch, head, first, rows: tl.constexpr):
    """The inverse of `load_result`."""
    places = tile_places(array, batch, head, first, rows.depth, rows)
    tl.store(places, x, mask=are_rows(first, rows) & are_columns(rows))


@triton.jit
def tile_places(array, batch, head, first, width: tl.constexpr, rows: tl.constexpr):
    """Pointers (tile, block_d) into an array (B, length, heads, width)."""
    stride: tl.constexpr = rows.heads * width
    row = tl.arange(0, rows.tile)[:, None]
    column = tl.arange(0, rows.block_d)[None, :]
    # Offsets inside a tile fit 32 bits, those of long sequences do not.
    array += (tl.cast(batch, tl.int64) * rows.length + first) * stride
    return array + head * width + row * stride + column


@triton.jit
def are_rows(first, rows: tl.constexpr):
    """(tile, 1), which rows from `first` on there are."""
    return (first + tl.arange(0, rows.tile) < rows.length)[:, None]


@triton.jit
def are_columns(rows: tl.constexpr):
    """(1, block_d), which columns are not padding."""
    return (tl.arange(0, rows.block_d) < rows.depth)[None, :]


@triton.jit
def load_numbers(array, batch, head, first, other: tl.constexpr, sizes: tl.constexpr):
    """(block_q,) of an array like lse; `other` after the last row if there is one."""
    rows = first + tl.arange(0, sizes.block_q)
    array += (tl.cast(batch, tl.int64) * sizes.heads + head) * sizes.queries
    if other is None:
        x = tl.load(array + rows)
    else:
        x = tl.load(array + rows, mask=rows < sizes.queries, other=other)
    return x


@triton.jit
def store_numbers(array, x, batch, head, first, sizes: tl.constexpr):
    """The inverse of `load_numbers`."""
    rows = first + tl.arange(0, sizes.block_q)
    array += (tl.cast(batch, tl.int64) * sizes.heads + head) * sizes.queries
    tl.store(array + rows, x, mask=rows < sizes.queries)


@triton.jit
def load_bounds(bounds, batch, first, sizes: tl.constexpr):
    """start and stop, (block_q,) each; rows after the last see nothing."""
    rows = first + tl.arange(0, sizes.block_q)
    inside = rows < sizes.queries
    start = bounds + (batch % sizes.bound_rows) * sizes.queries + rows
    stop = start + sizes.bound_rows * sizes.queries
    return tl.load(start, mask=inside, other=0), tl.load(stop, mask=inside, other=0)


@triton.jit
def load_ranges(ranges, batch, tile, tiles: tl.constexpr, sizes: tl.constexpr):
    """live_begin, full_begin, full_end and live_end of a tile."""
    place = ranges + (batch % sizes.bound_rows) * tiles + tile
    step: tl.constexpr = sizes.bound_rows * tiles
    return (
        tl.load(place),
        tl.load(place + step),
        tl.load(place + 2 * step),
        tl.load(place + 3 * step),
    )
