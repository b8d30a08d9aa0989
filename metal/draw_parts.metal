// The first half of a draw: of each slice of a row's logits the maximum, what all weigh, and the best logit + noise.
//
// Work split: one threadgroup per (slice, row); its threads stride the slice.
//
//   logits  [rows, V] float
//   wishes  [rows, WISHES] uint32
//   weights [rows, slices, 2] float  maximum of the logits; sum of exp((logit - maximum) / temperature)
//   scores  [rows, slices] float     best of logit / temperature + noise
//   ids     [rows, slices] int32     whose it is

constexpr int THREADS = SIMDGROUPS * SIMD_WIDTH;

const int thread_id = int(thread_index_in_threadgroup);
const int simdgroup = thread_id / SIMD_WIDTH;
const uint row = threadgroup_position_in_grid.y;
const uint slice = threadgroup_position_in_grid.x;
const uint slices = threadgroups_per_grid.x;
const int vocab = int(logits_shape[1]);
const size_t base = size_t(row) * size_t(vocab);
const int begin = int(slice) * SLICE;
const int end = min(begin + SLICE, vocab);
const float inverse = 1.0f / as_type<float>(wishes[row * WISHES + TEMPERATURE]);
const uint high = wishes[row * WISHES + NOISE_HIGH];
const uint low = wishes[row * WISHES + NOISE_LOW];

// read
float maximum = NOTHING;
Best best = {LOWEST, begin};
for (int id = begin + thread_id; id < end; id += THREADS) {
  const float logit = logits[base + id];
  maximum = max(maximum, logit);
  keep_best(best, is_number(logit) ? logit * inverse + gumbel(high, low, uint(id)) : NO_NUMBER, id);
}
merge_lanes(best);
maximum = simd_max(maximum);
threadgroup float shared_maximum[SIMDGROUPS];
threadgroup float shared_score[SIMDGROUPS];
threadgroup int shared_id[SIMDGROUPS];
if (thread_id % SIMD_WIDTH == 0) {
  shared_maximum[simdgroup] = maximum;
  shared_score[simdgroup] = best.score;
  shared_id[simdgroup] = best.id;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int s = 0; s < SIMDGROUPS; s++) {
  maximum = max(maximum, shared_maximum[s]);
  keep_best(best, shared_score[s], shared_id[s]);
}

// weigh
float weight = 0.0f;
for (int id = begin + thread_id; id < end; id += THREADS) {
  weight += fast::exp2((logits[base + id] - maximum) * inverse * LOG2_E);
}
weight = simd_sum(weight);
threadgroup float shared_weight[SIMDGROUPS];
if (thread_id % SIMD_WIDTH == 0) {
  shared_weight[simdgroup] = weight;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// write
if (thread_id == 0) {
  float total = 0.0f;
  for (int s = 0; s < SIMDGROUPS; s++) total += shared_weight[s];
  const size_t at = size_t(row) * slices + slice;
  weights[2 * at] = maximum;
  weights[2 * at + 1] = total;
  scores[at] = best.score;
  ids[at] = best.id;
}
