// The words of Metal that the kernels use, in CUDA: given before a kernel's own headers, so that its text compiles
// through mx.fast.cuda_kernel (NVRTC, every function a device function). A warp is a simdgroup, a block a threadgroup.
// Threadgroups are one-dimensional. `threadgroup` stands only before arrays, which is what makes it a macro.

typedef unsigned int uint;
typedef unsigned short ushort;
typedef __half float16_t;
typedef __nv_bfloat16 bfloat16_t;

#define device
#define thread
#define constant const
#define threadgroup __shared__

#define thread_index_in_threadgroup threadIdx.x
#define threads_per_threadgroup blockDim
#define threadgroup_position_in_grid blockIdx
#define threadgroups_per_grid gridDim
#define threadgroup_barrier(flags) __syncthreads()

template <typename To, typename From>
inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

template <typename X>
inline X simd_shuffle_xor(X x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}

template <typename X>
inline X simd_sum(X x) {
  for (int offset = 16; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  }
  return x;
}

template <typename X>
inline X simd_max(X x) {
  for (int offset = 16; offset > 0; offset /= 2) {
    x = max(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

namespace fast {
inline float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
}  // namespace fast
