// Names every kernel shares.

// Threads of a simdgroup: a warp on CUDA.
constexpr constant int SIMD_WIDTH = 32;

// Log-sum-exp of nothing, and a running maximum before its first score. Finite, so that differences stay finite.
constexpr constant float NOTHING = -1e30f;

// A score that may not count: so far below NOTHING that exp2(HIDDEN - maximum) is 0 even before the first real score.
constexpr constant float HIDDEN = -2e30f;

constexpr constant float LOG2_E = 1.44269504088896340736f;

// Before a loop over registers: an array that is not unrolled leaves the registers for memory.
#define UNROLL _Pragma("unroll")
