// The sm_90 instructions that the kernel is made of, one function each. No CUDA header is needed.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

struct alignas(64) TensorMap {
  u64 opaque[16];
};

__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// mbarriers ------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Bulk tensor copies ---------------------------------------------------------------------------

constexpr u64 EVICT_FIRST = 0x12F0000000000000ull;  // createpolicy's encodings, as CUTLASS has them
constexpr u64 EVICT_LAST = 0x14F0000000000000ull;

__device__ __forceinline__ void copy_tile(u32 destination, const TensorMap* map, u32 barrier,
                                          i32 column, i32 row, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(policy)
      : "memory");
}

// Orders ordinary accesses before and after accesses by the copy engine.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Device-wide counters -------------------------------------------------------------------------

__device__ __forceinline__ void count_up(i32* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ void wait_for_count(const i32* counter, i32 count) {
  i32 seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < count);
}

// Past L1, and not moved by the compiler.
__device__ __forceinline__ float4 load_relaxed(const float4* from) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

__device__ __forceinline__ void store_relaxed(float4* to, const float4& x) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x),
               "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}

// wgmma bookkeeping ----------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Rows of 64 16-bit elements, 128-byte swizzle: 8 rows (1024 bytes) to the next core matrix.
__device__ __forceinline__ u64 matrix_descriptor(u32 address) {
  return ((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// Numbers --------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(u16 x) {
#ifdef WEIGHTS_ARE_HALF
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
#else
  return __uint_as_float(static_cast<u32>(x) << 16);
#endif
}

__device__ __forceinline__ float half_to_float(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

__device__ __forceinline__ u16 to_half(float x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u16 to_bfloat16(float x) {
  u16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u16 to_weight_dtype(float x) {
#ifdef WEIGHTS_ARE_HALF
  return to_half(x);
#else
  return to_bfloat16(x);
#endif
}

__device__ __forceinline__ float rounded(float x) { return to_float(to_weight_dtype(x)); }

// Round to nearest even; an overflow becomes the byte OVERFLOWN, which for e4m3 depends on torch's
// version. The hardware's own conversion always saturates.
template <int MANTISSA, int BIAS, u32 OVERFLOW_BITS, u32 OVERFLOWN>
__device__ __forceinline__ u8 to_float8(float x) {
  constexpr int SHIFT = 23 - MANTISSA;
  constexpr u32 MAGIC = static_cast<u32>(127 - BIAS + 24 - MANTISSA) << 23;
  u32 bits = __float_as_uint(x);
  const u32 sign = (bits >> 24) & 0x80;
  bits &= 0x7FFFFFFF;
  u32 out;
  if (bits >= OVERFLOW_BITS) {
    out = OVERFLOWN;
  } else if (bits < static_cast<u32>(128 - BIAS) << 23) {
    out = __float_as_uint(__uint_as_float(bits) + __uint_as_float(MAGIC)) - MAGIC;
  } else {
    const u32 odd = (bits >> SHIFT) & 1;
    out = (bits - (static_cast<u32>(127 - BIAS) << 23) + ((1u << (SHIFT - 1)) - 1) + odd) >> SHIFT;
  }
  out = bits > 0x7F800000 ? 0x7F : min(out, OVERFLOWN);
  return static_cast<u8>(out | sign);
}
