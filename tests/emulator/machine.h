// What every part of the runtime shares: the launch as Python describes it (machine.py), the thread that runs now, and
// how a launch ends early.
#pragma once
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <csetjmp>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "runtime.h"

constexpr unsigned max_threads = 1024, max_buffers = 31;
static const uint64_t page = sysconf(_SC_PAGESIZE);

struct Buffer {
  const char* name;
  char* data;  // the caller's bytes: read before the launch, and written back after it where `writable`
  uint64_t bytes, item_bytes;
  int32_t writable;
};
struct Launch {
  void (*entry)(void**, const Thread&);
  Range (*threadgroup_memory)();
  Buffer* buffers;
  uint32_t num_buffers, grid[3], threadgroup[3];  // grid counts threads, a multiple of threadgroup
  int32_t reverse;                                // run the last thread and threadgroup first
  int32_t at_start;                               // buffers begin (else end) at a guard page
  int32_t poison;                                 // the byte that fills memory nobody has written
  double limit_s;
  char* message;
  uint64_t message_bytes;
};

struct Fiber {
  void* stack_pointer;
  enum State { ready, waiting, returned } state;
  Thread place;
};

static Launch* launch;
static Fiber* current;                // null between threadgroups
static void* arguments[max_buffers];  // where the kernel finds its buffers
static sigjmp_buf leave;
enum { finished, failed, realigned };  // what `leave` brings back

static void describe(const char* format, va_list values) {
  char* out = launch->message;
  int used = vsnprintf(out, launch->message_bytes, format, values);
  if (current && used >= 0 && uint64_t(used) < launch->message_bytes) {
    const unsigned *g = current->place.threadgroup_position_in_grid, *t = current->place.thread_position_in_threadgroup;
    snprintf(out + used, launch->message_bytes - used, ", in threadgroup (%u, %u, %u) by thread (%u, %u, %u)", g[0],
             g[1], g[2], t[0], t[1], t[2]);
  }
}
__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  describe(format, values);
  va_end(values);
  siglongjmp(leave, failed);
}
