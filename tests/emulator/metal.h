// The part of Metal's language that the kernels use, for clang on the CPU. Address spaces are distinct types, so mixing
// them is an error as in Metal, and vanish in the code. Knows nothing of fibers, buffers or signals (runtime.cpp).
#pragma once
#include "runtime.h"

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
// Declares arrays of a kernel body only; all of them share one section, which the runtime poisons per threadgroup
// (`used`: clang must not conclude from this text what they hold).
#define threadgroup static __attribute__((used, section("threadgroup"), address_space(3)))
#define thread

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __SIZE_TYPE__ size_t;
typedef _Float16 half;
typedef __bf16 bfloat;
typedef half float16_t;
typedef bfloat bfloat16_t;

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define M_PI_F 3.14159265358979323846f

namespace metal {

// ---- vectors ----
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
#define VECTORS(T) \
  typedef vec<T, 2> T##2; \
  typedef vec<T, 3> T##3; \
  typedef vec<T, 4> T##4;
VECTORS(float) VECTORS(half) VECTORS(bfloat) VECTORS(int) VECTORS(uint)
VECTORS(char) VECTORS(uchar) VECTORS(short) VECTORS(ushort)
#undef VECTORS

template <class V, class X> V construct(X x) {  // V(scalar) and V(vector of another type)
  if constexpr (__is_arithmetic(X) || __is_same(X, bfloat) || __is_same(X, half)) return V(x);
  else return __builtin_convertvector(x, V);
}
template <class V, class A, class B, class... Rest> V construct(A a, B b, Rest... rest) {  // V(x, y, ...)
  typedef __typeof__(+V{}[0]) Element;
  constexpr bool fits = sizeof...(rest) + 2 == __builtin_vectorelements(V);
  static_assert(fits, "a vector is made of one value, or of one scalar per component");
  return V{Element(a), Element(b), Element(rest)...};
}
// clang reads `float4(a, b, c, d)` as a cast of one value, so the call form, and only that, goes to construct.
#define float2(...) construct<float2>(__VA_ARGS__)
#define float3(...) construct<float3>(__VA_ARGS__)
#define float4(...) construct<float4>(__VA_ARGS__)
#define half2(...) construct<half2>(__VA_ARGS__)
#define half4(...) construct<half4>(__VA_ARGS__)
#define bfloat2(...) construct<bfloat2>(__VA_ARGS__)
#define bfloat4(...) construct<bfloat4>(__VA_ARGS__)
#define int2(...) construct<int2>(__VA_ARGS__)
#define int4(...) construct<int4>(__VA_ARGS__)
#define uint2(...) construct<uint2>(__VA_ARGS__)
#define uint3(...) construct<uint3>(__VA_ARGS__)
#define uint4(...) construct<uint4>(__VA_ARGS__)
#define uchar4(...) construct<uchar4>(__VA_ARGS__)
#define char4(...) construct<char4>(__VA_ARGS__)

template <class To, class From> To as_type(From value) { return __builtin_bit_cast(To, value); }

// ---- mathematics: exact here; a GPU's `fast` functions are not ----
// Both arguments have one type: `max(int, float)` is ambiguous in Metal and an error here.
#define UNARY(name) template <class T> T name(T x) { return __builtin_elementwise_##name(x); }
UNARY(abs) UNARY(ceil) UNARY(cos) UNARY(exp) UNARY(exp2) UNARY(floor) UNARY(log) UNARY(log2) UNARY(rint) UNARY(round)
UNARY(sin) UNARY(sqrt) UNARY(trunc)
#undef UNARY
template <class T> T fabs(T x) { return __builtin_elementwise_abs(x); }
template <class T> T rsqrt(T x) { return T(1) / __builtin_elementwise_sqrt(x); }
template <class T> T max(T a, T b) { return __builtin_elementwise_max(a, b); }
template <class T> T min(T a, T b) { return __builtin_elementwise_min(a, b); }
template <class T> T pow(T a, T b) { return __builtin_elementwise_pow(a, b); }
template <class T> T fma(T a, T b, T c) { return __builtin_elementwise_fma(a, b, c); }
template <class T> T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T> T select(T if_false, T if_true, bool condition) { return condition ? if_true : if_false; }
inline float tanh(float x) { return __builtin_tanhf(x); }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
template <class T, int N> T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; i++) sum += a[i] * b[i];
  return sum;
}
namespace fast { using namespace metal; }
namespace precise { using namespace metal; }

// ---- threadgroups ----
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
#define INLINE inline __attribute__((always_inline))
INLINE void threadgroup_barrier(mem_flags, int line = __builtin_LINE()) { emulator_barrier(line); }

// ---- simdgroups ----
template <class T> INLINE Lanes exchange(T value, uint uniform, const char* what, int line) {
  static_assert(sizeof(T) <= lane_bytes, "a simdgroup function takes at most 16 bytes");
  alignas(lane_bytes) char bytes[lane_bytes];
  __builtin_memcpy(bytes, &value, sizeof(T));
  return emulator_exchange(bytes, uniform, what, line);
}
INLINE void simdgroup_barrier(mem_flags, int line = __builtin_LINE()) { exchange(0, 0, "simdgroup_barrier", line); }
template <class T> T lane_value(Lanes lanes, uint lane) {
  T value;
  // Metal leaves the value of a lane that does not exist undefined: all ones, a NaN in every float type.
  if (lane >= lanes.count) __builtin_memset(&value, 0xFF, sizeof(T));
  else __builtin_memcpy(&value, lanes.values + lane * lane_bytes, sizeof(T));
  return value;
}
#define REDUCTION(name, expression) \
  template <class T> INLINE T name(T value, int line = __builtin_LINE()) { \
    Lanes lanes = exchange(value, 0, #name, line); \
    T a = lane_value<T>(lanes, 0); \
    for (uint i = 1; i < lanes.count; i++) { T b = lane_value<T>(lanes, i); a = expression; } \
    return a; \
  }
REDUCTION(simd_sum, T(a + b)) REDUCTION(simd_max, metal::max(a, b)) REDUCTION(simd_min, metal::min(a, b))
#undef REDUCTION
INLINE bool simd_any(bool value, int line = __builtin_LINE()) { return simd_max(int(value), line); }
INLINE bool simd_all(bool value, int line = __builtin_LINE()) { return simd_min(int(value), line); }

#define SHUFFLE(name, uniform, source) \
  template <class T> INLINE T name(T value, ushort n, int line = __builtin_LINE()) { \
    Lanes lanes = exchange(value, uniform, #name, line); \
    return lane_value<T>(lanes, source); \
  }
SHUFFLE(simd_broadcast, n, n) SHUFFLE(simd_shuffle, 0, n) SHUFFLE(simd_shuffle_xor, n, lanes.self ^ n)
SHUFFLE(simd_shuffle_down, n, lanes.self + n) SHUFFLE(simd_shuffle_up, n, lanes.self - n)
#undef SHUFFLE

// ---- simdgroup matrices: as Apple's devices lay them out, a lane holds two neighbours of one row ----
template <class T, int Rows, int Columns> struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "a simdgroup matrix is 8 x 8");
  vec<T, 2> held;
  vec<T, 2>& thread_elements() { return held; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class A, class B> struct Factors {
  vec<A, 2> a;
  vec<B, 2> b;
};
template <class D, class A, class B, class C>
INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                          simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c,
                                          int line = __builtin_LINE()) {
  Lanes lanes = exchange(Factors<A, B>{a.held, b.held}, 0, "simdgroup_multiply_accumulate", line);
  auto lane_of = [](uint row, uint column) { return row / 4 * 16 + column / 4 * 8 + row % 4 * 2 + column / 2 % 2; };
  const uint row = lanes.self / 16 * 4 + lanes.self / 2 % 4, first = lanes.self / 8 % 2 * 4 + lanes.self % 2 * 2;
  for (uint e = 0; e < 2; e++) {
    float sum = float(c.held[e]);
    for (uint k = 0; k < 8; k++)
      sum += float(lane_value<Factors<A, B>>(lanes, lane_of(row, k)).a[k % 2]) *
             float(lane_value<Factors<A, B>>(lanes, lane_of(k, first + e)).b[e]);
    d.held[e] = D(sum);
  }
}

}  // namespace metal
using namespace metal;

// The linker's names for the section's bounds; absent where a kernel declares no threadgroup memory.
extern "C" char __start_threadgroup[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_threadgroup[] __attribute__((weak, visibility("hidden")));
extern "C" Range threadgroup_memory() { return {__start_threadgroup, __stop_threadgroup}; }
