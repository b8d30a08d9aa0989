// A product of few rows with a whole weight: out[m, n] = sum over k of rows[m, k] * weight[n, k]. The weight is read once,
// whatever the number of rows, and as fast as memory gives it.
//
// Work split: one threadgroup per 16 * TILES outputs of all rows; its simdgroups share K among them, SPANS spans at a time,
// and add up their sums at the end. Of a span four lanes hold a row of a tile, 16 bytes of the weight each. Which elements
// of K meet in one tile is arbitrary as long as both factors agree: a lane's neighbours become the tile's columns. The next
// spans are on their way while these are multiplied.
//
//   rows    [M, K] T                            M <= 8 * ROW_TILES
//   weight  [N, K] T                            BITS = 0
//           [N, K * BITS / 32] uint             else, packed: BITS each, lowest first
//   scales  [N, K / GROUP_SIZE] T               read if BITS: an element is its integer times scale plus bias
//   biases  [N, K / GROUP_SIZE] T
//   out     [M, N] T
//
// K is a multiple of SPAN. Rows and outputs past the end are read as the last one and not written.

constexpr int HELD = BITS > 0 ? 128 / BITS : 8;  // elements in 16 bytes of the weight
constexpr int SPAN = 4 * HELD;
constexpr int PAIRS = HELD / 2;
constexpr int STRIDE = SIMDGROUPS * SPANS;

const int thread_id = int(thread_index_in_threadgroup);
const int simdgroup = thread_id / SIMD_WIDTH;
const int lane = thread_id % SIMD_WIDTH;
const int row = tile_row(lane);
const int pair = tile_pair(lane);

const int num_rows = int(rows_shape[0]);
const uint width = uint(rows_shape[1]);
const int num_outputs = int(weight_shape[0]);
const int first = int(threadgroup_position_in_grid.x) * 16 * TILES;
const int spans = int(width) / SPAN;

uint output[2 * TILES];  // which output each tile row of this lane is
UNROLL for (int i = 0; i < 2 * TILES; i++) {
  output[i] = uint(min(first + 8 * i + row, num_outputs - 1));
}
float sums[TILES][ROW_TILES][4];
UNROLL for (int i = 0; i < TILES; i++) {
  UNROLL for (int m = 0; m < ROW_TILES; m++) {
    UNROLL for (int e = 0; e < 4; e++) sums[i][m][e] = 0.0f;
  }
}

uint4 held[SPANS][2 * TILES];
T scale[SPANS][2 * TILES];
T bias[SPANS][2 * TILES];
for (int base = simdgroup * SPANS - STRIDE; base < spans; base += STRIDE) {
  // read ahead
  uint4 ahead[SPANS][2 * TILES];
  T next_scale[SPANS][2 * TILES];
  T next_bias[SPANS][2 * TILES];
  UNROLL for (int s = 0; s < SPANS; s++) {
    const uint span = uint(min(base + STRIDE + s, spans - 1));
    UNROLL for (int i = 0; i < 2 * TILES; i++) {
      ahead[s][i] = read_once((const device uint4*)weight + output[i] * (width / HELD) + span * 4 + pair);
      if (BITS > 0) {
        const uint at = output[i] * (width / GROUP_SIZE) + (span * SPAN + pair * HELD) / GROUP_SIZE;
        next_scale[s][i] = scales[at];
        next_bias[s][i] = biases[at];
      }
    }
  }

  // multiply what was read a round ago
  UNROLL for (int s = 0; s < SPANS; s++) {
    if (base >= 0 && base + s < spans) {
      uint4 given[ROW_TILES][HELD / 8];
      UNROLL for (int m = 0; m < ROW_TILES; m++) {
        const uint from = uint(min(8 * m + row, num_rows - 1)) * width + uint(base + s) * SPAN + pair * HELD;
        UNROLL for (int w = 0; w < HELD / 8; w++) {
          given[m][w] = paired<BITS>(((const device uint4*)rows)[from / 8 + w]);
        }
      }
      UNROLL for (int p = 0; p < PAIRS; p += 2) {
        uint right[ROW_TILES][2];
        UNROLL for (int m = 0; m < ROW_TILES; m++) {
          UNROLL for (int k = 0; k < 2; k++) right[m][k] = component(given[m][(p + k) / 4], (p + k) % 4);
        }
        UNROLL for (int i = 0; i < TILES; i++) {
          uint left[4];
          UNROLL for (int j = 0; j < 4; j++) {
            const int at = 2 * i + j / 2;
            left[j] = unpacked<T, BITS>(held[s][at], p + j % 2, scale[s][at], bias[s][at]);
          }
          UNROLL for (int m = 0; m < ROW_TILES; m++) multiply_tiles(sums[i][m], left, right[m], lane, T(0.0f));
        }
      }
    }
    UNROLL for (int i = 0; i < 2 * TILES; i++) {
      held[s][i] = ahead[s][i];
      scale[s][i] = next_scale[s][i];
      bias[s][i] = next_bias[s][i];
    }
  }
}

// merge the simdgroups, 16 outputs at a time, and write
threadgroup float shared_sum[SIMDGROUPS * ROW_TILES * 8 * 16];
UNROLL for (int i = 0; i < TILES; i++) {
  UNROLL for (int m = 0; m < ROW_TILES; m++) {
    UNROLL for (int e = 0; e < 4; e++) {
      const int at = (simdgroup * ROW_TILES + m) * 8 + 2 * pair + e % 2;
      shared_sum[at * 16 + 8 * (e / 2) + row] = sums[i][m][e];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int e = thread_id; e < ROW_TILES * 8 * 16; e += SIMDGROUPS * SIMD_WIDTH) {
    const int m = e / 16;
    const int n = first + 16 * i + e % 16;
    if (m < num_rows && n < num_outputs) {
      float sum = 0.0f;
      UNROLL for (int s = 0; s < SIMDGROUPS; s++) sum += shared_sum[s * ROW_TILES * 8 * 16 + e];
      out[size_t(m) * size_t(num_outputs) + n] = T(sum);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
