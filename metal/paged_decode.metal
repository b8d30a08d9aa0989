// Attention of a few query positions per row over K/V that lies scattered in blocks.
//
// Work split: one threadgroup per (kv head and pass, row, partition): each row is divided evenly. The query vectors of a kv head (its G query heads
// at each of Q positions) are taken HEADS at a time; the HEADS vectors of a pass share every read of K and V. The
// SIMDGROUPS simdgroups stride the partition's tokens. Inside one, LANES lanes share a token and hold one chunk of 8
// elements each, so SIMD_WIDTH / LANES tokens are read side by side, and TOKENS such rounds are in flight at once.
//
//   queries      [R, Q, Hq, DK] T              position i of a row attends as position context_len - Q + i
//   key_pool     [num_blocks, BLOCK_SIZE, Hkv, DK] T
//   value_pool   [num_blocks, BLOCK_SIZE, Hkv, DV] T
//   tables       [>= R, width] int32           entry i: the block of positions [i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE)
//   context_lens [>= R] int32                  positions in the pool, the row's own queries included; 0: an empty row
//   sinks        [Hq]                          an extra logit per query head, if SINKS; else not read
//   factors      [8] float                     [0] scales queries, [1] scales tanh, if SOFTCAP; scores are in log2 units
//   token        [8] uint32                    of whoever wrote the pools before
//   out          [R, Q, Hq, partitions, DV] O  attention within each partition
//   lse          [R, Q, Hq, partitions] float  log2-sum-exp of its scores: the weight of the partition
//   token_out    [8] uint32
//
// WINDOW > 0: a query sees the last WINDOW positions up to its own; what is divided begins at the first position that any
// query of the row sees. Loop bounds are the same for every lane of a
// simdgroup, as the shuffles need; lanes past the end read the last token again and hide its score. Vectors of a pool are
// counted in 32 bits.

constexpr int TOKENS = 4;
constexpr int KEY_CHUNKS = DK / CHUNK;
constexpr int VALUE_CHUNKS = DV / CHUNK;
constexpr int CHUNKS = KEY_CHUNKS > VALUE_CHUNKS ? KEY_CHUNKS : VALUE_CHUNKS;
constexpr int LANES = CHUNKS <= 4 ? 4 : CHUNKS <= 8 ? 8 : CHUNKS <= 16 ? 16 : 32;
constexpr int SIDE_BY_SIDE = SIMD_WIDTH / LANES;
constexpr int STEP = TOKENS * SIDE_BY_SIDE;  // tokens a simdgroup takes at once
constexpr int ROUND_TOKENS = SIMDGROUPS * STEP;
constexpr int WORDS = chunk_words<T>();
constexpr int PASSES = (Q * G + HEADS - 1) / HEADS;

const int thread_id = int(thread_index_in_threadgroup);
const int simdgroup = thread_id / SIMD_WIDTH;
const int group = thread_id % SIMD_WIDTH / LANES;
const int chunk = thread_id % LANES;
const int key_chunk = min(chunk, KEY_CHUNKS - 1);  // surplus lanes read along and weigh nothing
const int value_chunk = min(chunk, VALUE_CHUNKS - 1);

const uint num_kv_heads = uint(key_pool_shape[2]);
const uint kv_head = threadgroup_position_in_grid.x / PASSES;
const int first_vector = int(threadgroup_position_in_grid.x % PASSES) * HEADS;
const uint row = threadgroup_position_in_grid.y;
const int partition = int(threadgroup_position_in_grid.z);
const int partitions = int(threadgroups_per_grid.z);

if (threadgroup_position_in_grid.x == 0 && row == 0 && partition == 0 && thread_id < 8) {
  token_out[thread_id] = token[thread_id] + 1u;
}

const int context_len = context_lens[row];
const int first = WINDOW > 0 ? max(context_len - Q + 1 - WINDOW, 0) : 0;
const int rounds = (context_len - first + partitions * ROUND_TOKENS - 1) / (partitions * ROUND_TOKENS);
const int begin = first + partition * rounds * ROUND_TOKENS;
const int end = min(begin + rounds * ROUND_TOKENS, context_len);
const uint table = row * uint(tables_shape[1]);

// A short row has partitions without tokens, whose answer needs no merge.
if (partition > 0 && begin >= context_len) {
  for (int e = thread_id; e < HEADS * DV; e += SIMDGROUPS * SIMD_WIDTH) {
    const uint vector = first_vector + e / DV;
    if (vector < Q * G) {
      const uint at = (((row * Q + vector / G) * num_kv_heads + kv_head) * G + vector % G) * partitions + partition;
      out[size_t(at) * DV + e % DV] = O(0.0f);
      if (e % DV == 0) lse[at] = NOTHING;
    }
  }
  return;
}

// read queries
float query[HEADS][CHUNK];
int position[HEADS];
Softmax seen[HEADS];
UNROLL for (int h = 0; h < HEADS; h++) {
  const uint vector = first_vector + h;  // of this kv head: position by position, G heads each
  const uint at = ((row * Q + vector / G) * num_kv_heads + kv_head) * G + vector % G;
  const bool real = vector < Q * G && chunk < KEY_CHUNKS;
  position[h] = Q > 1 ? context_len - Q + int(vector / G) : context_len - 1;
  seen[h].maximum = NOTHING;
  seen[h].total = 0.0f;
  UNROLL for (int i = 0; i < CHUNK; i++) {
    query[h][i] = real ? float(queries[at * DK + chunk * CHUNK + i]) * factors[0] : 0.0f;
    seen[h].sum[i] = 0.0f;
  }
}

for (int base = begin + simdgroup * STEP; base < end; base += SIMDGROUPS * STEP) {
  // read
  uint4 key[TOKENS][WORDS];
  uint4 value[TOKENS][WORDS];
  UNROLL for (int j = 0; j < TOKENS; j++) {
    const uint at = uint(min(base + j * SIDE_BY_SIDE + group, end - 1));
    const uint slot = uint(tables[table + at / BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE;
    const uint vector = slot * num_kv_heads + kv_head;
    UNROLL for (int w = 0; w < WORDS; w++) {
      key[j][w] = ((const device uint4*)key_pool)[(vector * KEY_CHUNKS + key_chunk) * WORDS + w];
      value[j][w] = ((const device uint4*)value_pool)[(vector * VALUE_CHUNKS + value_chunk) * WORDS + w];
    }
  }

  // score
  float weight[TOKENS][HEADS];
  UNROLL for (int j = 0; j < TOKENS; j++) {
    float k[CHUNK];
    unpack<T>(key[j], k);
    const int at = base + j * SIDE_BY_SIDE + group;
    UNROLL for (int h = 0; h < HEADS; h++) {
      float score = dot_chunk(query[h], k);
      UNROLL for (int offset = LANES / 2; offset > 0; offset /= 2) score += simd_shuffle_xor(score, offset);
      if (SOFTCAP) score = tanh(score) * factors[1];
      const bool counts = at < end && (Q == 1 || (at <= position[h] && (WINDOW == 0 || at > position[h] - WINDOW)));
      weight[j][h] = counts ? score : HIDDEN;
    }
  }

  // weigh: one rescale to the new maximum for TOKENS tokens
  UNROLL for (int h = 0; h < HEADS; h++) {
    float highest = seen[h].maximum;
    UNROLL for (int j = 0; j < TOKENS; j++) highest = max(highest, weight[j][h]);
    raise_maximum(seen[h], highest);
    UNROLL for (int j = 0; j < TOKENS; j++) {
      weight[j][h] = fast::exp2(weight[j][h] - highest);
      seen[h].total += weight[j][h];
    }
  }
  UNROLL for (int j = 0; j < TOKENS; j++) {
    float v[CHUNK];
    unpack<T>(value[j], v);
    UNROLL for (int h = 0; h < HEADS; h++) add_chunk(seen[h].sum, weight[j][h], v);
  }
}

// merge, ROUND heads at a time: the lane groups of each simdgroup, then the simdgroups; and write
constexpr int FIT = 4096 / (SIMDGROUPS * DV);  // heads whose sums fit 16 KB
constexpr int ROUND = FIT < 1 ? 1 : FIT < HEADS ? FIT : HEADS;
threadgroup float shared_maximum[SIMDGROUPS * HEADS];
threadgroup float shared_total[SIMDGROUPS * HEADS];
threadgroup float shared_sum[SIMDGROUPS * ROUND * DV];
UNROLL for (int start = 0; start < HEADS; start += ROUND) {
  UNROLL for (int h = start; h < start + ROUND && h < HEADS; h++) {
    merge_lane_groups<LANES>(seen[h]);
    if (group == 0 && chunk == 0) {
      shared_maximum[simdgroup * HEADS + h] = seen[h].maximum;
      shared_total[simdgroup * HEADS + h] = seen[h].total;
    }
    if (group == 0 && chunk < VALUE_CHUNKS) {
      UNROLL for (int i = 0; i < CHUNK; i++) {
        shared_sum[(simdgroup * ROUND + h - start) * DV + chunk * CHUNK + i] = seen[h].sum[i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int e = thread_id; e < ROUND * DV; e += SIMDGROUPS * SIMD_WIDTH) {
    const int h = start + e / DV;
    const uint vector = first_vector + h;
    if (h < HEADS && vector < Q * G) {
      const bool has_sink = SINKS && partition == 0;
      const float sink = has_sink ? float(sinks[kv_head * G + vector % G]) * LOG2_E : NOTHING;
      float highest = sink;
      for (int s = 0; s < SIMDGROUPS; s++) highest = max(highest, shared_maximum[s * HEADS + h]);
      float total = has_sink ? fast::exp2(sink - highest) : 0.0f;
      float sum = 0.0f;
      for (int s = 0; s < SIMDGROUPS; s++) {
        const float keep = fast::exp2(shared_maximum[s * HEADS + h] - highest);
        total += keep * shared_total[s * HEADS + h];
        sum += keep * shared_sum[(s * ROUND + h - start) * DV + e % DV];
      }
      const uint at = (((row * Q + vector / G) * num_kv_heads + kv_head) * G + vector % G) * partitions + partition;
      out[size_t(at) * DV + e % DV] = O(total > 0.0f ? sum / total : 0.0f);
      if (e % DV == 0) lse[at] = total > 0.0f ? highest + log2(total) : NOTHING;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
