// Runs one launch of a compiled kernel on the calling OS thread, and describes what it did wrong. Linux. One launch at
// a time (the Python side holds a lock). Knows nothing of Metal's types (metal.h).
#include <sys/time.h>
#include <ucontext.h>

#include <csignal>

#include "buffers.h"
#include "fibers.h"

// ---- signals ----
constexpr int caught[] = {SIGSEGV, SIGBUS, SIGVTALRM};
static struct sigaction previous[3];
static pthread_t runner;
static volatile sig_atomic_t running;

static void describe_fault(const char* address, const char* verb) {
  int k = slot_of(address);
  const char* stack = stacks + (current - fibers) * (page + stack_bytes);
  if (address >= stack && address < stack + page)
    fail("the thread's stack of %llu bytes is full", (unsigned long long)stack_bytes);
  if (k < 0) fail("%s at address %p, in no buffer", verb, (const void*)address);
  const Buffer& buffer = launch->buffers[k];
  long long offset = address - placed[k].begin, bytes = buffer.bytes, item = buffer.item_bytes;
  if (offset >= 0 && offset < bytes)
    fail("a write to the read-only `%s` at byte %lld (element %lld)", buffer.name, offset, offset / item);
  fail("%s outside `%s` at byte %lld (element %lld of %lld)", verb, buffer.name, offset,
       (offset - (offset < 0 ? item - 1 : 0)) / item, bytes / item);
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
  if (info->si_code == SI_KERNEL)
    fail("a vector access at an address that is no multiple of 16, or outside all memory");
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
void __ubsan_handle_out_of_bounds(const Location* l, uint64_t index) {
  fail("line %u: index %lld is outside the array", l->line, (long long)index);
}
void __ubsan_handle_divrem_overflow(const Location* l, uint64_t, uint64_t) {
  fail("line %u: integer division by zero", l->line);
}
void __ubsan_handle_shift_out_of_bounds(const Location* l, uint64_t, uint64_t) {
  fail("line %u: shift by more than the type's width", l->line);
}
void __ubsan_handle_float_cast_overflow(const Location* l, uint64_t) {
  fail("line %u: a float that the integer type cannot hold", l->line);
}

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
    void* space = mmap(nullptr, max_buffers * slot_bytes, PROT_NONE, flags, -1, 0);
    stacks = (char*)mmap(nullptr, max_threads * (page + stack_bytes), PROT_READ | PROT_WRITE, flags, -1, 0);
    if (space == MAP_FAILED || stacks == MAP_FAILED) {
      snprintf(l->message, l->message_bytes, "the emulator needs 5 TiB of address space (not memory); raise ulimit -v");
      return 1;
    }
    arena = (char*)space;
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
      if (l->buffers[k].writable && l->buffers[k].bytes)
        memcpy(l->buffers[k].data, placed[k].begin, l->buffers[k].bytes);
  }
  watch(false);
  release_buffers();
  return outcome == failed;
}
}
