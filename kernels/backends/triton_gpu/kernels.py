"""The Triton kernels: flash attention forward, and backward in two kernels.

A program owns one tile of rows and loops over the live tiles across it, in two loops
(drawn in docs/kernels/triton.md): the partial tiles come first, so that every row has a
maximum m when the many full tiles come. `num_stages` of each loop is Triton's software
pipeline: while tile n is computed, `cp.async` copies the operands of tiles n + 1 …
n + stages - 1 to shared memory.

`backward_dkv` adds up over the query heads that share its keys. Both backward kernels
compute s and dp: seven products a tile where one kernel has five, but nothing is added
atomically, so that results are the same every time.

`launch` imports this file, which imports triton, when a kernel is first run. Arrays are
those that `reference` names, each [B, T, H, D] or [B, H, T] as it lies in memory; rows
of operands (q, k, v, do) are padded with zeros to `block_d` numbers, those of float32
results are not. Beside them:

  bounds: int32 [2, M, T], k_start and k_end of M rows, 1 or B.
  ranges: int32 [4, M, tiles], the tiles across for each tile, as in `tile_ranges`.
  sizes: `launch.Sizes`, all constants of the problem and its tiles. Its `query_rows`
    and `key_rows` have a name before they are passed on, or triton 3.6 takes them for
    no constants.

Shapes below: Q, K are block_q, block_k; d is block_d.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def forward(
    q, k, v, bounds, ranges, carry_out, carry_lse, out, lse, sizes: tl.constexpr
):
    """Computes out and lse of one query tile of one head.

    carry_out, carry_lse: read if `sizes.has_carry`.
    """
    query_rows: tl.constexpr = sizes.query_rows
    key_rows: tl.constexpr = sizes.key_rows
    batch, head, tile = query_program(sizes)
    kv_head = head // sizes.group
    row = tile * sizes.block_q  # the tile's first
    q_i = load_tile(q, batch, head, row, True, query_rows)  # [Q, d]
    k_start, k_end = load_bounds(bounds, batch, row, sizes)  # [Q] each
    live_begin, full_begin, full_end, live_end = load_ranges(
        ranges, batch, tile, sizes.query_tiles, sizes
    )
    if sizes.has_carry:
        # A result over other keys is the state in which they left the softmax.
        m = load_row(carry_lse, batch, head, row, float("-inf"), sizes) * LOG2_E  # [Q]
        l = tl.where(m == float("-inf"), 0.0, 1.0)  # [Q]
        acc = load_result(carry_out, batch, head, row, query_rows)  # [Q, d]
    else:
        m = tl.full((sizes.block_q,), float("-inf"), tl.float32)  # [Q], log2
        l = tl.full((sizes.block_q,), 0.0, tl.float32)  # [Q]
        acc = tl.full((sizes.block_q, sizes.block_d), 0.0, tl.float32)  # [Q, d]
    full = full_end - full_begin
    for n in range(live_begin, live_end - full):
        key = partial_tile(n, full_begin, full) * sizes.block_k
        k_j = load_tile(k, batch, kv_head, key, True, key_rows)  # [K, d]
        v_j = load_tile(v, batch, kv_head, key, True, key_rows)  # [K, d]
        visible = visible_keys(k_start, k_end, key, sizes)  # [Q, K]
        m, l, acc = attend(m, l, acc, q_i, k_j, v_j, visible, True, sizes)
    # No mask here: a key tile that is full for all rows lies before the last key.
    for j in range(full_begin, full_end):
        k_j = load_tile(k, batch, kv_head, j * sizes.block_k, False, key_rows)  # [K, d]
        v_j = load_tile(v, batch, kv_head, j * sizes.block_k, False, key_rows)  # [K, d]
        m, l, acc = attend(m, l, acc, q_i, k_j, v_j, None, False, sizes)
    is_live = l != 0  # [Q]; also where l is nan, which must show
    l = tl.where(is_live, l, 1.0)  # [Q]
    out_i = acc / l[:, None]  # [Q, d]
    store_result(out, out_i, batch, head, row, query_rows)
    lse_i = tl.where(is_live, (m + tl.log2(l)) * LN_2, float("-inf"))  # [Q]
    store_row(lse, lse_i, batch, head, row, sizes)


@triton.jit
def attend(m, l, acc, q, k, v, visible, is_partial: tl.constexpr, sizes: tl.constexpr):
    """Adds a key tile to m, l, acc (FlashAttention-2, 2307.08691, algorithm 1).

    m [Q]: row maximum, in log2. l [Q]: row sum. acc [Q, d]: p v. q [Q, d]. k, v [K, d].
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [Q, K]
    if sizes.is_capped:
        s = tanh(s, sizes.tanh_scale, q.dtype == tl.float32)
    if is_partial:
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * sizes.scale_log2)  # [Q]
    # In a full tile every row sees a key, and m is finite.
    m_safe = m_new
    if is_partial:
        # A row without a visible key so far: any finite number will do.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * sizes.scale_log2 - m_safe[:, None])  # [Q, K]
    alpha = tl.exp2(m - m_safe)  # [Q], rescales what was summed under the old maximum
    l = l * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return m_new, l, acc


@triton.jit
def backward_dkv(q, k, v, do, lse, delta, bounds, ranges, dk, dv, sizes: tl.constexpr):
    """Computes dk and dv of one key tile of one head, the heaviest (causal) first."""
    query_rows: tl.constexpr = sizes.query_rows
    key_rows: tl.constexpr = sizes.key_rows
    program = tl.program_id(0)
    tile = program % sizes.key_tiles
    kv_head = program // sizes.key_tiles % sizes.kv_heads
    batch = program // (sizes.key_tiles * sizes.kv_heads)
    key = tile * sizes.block_k  # the tile's first
    k_j = load_tile(k, batch, kv_head, key, True, key_rows)  # [K, d]
    v_j = load_tile(v, batch, kv_head, key, True, key_rows)  # [K, d]
    live_begin, full_begin, full_end, live_end = load_ranges(
        ranges, batch, tile, sizes.key_tiles, sizes
    )
    dk_j = tl.full((sizes.block_k, sizes.block_d), 0.0, tl.float32)  # [K, d]
    dv_j = tl.full((sizes.block_k, sizes.block_d), 0.0, tl.float32)  # [K, d]
    full = full_end - full_begin
    for head in range(kv_head * sizes.group, (kv_head + 1) * sizes.group):
        for n in range(live_begin, live_end - full):
            row = partial_tile(n, full_begin, full) * sizes.block_q
            q_i = load_tile(q, batch, head, row, True, query_rows)  # [Q, d]
            do_i = load_tile(do, batch, head, row, True, query_rows)  # [Q, d]
            # Rows after the end have no weight, as exp(-inf) is 0.
            lse_i = load_row(lse, batch, head, row, float("inf"), sizes)  # [Q]
            delta_i = load_row(delta, batch, head, row, 0.0, sizes)  # [Q]
            k_start, k_end = load_bounds(bounds, batch, row, sizes)  # [Q] each
            visible = tl.trans(visible_keys(k_start, k_end, key, sizes))  # [K, Q]
            dk_j, dv_j = add_dkv(
                dk_j, dv_j, k_j, v_j, q_i, do_i, lse_i, delta_i, visible, True, sizes
            )
        for i in range(full_begin, full_end):
            row = i * sizes.block_q
            q_i = load_tile(q, batch, head, row, False, query_rows)  # [Q, d]
            do_i = load_tile(do, batch, head, row, False, query_rows)  # [Q, d]
            lse_i = load_row(lse, batch, head, row, None, sizes)  # [Q]
            delta_i = load_row(delta, batch, head, row, None, sizes)  # [Q]
            dk_j, dv_j = add_dkv(
                dk_j, dv_j, k_j, v_j, q_i, do_i, lse_i, delta_i, None, False, sizes
            )
    store_result(dk, dk_j, batch, kv_head, key, key_rows)
    store_result(dv, dv_j, batch, kv_head, key, key_rows)


@triton.jit
def add_dkv(
    dk,
    dv,
    k,
    v,
    q,
    do,
    lse,
    delta,
    visible,
    is_partial: tl.constexpr,
    sizes: tl.constexpr,
):
    """Adds what a query tile contributes to dk, dv [K, d]; scores are transposed."""
    s = tl.dot(k, tl.trans(q), input_precision="ieee")  # [K, Q]
    if sizes.is_capped:
        s = tanh(s, sizes.tanh_scale, q.dtype == tl.float32)
    p = tl.exp2(s * sizes.scale_log2 - (lse * LOG2_E)[None, :])  # [K, Q]
    if is_partial:
        p = tl.where(visible, p, 0.0)
    dv = tl.dot(p.to(q.dtype), do, dv, input_precision="ieee")  # [K, d]
    if sizes.is_capped:
        # s is tanh, whose slope is 1 - s². After dv, which takes p without it.
        p -= p * s * s
    dp = tl.dot(v, tl.trans(do), input_precision="ieee")  # [K, Q]
    ds = (p * (dp - delta[None, :])).to(q.dtype)  # [K, Q]
    return tl.dot(ds, q, dk, input_precision="ieee"), dv


@triton.jit
def backward_dq(
    q, k, v, do, lse, delta, bounds, ranges, dq_carry, dq, sizes: tl.constexpr
):
    """Computes dq of one query tile of one head: dq_carry plus what these keys add."""
    query_rows: tl.constexpr = sizes.query_rows
    key_rows: tl.constexpr = sizes.key_rows
    batch, head, tile = query_program(sizes)
    kv_head = head // sizes.group
    row = tile * sizes.block_q  # the tile's first
    q_i = load_tile(q, batch, head, row, True, query_rows)  # [Q, d]
    do_i = load_tile(do, batch, head, row, True, query_rows)  # [Q, d]
    lse_i = load_row(lse, batch, head, row, float("inf"), sizes) * LOG2_E  # [Q]
    delta_i = load_row(delta, batch, head, row, 0.0, sizes)  # [Q]
    k_start, k_end = load_bounds(bounds, batch, row, sizes)  # [Q] each
    live_begin, full_begin, full_end, live_end = load_ranges(
        ranges, batch, tile, sizes.query_tiles, sizes
    )
    acc = tl.full((sizes.block_q, sizes.block_d), 0.0, tl.float32)  # [Q, d]
    full = full_end - full_begin
    for n in range(live_begin, live_end - full):
        key = partial_tile(n, full_begin, full) * sizes.block_k
        k_j = load_tile(k, batch, kv_head, key, True, key_rows)  # [K, d]
        v_j = load_tile(v, batch, kv_head, key, True, key_rows)  # [K, d]
        visible = visible_keys(k_start, k_end, key, sizes)  # [Q, K]
        acc = add_dq(acc, q_i, do_i, lse_i, delta_i, k_j, v_j, visible, True, sizes)
    for j in range(full_begin, full_end):
        k_j = load_tile(k, batch, kv_head, j * sizes.block_k, False, key_rows)  # [K, d]
        v_j = load_tile(v, batch, kv_head, j * sizes.block_k, False, key_rows)  # [K, d]
        acc = add_dq(acc, q_i, do_i, lse_i, delta_i, k_j, v_j, None, False, sizes)
    dq_i = load_result(dq_carry, batch, head, row, query_rows)  # [Q, d]
    dq_i += acc
    store_result(dq, dq_i, batch, head, row, query_rows)


@triton.jit
def add_dq(
    acc, q, do, lse, delta, k, v, visible, is_partial: tl.constexpr, sizes: tl.constexpr
):
    """Adds what a key tile contributes to acc [Q, d]; lse in log2."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [Q, K]
    if sizes.is_capped:
        s = tanh(s, sizes.tanh_scale, q.dtype == tl.float32)
    p = tl.exp2(s * sizes.scale_log2 - lse[:, None])  # [Q, K]
    if is_partial:
        p = tl.where(visible, p, 0.0)
    if sizes.is_capped:
        p -= p * s * s
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")  # [Q, K]
    ds = (p * (dp - delta[:, None])).to(q.dtype)  # [Q, K]
    return tl.dot(ds, k, acc, input_precision="ieee")


@triton.jit
def tanh(x, scale: tl.constexpr, is_exact: tl.constexpr):
    """Returns tanh(scale · x), off by 2⁻²⁰ at most.

    is_exact: whether its small numbers are as exact as float32.
    """
    # 1 + tanh is the square; division takes twice the steps.
    root = tl.rsqrt(0.5 + tl.exp2(x * (-2 * LOG2_E * scale) - 1))
    t = root * root - 1
    if is_exact:
        x *= scale
        y = x * x
        # Of degree 9, fitted up to 1 / 2.
        series = ((0.01724149 * y - 0.05304549) * y + 0.1332588) * y - 0.33333144
        t = tl.where(y < 0.25, x + x * (y * series), t)
    return t


@triton.jit
def query_program(sizes: tl.constexpr):
    """Returns batch row, head and query tile of this program, heaviest (causal) first.

    Programs of a head are next to each other, so that its keys stay in the cache.
    """
    program = tl.program_id(0)
    tile = sizes.query_tiles - 1 - program % sizes.query_tiles
    head = program // sizes.query_tiles % sizes.heads
    return program // (sizes.query_tiles * sizes.heads), head, tile


@triton.jit
def partial_tile(n, full_begin, full):
    """Returns the tile that step n masks: the full tiles between them are left out."""
    return n + tl.where(n < full_begin, 0, full)


@triton.jit
def visible_keys(k_start, k_end, key, sizes: tl.constexpr):
    """Returns [Q, K], whether each row sees each key from `key` on."""
    slot = (key + tl.arange(0, sizes.block_k))[None, :]  # [1, K]
    return (k_start[:, None] <= slot) & (slot < k_end[:, None])


@triton.jit
def load_tile(array, batch, head, first, is_partial: tl.constexpr, rows: tl.constexpr):
    """Loads [tile, d] of an operand; zeros after the last row if partial."""
    pointers = tile_pointers(array, batch, head, first, rows.block_d, rows)  # [tile, d]
    # Known while compiling: where tiles divide the length, no load has a mask.
    if is_partial and rows.length % rows.tile:
        x = tl.load(pointers, mask=row_mask(first, rows), other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def load_result(array, batch, head, first, rows: tl.constexpr):
    """Loads [tile, d] of an array like a result; zeros where it has no numbers."""
    pointers = tile_pointers(array, batch, head, first, rows.depth, rows)  # [tile, d]
    return tl.load(pointers, mask=row_mask(first, rows) & column_mask(rows), other=0.0)


@triton.jit
def store_result(array, x, batch, head, first, rows: tl.constexpr):
    """Stores x [tile, d] where `load_result` loads it."""
    pointers = tile_pointers(array, batch, head, first, rows.depth, rows)  # [tile, d]
    tl.store(pointers, x, mask=row_mask(first, rows) & column_mask(rows))


@triton.jit
def tile_pointers(array, batch, head, first, width: tl.constexpr, rows: tl.constexpr):
    """Returns pointers [tile, d] into an array [B, length, heads, width]."""
    stride: tl.constexpr = rows.heads * width
    row = tl.arange(0, rows.tile)[:, None]  # [tile, 1]
    column = tl.arange(0, rows.block_d)[None, :]  # [1, d]
    # Offsets inside a tile fit 32 bits, those of long sequences do not.
    array += (tl.cast(batch, tl.int64) * rows.length + first) * stride
    return array + head * width + row * stride + column


@triton.jit
def row_mask(first, rows: tl.constexpr):
    """Returns [tile, 1], which rows from `first` on there are."""
    return (first + tl.arange(0, rows.tile) < rows.length)[:, None]


@triton.jit
def column_mask(rows: tl.constexpr):
    """Returns [1, d], which columns are not padding."""
    return (tl.arange(0, rows.block_d) < rows.depth)[None, :]


@triton.jit
def load_row(array, batch, head, first, other: tl.constexpr, sizes: tl.constexpr):
    """Loads [Q] of an array [B, H, T]; `other` after the last row, if not None."""
    rows = first + tl.arange(0, sizes.block_q)  # [Q]
    array += (tl.cast(batch, tl.int64) * sizes.heads + head) * sizes.queries
    if other is None:
        x = tl.load(array + rows)
    else:
        x = tl.load(array + rows, mask=rows < sizes.queries, other=other)
    return x


@triton.jit
def store_row(array, x, batch, head, first, sizes: tl.constexpr):
    """Stores x [Q] where `load_row` loads it."""
    rows = first + tl.arange(0, sizes.block_q)  # [Q]
    array += (tl.cast(batch, tl.int64) * sizes.heads + head) * sizes.queries
    tl.store(array + rows, x, mask=rows < sizes.queries)


@triton.jit
def load_bounds(bounds, batch, first, sizes: tl.constexpr):
    """Loads k_start and k_end, [Q] each; rows after the last see nothing."""
    rows = first + tl.arange(0, sizes.block_q)  # [Q]
    inside = rows < sizes.queries  # [Q]
    # Row 0 for all of a batch that shares its bounds, as bound_rows is 1 then.
    k_start = bounds + (batch % sizes.bound_rows) * sizes.queries + rows  # [Q] pointers
    k_end = k_start + sizes.bound_rows * sizes.queries  # [Q] pointers
    return tl.load(k_start, mask=inside, other=0), tl.load(k_end, mask=inside, other=0)


@triton.jit
def load_ranges(ranges, batch, tile, tiles: tl.constexpr, sizes: tl.constexpr):
    """Loads live_begin, full_begin, full_end and live_end of a tile."""
    pointer = ranges + (batch % sizes.bound_rows) * tiles + tile
    step: tl.constexpr = sizes.bound_rows * tiles
    return (
        tl.load(pointer),
        tl.load(pointer + step),
        tl.load(pointer + 2 * step),
        tl.load(pointer + 3 * step),
    )
