// Threads as fibers, a threadgroup at a time. SIMD-group functions and barriers are rendezvous: whoever arrives where
// its mates do not wait ends the launch. x86-64 and aarch64.
#pragma once
#include "machine.h"

constexpr uint64_t stack_bytes = 256 * 1024;

struct Group {  // a simdgroup
  unsigned size, waiting, at_barrier, returned, parity, uniform;
  const void* site;
  const char* what;
  int line;
  alignas(lane_bytes) char values[2][simd_width][lane_bytes];  // two sets: a lane may be one exchange ahead
};

static Fiber fibers[max_threads];
static Group groups[max_threads / simd_width];
static void* scheduler;
static char* stacks;  // each above a guard page
static unsigned num_threads, num_groups, barrier_waiting, num_returned;
static const void* barrier_site;
static int barrier_line;

// void switch_stack(void** save, void* load): keeps the callee-saved registers on the stack that is left.
extern "C" void switch_stack(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.text
switch_stack:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");
constexpr unsigned frame_words = 8, return_word = 6;  // six registers, the return address, one word of alignment
#elif defined(__aarch64__)
asm(R"(
.text
switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]; stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]; stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]; ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]; ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
constexpr unsigned frame_words = 20, return_word = 11;  // x19..x30, d8..d15; x30 returns
#else
#error "the emulator's fibers know x86-64 and aarch64"
#endif

static bool is_blocked(const Group& group) { return group.waiting + group.at_barrier + group.returned == group.size; }

// The first ready fiber of a simdgroup after `lane`, or, without one, in this run's order; null when none is ready.
static Fiber* next_ready(unsigned group, int lane = -1) {
  const int size = groups[group].size, step = launch->reverse ? -1 : 1;
  if (is_blocked(groups[group])) return nullptr;
  if (lane < 0) lane = launch->reverse ? 0 : size - 1;
  for (;;) {
    lane = (lane + step + size) % size;
    Fiber& fiber = fibers[group * simd_width + lane];
    if (fiber.state == Fiber::ready) return &fiber;
  }
}
// Lanes hand over to each other directly: processors then predict every return, since all fibers come from one place.
static void leave_fiber(Fiber::State state, Fiber* next) {
  Fiber& self = *current;
  self.state = state;
  if (next == &self) return;
  if (next) current = next;
  switch_stack(&self.stack_pointer, next ? next->stack_pointer : scheduler);
}
static void wake(unsigned first, unsigned count) {
  for (unsigned i = first; i < first + count; i++)
    if (fibers[i].state == Fiber::waiting) fibers[i].state = Fiber::ready;
}
static void thread_main() {
  launch->entry(arguments, current->place);
  Group& group = groups[current->place.simdgroup_index_in_threadgroup];
  if (group.waiting)
    fail("a thread returned while %u of its simdgroup wait in %s, line %d", group.waiting, group.what, group.line);
  if (barrier_waiting)
    fail("a thread returned while %u threads wait at threadgroup_barrier, line %d", barrier_waiting, barrier_line);
  group.returned++, num_returned++;
  leave_fiber(Fiber::returned,
              next_ready(current->place.simdgroup_index_in_threadgroup, current->place.thread_index_in_simdgroup));
}

extern "C" Lanes emulator_exchange(const void* value, unsigned uniform, const char* what, int line) {
  const unsigned index = current->place.simdgroup_index_in_threadgroup, self = current->place.thread_index_in_simdgroup;
  Group& group = groups[index];
  const void* site = __builtin_return_address(0);
  if (group.returned) fail("line %d: %s after %u threads of the simdgroup have returned", line, what, group.returned);
  if (group.at_barrier)
    fail("line %d: %s while %u of the simdgroup wait at threadgroup_barrier, line %d", line, what, group.at_barrier,
         barrier_line);
  if (group.waiting && group.site != site)
    fail("line %d: %s while %u of the simdgroup wait in %s, line %d", line, what, group.waiting, group.what,
         group.line);
  if (group.waiting && group.uniform != uniform)
    fail("line %d: %s with %u by one lane and %u by another", line, what, group.uniform, uniform);
  group.site = site, group.what = what, group.line = line, group.uniform = uniform;
  auto& values = group.values[group.parity];
  memcpy(values[self], value, lane_bytes);
  if (++group.waiting < group.size) {
    leave_fiber(Fiber::waiting, next_ready(index, self));
  } else {  // the last to come does not go first
    group.waiting = 0, group.parity ^= 1;
    wake(index * simd_width, group.size);
    leave_fiber(Fiber::ready, next_ready(index));
  }
  return {values[0], self, group.size};
}
extern "C" void emulator_barrier(int line) {
  Group& group = groups[current->place.simdgroup_index_in_threadgroup];
  const void* site = __builtin_return_address(0);
  if (num_returned)
    fail("line %d: threadgroup_barrier after %u threads of the threadgroup have returned", line, num_returned);
  if (group.waiting)
    fail("line %d: threadgroup_barrier while %u of the simdgroup wait in %s, line %d", line, group.waiting, group.what,
         group.line);
  if (barrier_waiting && barrier_site != site)
    fail("line %d: threadgroup_barrier while %u threads wait at the one in line %d", line, barrier_waiting,
         barrier_line);
  barrier_site = site, barrier_line = line, group.at_barrier++;
  if (++barrier_waiting < num_threads)
    return leave_fiber(Fiber::waiting, next_ready(current->place.simdgroup_index_in_threadgroup,
                                                  current->place.thread_index_in_simdgroup));
  barrier_waiting = 0;
  for (unsigned i = 0; i < num_groups; i++) groups[i].at_barrier = 0;
  wake(0, num_threads);
  leave_fiber(Fiber::ready, nullptr);
}

// Each simdgroup runs until all of its lanes wait at a barrier or have returned, so that threads are as far apart as
// the text allows. No deadlock can hide: a lane that will not come ends the launch where it arrives instead.
static void run_threadgroup() {
  while (num_returned < num_threads) {
    unsigned k = 0;
    while (is_blocked(groups[launch->reverse ? num_groups - 1 - k : k])) k++;
    current = next_ready(launch->reverse ? num_groups - 1 - k : k);
    switch_stack(&scheduler, current->stack_pointer);
  }
  current = nullptr;
}
static void prepare_threadgroup(const unsigned position[3]) {
  const uint32_t *grid = launch->grid, *extent = launch->threadgroup;
  num_returned = barrier_waiting = 0;
  for (unsigned i = 0; i < num_groups; i++) {
    unsigned left = num_threads - i * simd_width;
    groups[i].size = left < simd_width ? left : simd_width;
    groups[i].waiting = groups[i].at_barrier = groups[i].returned = 0;
  }
  for (unsigned i = 0; i < num_threads; i++) {
    Fiber& fiber = fibers[i];
    Thread& place = fiber.place;
    const unsigned local[3] = {i % extent[0], i / extent[0] % extent[1], i / extent[0] / extent[1]};
    for (int axis = 0; axis < 3; axis++) {
      place.thread_position_in_threadgroup[axis] = local[axis];
      place.threadgroup_position_in_grid[axis] = position[axis];
      place.thread_position_in_grid[axis] = position[axis] * extent[axis] + local[axis];
      place.threads_per_threadgroup[axis] = extent[axis];
      place.threads_per_grid[axis] = grid[axis];
      place.threadgroups_per_grid[axis] = grid[axis] / extent[axis];
    }
    place.thread_index_in_threadgroup = i;
    place.thread_index_in_simdgroup = i % simd_width;
    place.simdgroup_index_in_threadgroup = i / simd_width;
    place.simdgroups_per_threadgroup = num_groups;
    place.threads_per_simdgroup = place.thread_execution_width = simd_width;
    // Staggered by cache lines: stacks that began at one offset in their pages would share a few cache sets.
    void** frame = (void**)(stacks + (i + 1) * (page + stack_bytes) - i % 64 * 320) - frame_words;
    frame[return_word] = (void*)thread_main;
    fiber.stack_pointer = frame;
    fiber.state = Fiber::ready;
  }
}
static void run_grid() {
  const uint32_t *grid = launch->grid, *extent = launch->threadgroup;
  const unsigned count[3] = {grid[0] / extent[0], grid[1] / extent[1], grid[2] / extent[2]},
                 total = count[0] * count[1] * count[2];
  num_threads = extent[0] * extent[1] * extent[2];
  num_groups = (num_threads + simd_width - 1) / simd_width;
  Range shared = launch->threadgroup_memory();
  for (unsigned k = 0; k < total; k++) {
    unsigned i = launch->reverse ? total - 1 - k : k;
    const unsigned position[3] = {i % count[0], i / count[0] % count[1], i / count[0] / count[1]};
    if (shared.begin) memset(shared.begin, launch->poison, shared.end - shared.begin);
    prepare_threadgroup(position);
    run_threadgroup();
  }
}
