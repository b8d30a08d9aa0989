// Copies the first slots of blocks to other blocks of the same pools, in place: copy on write for one layer.
//
// Work split: one threadgroup per (slot of a block, copy); its threads stride the slot's K, then its V.
//
//   key_pool   [num_blocks, BLOCK_SIZE, Hkv, DK] T   written, though MLX passes it as an input
//   value_pool [num_blocks, BLOCK_SIZE, Hkv, DV] T   written likewise
//   copies     [>= copies, 3] int32                  (source, destination, slots); destination 0 is skipped
//   token      [8] uint32                            whoever touched the pools before
//   token_out  [8] uint32
//
// No block is both a source and a destination of one call: copies run at once, in no order.

const int thread_id = int(thread_index_in_threadgroup);
const int num_threads = int(threads_per_threadgroup.x);
const int offset = int(threadgroup_position_in_grid.x);
const int copy = int(threadgroup_position_in_grid.y);

if (offset == 0 && copy == 0 && thread_id < 8) {
  token_out[thread_id] = token[thread_id] + 1u;
}

const int source = copies[copy * 3];
const int destination = copies[copy * 3 + 1];
const int slots = copies[copy * 3 + 2];
if (destination != 0 && offset < slots) {
  const int block_size = int(key_pool_shape[1]);
  const int key_width = int(key_pool_shape[2]) * int(key_pool_shape[3]);
  const int value_width = int(value_pool_shape[2]) * int(value_pool_shape[3]);
  const size_t from = size_t(source) * block_size + offset;
  const size_t to = size_t(destination) * block_size + offset;
  for (int i = thread_id; i < key_width; i += num_threads) {
    ((device T*)key_pool)[to * key_width + i] = key_pool[from * key_width + i];
  }
  for (int i = thread_id; i < value_width; i += num_threads) {
    ((device T*)value_pool)[to * value_width + i] = value_pool[from * value_width + i];
  }
}
