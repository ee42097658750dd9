#include "fibers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

namespace cudasim {

Stack::Stack() {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  mapping_ = mmap(nullptr, kBytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  mprotect(mapping_, page, PROT_NONE);
  base_ = static_cast<char*>(mapping_) + page;
}

Stack::~Stack() { munmap(mapping_, kBytes + static_cast<std::size_t>(sysconf(_SC_PAGESIZE))); }

void Fiber::resume() {
  if (_setjmp(scheduler_) != 0) return;
  if (started_) _longjmp(inside_, 1);
  started_ = true;
  ucontext_t top;
  getcontext(&top);  // here and not at construction: it captures this OS thread's signal mask
  top.uc_stack.ss_sp = stack_.base();
  top.uc_stack.ss_size = Stack::kBytes;
  top.uc_link = nullptr;
  makecontext(&top, entry_, 0);
  setcontext(&top);
}

void Fiber::suspend() {
  if (_setjmp(inside_) == 0) _longjmp(scheduler_, 1);
}

}  // namespace cudasim
