// Gathers scattered K and V of one layer into contiguous runs, for prefill attention.
//
// Work split: one threadgroup per token; its threads stride the token's K, then its V, in 16-byte words.
//
//   key_pool   [num_blocks, BLOCK_SIZE, Hkv, DK]
//   value_pool [num_blocks, BLOCK_SIZE, Hkv, DV]
//   slots      [>= tokens] int32                 block * BLOCK_SIZE + offset, in the order wanted
//   token      [8] uint32                        whoever wrote the pools before
//   keys       [tokens, Hkv, DK] T
//   values     [tokens, Hkv, DV] T
//   token_out  [8] uint32

const int thread_id = int(thread_index_in_threadgroup);
const int num_threads = int(threads_per_threadgroup.x);
const size_t entry = size_t(threadgroup_position_in_grid.x);

if (entry == 0 && thread_id < 8) {
  token_out[thread_id] = token[thread_id] + 1u;
}

constexpr int WORD = 16 / int(sizeof(T));  // elements in a word
const size_t slot = size_t(slots[entry]);
const int key_words = int(key_pool_shape[2]) * int(key_pool_shape[3]) / WORD;
const int value_words = int(value_pool_shape[2]) * int(value_pool_shape[3]) / WORD;
for (int i = thread_id; i < key_words; i += num_threads) {
  ((device uint4*)keys)[entry * key_words + i] = ((const device uint4*)key_pool)[slot * key_words + i];
}
for (int i = thread_id; i < value_words; i += num_threads) {
  ((device uint4*)values)[entry * value_words + i] = ((const device uint4*)value_pool)[slot * value_words + i];
}
