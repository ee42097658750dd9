// Executes kernels: blocks in sequence, the threads of a block as fibers that switch where they meet.
#include <array>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cuda_runtime.h"
#include "fibers.h"
#include "launch_limits.h"
#include "schedule.h"
#include "shared_memory.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace cudasim {
namespace {

std::string text(uint3 v) {
  return "(" + std::to_string(v.x) + ", " + std::to_string(v.y) + ", " + std::to_string(v.z) + ")";
}

std::string text(unsigned mask) {
  char digits[16];
  std::snprintf(digits, sizeof digits, "0x%08x", mask);
  return digits;
}

// A point in a kernel where threads wait for each other.
struct Call {
  const char* name = nullptr;
  Where where;
  bool operator==(const Call& other) const {
    return where.line() == other.where.line() && std::string_view(name) == other.name &&
           std::string_view(where.file_name()) == other.where.file_name();
  }
  std::string text() const {
    return std::string(name) + " (" + where.file_name() + ":" + std::to_string(where.line()) + ")";
  }
};

// Lanes of a warp that wait for the rest of their mask.
struct Group {
  unsigned mask = 0;
  unsigned arrived = 0;
  Call call;
  Combine combine = nullptr;
};

struct Warp {
  unsigned live = 0;   // lanes that have not returned
  unsigned ready = 0;  // lanes that can be resumed
  int groups_waiting = 0;
  std::array<Group, warpSize> groups;
  std::array<LaneSlot, warpSize> lanes;

  Group& group(unsigned mask) {
    for (int i = 0; i < groups_waiting; ++i) {
      if (groups[i].mask == mask) return groups[i];
    }
    groups[groups_waiting] = {.mask = mask, .arrived = 0, .call = {}, .combine = nullptr};
    return groups[groups_waiting++];
  }
};

struct Thread {
  explicit Thread(void (*entry)()) : fiber(entry) {}
  Fiber fiber;
  uint3 index{};
  unsigned warp = 0;
  unsigned lane = 0;
};

class Engine {
 public:
  Engine() {
    const char* wanted = std::getenv("PDKERNELS_CUDASIM_SCHEDULE");
    if (wanted != nullptr && !schedule.parse(wanted)) {
      throw std::runtime_error("PDKERNELS_CUDASIM_SCHEDULE must be forward, reverse or random:SEED, got " +
                               std::string(wanted));
    }
  }

  void launch(const char* name, dim3 grid, dim3 block, std::size_t shared_bytes, void (*run)(void*), void* body);
  std::uint64_t meet_warp(Call call, unsigned mask, std::uint64_t value, int source, Combine combine);
  Votes meet_block(Call call, bool predicate);
  [[noreturn]] void fail(const std::string& sentence);
  bool in_kernel() const { return current_ != nullptr; }
  unsigned lane();

  std::recursive_mutex mutex;  // one launch at a time; recursive so that a launch from a kernel is an error, not a hang
  Schedule schedule;
  DynamicShared dynamic;
  std::uint64_t blocks = 0;  // run so far

 private:
  static void thread_main();
  void run_block(unsigned threads);
  void finish_thread();
  void set_ready(unsigned warp, unsigned lanes);
  void complete_if_all_here(Warp& warp, int group);
  void release_barrier();
  [[noreturn]] void stop(const std::string& sentence);
  std::string deadlock() const;

  std::vector<std::unique_ptr<Thread>> threads_;
  std::array<Warp, kMaxThreadsPerBlock / warpSize> warps_;
  Thread* current_ = nullptr;
  unsigned ready_warps_ = 0;
  unsigned live_ = 0;

  struct Barrier {
    unsigned waiting = 0;
    int yes = 0;
    Call call;
    Votes outcome{};  // of the last meeting: the next cannot complete before all have read this one
  } barrier_;

  std::string kernel_;
  std::string error_;
  void (*run_)(void*) = nullptr;
  void* body_ = nullptr;
};

Engine& engine() {
  static Engine only;
  return only;
}

void Engine::launch(const char* name, dim3 grid, dim3 block, std::size_t shared_bytes, void (*run)(void*), void* body) {
  kernel_ = name[0] == '(' ? std::string(name + 1, std::strlen(name) - 2) : name;
  run_ = run;
  body_ = body;
  gridDim = grid;
  blockDim = block;
  const unsigned threads = block.x * block.y * block.z;
  while (threads_.size() < threads) threads_.push_back(std::make_unique<Thread>(thread_main));
  for (unsigned t = 0; t < threads; ++t) {
    Thread& thread = *threads_[t];
    thread.index = {t % block.x, t / block.x % block.y, t / block.x / block.y};
    thread.warp = t / warpSize;
    thread.lane = t % warpSize;
  }
  dynamic.prepare(shared_bytes);
  schedule.restart();
  const std::span<unsigned char> shared = static_shared();
  for (const std::uint64_t at : schedule.block_order(std::uint64_t{grid.x} * grid.y * grid.z)) {
    blockIdx = {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                static_cast<unsigned>(at / grid.x / grid.y)};
    const unsigned char poison = schedule.poison();
    std::memset(shared.data(), poison, shared.size());
    dynamic.poison(poison);
    run_block(threads);
    ++blocks;
    if (!dynamic.guards_intact()) {
      stop("block " + text(blockIdx) + " wrote outside its " + std::to_string(shared_bytes) +
           " bytes of dynamic shared memory");
    }
  }
}

void Engine::run_block(unsigned threads) {
  live_ = threads;
  barrier_ = {};
  ready_warps_ = 0;
  for (unsigned w = 0; w * warpSize < threads; ++w) {
    const unsigned left = threads - w * warpSize;
    warps_[w].live = left >= warpSize ? ~0u : (1u << left) - 1;
    warps_[w].ready = 0;
    warps_[w].groups_waiting = 0;
    set_ready(w, warps_[w].live);
  }
  while (ready_warps_ != 0) {
    const int w = schedule.pick(ready_warps_);
    Warp& warp = warps_[w];
    const int lane = schedule.pick(warp.ready);
    warp.ready &= ~(1u << lane);
    if (warp.ready == 0) ready_warps_ &= ~(1u << w);
    current_ = threads_[w * warpSize + lane].get();
    threadIdx = current_->index;
    current_->fiber.resume();
    const std::string who = error_.empty() ? "" : "block " + text(blockIdx) + ", thread " + text(current_->index);
    current_ = nullptr;
    if (!error_.empty()) stop(who + ": " + std::exchange(error_, {}));
  }
  if (live_ > 0) stop("block " + text(blockIdx) + ": deadlock: " + deadlock());
}

// Never left by a fiber: one iteration of the loop is one thread of one block.
void Engine::thread_main() {
  Engine& self = engine();
  for (;;) {
    try {
      self.run_(self.body_);
    } catch (const std::exception& thrown) { self.error_ = std::string("the kernel threw: ") + thrown.what(); }
    self.finish_thread();
    self.current_->fiber.suspend();
  }
}

void Engine::finish_thread() {
  Warp& warp = warps_[current_->warp];
  warp.live &= ~(1u << current_->lane);
  --live_;
  // Returned threads are not waited for: a meeting that lacked only this one is complete now.
  for (int group = warp.groups_waiting - 1; group >= 0; --group) complete_if_all_here(warp, group);
  if (live_ > 0 && barrier_.waiting == live_) release_barrier();
}

void Engine::set_ready(unsigned warp, unsigned lanes) {
  warps_[warp].ready |= lanes;
  if (warps_[warp].ready != 0) ready_warps_ |= 1u << warp;
}

void Engine::complete_if_all_here(Warp& warp, int index) {
  const Group group = warp.groups[index];
  if (group.arrived != (group.mask & warp.live)) return;
  group.combine(warp.lanes.data(), group.arrived);
  warp.groups[index] = warp.groups[--warp.groups_waiting];
  set_ready(current_->warp, group.arrived & ~(1u << current_->lane));  // the last to arrive simply continues
}

std::uint64_t Engine::meet_warp(Call call, unsigned mask, std::uint64_t value, int source, Combine combine) {
  if (current_ == nullptr) fail(call.text());
  const Thread& self = *current_;
  Warp& warp = warps_[self.warp];
  const unsigned bit = 1u << self.lane;
  if (!(mask & bit)) {
    fail(call.text() + " has mask " + text(mask) + ", which lacks the calling lane " + std::to_string(self.lane));
  }
  Group& group = warp.group(mask);
  if (group.arrived == 0) {
    group.call = call;
    group.combine = combine;
  } else if (!(group.call == call)) {
    fail("lanes of mask " + text(mask) + " meet at different calls: " + call.text() + " and " + group.call.text());
  }
  LaneSlot& slot = warp.lanes[self.lane];
  slot = {value, source, 0};
  group.arrived |= bit;
  const bool last = group.arrived == (mask & warp.live);
  complete_if_all_here(warp, static_cast<int>(&group - warp.groups.data()));
  if (!last) current_->fiber.suspend();
  return slot.result;
}

Votes Engine::meet_block(Call call, bool predicate) {
  if (current_ == nullptr) fail(call.text());
  if (barrier_.waiting == 0) {
    barrier_.call = call;
    barrier_.yes = 0;
  } else if (!(barrier_.call == call)) {
    fail("threads meet at different barriers: " + call.text() + " and " + barrier_.call.text());
  }
  ++barrier_.waiting;
  barrier_.yes += predicate;
  if (barrier_.waiting < live_) {
    current_->fiber.suspend();
  } else {
    release_barrier();
    warps_[current_->warp].ready &= ~(1u << current_->lane);  // the last to arrive simply continues
    if (warps_[current_->warp].ready == 0) ready_warps_ &= ~(1u << current_->warp);
  }
  return barrier_.outcome;
}

void Engine::release_barrier() {
  barrier_.outcome = {barrier_.yes, static_cast<int>(barrier_.waiting)};
  barrier_.waiting = 0;
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  for (unsigned w = 0; w * warpSize < threads; ++w) set_ready(w, warps_[w].live);
}

std::string Engine::deadlock() const {
  std::string report;
  if (barrier_.waiting > 0) {
    report += std::to_string(barrier_.waiting) + " of " + std::to_string(live_) + " live threads wait at " +
              barrier_.call.text();
  }
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  for (unsigned w = 0; w * warpSize < threads; ++w) {
    for (int i = 0; i < warps_[w].groups_waiting; ++i) {
      const Group& group = warps_[w].groups[i];
      const unsigned first = w * warpSize + static_cast<unsigned>(std::countr_zero(group.arrived));
      report += (report.empty() ? "" : "; ") + std::string("thread ") + text(threads_[first]->index) + " waits at " +
                group.call.text() + " with mask " + text(group.mask) + " for lanes " +
                text(group.mask & warps_[w].live & ~group.arrived) + " of its warp, which never come";
    }
  }
  return report;
}

void Engine::fail(const std::string& sentence) {
  if (current_ == nullptr) throw std::logic_error("cudasim: called outside a kernel: " + sentence);
  error_ = sentence;
  current_->fiber.suspend();
  std::abort();  // an abandoned fiber is never resumed here
}

unsigned Engine::lane() {
  if (current_ == nullptr) fail("a warp intrinsic");
  return current_->lane;
}

void Engine::stop(const std::string& sentence) {
  for (const auto& thread : threads_) thread->fiber.abandon();
  throw std::runtime_error("cudasim: kernel " + kernel_ + ", " + sentence + " [schedule " + schedule.text() + "]");
}

}  // namespace

void fail(const std::string& sentence) { engine().fail(sentence); }
void* dynamic_shared() { return engine().dynamic.start(); }
unsigned lane() { return engine().lane(); }

std::uint64_t meet_warp(const char* call, unsigned mask, std::uint64_t value, int source, Combine combine,
                        Where where) {
  return engine().meet_warp({call, where}, mask, value, source, combine);
}

Votes meet_block(const char* call, bool predicate, Where where) {
  return engine().meet_block({call, where}, predicate);
}

void launch_erased(const char* name, const void* kernel, dim3 grid, dim3 block, std::size_t shared_bytes,
                   void (*run)(void*), void* body) {
  Engine& one = engine();
  const std::lock_guard lock(one.mutex);
  if (one.in_kernel()) one.fail("a kernel launched a kernel, which the simulator does not run");
  if (!launch_allowed(kernel, grid, block, shared_bytes)) return;
  one.launch(name, grid, block, shared_bytes, run, body);
}

}  // namespace cudasim

// For the tests.
extern "C" {

// 1 if the text names a schedule, else 0 and nothing changes.
__attribute__((visibility("default"))) int cudasim_set_schedule(const char* text) {
  const std::lock_guard lock(cudasim::engine().mutex);
  return cudasim::engine().schedule.parse(text);
}

__attribute__((visibility("default"))) const char* cudasim_schedule() {
  return cudasim::engine().schedule.text().c_str();
}

// Blocks run by all launches so far.
__attribute__((visibility("default"))) std::uint64_t cudasim_blocks() {
  const std::lock_guard lock(cudasim::engine().mutex);
  return cudasim::engine().blocks;
}

}  // extern "C"
