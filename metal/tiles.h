// Products of 8 x 8 tiles that a simdgroup holds together. A lane holds a pair of a tile's row tile_row: columns
// 2 * tile_pair and the next, as the 32 bits of two 16-bit T. The one header whose Metal and CUDA texts differ, since the
// devices' matrix units do.

// Two T as a lane holds them.
template <typename T>
inline uint pair_bits(float first, float second) {
  return uint(as_type<ushort>(T(first))) | uint(as_type<ushort>(T(second))) << 16;
}

// Two integers, 16 bits each, of which BITS are used -> integer * scale + bias.
template <int BITS, typename T>
inline uint scaled_pair(uint bits, T scale, T bias) {
  const float s = float(scale);
  const float b = float(bias);
  return pair_bits<T>(float(bits & 0xffffu) * s + b, float(bits >> 16) * s + b);
}

// Each maker's part gives tile_row and tile_pair of a lane; read_once, for words that nobody reads again soon; and
// multiply_tiles: sums [16, 8] += left [16, 16] * right [8, 16] transposed. sums[2 * i + e]: row 8 * i + tile_row, its e-th
// of two; left[2 * i + k]: the same row of the k-th 8 columns; right[k]: likewise. Its last argument only selects the type.

#ifdef __CUDACC__

inline int tile_row(int lane) { return lane / 4; }
inline int tile_pair(int lane) { return lane % 4; }

inline uint4 read_once(const uint4* at) {
  uint4 word;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w) : "l"(at));
  return word;
}

#define MULTIPLY_TILES(T, NAME)                                                                    \
  inline void multiply_tiles(float* sums, const uint* left, const uint* right, int, T) {           \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                                     \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                     \
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                               \
        : "r"(left[0]), "r"(left[2]), "r"(left[1]), "r"(left[3]), "r"(right[0]), "r"(right[1]));   \
  }
MULTIPLY_TILES(float16_t, "f16")
MULTIPLY_TILES(bfloat16_t, "bf16")

// 2^7 + integer is a bfloat16 with the integer as its lowest bits, 2^10 + integer a half.
template <>
inline uint scaled_pair<4, bfloat16_t>(uint bits, bfloat16_t scale, bfloat16_t bias) {
  const auto integers = __hsub2(as_type<__nv_bfloat162>(bits | 0x43004300u), __float2bfloat162_rn(128.0f));
  return as_type<uint>(__hfma2(integers, __bfloat162bfloat162(scale), __bfloat162bfloat162(bias)));
}
template <>
inline uint scaled_pair<4, float16_t>(uint bits, float16_t scale, float16_t bias) {
  const auto integers = __hsub2(as_type<__half2>(bits | 0x64006400u), __float2half2_rn(1024.0f));
  return as_type<uint>(__hfma2(integers, __half2half2(scale), __half2half2(bias)));
}

#else

#include <metal_simdgroup_matrix>

inline int tile_row(int lane) { return lane / 16 * 4 + lane / 2 % 4; }
inline int tile_pair(int lane) { return lane / 8 % 2 * 2 + lane % 2; }
inline int tile_lane(int row, int pair) { return row / 4 * 16 + pair / 2 * 8 + row % 4 * 2 + pair % 2; }

inline uint4 read_once(const device uint4* at) { return *at; }

template <typename T>
inline void multiply_tiles(thread float* sums, const thread uint* left, const thread uint* right, int lane, T) {
  const int row = tile_row(lane);
  const int pair = tile_pair(lane);
  UNROLL for (int k = 0; k < 2; k++) {
    simdgroup_float8x8 turned;
    UNROLL for (int e = 0; e < 2; e++) {
      float both[2];
      split(simd_shuffle(right[k], ushort(tile_lane(2 * pair + e, row / 2))), both, T(0.0f));
      turned.thread_elements()[e] = row % 2 == 0 ? both[0] : both[1];
    }
    UNROLL for (int i = 0; i < 2; i++) {
      float both[2];
      split(left[2 * i + k], both, T(0.0f));
      simdgroup_float8x8 tile;
      simdgroup_float8x8 sum;
      UNROLL for (int e = 0; e < 2; e++) {
        tile.thread_elements()[e] = both[e];
        sum.thread_elements()[e] = sums[2 * i + e];
      }
      simdgroup_multiply_accumulate(sum, tile, turned, sum);
      UNROLL for (int e = 0; e < 2; e++) sums[2 * i + e] = sum.thread_elements()[e];
    }
  }
}

#endif
