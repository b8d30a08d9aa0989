// Merges the partitions of paged_decode by their log-sum-exp.
//
// Work split: one threadgroup per query vector; its SIMDGROUPS simdgroups stride the partitions, lanes stride the width.
//
//   parts [vectors, partitions, DV] float   attention of each partition, normalised
//   lse   [vectors, partitions] float       log2-sum-exp of each partition; NOTHING where it saw no token
//   out   [vectors, DV] O                   vectors: R * Q * Hq

constexpr int PER_LANE = (DV + SIMD_WIDTH - 1) / SIMD_WIDTH;

const int thread_id = int(thread_index_in_threadgroup);
const int simdgroup = thread_id / SIMD_WIDTH;
const int lane = thread_id % SIMD_WIDTH;
const size_t vector = size_t(threadgroup_position_in_grid.x);
const int partitions = int(lse_shape[1]);

// read: every simdgroup finds the highest log-sum-exp for itself, which is cheaper than a barrier
float highest = NOTHING;
for (int base = 0; base < partitions; base += SIMD_WIDTH) {
  highest = max(highest, base + lane < partitions ? lse[vector * partitions + base + lane] : NOTHING);
}
highest = simd_max(highest);

// weigh
float total = 0.0f;
float sum[PER_LANE];
UNROLL for (int i = 0; i < PER_LANE; i++) {
  sum[i] = 0.0f;
}
for (int p = simdgroup; p < partitions; p += SIMDGROUPS) {
  const float weight = fast::exp2(lse[vector * partitions + p] - highest);
  total += weight;
  UNROLL for (int i = 0; i < PER_LANE; i++) {
    const int d = i * SIMD_WIDTH + lane;
    sum[i] += d < DV ? weight * parts[(vector * partitions + p) * DV + d] : 0.0f;
  }
}

// merge
threadgroup float shared_total[SIMDGROUPS];
threadgroup float shared_sum[SIMDGROUPS * DV];
if (lane == 0) {
  shared_total[simdgroup] = total;
}
UNROLL for (int i = 0; i < PER_LANE; i++) {
  if (i * SIMD_WIDTH + lane < DV) {
    shared_sum[simdgroup * DV + i * SIMD_WIDTH + lane] = sum[i];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// write
for (int d = thread_id; d < DV; d += SIMDGROUPS * SIMD_WIDTH) {
  float weights = 0.0f;
  float weighed = 0.0f;
  for (int s = 0; s < SIMDGROUPS; s++) {
    weights += shared_total[s];
    weighed += shared_sum[s * DV + d];
  }
  out[vector * DV + d] = O(weighed / weights);  // some weight is 1, that of the highest
}
