// x @ weight.T for few rows of x, split over K: float32 partial sums of the draft step's matmuls.
//
// A block takes 64 * GROUPS weight rows, all rows of x and a share of K. Each of GROUPS warpgroups
// multiplies 64 weight rows as wgmma's A operand with x as its B; one more warp feeds them weights
// and another x. The weights depend on no other kernel: with programmatic dependent launch they
// are on their way while the kernel before still makes x.
//
// Compile-time: ROWS (8 to 128) of the x tile, GROUPS, BOXES of 64 columns in a stage, STAGES of the
// ring, IN_FLIGHT of them requested and not landed, WEIGHTS_ARE_HALF.

constexpr int CONSUMERS = 128 * GROUPS;
constexpr int THREADS = CONSUMERS + 64;
constexpr int BOX_K = 64;
constexpr int TILE_N = 64 * GROUPS;
constexpr int WEIGHT_BYTES = TILE_N * BOX_K * 2;  // of a box
constexpr int X_BYTES = ROWS * BOX_K * 2;
static_assert(IN_FLIGHT <= STAGES, "the parity of a stage tells two phases apart");

struct Params {
  TensorMap weight[2];  // [n, k], box TILE_N rows: one or two runs of columns
  TensorMap x[2];       // [rows, k], box ROWS rows, likewise
  float* partials;      // [splits, rows, n] (output)
  i32 rows, n, tiles, splits;
  i32 runs, steps;      // runs of columns, and stages in each
  i32 late;             // the first run of x that the kernel before writes; `runs` if none
};

struct alignas(1024) Shared {
  u8 weight[STAGES][BOXES][WEIGHT_BYTES];
  u8 x[STAGES][BOXES][X_BYTES];
  u64 weight_full[STAGES], x_full[STAGES], empty[STAGES];
};

// A place in the ring, walked alike by its producers and by the consumers.
struct Cursor {
  u32 stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Fill the ring with the boxes of `maps` at `row`, from run `late` on after the kernel before. More
// than IN_FLIGHT stages at a time are no faster, and what the kernel before still reads through
// this multiprocessor would queue behind them.
template <int BYTES>
__device__ __forceinline__ void feed(const Params& p, Shared& shared, const TensorMap* maps,
                                     u8 (&tiles)[STAGES][BOXES][BYTES], u64* full, i32 row,
                                     i32 begin, i32 end, i32 late, u64 policy) {
  Cursor at, landing;
  i32 in_flight = IN_FLIGHT;
  for (i32 run = 0; run < p.runs; ++run) {
    if (run == late) wait_for_previous();
    for (i32 step = begin; step < end; ++step) {
      if (in_flight-- <= 0) {
        barrier_wait(shared_address(&full[landing.stage]), landing.parity);
        landing.advance();
      }
      barrier_wait(shared_address(&shared.empty[at.stage]), at.parity ^ 1);
      const u32 landed = shared_address(&full[at.stage]);
      barrier_expect(landed, BOXES * BYTES);
#pragma unroll
      for (int box = 0; box < BOXES; ++box) {
        copy_tile(shared_address(tiles[at.stage][box]), &maps[run], landed,
                  (step * BOXES + box) * BOX_K, row, policy);
      }
      at.advance();
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    split_k_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  const i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const i32 first = blockIdx.x % p.tiles * TILE_N, split = blockIdx.x / p.tiles;
  const i32 begin = p.steps * split / p.splits, end = p.steps * (split + 1) / p.splits;

  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(shared_address(&shared.weight_full[i]), 1);
      barrier_init(shared_address(&shared.x_full[i]), 1);
      barrier_init(shared_address(&shared.empty[i]), CONSUMERS / 32);
    }
    proxy_fence();
  }
  __syncthreads();

  if (warp == CONSUMERS / 32) {
    if (lane == 0) {
      feed(p, shared, p.weight, shared.weight, shared.weight_full, first, begin, end, p.runs,
           EVICT_FIRST);
      wait_for_previous();  // so that whoever starts next can rely on all kernels before
      start_next();
    }
  } else if (warp > CONSUMERS / 32) {
    if (lane == 0) {
      feed(p, shared, p.x, shared.x, shared.x_full, 0, begin, end, p.late, EVICT_LAST);
    }
  } else {
    const i32 group = warp / 4, steps = p.runs * (end - begin);
    float sums[ROWS / 2] = {};
    Cursor at, done;
    for (i32 step = 0; step < steps; ++step) {
      barrier_wait(shared_address(&shared.weight_full[at.stage]), at.parity);
      barrier_wait(shared_address(&shared.x_full[at.stage]), at.parity);
      wgmma_fence();
#pragma unroll
      for (int box = 0; box < BOXES; ++box) {
        const u32 a = shared_address(shared.weight[at.stage][box]) + group * 64 * BOX_K * 2;
        const u32 b = shared_address(shared.x[at.stage][box]);
#pragma unroll
        for (int i = 0; i < BOX_K / 16; ++i) {
          wgmma<ROWS>(sums, matrix_descriptor(a + i * 32), matrix_descriptor(b + i * 32));
        }
      }
      wgmma_commit();
      wgmma_wait<1>();  // the products of the step before are done
      if (step > 0) {
        if (lane == 0) barrier_arrive(shared_address(&shared.empty[done.stage]));
        done.advance();
      }
      at.advance();
    }
    wgmma_wait<0>();
    wait_for_previous();  // it may still read what the partial sums replace
    const i32 n = first + group * 64 + warp % 4 * 16 + lane / 4;
    float* to = p.partials + static_cast<i64>(split) * p.rows * p.n + n;
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) {
      const i32 row = i / 4 * 8 + lane % 4 * 2 + i % 2, down = i % 4 / 2 * 8;
      if (row < p.rows && n + down < p.n) to[static_cast<i64>(row) * p.n + down] = sums[i];
    }
  }
}
