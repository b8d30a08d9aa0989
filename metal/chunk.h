// A chunk: 8 neighbouring elements of one K or V vector. It is fetched as 16-byte words (one for a 16-bit T, two for
// float), stays as bits while it waits in registers, and becomes fp32 only where it is used.

constexpr constant int CHUNK = 8;

// 16-byte words in a chunk of T.
template <typename T>
constexpr int chunk_words() {
  return CHUNK * int(sizeof(T)) / 16;
}

// The elements held by 32 bits, lowest address first; the last argument only selects the type.
inline void split(uint bits, thread float* elements, float) {
  elements[0] = as_type<float>(bits);
}
inline void split(uint bits, thread float* elements, float16_t) {
  elements[0] = float(as_type<float16_t>(ushort(bits & 0xffffu)));
  elements[1] = float(as_type<float16_t>(ushort(bits >> 16)));
}
inline void split(uint bits, thread float* elements, bfloat16_t) {
  elements[0] = as_type<float>(bits << 16);
  elements[1] = as_type<float>(bits & 0xffff0000u);
}

// words [chunk_words<T>()] -> elements [CHUNK]
template <typename T>
inline void unpack(const thread uint4* words, thread float* elements) {
  constexpr int N = 4 / int(sizeof(T));
  UNROLL for (int w = 0; w < chunk_words<T>(); w++) {
    split(words[w].x, elements + (4 * w + 0) * N, T(0.0f));
    split(words[w].y, elements + (4 * w + 1) * N, T(0.0f));
    split(words[w].z, elements + (4 * w + 2) * N, T(0.0f));
    split(words[w].w, elements + (4 * w + 3) * N, T(0.0f));
  }
}

inline float dot_chunk(const thread float* a, const thread float* b) {
  float sum = 0.0f;
  UNROLL for (int i = 0; i < CHUNK; i++) sum += a[i] * b[i];
  return sum;
}

// a += factor * b
inline void add_chunk(thread float* a, float factor, const thread float* b) {
  UNROLL for (int i = 0; i < CHUNK; i++) a[i] += factor * b[i];
}
