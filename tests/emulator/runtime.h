// What a compiled kernel (metal.h) and the machine that runs it (runtime.cpp) know of each other.
#pragma once

constexpr unsigned simd_width = 32;
constexpr unsigned lane_bytes = 16;  // room for one lane's value in an exchange

struct Thread {  // where one thread stands, named as Metal's thread attributes
  unsigned thread_position_in_grid[3], thread_position_in_threadgroup[3], threadgroup_position_in_grid[3];
  unsigned threads_per_threadgroup[3], threadgroups_per_grid[3], threads_per_grid[3];
  unsigned thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  unsigned simdgroups_per_threadgroup, threads_per_simdgroup, thread_execution_width;
};

struct Lanes {  // the values that the lanes of a simdgroup brought to an exchange
  const char* values;
  unsigned self;   // the caller's own lane
  unsigned count;  // 32, or fewer in the last simdgroup of a threadgroup
};

struct Range {
  char *begin, *end;
};

// The compiler may neither copy such a call into two branches nor merge those of two: a return address names one place.
#define RENDEZVOUS extern "C" __attribute__((convergent, nomerge))
RENDEZVOUS Lanes emulator_exchange(const void* value, unsigned uniform, const char* what, int line);
RENDEZVOUS void emulator_barrier(int line);
