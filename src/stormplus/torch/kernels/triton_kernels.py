"""The passes in Triton: each program updates one chunk of one tensor.

It finds the addresses of the tensor in tables on the device, and computes in float32. Sums have the
`accumulator_dtype`, and their terms are added in a fixed order.

A loop over elements is compiled twice: for whole blocks of aligned tensors without masks, so that
loads and stores are 16 bytes wide; and for PARTIAL blocks and other tensors.
"""

# ruff: noqa: PLR0917 (kernels take numbers and pointers, and no structures)
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _chunk(chunks, aligned, skip, BLOCK: tl.constexpr):
    """Return a program's tensor, and where to start, to use masks, and to stop in it."""
    row = chunks + 3 * tl.program_id(0)
    i, start, stop = tl.load(row), tl.multiple_of(tl.load(row + 1), 16), tl.load(row + 2)
    if skip is not None:
        stop = tl.where(tl.load(skip) != 0, start, stop)
    return i, start, start + tl.load(aligned + i) * ((stop - start) // BLOCK * BLOCK), stop


@triton.jit
def _pointer(entry, like, PARTIAL: tl.constexpr):
    """Return an entry of a table of addresses as a pointer of the same type as `like`."""
    pointer = tl.load(entry).to(like.dtype)
    if not PARTIAL:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _to_bfloat16(v, addend):
    """Truncate v after adding to its bits. NaN, which could overflow, stays."""
    bits = (v.to(tl.uint32, bitcast=True) + addend) & 0xFFFF0000
    return tl.where(tl.abs(v) <= float("inf"), bits.to(tl.float32, bitcast=True), v).to(tl.bfloat16)


@triton.jit
def _round(v, dtype: tl.constexpr):
    """Round to nearest, ties to even; by bits, as Triton's interpreter truncates to bfloat16."""
    if dtype == tl.bfloat16:
        v = _to_bfloat16(v, 0x7FFF + ((v.to(tl.uint32, bitcast=True) >> 16) & 1))
    return v.to(dtype)


@triton.jit
def _mix_bits(n):
    """See plain.py."""
    n = (n ^ (n >> 16)) * 0x21F0AAAD
    n = (n ^ (n >> 15)) * 0x735A2D97
    return n ^ (n >> 15)


@triton.jit
def _load_y(x, master, at, mask, HAS_MASTER: tl.constexpr):
    """Return x or, where it still rounds to a finite x, the master."""
    y = tl.load(x + at, mask).to(tl.float32)
    if HAS_MASTER:
        wide = tl.load(master + at, mask)
        same = _round(wide, x.dtype.element_ty).to(tl.float32) == y
        y = tl.where(same & (tl.abs(y) < float("inf")), wide, y)
    return y


@triton.jit
def _rms_and_ratio(g, s, w, one_minus_w):
    """Return the new s, sqrt((1 - w) s^2 + w g^2), and u = g / s."""
    # float32 has no squares of 1e-20 and 1e20: bring both near 1 by a power of two, which is exact.
    larger = tl.maximum(g.to(tl.uint32, bitcast=True) & 0x7FFFFFFF, s.to(tl.uint32, bitcast=True))
    exponent = tl.minimum(tl.maximum(larger & 0x7F800000, 0x00800000), 0x7E800000)
    scale = exponent.to(tl.float32, bitcast=True)
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    near_g, near_s = g * inverse, s * inverse
    root = tl.sqrt_rn(one_minus_w * (near_s * near_s) + w * (near_g * near_g))
    return root * scale, tl.div_rn(near_g, tl.where(root == 0, 1.0, root))


@triton.jit
def _add_squares(total, v, valid):
    wide = tl.where(valid, v, 0.0).to(total.dtype)
    return tl.fma(wide, wide, total)


@triton.jit
def nonfinite_kernel(g_table, aligned, chunks, found, g_like, BLOCK: tl.constexpr):
    """Set `found` if a chunk has a NaN or an infinity."""
    i, start, middle, stop = _chunk(chunks, aligned, None, BLOCK)
    nonfinite = tl.zeros((BLOCK,), tl.int32)
    for PARTIAL in tl.static_range(2):
        g = _pointer(g_table + i, g_like, PARTIAL)
        for block in range(middle if PARTIAL else start, stop if PARTIAL else middle, BLOCK):
            at = block + tl.arange(0, BLOCK)
            gradient = tl.load(g + at, at < stop if PARTIAL else None).to(tl.float32)
            nonfinite |= ((at < stop) & ~(tl.abs(gradient) < float("inf"))).to(tl.int32)
    tl.store(found, 1, tl.max(nonfinite, 0) != 0)


@triton.jit
def move_kernel(
    x_table, g_table, d_table, aligned, chunks, alpha, sign, l2, skip, x_like, g_like, d_like,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Do `move` on a chunk."""
    i, start, middle, stop = _chunk(chunks, aligned, skip, BLOCK)
    alpha = tl.load(alpha).to(tl.float32)
    for PARTIAL in tl.static_range(2):
        x, g = _pointer(x_table + i, x_like, PARTIAL), _pointer(g_table + i, g_like, PARTIAL)
        d = _pointer(d_table + i, d_like, PARTIAL)
        for block in range(middle if PARTIAL else start, stop if PARTIAL else middle, BLOCK):
            at = block + tl.arange(0, BLOCK)
            mask = at < stop if PARTIAL else None
            old_x, old_d = tl.load(x + at, mask).to(tl.float32), tl.load(d + at, mask)
            g_tilde = sign * tl.load(g + at, mask).to(tl.float32)
            if l2 is not None:  # beyond the paper: weight decay
                g_tilde += l2 * old_x
            new_x = _round(old_x - alpha * old_d, x.dtype.element_ty)
            tl.store(x + at, new_x, mask)  # Alg. 1, line 4
            tl.store(d + at, old_d - g_tilde, mask)  # Alg. 1, line 6: the bracket


@triton.jit
def estimate_kernel(
    x_table, g_table, d_table, aligned, chunks, one_minus_a, sign, l2, skip, g_sq, d_sq, x_like,
    g_like, d_like, FINITE_ONLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Do `estimate` on a chunk."""
    i, start, middle, stop = _chunk(chunks, aligned, skip, BLOCK)
    one_minus_a = tl.load(one_minus_a).to(tl.float32)
    sum_g_sq = tl.zeros((BLOCK,), g_sq.dtype.element_ty)
    sum_d_sq = tl.zeros((BLOCK,), d_sq.dtype.element_ty)
    for PARTIAL in tl.static_range(2):
        x, g = _pointer(x_table + i, x_like, PARTIAL), _pointer(g_table + i, g_like, PARTIAL)
        d = _pointer(d_table + i, d_like, PARTIAL)
        for block in range(middle if PARTIAL else start, stop if PARTIAL else middle, BLOCK):
            at = block + tl.arange(0, BLOCK)
            mask = at < stop if PARTIAL else None
            new_d = sign * tl.load(g + at, mask).to(tl.float32)
            if l2 is not None:  # beyond the paper: weight decay
                new_d += l2 * tl.load(x + at, mask).to(tl.float32)
            sum_g_sq = _add_squares(sum_g_sq, new_d, at < stop)
            if FINITE_ONLY:
                new_d = tl.where(tl.abs(new_d) < float("inf"), new_d, 0.0)
            new_d += one_minus_a * tl.load(d + at, mask)  # Alg. 1, line 6
            tl.store(d + at, new_d, mask)
            sum_d_sq = _add_squares(sum_d_sq, new_d, at < stop)
    tl.store(g_sq + tl.program_id(0), tl.sum(sum_g_sq, 0))
    tl.store(d_sq + tl.program_id(0), tl.sum(sum_d_sq, 0))


@triton.jit
def untuned_kernel(
    x_table, g_table, e_table, s_table, master_table, aligned, chunks, alpha,
    max_move, decay, grad_weight, average_weight, grad_factor, step, skip, chunk_u_sq, x_like,
    g_like, e_like, s_like, master_like,
    HAS_MASTER: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Do `untuned_step` on a chunk, except for (z - z_1)^2."""
    i, start, middle, stop = _chunk(chunks, aligned, skip, BLOCK)
    alpha, max_move = tl.load(alpha + i).to(tl.float32), tl.load(max_move + i).to(tl.float32)
    decay, grad_factor = tl.load(decay + i).to(tl.float32), tl.load(grad_factor + i).to(tl.float32)
    w, c = tl.load(grad_weight + i), tl.load(average_weight + i)
    w, one_minus_w = w.to(tl.float32), (1 - w).to(tl.float32)
    one_minus_c, m_weight = (1 - c).to(tl.float32), (c + (1 - B) * (1 - c)).to(tl.float32)
    twice_t = 2 * tl.load(step + i).to(tl.int64)
    key_e, key_s = _mix_bits(twice_t.to(tl.uint32)), _mix_bits((twice_t + 1).to(tl.uint32))
    u_sq = tl.zeros((BLOCK,), chunk_u_sq.dtype.element_ty)
    for PARTIAL in tl.static_range(2):
        x, g = _pointer(x_table + i, x_like, PARTIAL), _pointer(g_table + i, g_like, PARTIAL)
        e, s = _pointer(e_table + i, e_like, PARTIAL), _pointer(s_table + i, s_like, PARTIAL)
        master = _pointer(master_table + i, master_like, PARTIAL)
        for block in range(middle if PARTIAL else start, stop if PARTIAL else middle, BLOCK):
            at = block + tl.arange(0, BLOCK)
            mask = at < stop if PARTIAL else None
            y = _load_y(x, master, at, mask, HAS_MASTER)
            old_e = tl.load(e + at, mask).to(tl.float32)
            old_s = tl.load(s + at, mask).to(tl.float32)
            gradient = grad_factor * tl.load(g + at, mask).to(tl.float32)
            new_s, u = _rms_and_ratio(gradient, old_s, w, one_minus_w)
            u_sq = _add_squares(u_sq, u, at < stop)
            move = alpha * u
            move = tl.where(move > max_move, max_move, tl.where(move < -max_move, -max_move, move))
            m = old_e - (move + decay * (y + B * old_e))
            y += m_weight * m - (1 - B) * old_e
            new_e = one_minus_c * m
            if e.dtype.element_ty == tl.bfloat16:  # stochastic rounding
                place = _mix_bits(at.to(tl.uint32))
                new_e = _to_bfloat16(new_e, _mix_bits(place ^ key_e) & 0xFFFF)
                new_s = _to_bfloat16(new_s, _mix_bits(place ^ key_s) & 0xFFFF)
            tl.store(x + at, _round(y, x.dtype.element_ty), mask)
            tl.store(e + at, new_e, mask)
            tl.store(s + at, new_s, mask)
            if HAS_MASTER:
                tl.store(master + at, y, mask)
    tl.store(chunk_u_sq + tl.program_id(0), tl.sum(u_sq, 0))


@triton.jit
def measure_kernel(
    x_table, e_table, master_table, z_1_table, index_table, in_whole_table, counts, first_chunks,
    chunk_u_sq, u_sq, displacement_sq, x_like, e_like, master_like, z_1_like, index_like,
    in_whole_like, HAS_MASTER: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum u^2 over the chunks of a tensor, and (z - z_1)^2 over its sample."""
    i = tl.program_id(0)
    sums = tl.zeros((BLOCK,), u_sq.dtype.element_ty)
    stop = tl.load(first_chunks + i + 1)
    for block in range(tl.load(first_chunks + i), stop, BLOCK):
        at = block + tl.arange(0, BLOCK)
        sums += tl.load(chunk_u_sq + at, at < stop, 0.0)
    tl.store(u_sq + i, tl.sum(sums, 0))

    x, e = _pointer(x_table + i, x_like, True), _pointer(e_table + i, e_like, True)
    master = _pointer(master_table + i, master_like, True)
    z_1 = _pointer(z_1_table + i, z_1_like, True)
    index = _pointer(index_table + i, index_like, True)
    in_whole = _pointer(in_whole_table + i, in_whole_like, True)
    stop = tl.load(counts + i)
    sums = tl.zeros((BLOCK,), displacement_sq.dtype.element_ty)
    for block in range(0, stop, BLOCK):
        k = block + tl.arange(0, BLOCK)
        mask = k < stop
        at, place = tl.load(index + k, mask, 0), tl.load(in_whole + k, mask, 0)
        y = _load_y(x, master, at, mask, HAS_MASTER)
        z = y + B * tl.load(e + at, mask).to(tl.float32)
        sums = _add_squares(sums, z - tl.load(z_1 + place, mask), mask)
    tl.store(displacement_sq + i, tl.sum(sums, 0))
