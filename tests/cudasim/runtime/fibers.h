// Fibers: every GPU thread of a block runs on its own stack, all of them on the OS thread that launched the kernel.
//
// A fiber is first entered with ucontext, which makes the stack; from then on switches are _setjmp/_longjmp, which save
// no signal mask and so need no system call. Fibers are kept for the next block and launch.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>

namespace cudasim {

class Stack {
 public:
  Stack();
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  void* base() const { return base_; }
  static constexpr std::size_t kBytes = 128 * 1024;

 private:
  void* mapping_;  // one page that faults on overflow, then the stack
  void* base_;
};

class Fiber {
 public:
  explicit Fiber(void (*entry)()) : entry_(entry) {}

  // From the scheduler: continues the fiber until it suspends itself.
  void resume();
  // From inside the fiber: back to the scheduler's resume().
  void suspend();
  // Resets the fiber; the next resume() enters it from the top. Nothing on its stack is destroyed.
  void abandon() { started_ = false; }

 private:
  void (*entry_)();  // must never return
  Stack stack_;
  jmp_buf inside_;
  jmp_buf scheduler_;
  bool started_ = false;
};

}  // namespace cudasim
