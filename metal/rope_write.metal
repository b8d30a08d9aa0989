// Rotates a step's new queries and keys by their positions, and writes the keys and values into the pools of one layer,
// in place.
//
// Work split: one simdgroup per vector (a token's Hq queries, Hkv keys, Hkv values, in that order), SIMDGROUPS of them
// in a threadgroup, grid y the token. Lanes stride a vector's pairs, then what is not rotated; a value has no pairs.
//
//   key_pool   [num_blocks, BLOCK_SIZE, Hkv, DK] T    written, though MLX passes it as an input
//   value_pool [num_blocks, BLOCK_SIZE, Hkv, DV] T    written likewise
//   queries    [tokens, Hq, 1, DK] T                  with any strides, as are keys and values: views of one product
//   keys       [tokens, Hkv, 1, DK]                   converted to T
//   values     [tokens, Hkv, 1, DV]
//   rotations  [>= tokens, DK] float                  first of a pair: cosine, second: sine; beyond DIMS: a factor
//   scale      [8] float                              the first: what the first DIMS elements are multiplied by before,
//                                                     in T
//   slots      [>= tokens] int32                      block * BLOCK_SIZE + offset; a slot of block 0 is skipped
//   token      [8] uint32                             whoever touched the pools before
//   rotated    [tokens, 1, Hq, DK] T                  the queries
//   token_out  [8] uint32

const int thread_id = int(thread_index_in_threadgroup);
const int lane = thread_id % SIMD_WIDTH;
const int index = int(threadgroup_position_in_grid.x) * SIMDGROUPS + thread_id / SIMD_WIDTH;
const int entry = int(threadgroup_position_in_grid.y);
const int num_queries = int(queries_shape[1]);
const int num_keys = int(keys_shape[1]);

if (entry == 0 && index == 0 && lane < 8) {
  token_out[lane] = token[lane] + 1u;
}

const int slot = slots[entry];
const bool stored = slot >= int(key_pool_shape[1]);
const bool is_query = index < num_queries;
const bool is_key = !is_query && index < num_queries + num_keys;

// rotate, write
if (is_query || (is_key && stored)) {
  const int head = is_query ? index : index - num_queries;
  const size_t row = is_query ? size_t(entry) * size_t(num_queries) : size_t(slot) * size_t(num_keys);
  device T* out = (is_query ? rotated : (device T*)key_pool) + (row + size_t(head)) * DK;
  const auto begin = is_query ? entry * queries_strides[0] + head * queries_strides[1]
                              : entry * keys_strides[0] + head * keys_strides[1];
  const auto stride = is_query ? queries_strides[3] : keys_strides[3];
  const size_t turn = size_t(entry) * DK;
  const float factor = float(T(scale[0]));
  for (int pair = lane; pair < DIMS / 2; pair += SIMD_WIDTH) {
    const int first = TRADITIONAL ? 2 * pair : pair;
    const int second = first + (TRADITIONAL ? 1 : DIMS / 2);
    const float x = is_query ? float(queries[begin + first * stride]) : float(keys[begin + first * stride]);
    const float y = is_query ? float(queries[begin + second * stride]) : float(keys[begin + second * stride]);
    const float a = float(T(x * factor));
    const float b = float(T(y * factor));
    const float cosine = rotations[turn + first];
    const float sine = rotations[turn + second];
    out[first] = T(a * cosine - b * sine);
    out[second] = T(a * sine + b * cosine);
  }
  for (int d = DIMS + lane; d < DK; d += SIMD_WIDTH) {
    const float a = is_query ? float(queries[begin + d * stride]) : float(keys[begin + d * stride]);
    out[d] = T(a * rotations[turn + d]);
  }
}

// write
if (!is_query && !is_key && index < num_queries + 2 * num_keys && stored) {
  const int head = index - num_queries - num_keys;
  device T* out = (device T*)value_pool + (size_t(slot) * size_t(num_keys) + size_t(head)) * DV;
  const auto begin = entry * values_strides[0] + head * values_strides[1];
  for (int d = lane; d < DV; d += SIMD_WIDTH) {
    out[d] = T(float(values[begin + d * values_strides[3]]));
  }
}
