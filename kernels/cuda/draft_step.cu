// The whole draft step in one persistent launch on Hopper.
//
// Blocks: one a multiprocessor, all resident (a cooperative launch). Warps 0-7 are two warpgroups
// of wgmma consumers, warp 8 feeds a ring of weight tiles and warp 9 a ring of batch tiles, warps
// 10-11 take batch rows: stages capture_aux_hidden_states and build_draft_input, and the embedding
// with its norm.
//
// Stage write_draft_kv is two matmuls that read their weights once. A unit of work is a tile of
// weight rows, all batch rows and a split of K; the partial sums of a tile meet in L2, where each
// of its blocks adds up a share in the order of the splits.
//   1. fc: 256 weight rows. The sums become `hidden` = fc output * hidden_norm weight, with the sum
//      of squares of each row beside it.
//   2. K and V: 128 weight rows, first the embedding half of K, then the hidden half. Their weights
//      are on the way while fc is being added up. 1 / RMS of `hidden` scales the float32 sums of
//      its half, so nobody waits for a row's norm before multiplying. Then rotate, convert, store.
// Partial sums need neither fence nor flag: the buffer holds EMPTY between launches, a reader waits
// for a value that is not EMPTY, and puts EMPTY back. `hidden`, which the copy engine reads, is
// announced by a counter.
//
// A padding row (negative slot) gets a zero embedding row and stores nothing; its columns of the
// products meet no other row. Rows past the batch are zero-filled by the copy engine.
//
// Compile-time: BATCH_TILE (8 to 128 rows), WEIGHT_TILES and BATCH_TILES of the rings, IN_FLIGHT
// weight tiles not landed yet, E4M3_OVERFLOW (a byte), WEIGHTS_ARE_HALF.

constexpr int CONSUMERS = 256;
constexpr int THREADS = 384;
constexpr int ROW_WARPS = 2;
constexpr int TILE_K = 64;
constexpr int WEIGHT_BYTES = 128 * TILE_K * 2;
constexpr int BATCH_BYTES = BATCH_TILE * TILE_K * 2;
constexpr int FC_ROWS = 256;
constexpr int KV_ROWS = 128;
constexpr int GROUPS = BATCH_TILE / 8;
constexpr int PITCH = KV_ROWS + 4;
constexpr int FC_ITEMS = 2 * GROUPS;  // an item of a tile's sums: four registers of every consumer
constexpr int KV_ITEMS = GROUPS;
constexpr int FC_BATCH = FC_ITEMS >= 32 ? 4 : FC_ITEMS >= 16 ? 2 : 1;  // items added up at once
constexpr int KV_BATCH = KV_ITEMS >= 16 ? 2 : 1;
constexpr int NUM_COUNTERS = 64;
constexpr u32 EMPTY = 0xFFFFFFFF;     // a NaN that no arithmetic produces

enum { POOL_BF16, POOL_FP16, POOL_E4M3, POOL_E5M2 };

struct Params {
  TensorMap fc_map;         // [H, aux width], box 64 rows
  TensorMap kv_map;         // [2 * heads * head_dim, 2 * H], box 64 rows
  TensorMap aux_maps[4];    // [rows, part width], box BATCH_TILE rows
  TensorMap embed_map;      // [rows, H] normed embeddings
  TensorMap hidden_map;     // [rows, H] fc output * hidden_norm
  const u16* aux[4];        // [rows, part width]
  i64 aux_stride[4];        // elements
  const void* slots;        // [rows]
  const void* tokens;       // [rows]
  const void* seq_lens;     // [rows]
  const void* requests;     // [rows]
  u16* kept;                // [max_requests, aux width] (output) or null
  i64 kept_stride;
  i32* bonus_tokens;        // [rows] (output) or null
  void* new_seq_lens;       // [rows] (output)
  const u16* embeds;        // [vocab, H], or [rows, H] if !gather_embeds
  i64 embeds_stride;
  const u16* input_layernorm;  // [H]
  const u16* fc_bias;       // [H] or null
  const u16* hidden_norm;   // [H]
  const u16* kv_bias;       // [2 * heads * head_dim] or null
  const float* cos_sin;     // [max_position, rotary_dim]
  u8* k_buffer;             // [slots, heads, head_dim] (output)
  u8* v_buffer;             // [slots, heads, head_dim] (output)
  i64 k_stride;             // elements
  i64 v_stride;
  i64 num_slots;
  i64 max_requests;
  i64 num_embeds;
  u16* embed_rows;          // [rows, H] workspace behind embed_map
  u16* hidden_rows;         // [rows, H] workspace behind hidden_map
  float* square_sums;       // [BATCH_TILE, 2 * fc_tiles] workspace
  float4* fc_partials;      // [fc_tiles, FC_ITEMS, fc_splits, CONSUMERS] workspace, EMPTY at first
  float4* kv_partials;      // [kv_tiles, KV_ITEMS, kv_splits, CONSUMERS] workspace, EMPTY at first
  i32* counters;            // workspace, zero at first: see Counters
  i32 rows, hidden_size;
  i32 num_parts, part_width;          // of aux
  i32 num_map_parts, map_part_width;  // of aux_maps: one packed workspace where a norm precedes fc
  i32 heads, head_dim, rotary_dim, is_neox;
  i32 fc_tiles, fc_splits, kv_tiles, kv_splits;
  i32 tokens_wide, seq_lens_wide, requests_wide, slots_wide;  // int64 if set, else int32
  i32 gather_embeds, pool;
  i32 has_k_scale, has_v_scale;
  float k_scale, v_scale, eps;
};

// Counters in global memory, two sets of them. A launch counts in the set that `turn` names; its
// first block zeroes the other set and flips `turn` for the next launch.
struct Counters {
  i32* embeds_ready;  // row warps of all blocks
  i32* hidden_ready;  // shares of all fc tiles
};

struct alignas(1024) Shared {
  u8 weights[WEIGHT_TILES][WEIGHT_BYTES];
  u8 batch[BATCH_TILES][BATCH_BYTES];
  u64 weights_full[WEIGHT_TILES], weights_empty[WEIGHT_TILES];
  u64 batch_full[BATCH_TILES], batch_empty[BATCH_TILES];
  float inverse_rms[BATCH_TILE];
  float warp_sums[FC_BATCH][8][8];
  union alignas(16) {
    u16 hidden[FC_BATCH][8][2][72];  // [item][batch row][warpgroup][64 weight rows, padded]
    float kv[KV_BATCH][8][PITCH];    // [item][batch row][128 weight rows, padded]
  } staging;
};

// A place in a ring, walked alike by its producer and by the consumers.
template <int TILES>
struct Cursor {
  u32 tile = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++tile == TILES) {
      tile = 0;
      parity ^= 1;
    }
  }
};

// The steps along K of one split.
struct Range {
  i32 begin, end;
};

__device__ __forceinline__ Range share(i32 steps, i32 split, i32 splits) {
  return {steps * split / splits, steps * (split + 1) / splits};
}

// Steps of 64 along K. A step does not cross from one aux tensor into the next.
__device__ __forceinline__ i32 fc_steps(const Params& p) {
  return p.num_map_parts * ((p.map_part_width + TILE_K - 1) / TILE_K);
}

// Of either half.
__device__ __forceinline__ i32 kv_steps(const Params& p) {
  return (p.hidden_size + TILE_K - 1) / TILE_K;
}

// Units that add up a share of an fc tile, over all tiles.
__device__ __forceinline__ i32 hidden_shares(const Params& p) {
  return p.fc_tiles * min(FC_ITEMS, p.fc_splits);
}

// Rows of kv_proj behind a tile of 128: whole heads, or, where a head is wider than a tile, the
// two runs of 64 rows that RoPE pairs with each other.
struct KvTile {
  i32 first, second;  // kv_proj rows of tile rows 0 and 64
  i32 used;           // tile rows that count
};

__device__ __forceinline__ bool splits_heads(const Params& p) {
  return p.head_dim > KV_ROWS && p.is_neox && p.rotary_dim > KV_ROWS;
}

__device__ __forceinline__ KvTile kv_tile_at(const Params& p, i32 index) {
  if (splits_heads(p)) {  // head_dim and rotary_dim are 256
    const i32 first = index / 2 * 256 + index % 2 * 64;
    return {first, first + 128, KV_ROWS};
  }
  const i32 used = p.head_dim >= KV_ROWS ? KV_ROWS : KV_ROWS / p.head_dim * p.head_dim;
  return {index * used, index * used + 64, used};
}

__device__ __forceinline__ i64 load_index(const void* p, i32 row, i32 wide) {
  return wide ? static_cast<const i64*>(p)[row] : static_cast<const i32*>(p)[row];
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// Batch rows -----------------------------------------------------------------------------------

__device__ __forceinline__ void copy_row(u16* to, const u16* from, i32 count, i32 lane) {
#pragma unroll 8
  for (i32 i = lane * 8; i < count; i += 256) {
    *reinterpret_cast<uint4*>(to + i) = __ldg(reinterpret_cast<const uint4*>(from + i));
  }
}

__device__ __forceinline__ void norm_embedding(const Params& p, const u16* from, u16* to,
                                               i32 lane) {
  float sum = 0.f;
#pragma unroll 4
  for (i32 i = lane * 8; i < p.hidden_size; i += 256) {
    uint4 packed = __ldg(reinterpret_cast<const uint4*>(from + i));
    const u16* x = reinterpret_cast<const u16*>(&packed);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += to_float(x[j]) * to_float(x[j]);
  }
  const float scale = rsqrtf(warp_sum(sum) / p.hidden_size + p.eps);
#pragma unroll 4
  for (i32 i = lane * 8; i < p.hidden_size; i += 256) {
    uint4 packed = __ldg(reinterpret_cast<const uint4*>(from + i));
    const uint4 weights = __ldg(reinterpret_cast<const uint4*>(p.input_layernorm + i));
    u16* x = reinterpret_cast<u16*>(&packed);
    const u16* w = reinterpret_cast<const u16*>(&weights);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = to_weight_dtype(to_float(x[j]) * scale * to_float(w[j]));
    *reinterpret_cast<uint4*>(to + i) = packed;
  }
}

__device__ __forceinline__ void prepare_embedding(const Params& p, i32 row, i32 lane) {
  u16* embed_row = p.embed_rows + static_cast<i64>(row) * p.hidden_size;
  const bool live = load_index(p.slots, row, p.slots_wide) >= 0;
  const i64 source = !live ? -1 : p.gather_embeds ? load_index(p.tokens, row, p.tokens_wide) : row;
  if (source >= 0 && source < p.num_embeds) {
    norm_embedding(p, p.embeds + source * p.embeds_stride, embed_row, lane);
  } else {
    for (i32 i = lane * 8; i < p.hidden_size; i += 256) {
      *reinterpret_cast<uint4*>(embed_row + i) = make_uint4(0, 0, 0, 0);
    }
  }
}

__device__ __forceinline__ void keep_row(const Params& p, i32 row, i32 lane) {
  if (p.kept == nullptr || load_index(p.slots, row, p.slots_wide) < 0) return;
  // Stage build_draft_input.
  if (lane == 0) {
    p.bonus_tokens[row] = static_cast<i32>(load_index(p.tokens, row, p.tokens_wide));
    const i64 seq_len = load_index(p.seq_lens, row, p.seq_lens_wide) + 1;
    if (p.seq_lens_wide) {
      static_cast<i64*>(p.new_seq_lens)[row] = seq_len;
    } else {
      static_cast<i32*>(p.new_seq_lens)[row] = static_cast<i32>(seq_len);
    }
  }
  // Stage capture_aux_hidden_states.
  const i64 request = load_index(p.requests, row, p.requests_wide);
  if (request < 0 || request >= p.max_requests) return;
  for (i32 part = 0; part < p.num_parts; ++part) {
    copy_row(p.kept + request * p.kept_stride + static_cast<i64>(part) * p.part_width,
             p.aux[part] + row * p.aux_stride[part], p.part_width, lane);
  }
}

// Producers ------------------------------------------------------------------------------------

template <int TILES>
__device__ __forceinline__ void wait_empty(u64 (&empty)[TILES], const Cursor<TILES>& at) {
  barrier_wait(shared_address(&empty[at.tile]), at.parity ^ 1);
}

// Weights depend on nothing: the ring fills with K and V weights while fc is being added up.
struct WeightProducer {
  Shared& shared;
  i32 issued;
  Cursor<WEIGHT_TILES> cursor, landed;

  __device__ __forceinline__ void load(const TensorMap* map, i32 column, i32 first, i32 second) {
    // A deeper queue is no faster, and everything else that goes to L2 would wait behind it.
    if (issued++ >= IN_FLIGHT) {
      barrier_wait(shared_address(&shared.weights_full[landed.tile]), landed.parity);
      landed.advance();
    }
    wait_empty(shared.weights_empty, cursor);
    const u32 to = shared_address(shared.weights[cursor.tile]);
    const u32 full = shared_address(&shared.weights_full[cursor.tile]);
    barrier_expect(full, WEIGHT_BYTES);
    copy_tile(to, map, full, column, first, EVICT_FIRST);
    copy_tile(to + WEIGHT_BYTES / 2, map, full, column, second, EVICT_FIRST);
    cursor.advance();
  }

  __device__ void feed_fc(const Params& p, i32 unit) {
    const i32 steps_per_part = (p.map_part_width + TILE_K - 1) / TILE_K;
    const i32 row = unit % p.fc_tiles * FC_ROWS;
    const Range range = share(fc_steps(p), unit / p.fc_tiles, p.fc_splits);
    for (i32 k = range.begin; k < range.end; ++k) {
      const i32 part = k / steps_per_part;
      const i32 column = part * p.map_part_width + k % steps_per_part * TILE_K;
      load(&p.fc_map, column, row, row + 64);
      load(&p.fc_map, column, row + 128, row + 192);
    }
  }

  __device__ void feed_kv(const Params& p, i32 unit) {
    const Range range = share(kv_steps(p), unit / p.kv_tiles, p.kv_splits);
    const KvTile rows = kv_tile_at(p, unit % p.kv_tiles);
    for (i32 half = 0; half < 2; ++half) {
      for (i32 k = range.begin; k < range.end; ++k) {
        load(&p.kv_map, half * p.hidden_size + k * TILE_K, rows.first, rows.second);
      }
    }
  }
};

struct BatchProducer {
  Shared& shared;
  Cursor<BATCH_TILES> cursor;

  __device__ __forceinline__ void load(const TensorMap* map, i32 column) {
    wait_empty(shared.batch_empty, cursor);
    const u32 full = shared_address(&shared.batch_full[cursor.tile]);
    barrier_expect(full, BATCH_BYTES);
    copy_tile(shared_address(shared.batch[cursor.tile]), map, full, column, 0, EVICT_LAST);
    cursor.advance();
  }

  __device__ void feed_fc(const Params& p, i32 unit) {
    const i32 steps_per_part = (p.map_part_width + TILE_K - 1) / TILE_K;
    const Range range = share(fc_steps(p), unit / p.fc_tiles, p.fc_splits);
    for (i32 k = range.begin; k < range.end; ++k) {
      load(&p.aux_maps[k / steps_per_part], k % steps_per_part * TILE_K);
    }
  }

  __device__ void feed_kv(const Params& p, i32 unit, const Counters& counters) {
    const Range range = share(kv_steps(p), unit / p.kv_tiles, p.kv_splits);
    wait_for_count(counters.embeds_ready, ROW_WARPS * gridDim.x);
    proxy_fence();
    for (i32 k = range.begin; k < range.end; ++k) load(&p.embed_map, k * TILE_K);
    wait_for_count(counters.hidden_ready, hidden_shares(p));
    proxy_fence();
    for (i32 k = range.begin; k < range.end; ++k) load(&p.hidden_map, k * TILE_K);
  }
};

// Consumers ------------------------------------------------------------------------------------

__device__ __forceinline__ float4 empty() {
  const float x = __uint_as_float(EMPTY);
  return make_float4(x, x, x, x);
}

__device__ __forceinline__ bool is_empty(const float4& x) {
  return __float_as_uint(x.x) == EMPTY || __float_as_uint(x.y) == EMPTY ||
         __float_as_uint(x.z) == EMPTY || __float_as_uint(x.w) == EMPTY;
}

struct Consumer {
  Shared& shared;
  i32 thread, lane, warp, group;  // group: the warpgroup, 0 or 1
  Cursor<WEIGHT_TILES> weights;
  Cursor<BATCH_TILES> batch;
  float sums[2][BATCH_TILE / 2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < BATCH_TILE / 2; ++i) sums[0][i] = sums[1][i] = 0.f;
  }

  __device__ __forceinline__ u32 wait_full(const Cursor<WEIGHT_TILES>& at) {
    barrier_wait(shared_address(&shared.weights_full[at.tile]), at.parity);
    return shared_address(shared.weights[at.tile]);
  }

  __device__ __forceinline__ u32 wait_full(const Cursor<BATCH_TILES>& at) {
    barrier_wait(shared_address(&shared.batch_full[at.tile]), at.parity);
    return shared_address(shared.batch[at.tile]);
  }

  __device__ __forceinline__ void release(u64* empty) {
    if (lane == 0) barrier_arrive(shared_address(empty));
  }

  // A step of fc: one batch tile, weight rows 0-127 and 128-255, one of them for each warpgroup.
  __device__ __forceinline__ void multiply_fc(i32 steps) {
    Cursor<WEIGHT_TILES> old_weights = weights;
    Cursor<BATCH_TILES> old_batch = batch;
    for (i32 k = 0; k <= steps; ++k) {
      if (k < steps) {
        Cursor<WEIGHT_TILES> mine = weights;
        if (group == 1) mine.advance();
        const u32 x = wait_full(batch), w = wait_full(mine);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < TILE_K / 16; ++step) {
          const u64 b = matrix_descriptor(x + step * 32);
          wgmma<BATCH_TILE>(sums[0], matrix_descriptor(w + step * 32), b);
          wgmma<BATCH_TILE>(sums[1], matrix_descriptor(w + WEIGHT_BYTES / 2 + step * 32), b);
        }
        wgmma_commit();
        wgmma_wait<1>();
        weights.advance();
        weights.advance();
        batch.advance();
      } else {
        wgmma_wait<0>();
      }
      if (k > 0) {  // the products of the step before are done
        release(&shared.batch_empty[old_batch.tile]);
        old_batch.advance();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // Not before the other group's weights have landed, or a later phase could be counted.
          if (half != group) wait_full(old_weights);
          release(&shared.weights_empty[old_weights.tile]);
          old_weights.advance();
        }
      }
    }
  }

  // A step of K and V: one batch tile, 128 weight rows, 64 for each warpgroup.
  template <int HALF>
  __device__ __forceinline__ void multiply_kv(i32 steps) {
    Cursor<WEIGHT_TILES> old_weights = weights;
    Cursor<BATCH_TILES> old_batch = batch;
    for (i32 k = 0; k <= steps; ++k) {
      if (k < steps) {
        const u32 x = wait_full(batch), w = wait_full(weights) + group * (WEIGHT_BYTES / 2);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < TILE_K / 16; ++step) {
          wgmma<BATCH_TILE>(sums[HALF], matrix_descriptor(w + step * 32),
                            matrix_descriptor(x + step * 32));
        }
        wgmma_commit();
        wgmma_wait<1>();
        weights.advance();
        batch.advance();
      } else {
        wgmma_wait<0>();
      }
      if (k > 0) {
        release(&shared.batch_empty[old_batch.tile]);
        release(&shared.weights_empty[old_weights.tile]);
        old_batch.advance();
        old_weights.advance();
      }
    }
  }

  // Adds up items `first`, `first + splits`, ... of a tile. Its partial sums stay: see make_empty.
  template <int BATCH, int ITEMS>
  __device__ __forceinline__ void add_up(const float4* tile, i32 first, i32 splits,
                                         float4 (&totals)[BATCH]) {
    // A lane a share watches its last thread's sums, so that the others do not load L2 with polls.
    for (i32 i = thread; i < BATCH * splits; i += CONSUMERS) {
      const i32 item = first + i / splits * splits;
      if (item >= ITEMS) break;
      const float4* last = tile + (item * splits + i % splits + 1) * CONSUMERS - 1;
      while (is_empty(load_relaxed(last))) {
      }
    }
    named_barrier(1, CONSUMERS);
#pragma unroll
    for (int b = 0; b < BATCH; ++b) totals[b] = make_float4(0.f, 0.f, 0.f, 0.f);
    for (i32 begin = 0; begin < splits; begin += 8) {
      float4 x[BATCH][8];
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const i32 item = first + b * splits;
          if (item < ITEMS && begin + i < splits) {
            x[b][i] = load_relaxed(tile + (item * splits + begin + i) * CONSUMERS + thread);
          }
        }
      }
#pragma unroll
      for (int b = 0; b < BATCH; ++b) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const i32 item = first + b * splits;
          if (item >= ITEMS || begin + i >= splits) break;
          const float4* place = tile + (item * splits + begin + i) * CONSUMERS + thread;
          while (is_empty(x[b][i])) x[b][i] = load_relaxed(place);
          totals[b].x += x[b][i].x;
          totals[b].y += x[b][i].y;
          totals[b].z += x[b][i].z;
          totals[b].w += x[b][i].w;
        }
      }
    }
  }

  // What this block added up is EMPTY for the next launch. Last of all: a fence would wait for it.
  template <int ITEMS>
  __device__ __forceinline__ void make_empty(float4* tile, i32 first, i32 splits) {
    for (i32 item = first; item < ITEMS; item += splits) {
      for (i32 split = 0; split < splits; ++split) {
        tile[(item * splits + split) * CONSUMERS + thread] = empty();
      }
    }
  }

  __device__ void run_fc(const Params& p, i32 unit) {
    const i32 tile = unit % p.fc_tiles, split = unit / p.fc_tiles;
    const Range range = share(fc_steps(p), split, p.fc_splits);
    clear();
    multiply_fc(range.end - range.begin);
    float4* to = p.fc_partials + (tile * FC_ITEMS * p.fc_splits + split) * CONSUMERS + thread;
#pragma unroll
    for (int item = 0; item < FC_ITEMS; ++item) {
      const float* s = &sums[item & 1][item / 2 * 4];
      store_relaxed(to + item * p.fc_splits * CONSUMERS, make_float4(s[0], s[1], s[2], s[3]));
    }
  }

  __device__ void reduce_fc(const Params& p, i32 unit, const Counters& counters) {
    const i32 tile = unit % p.fc_tiles, split = unit / p.fc_tiles;
    if (split >= FC_ITEMS) return;
    float4* partials = p.fc_partials + tile * FC_ITEMS * p.fc_splits * CONSUMERS;
    for (i32 item = split; item < FC_ITEMS; item += FC_BATCH * p.fc_splits) {
      float4 totals[FC_BATCH];
      float bias[FC_BATCH][2], weight[FC_BATCH][2];  // looked up before the sums have arrived
#pragma unroll
      for (int b = 0; b < FC_BATCH; ++b) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const i32 n = weight_row(tile, item + b * p.fc_splits) + i * 8;
          const bool valid = n < p.hidden_size;
          bias[b][i] = valid && p.fc_bias ? to_float(__ldg(p.fc_bias + n)) : 0.f;
          weight[b][i] = valid ? to_float(__ldg(p.hidden_norm + n)) : 0.f;
        }
      }
      add_up<FC_BATCH, FC_ITEMS>(partials, item, p.fc_splits, totals);
#pragma unroll
      for (int b = 0; b < FC_BATCH; ++b) {
        const i32 which = item + b * p.fc_splits;
        if (which < FC_ITEMS) stage_hidden(p, tile, which, totals[b], bias[b], weight[b], b);
      }
      named_barrier(1, CONSUMERS);
#pragma unroll
      for (int b = 0; b < FC_BATCH; ++b) {
        if (item + b * p.fc_splits < FC_ITEMS) store_hidden(p, tile, item + b * p.fc_splits, b);
      }
      named_barrier(1, CONSUMERS);
    }
    proxy_fence();
    named_barrier(1, CONSUMERS);
    if (thread == 0) count_up(counters.hidden_ready);
    __syncwarp();
    make_empty<FC_ITEMS>(partials, split, p.fc_splits);
  }

  // An item is 8 batch rows x 64 weight rows of each warpgroup.
  __device__ __forceinline__ i32 weight_row(i32 tile, i32 item) {
    return tile * FC_ROWS + group * 128 + item % 2 * 64 + warp % 4 * 16 + lane / 4;
  }

  __device__ __forceinline__ void stage_hidden(const Params& p, i32 tile, i32 item,
                                               const float4& total, const float (&bias)[2],
                                               const float (&weight)[2], int b) {
    const i32 in_segment = warp % 4 * 16 + lane / 4, column = lane % 4 * 2;
    const float values[2][2] = {{total.x, total.y}, {total.z, total.w}};  // [n, n + 8][batch row]
    float squares[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool valid = weight_row(tile, item) + i * 8 < p.hidden_size;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float h = values[i][j] + bias[i];
        squares[j] += valid ? h * h : 0.f;
        shared.staging.hidden[b][column + j][group][in_segment + i * 8] =
            to_weight_dtype(h * weight[i]);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        squares[j] += __shfl_xor_sync(~0u, squares[j], offset);
      }
      if (lane < 4) shared.warp_sums[b][warp][column + j] = squares[j];
    }
  }

  __device__ __forceinline__ void store_hidden(const Params& p, i32 tile, i32 item, int b) {
    const i32 half = item % 2, first_row = item / 2 * 8;
    if (thread < 128) {
      const i32 row = first_row + thread / 16, segment = thread / 8 % 2, at = thread % 8 * 8;
      const i32 to = tile * FC_ROWS + segment * 128 + half * 64 + at;
      if (row < p.rows && to < p.hidden_size) {
        *reinterpret_cast<uint4*>(p.hidden_rows + static_cast<i64>(row) * p.hidden_size + to) =
            *reinterpret_cast<const uint4*>(&shared.staging.hidden[b][thread / 16][segment][at]);
      }
    } else if (thread < 136) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += shared.warp_sums[b][i][thread - 128];
      p.square_sums[(first_row + thread - 128) * p.fc_tiles * 2 + tile * 2 + half] = sum;
    }
  }

  // 1 / RMS of `hidden` for every row of the batch tile, BATCH_TILE / 8 rows a warp.
  __device__ __forceinline__ void load_inverse_rms(const Params& p) {
    const i32 parts = 2 * p.fc_tiles;
    float totals[BATCH_TILE / 8];
#pragma unroll
    for (int i = 0; i < BATCH_TILE / 8; ++i) totals[i] = 0.f;
    for (i32 part = lane; part < parts; part += 32) {
#pragma unroll
      for (int i = 0; i < BATCH_TILE / 8; ++i) {
        totals[i] += __ldcg(p.square_sums + (i * 8 + warp) * parts + part);
      }
    }
#pragma unroll
    for (int i = 0; i < BATCH_TILE / 8; ++i) {
      const float total = warp_sum(totals[i]);
      if (lane == 0) shared.inverse_rms[i * 8 + warp] = rsqrtf(total / p.hidden_size + p.eps);
    }
  }

  // Where four neighbouring elements of one head go, looked up before their sums have arrived.
  struct Target {
    i64 slot;  // negative if nowhere
    i32 in_side, d;
    bool is_v;
    float cos[4], sin[4];
  };

  __device__ __forceinline__ bool is_first_of_pair(const Params& p, i32 d) {
    return p.is_neox ? d < p.rotary_dim / 2 : d % 2 == 0;
  }

  __device__ __forceinline__ Target target_at(const Params& p, const KvTile& rows, i32 row,
                                              i32 in_tile) {
    Target target;
    const i32 n = in_tile < 64 ? rows.first + in_tile : rows.second + in_tile - 64;
    target.slot = -1;
    if (row >= p.rows || in_tile >= rows.used || n >= 2 * p.heads * p.head_dim) return target;
    const i64 slot = load_index(p.slots, row, p.slots_wide);
    if (slot < 0 || slot >= p.num_slots) return target;
    target.slot = slot;
    target.is_v = n >= p.heads * p.head_dim;
    target.in_side = target.is_v ? n - p.heads * p.head_dim : n;
    target.d = target.in_side % p.head_dim;
    if (target.is_v) return target;
    const i64 position = load_index(p.seq_lens, row, p.seq_lens_wide);
    const float* cos_sin = p.cos_sin + position * p.rotary_dim;
    const i32 half = p.rotary_dim / 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const i32 d = target.d + i;
      if (d >= p.rotary_dim) break;
      const i32 frequency = !p.is_neox ? d / 2 : d < half ? d : d - half;
      target.cos[i] = __ldg(cos_sin + frequency);
      target.sin[i] = __ldg(cos_sin + half + frequency);
    }
    return target;
  }

  __device__ __forceinline__ void look_up(const Params& p, i32 unit, i32 item,
                                          Target (&targets)[KV_BATCH]) {
#pragma unroll
    for (int b = 0; b < KV_BATCH; ++b) {
      const i32 row = (item + b * p.kv_splits) * 8 + thread / 32;
      targets[b] = target_at(p, kv_tile_at(p, unit % p.kv_tiles), row, lane * 4);
    }
  }

  __device__ void run_kv(const Params& p, i32 unit, const Counters& counters) {
    const i32 tile = unit % p.kv_tiles, split = unit / p.kv_tiles;
    const Range range = share(kv_steps(p), split, p.kv_splits);
    clear();
    multiply_kv<0>(range.end - range.begin);
    if (thread == 0) wait_for_count(counters.hidden_ready, hidden_shares(p));
    named_barrier(1, CONSUMERS);
    load_inverse_rms(p);
    multiply_kv<1>(range.end - range.begin);
    named_barrier(1, CONSUMERS);
    float4* to = p.kv_partials + (tile * KV_ITEMS * p.kv_splits + split) * CONSUMERS + thread;
#pragma unroll
    for (int item = 0; item < KV_ITEMS; ++item) {
      const float* e = &sums[0][item * 4];
      const float* h = &sums[1][item * 4];
      const float even = shared.inverse_rms[item * 8 + lane % 4 * 2];
      const float odd = shared.inverse_rms[item * 8 + lane % 4 * 2 + 1];
      store_relaxed(to + item * p.kv_splits * CONSUMERS,
                    make_float4(e[0] + even * h[0], e[1] + odd * h[1], e[2] + even * h[2],
                                e[3] + odd * h[3]));
    }
  }

  // `looked_up`: whether `targets` already are those of the unit's first items.
  __device__ void reduce_kv(const Params& p, i32 unit, bool looked_up,
                            Target (&targets)[KV_BATCH]) {
    const KvTile rows = kv_tile_at(p, unit % p.kv_tiles);
    const i32 split = unit / p.kv_tiles;
    float4* partials = p.kv_partials + unit % p.kv_tiles * KV_ITEMS * p.kv_splits * CONSUMERS;
    for (i32 item = split; item < KV_ITEMS; item += KV_BATCH * p.kv_splits) {
      if (!looked_up || item != split) look_up(p, unit, item, targets);
      float4 totals[KV_BATCH];
      add_up<KV_BATCH, KV_ITEMS>(partials, item, p.kv_splits, totals);
#pragma unroll
      for (int b = 0; b < KV_BATCH; ++b) stage_kv(p, rows, totals[b], b);
      named_barrier(1, CONSUMERS);
#pragma unroll
      for (int b = 0; b < KV_BATCH; ++b) {
        store_kv(p, targets[b], shared.staging.kv[b][thread / 32], lane * 4);
      }
      named_barrier(1, CONSUMERS);
    }
    make_empty<KV_ITEMS>(partials, split, p.kv_splits);
  }

  // An item is 8 batch rows x the 128 weight rows of the tile.
  __device__ __forceinline__ void stage_kv(const Params& p, const KvTile& rows,
                                           const float4& total, int b) {
    const float values[2][2] = {{total.x, total.y}, {total.z, total.w}};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const i32 in_tile = warp * 16 + lane / 4 + i * 8;
      const i32 n = in_tile < 64 ? rows.first + in_tile : rows.second + in_tile - 64;
      const bool valid = in_tile < rows.used && n < 2 * p.heads * p.head_dim;
      const float bias = valid && p.kv_bias ? to_float(__ldg(p.kv_bias + n)) : 0.f;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        shared.staging.kv[b][lane % 4 * 2 + j][in_tile] = rounded(values[i][j] + bias);
      }
    }
  }

  // Rotate, scale, convert, store. `tile` is the batch row's 128 values.
  __device__ __forceinline__ void store_kv(const Params& p, const Target& target,
                                           const float* tile, i32 in_tile) {
    if (target.slot < 0) return;
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const i32 d = target.d + i;
      values[i] = tile[in_tile + i];
      if (!target.is_v && d < p.rotary_dim) {
        const bool first = is_first_of_pair(p, d);
        const i32 distance = !p.is_neox ? 1 : splits_heads(p) ? 64 : p.rotary_dim / 2;
        const float partner = tile[in_tile + i + (first ? distance : -distance)];
        values[i] =
            rounded(values[i] * target.cos[i] + (first ? -partner : partner) * target.sin[i]);
      }
    }
    if (target.is_v ? p.has_v_scale : p.has_k_scale) {
      const float scale = target.is_v ? p.v_scale : p.k_scale;
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = rounded(__fdiv_rn(values[i], scale));
    }
    u8* buffer = target.is_v ? p.v_buffer : p.k_buffer;
    const i64 element = target.slot * (target.is_v ? p.v_stride : p.k_stride) + target.in_side;
    if (p.pool == POOL_BF16 || p.pool == POOL_FP16) {
      ushort4 out;
      u16* to = reinterpret_cast<u16*>(&out);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[i] = p.pool == POOL_BF16 ? to_bfloat16(values[i]) : to_half(values[i]);
      }
      *reinterpret_cast<ushort4*>(buffer + element * 2) = out;
    } else {
      uchar4 out;
      u8* to = reinterpret_cast<u8*>(&out);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        to[i] = p.pool == POOL_E4M3 ? to_float8<3, 7, 0x43F00000u, E4M3_OVERFLOW>(values[i])
                                    : to_float8<2, 15, 0x47800000u, 0x7Cu>(values[i]);
      }
      *reinterpret_cast<uchar4*>(buffer + element) = out;
    }
  }
};

// Norms before fc, in a launch of their own: one block a row.

struct NormParams {
  const u16* aux[4];       // [rows, part width]
  i64 aux_stride[4];       // elements
  const u16* input_norm;   // [aux width] or null
  const u16* fc_norm[4];   // [target hidden size] or null
  u16* packed;             // [rows, aux width] (output)
  const void* slots;       // [rows]
  i32 part_width, num_aux, target_width, slots_wide;
  float eps;
};

__device__ __forceinline__ float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0.f;
  for (u32 i = 0; i < blockDim.x / 32; ++i) x += scratch[i];
  return x;
}

extern "C" __global__ void __launch_bounds__(512)
    normalize_aux_kernel(const __grid_constant__ NormParams p) {
  __shared__ float scratch[16];
  const i32 row = blockIdx.x, width = p.num_aux * p.target_width;
  u16* out = p.packed + static_cast<i64>(row) * width;
  const bool live = load_index(p.slots, row, p.slots_wide) >= 0;
  const auto load = [&](i32 i) {
    const i32 part = i / p.part_width;
    return to_float(__ldg(p.aux[part] + row * p.aux_stride[part] + i - part * p.part_width));
  };
  float scale = 1.f;
  if (p.input_norm != nullptr && live) {
    float sum = 0.f;
    for (i32 i = threadIdx.x; i < width; i += blockDim.x) sum += load(i) * load(i);
    scale = rsqrtf(block_sum(sum, scratch) / width + p.eps);
  }
  const auto value = [&](i32 i) {
    if (!live) return 0.f;
    return p.input_norm ? rounded(load(i) * scale * to_float(__ldg(p.input_norm + i))) : load(i);
  };
  for (i32 aux = 0; aux < p.num_aux; ++aux) {
    const i32 begin = aux * p.target_width;
    const u16* weight = p.fc_norm[aux];
    float chunk_scale = 1.f;
    if (weight != nullptr) {
      float sum = 0.f;
      for (i32 i = threadIdx.x; i < p.target_width; i += blockDim.x) {
        sum += value(begin + i) * value(begin + i);
      }
      chunk_scale = rsqrtf(block_sum(sum, scratch) / p.target_width + p.eps);
    }
    for (i32 i = threadIdx.x; i < p.target_width; i += blockDim.x) {
      const float x = value(begin + i);
      out[begin + i] = to_weight_dtype(weight ? x * chunk_scale * to_float(__ldg(weight + i)) : x);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    draft_step_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) u8 raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  const i32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const i32 first = blockIdx.x, blocks = gridDim.x;
  const i32 fc_units = p.fc_tiles * p.fc_splits, kv_units = p.kv_tiles * p.kv_splits;
  const i32 turn = *reinterpret_cast<volatile i32*>(p.counters);
  i32* set = p.counters + 32 + turn * NUM_COUNTERS;
  const Counters counters{set, set + 32};

  if (thread == 0) {
    for (int i = 0; i < WEIGHT_TILES; ++i) {
      barrier_init(shared_address(&shared.weights_full[i]), 1);
      barrier_init(shared_address(&shared.weights_empty[i]), CONSUMERS / 32);
    }
    for (int i = 0; i < BATCH_TILES; ++i) {
      barrier_init(shared_address(&shared.batch_full[i]), 1);
      barrier_init(shared_address(&shared.batch_empty[i]), CONSUMERS / 32);
    }
    proxy_fence();
  }
  __syncthreads();

  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
    if (warp == 8 && lane == 0) {
      WeightProducer producer{shared, 0};
      for (i32 u = first; u < fc_units; u += blocks) producer.feed_fc(p, u);
      for (i32 u = first; u < kv_units; u += blocks) producer.feed_kv(p, u);
    } else if (warp == 9 && lane == 0) {
      BatchProducer producer{shared};
      for (i32 u = first; u < fc_units; u += blocks) producer.feed_fc(p, u);
      for (i32 u = first; u < kv_units; u += blocks) producer.feed_kv(p, u, counters);
    } else if (warp >= 10) {
      const i32 begin = first + (warp - 10) * blocks, stride = ROW_WARPS * blocks;
      for (i32 row = begin; row < p.rows; row += stride) prepare_embedding(p, row, lane);
      proxy_fence();
      __syncwarp();
      if (lane == 0) count_up(counters.embeds_ready);
      for (i32 row = begin; row < p.rows; row += stride) keep_row(p, row, lane);
      if (first == 0 && warp == 10) {
        i32* other = p.counters + 32 + (1 - turn) * NUM_COUNTERS;
        for (i32 i = lane; i < NUM_COUNTERS; i += 32) other[i] = 0;
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
    Consumer consumer{shared, thread, lane, warp, warp / 4};
    for (i32 u = first; u < fc_units; u += blocks) consumer.run_fc(p, u);
    for (i32 u = first; u < fc_units; u += blocks) consumer.reduce_fc(p, u, counters);
    Consumer::Target targets[KV_BATCH];
    if (first < kv_units) consumer.look_up(p, first, first / p.kv_tiles, targets);
    for (i32 u = first; u < kv_units; u += blocks) consumer.run_kv(p, u, counters);
    for (i32 u = first; u < kv_units; u += blocks) {
      consumer.reduce_kv(p, u, u == first, targets);
    }
    if (first == 0 && thread == 0) {
      wait_for_count(counters.embeds_ready, ROW_WARPS * blocks);  // every block has read `turn`
      *reinterpret_cast<volatile i32*>(p.counters) = 1 - turn;
    }
  }
}
