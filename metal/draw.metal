// The second half of a draw: the best of logits + noise among the tokens that min-p, top-k and top-p let stay, in that
// order, without a sorted list. Whether a token stays is known by how many lie above it and what they weigh, which one
// look at the row tells; the same look finds the best of those above it, the next to be asked where it does not.
//
// Work split: one threadgroup per row; its threads stride the row, each with AHEAD logits in flight.
//
//   logits  [rows, V] float
//   wishes  [rows, WISHES] uint32
//   weights [rows, slices, 2] float  of draw_parts, as are scores and ids
//   scores  [rows, slices] float
//   ids     [rows, slices] int32
//   drawn   [rows] int32

constexpr int THREADS = SIMDGROUPS * SIMD_WIDTH;
constexpr int AHEAD = 8;
constexpr int TURNS_BY_VALUE = 8;

const int thread_id = int(thread_index_in_threadgroup);
const int simdgroup = thread_id / SIMD_WIDTH;
const bool speaks = thread_id % SIMD_WIDTH == 0;
const uint row = threadgroup_position_in_grid.x;
const int slices = int(ids_shape[1]);
const int vocab = int(logits_shape[1]);
const size_t base = size_t(row) * size_t(vocab);
const float inverse = 1.0f / as_type<float>(wishes[row * WISHES + TEMPERATURE]);
const float least = as_type<float>(wishes[row * WISHES + LEAST]);
const float top_p = as_type<float>(wishes[row * WISHES + TOP_P]);
const int top_k = int(wishes[row * WISHES + TOP_K]);
const uint high = wishes[row * WISHES + NOISE_HIGH];
const uint low = wishes[row * WISHES + NOISE_LOW];

threadgroup float shared_weight[2 * SIMDGROUPS];
threadgroup int shared_count[3 * SIMDGROUPS];
threadgroup uint shared_bits[2 * SIMDGROUPS];
threadgroup float shared_score[SIMDGROUPS];
threadgroup int shared_id[SIMDGROUPS];

// merge the slices: few, so that every thread does it for itself
float maximum = NOTHING;
Best best = {LOWEST, 0};
for (int s = 0; s < slices; s++) {
  const size_t at = size_t(row) * size_t(slices) + s;
  maximum = max(maximum, weights[2 * at]);
  keep_best(best, scores[at], ids[at]);
}
float total = 0.0f;
for (int s = 0; s < slices; s++) {
  const size_t at = size_t(row) * size_t(slices) + s;
  total += weights[2 * at + 1] * fast::exp2((weights[2 * at] - maximum) * inverse * LOG2_E);
}

const bool by_least = least > NOTHING;
const bool by_count = top_k < vocab;
const bool by_weight = top_p <= 1.0f;

// Top-p takes what min-p and top-k let stay for all there is.
if (by_weight && (by_least || by_count)) {
  // The k-th largest logit: the smallest float that less than k logits lie above, or any that just k lie above. Each turn
  // looks at a quarter, half and three quarters of what is left: of the values, as logits are spread, for some turns;
  // then of the floats there are between, which always ends. Then what is left is cut to the logits in it: many are equal.
  uint above = ordered_bits(maximum);
  uint below = by_count ? ordered_bits(LOWEST) : above;  // at least k lie above
  float lowest = maximum - 32.0f;  // where a k-th is likely above
  for (int turn = 0; above > below + 1; turn++) {
    const uint width = above - below;
    uint pivots[3] = {below + width / 4, below + width / 2, above - width / 4};
    float floats[3];
    lowest = max(lowest, float_of(below));
    UNROLL for (int i = 0; i < 3; i++) {
      const uint even = ordered_bits(lowest + (float_of(above) - lowest) * (0.25f * float(i + 1)));
      if (turn < TURNS_BY_VALUE && even > below && even < above) pivots[i] = even;
      floats[i] = float_of(pivots[i]);
    }
    int counts[3] = {0, 0, 0};
    const float bottom = float_of(below);
    const float top = float_of(above);
    uint highest = below;  // of the logits in between
    uint lowest_not = ~above;
    for (int first = thread_id; first < vocab; first += THREADS * AHEAD) {
      float ahead[AHEAD];
      read_ahead<AHEAD, THREADS>(logits + base, first, vocab, ahead);
      UNROLL for (int j = 0; j < AHEAD; j++) {
        UNROLL for (int i = 0; i < 3; i++) counts[i] += ahead[j] > floats[i] ? 1 : 0;
        if (ahead[j] > bottom && ahead[j] <= top) {
          highest = max(highest, ordered_bits(ahead[j]));
          lowest_not = max(lowest_not, ~ordered_bits(ahead[j]));
        }
      }
    }
    highest = simd_max(highest);
    lowest_not = simd_max(lowest_not);
    if (speaks) {
      shared_bits[simdgroup] = highest;
      shared_bits[SIMDGROUPS + simdgroup] = lowest_not;
    }
    UNROLL for (int i = 0; i < 3; i++) {
      counts[i] = simd_sum(counts[i]);
      if (speaks) shared_count[i * SIMDGROUPS + simdgroup] = counts[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int i = 2; i >= 0; i--) {
      int count = 0;
      for (int s = 0; s < SIMDGROUPS; s++) count += shared_count[i * SIMDGROUPS + s];
      if (count <= top_k) above = min(above, pivots[i]);
      if (count >= top_k) below = max(below, pivots[i]);
    }
    for (int s = 0; s < SIMDGROUPS; s++) {
      highest = max(highest, shared_bits[s]);
      lowest_not = max(lowest_not, shared_bits[SIMDGROUPS + s]);
    }
    above = min(above, highest);
    below = max(below, ~lowest_not - 1);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const float kth = float_of(above);
  float likely = 0.0f;  // what min-p lets stay
  float largest = 0.0f;  // what lies above the k-th
  int count = 0;
  for (int first = thread_id; first < vocab; first += THREADS * AHEAD) {
    float ahead[AHEAD];
    read_ahead<AHEAD, THREADS>(logits + base, first, vocab, ahead);
    UNROLL for (int j = 0; j < AHEAD; j++) {
      const float distance = (ahead[j] - maximum) * inverse;
      const float weight = fast::exp2(distance * LOG2_E);
      likely += distance >= least ? weight : 0.0f;
      largest += ahead[j] > kth ? weight : 0.0f;
      count += ahead[j] > kth ? 1 : 0;
    }
  }
  likely = simd_sum(likely);
  largest = simd_sum(largest);
  count = simd_sum(count);
  if (speaks) {
    shared_weight[simdgroup] = likely;
    shared_weight[SIMDGROUPS + simdgroup] = largest;
    shared_count[simdgroup] = count;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  likely = 0.0f;
  largest = 0.0f;
  count = 0;
  for (int s = 0; s < SIMDGROUPS; s++) {
    likely += shared_weight[s];
    largest += shared_weight[SIMDGROUPS + s];
    count += shared_count[s];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // Logits equal to the k-th may be more than belong to the k.
  largest += float(top_k - count) * fast::exp2((kth - maximum) * inverse * LOG2_E);
  total = by_count ? min(likely, largest) : likely;
}

// ask the best, then the best of what lies above it, until one stays: the largest does
const float most = top_p * total;
bool asking = (by_least || by_count || by_weight) && is_number(logits[base + best.id]);
while (asking) {
  const float bound = logits[base + best.id];
  float weight = 0.0f;
  int count = 0;
  Best next = {LOWEST, best.id};
  for (int first = thread_id; first < vocab; first += THREADS * AHEAD) {
    float ahead[AHEAD];
    read_ahead<AHEAD, THREADS>(logits + base, first, vocab, ahead);
    UNROLL for (int j = 0; j < AHEAD; j++) {
      if (ahead[j] > bound) {
        const int id = first + j * THREADS;
        weight += fast::exp2((ahead[j] - maximum) * inverse * LOG2_E);
        count += 1;
        keep_best(next, ahead[j] * inverse + gumbel(high, low, uint(id)), id);
      }
    }
  }
  merge_lanes(next);
  weight = simd_sum(weight);
  count = simd_sum(count);
  if (speaks) {
    shared_weight[simdgroup] = weight;
    shared_count[simdgroup] = count;
    shared_score[simdgroup] = next.score;
    shared_id[simdgroup] = next.id;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  weight = 0.0f;
  count = 0;
  next.score = LOWEST;
  next.id = best.id;
  for (int s = 0; s < SIMDGROUPS; s++) {
    weight += shared_weight[s];
    count += shared_count[s];
    keep_best(next, shared_score[s], shared_id[s]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const bool stays = count < top_k && weight < most && (bound - maximum) * inverse >= least;
  asking = !stays && next.id != best.id;
  if (asking) best = next;
}
if (thread_id == 0) {
  drawn[row] = best.id;
}
