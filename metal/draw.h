// What a draw weighs and adds, for every kernel of it.

// A 32-bit finaliser, by Chris Wellons' search for low bias.
inline uint mixed_bits(uint x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Gumbel noise, a function of a row's key and a token's id.
inline float gumbel(uint high, uint low, uint id) {
  const uint bits = mixed_bits(mixed_bits(id ^ high) + low);
  // Exponential before it is Gumbel: a float resolves the small values, which become the large noise, best near 0.
  const float u = min((float(bits) + 0.5f) * 2.3283064365386963e-10f, 0.99999994f);
  const float series = u * (1.0f + u * (0.5f + u * (0.33333334f + u * 0.25f)));  // of -log(1 - u), near 0
  return -log(u < 0.015625f ? series : -log(1.0f - u));
}

// Below every score, also that of a hidden token at a low temperature.
constexpr constant float LOWEST = -3.4e38f;

// Above every score: that of a token whose logit is no number. Where a forward overflowed, it is at least one that no
// mask hides.
constexpr constant float NO_NUMBER = 3.4e38f;

// False for NaN, also where a compiler assumes that there is none.
inline bool is_number(float x) { return (as_type<uint>(x) & 0x7fffffffu) <= 0x7f800000u; }

// A token and its logit plus noise.
struct Best {
  float score;
  int id;
};

// The lower id where scores are equal, as argmax has it.
inline void keep_best(thread Best& best, float score, int id) {
  if (score > best.score || (score == best.score && id < best.id)) {
    best.score = score;
    best.id = id;
  }
}

inline void merge_lanes(thread Best& best) {
  UNROLL for (int offset = SIMD_WIDTH / 2; offset > 0; offset /= 2) {
    const float score = simd_shuffle_xor(best.score, offset);
    const int id = simd_shuffle_xor(best.id, offset);
    keep_best(best, score, id);
  }
}

// Of a row's logits those at first, first + STRIDE, ...; past the end LOWEST, which lies above nothing.
template <int COUNT, int STRIDE>
inline void read_ahead(const device float* logits, int first, int vocab, thread float* ahead) {
  UNROLL for (int j = 0; j < COUNT; j++) {
    const int id = first + j * STRIDE;
    ahead[j] = id < vocab ? logits[id] : LOWEST;
  }
}

// Unsigned integers in the order of the floats.
inline uint ordered_bits(float x) {
  const uint bits = as_type<uint>(x);
  return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}
inline float float_of(uint ordered) {
  return as_type<float>((ordered & 0x80000000u) != 0u ? ordered & 0x7fffffffu : ~ordered);
}

// A row's wishes: words of uint32, floats as their bits. draw.py lays them out.
constexpr constant int WISHES = 8;
constexpr constant int TEMPERATURE = 0;
constexpr constant int LEAST = 1;  // how far below the best logit one may be
constexpr constant int TOP_P = 2;  // above 1: off
constexpr constant int TOP_K = 3;
constexpr constant int NOISE_HIGH = 4;
constexpr constant int NOISE_LOW = 5;
