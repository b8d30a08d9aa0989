// A launch's buffers in guarded memory of their exact size: a stray access faults.
#pragma once
#include "machine.h"

// Slot k of the arena, address space without memory, belongs to buffer k, which lies in its middle: on either side is
// guard enough for any 32-bit index, so that -1 as a uint is still named as what it is.
constexpr uint64_t slot_bytes = 160ull << 30;

struct Placed {
  char *pages, *begin;
  uint64_t page_bytes;
};

static char* arena;
static Placed placed[max_buffers];
static uint64_t alignment;  // of a buffer that ends at its guard page

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
  if (!is_poison(p.begin + buffer.bytes, p.pages + p.page_bytes))
    fail("a write past the last element of `%s`", buffer.name);
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
