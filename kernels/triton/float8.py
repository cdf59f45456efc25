"""float32 to float8, bit for bit as torch rounds."""

from __future__ import annotations

import triton
import triton.language as tl

FLOAT8_E4M3, FLOAT8_E5M2 = 1, 2


@triton.jit
def to_float8_bits(x, FORMAT: tl.constexpr, E4M3_OVERFLOW: tl.constexpr):
    """Round float32 to float8 as torch does: to nearest even, e5m2 overflows to infinity.

    The hardware conversion always saturates, which is not always what `set_kv_buffer` writes.
    """
    MANTISSA: tl.constexpr = 3 if FORMAT == 1 else 2
    BIAS: tl.constexpr = 7 if FORMAT == 1 else 15
    OVERFLOW: tl.constexpr = 0x43F00000 if FORMAT == 1 else 0x47800000  # 480 and 65536
    OVERFLOWN: tl.constexpr = E4M3_OVERFLOW if FORMAT == 1 else 0x7C
    SUBNORMAL_BELOW: tl.constexpr = (128 - BIAS) << 23
    MAGIC: tl.constexpr = (127 - BIAS + 24 - MANTISSA) << 23
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # Adding a power of two whose last mantissa bit is the smallest subnormal lets the adder round.
    magic = tl.full(bits.shape, MAGIC, tl.int32)
    subnormal = bits.to(tl.float32, bitcast=True) + magic.to(tl.float32, bitcast=True)
    subnormal = subnormal.to(tl.int32, bitcast=True) - MAGIC
    odd = (bits >> SHIFT) & 1
    normal = (bits - ((127 - BIAS) << 23) + ((1 << (SHIFT - 1)) - 1) + odd) >> SHIFT
    out = tl.where(bits < SUBNORMAL_BELOW, subnormal, normal)
    out = tl.where((bits >= OVERFLOW) | (out > OVERFLOWN), OVERFLOWN, out)
    out = tl.where(bits > 0x7F800000, 0x7F, out)
    return (out | sign).to(tl.uint8)
