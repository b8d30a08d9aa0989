// Runs one launch of a compiled kernel: a fiber per thread, one threadgroup after another, on the calling OS thread.
//
// Buffers lie in guarded memory of their exact size; a fault there is caught and described. SIMD-group functions and
// barriers are rendezvous: whoever arrives where its mates do not wait ends the launch. Linux, x86-64 and aarch64.
// One launch at a time (the Python side holds a lock). Knows nothing of Metal's types (metal.h).
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

#include "runtime.h"

constexpr unsigned max_threads = 1024, max_buffers = 31;
static const uint64_t page = sysconf(_SC_PAGESIZE);
constexpr uint64_t stack_bytes = 256 * 1024, slot_bytes = 1ull << 30;

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
  int32_t reverse;    // run the last thread and threadgroup first
  int32_t at_start;   // buffers begin (else end) at a guard page
  int32_t poison;     // the byte that fills threadgroup memory, and a buffer's pages around its data
  double limit_s;
  char* message;
  uint64_t message_bytes;
};

struct Fiber {
  void* stack_pointer;
  enum State { ready, waiting, returned } state;
  Thread place;
};
struct Group {  // a simdgroup
  unsigned size, waiting, at_barrier, returned, parity, uniform;
  const void* site;
  const char* what;
  int line;
  alignas(lane_bytes) char values[2][simd_width][lane_bytes];  // two sets: a lane may be one exchange ahead
};
struct Placed {
  char *pages, *begin;
  uint64_t page_bytes;
};

static Launch* launch;
static Fiber fibers[max_threads], *current;
static Group groups[max_threads / simd_width];
static Placed placed[max_buffers];
static void *scheduler, *arguments[max_buffers];
static char *stacks, *arena;
static unsigned num_threads, num_groups, barrier_waiting, num_returned;
static const void* barrier_site;
static int barrier_line;
static sigjmp_buf leave;
static pthread_t runner;
static volatile sig_atomic_t running;
static uint64_t alignment;  // of a buffer that ends at its guard page
enum { finished, failed, realigned };

// ---- failures ----
static void describe(const char* format, va_list values) {
  char* out = launch->message;
  int used = vsnprintf(out, launch->message_bytes, format, values);
  if (current && used >= 0 && uint64_t(used) < launch->message_bytes) {
    const unsigned *g = current->place.threadgroup_position_in_grid, *t = current->place.thread_position_in_threadgroup;
    snprintf(out + used, launch->message_bytes - used, ", in threadgroup (%u, %u, %u) by thread (%u, %u, %u)", g[0], g[1], g[2], t[0], t[1], t[2]);
  }
}
__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  describe(format, values);
  va_end(values);
  siglongjmp(leave, failed);
}

// ---- fibers ----
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
  if (group.waiting) fail("a thread returned while %u of its simdgroup wait in %s, line %d", group.waiting, group.what, group.line);
  if (barrier_waiting) fail("a thread returned while %u threads wait at threadgroup_barrier, line %d", barrier_waiting, barrier_line);
  group.returned++, num_returned++;
  leave_fiber(Fiber::returned, next_ready(current->place.simdgroup_index_in_threadgroup, current->place.thread_index_in_simdgroup));
}

extern "C" Lanes emulator_exchange(const void* value, unsigned uniform, const char* what, int line) {
  const unsigned index = current->place.simdgroup_index_in_threadgroup, self = current->place.thread_index_in_simdgroup;
  Group& group = groups[index];
  const void* site = __builtin_return_address(0);
  if (group.returned) fail("line %d: %s after %u threads of the simdgroup have returned", line, what, group.returned);
  if (group.at_barrier) fail("line %d: %s while %u of the simdgroup wait at threadgroup_barrier, line %d", line, what, group.at_barrier, barrier_line);
  if (group.waiting && group.site != site) fail("line %d: %s while %u of the simdgroup wait in %s, line %d", line, what, group.waiting, group.what, group.line);
  if (group.waiting && group.uniform != uniform) fail("line %d: %s with %u by one lane and %u by another", line, what, group.uniform, uniform);
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
  if (num_returned) fail("line %d: threadgroup_barrier after %u threads of the threadgroup have returned", line, num_returned);
  if (group.waiting) fail("line %d: threadgroup_barrier while %u of the simdgroup wait in %s, line %d", line, group.waiting, group.what, group.line);
  if (barrier_waiting && barrier_site != site) fail("line %d: threadgroup_barrier while %u threads wait at the one in line %d", line, barrier_waiting, barrier_line);
  barrier_site = site, barrier_line = line, group.at_barrier++;
  if (++barrier_waiting < num_threads)
    return leave_fiber(Fiber::waiting, next_ready(current->place.simdgroup_index_in_threadgroup, current->place.thread_index_in_simdgroup));
  barrier_waiting = 0;
  for (unsigned i = 0; i < num_groups; i++) groups[i].at_barrier = 0;
  wake(0, num_threads);
  leave_fiber(Fiber::ready, nullptr);
}

// Each simdgroup runs until all of its lanes wait at a barrier or have returned, so that threads are as far apart as the
// text allows. No deadlock can hide: a lane that will not come ends the launch where it arrives instead.
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
  const unsigned count[3] = {grid[0] / extent[0], grid[1] / extent[1], grid[2] / extent[2]}, total = count[0] * count[1] * count[2];
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

// ---- guarded buffers ----
// Slot k of the arena belongs to buffer k, which lies in its middle: half a GiB of guard on either side.
static void place_buffer(unsigned k) {
  const Buffer& buffer = launch->buffers[k];
  Placed& p = placed[k];
  p.pages = arena + k * slot_bytes + slot_bytes / 2;
  p.page_bytes = (buffer.bytes + page - 1) / page * page;
  if (p.page_bytes) mprotect(p.pages, p.page_bytes, PROT_READ | PROT_WRITE);
  p.begin = launch->at_start ? p.pages : p.pages + (p.page_bytes - buffer.bytes) / alignment * alignment;
  memset(p.pages, launch->poison, p.page_bytes);
  if (buffer.bytes) memcpy(p.begin, buffer.data, buffer.bytes);
  if (p.page_bytes && !buffer.writable) mprotect(p.pages, p.page_bytes, PROT_READ);
  arguments[k] = p.begin;
}
static bool is_poison(const char* begin, const char* end) {
  for (; begin < end; begin++)
    if (*begin != char(launch->poison)) return false;
  return true;
}
static void check_margins(unsigned k) {
  const Buffer& buffer = launch->buffers[k];
  const Placed& p = placed[k];
  if (!buffer.writable) return;
  if (!is_poison(p.pages, p.begin)) fail("a write before the first element of `%s`", buffer.name);
  if (!is_poison(p.begin + buffer.bytes, p.pages + p.page_bytes)) fail("a write past the last element of `%s`", buffer.name);
}
static void release_buffers() {
  for (unsigned k = 0; k < launch->num_buffers; k++)
    if (placed[k].page_bytes) {
      madvise(placed[k].pages, placed[k].page_bytes, MADV_DONTNEED);
      mprotect(placed[k].pages, placed[k].page_bytes, PROT_NONE);
    }
}
static int slot_of(const char* address) {
  if (!arena || address < arena || address >= arena + launch->num_buffers * slot_bytes) return -1;
  return (address - arena) / slot_bytes;
}

// ---- signals ----
constexpr int caught[] = {SIGSEGV, SIGBUS, SIGVTALRM};
static struct sigaction previous[3];

static void describe_fault(const char* address, const char* verb) {
  int k = slot_of(address);
  const char* stack = stacks + (current - fibers) * (page + stack_bytes);
  if (address >= stack && address < stack + page) fail("the thread's stack of %llu bytes is full", (unsigned long long)stack_bytes);
  if (k < 0) fail("%s at address %p, in no buffer", verb, (const void*)address);
  const Buffer& buffer = launch->buffers[k];
  long long offset = address - placed[k].begin, bytes = buffer.bytes, item = buffer.item_bytes;
  if (offset >= 0 && offset < bytes) fail("a write to the read-only `%s` at byte %lld (element %lld)", buffer.name, offset, offset / item);
  fail("%s outside `%s` at byte %lld (element %lld of %lld)", verb, buffer.name, offset, (offset - (offset < 0 ? item - 1 : 0)) / item, bytes / item);
}
static void on_signal(int number, siginfo_t* info, void* context) {
  if (number == SIGVTALRM) {
    if (!running) return;
    if (!pthread_equal(pthread_self(), runner)) return void(pthread_kill(runner, number));
    fail("not finished after %g s of processor time", launch->limit_s);
  }
  if (!running || !pthread_equal(pthread_self(), runner) || !current) {  // not ours: as if we had never been here
    for (int i = 0; i < 2; i++)
      if (caught[i] == number) sigaction(number, &previous[i], nullptr);
    return;
  }
#if defined(__x86_64__)
  // A vector instruction met an address that is no multiple of 16. A buffer flush with its guard page may begin at such
  // an address through no fault of the kernel: the launch starts again with every buffer aligned.
  if (info->si_code == SI_KERNEL && !launch->at_start && alignment == 1) {
    alignment = 16;
    siglongjmp(leave, realigned);
  }
  if (info->si_code == SI_KERNEL) fail("a vector access at an address that is no multiple of 16");
  bool wrote = ((ucontext_t*)context)->uc_mcontext.gregs[REG_ERR] & 2;
  describe_fault((const char*)info->si_addr, wrote ? "a write" : "a read");
#else
  (void)context;
  describe_fault((const char*)info->si_addr, "an access");
#endif
}
static void watch(bool on) {
  static char signal_stack[65536];  // a fault may be a fiber's full stack
  static stack_t previous_stack;
  stack_t own = {};
  own.ss_sp = signal_stack, own.ss_size = sizeof signal_stack;
  struct sigaction action = {};
  action.sa_sigaction = on_signal, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  struct itimerval timer = {};
  if (on) {
    runner = pthread_self();
    sigaltstack(&own, &previous_stack);
    for (int i = 0; i < 3; i++) sigaction(caught[i], &action, &previous[i]);
    timer.it_value.tv_sec = long(launch->limit_s);
    timer.it_value.tv_usec = long(launch->limit_s * 1e6) % 1000000;
  }
  running = on;
  setitimer(ITIMER_VIRTUAL, &timer, nullptr);  // processor time, so that pytest's own real-time alarm stays untouched
  if (!on) {
    // SIGVTALRM stays ours: one already on its way would end the process by default.
    for (int i = 0; i < 2; i++) sigaction(caught[i], &previous[i], nullptr);
    sigaltstack(&previous_stack, nullptr);
  }
}

// ---- checks that clang writes into the kernel (-fsanitize): every handler's data begins with a source location ----
struct Location {
  const char* file;
  uint32_t line, column;
};
extern "C" {
void __ubsan_handle_out_of_bounds(const Location* l, uint64_t index) { fail("line %u: index %lld is outside the array", l->line, (long long)index); }
void __ubsan_handle_divrem_overflow(const Location* l, uint64_t, uint64_t) { fail("line %u: integer division by zero", l->line); }
void __ubsan_handle_shift_out_of_bounds(const Location* l, uint64_t, uint64_t) { fail("line %u: shift by more than the type's width", l->line); }
void __ubsan_handle_float_cast_overflow(const Location* l, uint64_t) { fail("line %u: a float that the integer type cannot hold", l->line); }

// float to bfloat16, rounded to nearest even; older compiler libraries lack it.
__bf16 __truncsfbf2(float value) {
  uint32_t bits = __builtin_bit_cast(uint32_t, value);
  bits = value == value ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : (bits >> 16) | 0x40;
  return __builtin_bit_cast(__bf16, uint16_t(bits));
}

// 0: done, every writable buffer's bytes are back with the caller; else `message` says what the kernel did wrong.
int emulator_run(Launch* l) {
  launch = l;
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  if (!arena) {
    arena = (char*)mmap(nullptr, max_buffers * slot_bytes, PROT_NONE, flags, -1, 0);
    stacks = (char*)mmap(nullptr, max_threads * (page + stack_bytes), PROT_READ | PROT_WRITE, flags, -1, 0);
    for (unsigned i = 0; i < max_threads; i++) mprotect(stacks + i * (page + stack_bytes), page, PROT_NONE);
  }
  alignment = 1;
  watch(true);
  int outcome = sigsetjmp(leave, 1);
  if (outcome != failed) {
    current = nullptr;
    for (unsigned k = 0; k < l->num_buffers; k++) place_buffer(k);
    run_grid();
    for (unsigned k = 0; k < l->num_buffers; k++) check_margins(k);
    for (unsigned k = 0; k < l->num_buffers; k++)
      if (l->buffers[k].writable && l->buffers[k].bytes) memcpy(l->buffers[k].data, placed[k].begin, l->buffers[k].bytes);
  }
  watch(false);
  release_buffers();
  return outcome == failed;
}
}
