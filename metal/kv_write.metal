// Writes a step's new K and V into the pools of one layer, in place.
//
// Work split: one threadgroup per token; its threads stride the token's K, then its V, element by element (neighbours
// write neighbours; a step writes little, so wider words would buy nothing and would demand aligned inputs).
//
//   key_pool   [num_blocks, BLOCK_SIZE, Hkv, DK] T    written, though MLX passes it as an input
//   value_pool [num_blocks, BLOCK_SIZE, Hkv, DV] T    written likewise
//   keys       [tokens, Hkv, DK]                      converted to T
//   values     [tokens, Hkv, DV]
//   slots      [>= tokens] int32                      block * BLOCK_SIZE + offset; a slot of block 0 is skipped
//   token      [8] uint32                             whoever touched the pools before
//   token_out  [8] uint32

const int thread_id = int(thread_index_in_threadgroup);
const int num_threads = int(threads_per_threadgroup.x);
const int entry = int(threadgroup_position_in_grid.x);

if (entry == 0 && thread_id < 8) {
  token_out[thread_id] = token[thread_id] + 1u;
}

// write
const int slot = slots[entry];
if (slot >= int(key_pool_shape[1])) {
  const int key_width = int(keys_shape[1]) * int(keys_shape[2]);
  const int value_width = int(values_shape[1]) * int(values_shape[2]);
  device T* key_row = (device T*)key_pool + size_t(slot) * size_t(key_width);
  device T* value_row = (device T*)value_pool + size_t(slot) * size_t(value_width);
  for (int i = thread_id; i < key_width; i += num_threads) {
    key_row[i] = T(float(keys[size_t(entry) * size_t(key_width) + i]));
  }
  for (int i = thread_id; i < value_width; i += num_threads) {
    value_row[i] = T(float(values[size_t(entry) * size_t(value_width) + i]));
  }
}
