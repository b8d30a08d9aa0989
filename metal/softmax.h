// The running softmax of one query vector: what a lane knows of the tokens its lane group has seen, in log2 units.
struct Softmax {
  float maximum;     // of the scores
  float total;       // of the weights exp2(score - maximum)
  float sum[CHUNK];  // of the weighted values, this lane's chunk of them
};

// Weighs what was seen against a new maximum.
inline void raise_maximum(thread Softmax& seen, float maximum) {
  const float keep = fast::exp2(seen.maximum - maximum);
  seen.maximum = maximum;
  seen.total *= keep;
  UNROLL for (int i = 0; i < CHUNK; i++) seen.sum[i] *= keep;
}

// Leaves in every lane what the lane groups of its simdgroup, of LANES lanes each, have seen together.
template <int LANES>
inline void merge_lane_groups(thread Softmax& seen) {
  float highest = seen.maximum;
  UNROLL for (int offset = LANES; offset < SIMD_WIDTH; offset *= 2) {
    highest = max(highest, simd_shuffle_xor(highest, offset));
  }
  raise_maximum(seen, highest);
  UNROLL for (int offset = LANES; offset < SIMD_WIDTH; offset *= 2) {
    seen.total += simd_shuffle_xor(seen.total, offset);
    UNROLL for (int i = 0; i < CHUNK; i++) seen.sum[i] += simd_shuffle_xor(seen.sum[i], offset);
  }
}
