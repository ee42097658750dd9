// Executes kernels: clusters of blocks in sequence (most are of one block), the blocks of a cluster in turns, the
// threads of a block as fibers that switch where they meet.
#include <bit>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "block.h"
#include "launch_limits.h"
#include "schedule.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace cudasim {
namespace {

class Engine {
 public:
  Engine() {
    const char* wanted = std::getenv("PDKERNELS_CUDASIM_SCHEDULE");
    if (wanted != nullptr && !schedule.parse(wanted)) {
      throw std::runtime_error("PDKERNELS_CUDASIM_SCHEDULE must be forward, reverse or random:SEED, got " +
                               std::string(wanted));
    }
  }

  void launch(const char* name, unsigned cluster, dim3 grid, dim3 block, std::size_t shared_bytes, void (*run)(void*),
              void* body);
  std::uint64_t meet_warp(Call call, unsigned mask, std::uint64_t value, int source, Combine combine);
  Votes meet_block(Call call, bool predicate);
  void arrive_cluster(Call call);
  void wait_cluster(Call call);
  void* map_shared(const void* at, unsigned rank);
  unsigned rank() { return running("__clusterRelativeBlockRank").rank; }
  unsigned size() { return running("__clusterSizeInBlocks"), size_; }
  void* dynamic_shared() { return running("dynamic shared memory").dynamic.start(); }
  [[noreturn]] void fail(const std::string& sentence);
  bool in_kernel() const { return current_ != nullptr; }
  unsigned lane();

  std::recursive_mutex mutex;  // one launch at a time; recursive so that a launch from a kernel is an error, not a hang
  Schedule schedule;
  std::uint64_t blocks = 0;  // run so far

 private:
  static void thread_main();
  void run_cluster();
  void enter(Block& block);
  void run_thread();
  void finish_block();
  void finish_thread();
  void complete_if_all_here(Warp& warp, int group);
  void release_barrier();
  void complete_cluster_if_all_here();
  Block& running(const char* call) {
    if (current_ == nullptr) fail(call);
    return *block_;
  }
  [[noreturn]] void stop(const std::string& sentence);
  std::string deadlock() const;

  std::vector<std::unique_ptr<Block>> blocks_;  // the first `size_` are those of the cluster
  unsigned size_ = 1;
  Block* block_ = nullptr;  // whose threads run
  Thread* current_ = nullptr;

  unsigned live_ = 0;        // threads of the cluster
  unsigned arrivals_ = 0;    // at its barrier
  std::uint64_t phase_ = 0;  // how often it was complete
  Call arrival_;             // the last

  std::string kernel_;
  std::string error_;
  void (*run_)(void*) = nullptr;
  void* body_ = nullptr;
};

Engine& engine() {
  static Engine only;
  return only;
}

void Engine::launch(const char* name, unsigned cluster, dim3 grid, dim3 block, std::size_t shared_bytes,
                    void (*run)(void*), void* body) {
  kernel_ = name[0] == '(' ? std::string(name + 1, std::strlen(name) - 2) : name;
  run_ = run;
  body_ = body;
  gridDim = grid;
  blockDim = block;
  size_ = cluster;
  while (blocks_.size() < cluster) blocks_.push_back(std::make_unique<Block>());
  for (unsigned rank = 0; rank < cluster; ++rank) {
    Block& one = *blocks_[rank];
    one.rank = rank;
    one.prepare(block, thread_main);
    one.dynamic.prepare(shared_bytes);
    if (cluster > 1) one.statics.prepare(static_shared());
  }
  schedule.restart();
  const unsigned threads = block.x * block.y * block.z;
  for (const std::uint64_t at : schedule.block_order(std::uint64_t{grid.x} * grid.y * grid.z / cluster)) {
    const std::uint64_t first = at * cluster;  // neighbours along x
    for (unsigned rank = 0; rank < cluster; ++rank) {
      blocks_[rank]->reset(
          {static_cast<unsigned>(first % grid.x) + rank, static_cast<unsigned>(first / grid.x % grid.y),
           static_cast<unsigned>(first / grid.x / grid.y)},
          threads);
    }
    live_ = threads * cluster, arrivals_ = 0;
    run_cluster();
    blocks += cluster;
  }
}

void Engine::run_cluster() {
  block_ = nullptr;
  for (;;) {
    unsigned ready = 0;
    for (unsigned rank = 0; rank < size_; ++rank) ready |= (blocks_[rank]->ready_warps != 0 ? 1u : 0u) << rank;
    if (ready == 0) break;
    enter(*blocks_[size_ == 1 ? 0 : schedule.pick(ready)]);
    for (std::uint64_t turns = size_ == 1 ? ~0ull : schedule.turns(); turns > 0 && block_->ready_warps != 0; --turns)
      run_thread();
  }
  for (unsigned rank = 0; rank < size_; ++rank) {
    if (blocks_[rank]->live > 0) stop("block " + text(blocks_[rank]->index) + ": deadlock: " + deadlock());
  }
}

// What another block has written to the memory of one that had not started is lost.
void Engine::enter(Block& block) {
  if (block_ == &block) return;
  if (block_ != nullptr) block_->statics.save();
  block_ = &block;
  blockIdx = block.index;
  if (block.started) return block.statics.restore();
  block.started = true;
  const unsigned char poison = schedule.poison();
  const std::span<unsigned char> shared = static_shared();
  std::memset(shared.data(), poison, shared.size());
  block.dynamic.poison(poison);
}

void Engine::run_thread() {
  Block& block = *block_;
  const unsigned w = static_cast<unsigned>(schedule.pick(block.ready_warps));
  const int lane = schedule.pick(block.warps[w].ready);
  block.clear_ready(w, 1u << lane);
  current_ = block.threads[w * warpSize + static_cast<unsigned>(lane)].get();
  threadIdx = current_->index;
  current_->fiber.resume();
  const std::string who = error_.empty() ? "" : "block " + text(block.index) + ", thread " + text(current_->index);
  current_ = nullptr;
  if (!error_.empty()) stop(who + ": " + std::exchange(error_, {}));
  if (block.live == 0) finish_block();
}

// Its memory may hold anything from here on.
void Engine::finish_block() {
  if (!block_->dynamic.guards_intact()) {
    stop("block " + text(block_->index) + " wrote outside its " + std::to_string(block_->dynamic.size()) +
         " bytes of dynamic shared memory");
  }
  if (size_ == 1) return;
  const unsigned char poison = schedule.poison();
  const std::span<unsigned char> shared = static_shared();
  std::memset(shared.data(), poison, shared.size());
  block_->dynamic.poison(poison);
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
  if (current_->arrived) {
    error_ = "returns after " + arrival_.text() + " without __cluster_barrier_wait";
    return;
  }
  Warp& warp = block_->warps[current_->warp];
  warp.live &= ~(1u << current_->lane);
  --block_->live, --live_;
  // Returned threads are not waited for: a meeting that lacked only this one is complete now.
  for (int group = warp.groups_waiting - 1; group >= 0; --group) complete_if_all_here(warp, group);
  if (block_->live > 0 && block_->barrier.waiting == block_->live) release_barrier();
  complete_cluster_if_all_here();
}

void Engine::complete_if_all_here(Warp& warp, int index) {
  const Group group = warp.groups[index];
  if (group.arrived != (group.mask & warp.live)) return;
  group.combine(warp.lanes.data(), group.arrived);
  warp.groups[index] = warp.groups[--warp.groups_waiting];
  // The last to arrive simply continues.
  block_->set_ready(current_->warp, group.arrived & ~(1u << current_->lane));
}

std::uint64_t Engine::meet_warp(Call call, unsigned mask, std::uint64_t value, int source, Combine combine) {
  if (current_ == nullptr) fail(call.text());
  const Thread& self = *current_;
  Warp& warp = block_->warps[self.warp];
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
  Barrier& barrier = block_->barrier;
  if (barrier.waiting == 0) {
    barrier.call = call;
    barrier.yes = 0;
  } else if (!(barrier.call == call)) {
    fail("threads meet at different barriers: " + call.text() + " and " + barrier.call.text());
  }
  ++barrier.waiting;
  barrier.yes += predicate;
  if (barrier.waiting < block_->live) {
    current_->fiber.suspend();
  } else {
    release_barrier();
    block_->clear_ready(current_->warp, 1u << current_->lane);  // the last to arrive simply continues
  }
  return barrier.outcome;
}

void Engine::release_barrier() {
  block_->barrier.outcome = {block_->barrier.yes, static_cast<int>(block_->barrier.waiting)};
  block_->barrier.waiting = 0;
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  for (unsigned w = 0; w * warpSize < threads; ++w) block_->set_ready(w, block_->warps[w].live);
}

void Engine::arrive_cluster(Call call) {
  if (current_ == nullptr) fail(call.text());
  if (current_->arrived) fail(call.text() + " follows " + arrival_.text() + " without __cluster_barrier_wait");
  arrival_ = call;
  current_->arrived = true, current_->phase = phase_;
  ++arrivals_;
  complete_cluster_if_all_here();
}

void Engine::wait_cluster(Call call) {
  if (current_ == nullptr) fail(call.text());
  if (!current_->arrived) fail(call.text() + " without __cluster_barrier_arrive");
  if (phase_ == current_->phase) {
    current_->waits = true;
    current_->fiber.suspend();
  }
  current_->arrived = false;
}

void Engine::complete_cluster_if_all_here() {
  if (arrivals_ == 0 || arrivals_ < live_) return;
  ++phase_, arrivals_ = 0;
  for (unsigned rank = 0; rank < size_; ++rank) {
    for (const auto& thread : blocks_[rank]->threads) {
      if (std::exchange(thread->waits, false)) blocks_[rank]->set_ready(thread->warp, 1u << thread->lane);
    }
  }
}

void* Engine::map_shared(const void* at, unsigned rank) {
  Block& here = running("__cluster_map_shared_rank");
  if (rank >= size_) {
    fail("__cluster_map_shared_rank names block " + std::to_string(rank) + " of a cluster of " + std::to_string(size_));
  }
  const Block& there = *blocks_[rank];
  if (here.dynamic.holds(at)) return here.dynamic.same_in(there.dynamic, at);
  const std::span<unsigned char> shared = static_shared();
  if (at < shared.data() || at >= shared.data() + shared.size()) {
    fail("__cluster_map_shared_rank has an address outside the block's shared memory");
  }
  return &there == &here ? const_cast<void*>(at) : there.statics.same(at);
}

std::string Engine::deadlock() const {
  std::string report;
  const auto add = [&](const std::string& sentence) { report += (report.empty() ? "" : "; ") + sentence; };
  if (arrivals_ > 0) {
    add(std::to_string(arrivals_) + " of " + std::to_string(live_) + " live threads of the cluster have come to " +
        arrival_.text());
  }
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  for (unsigned rank = 0; rank < size_; ++rank) {
    const Block& block = *blocks_[rank];
    const std::string of = size_ == 1 ? "" : " of block " + text(block.index);
    if (block.barrier.waiting > 0) {
      add(std::to_string(block.barrier.waiting) + " of " + std::to_string(block.live) + " live threads" + of +
          " wait at " + block.barrier.call.text());
    }
    for (unsigned w = 0; w * warpSize < threads; ++w) {
      for (int i = 0; i < block.warps[w].groups_waiting; ++i) {
        const Group& group = block.warps[w].groups[static_cast<std::size_t>(i)];
        const unsigned first = w * warpSize + static_cast<unsigned>(std::countr_zero(group.arrived));
        add("thread " + text(block.threads[first]->index) + of + " waits at " + group.call.text() + " with mask " +
            text(group.mask) + " for lanes " + text(group.mask & block.warps[w].live & ~group.arrived) +
            " of its warp, which never come");
      }
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
  for (const auto& block : blocks_) {
    for (const auto& thread : block->threads) thread->fiber.abandon();
  }
  throw std::runtime_error("cudasim: kernel " + kernel_ + ", " + sentence + " [schedule " + schedule.text() + "]");
}

}  // namespace

void fail(const std::string& sentence) { engine().fail(sentence); }
void* dynamic_shared() { return engine().dynamic_shared(); }
void* map_shared(const void* at, unsigned rank) { return engine().map_shared(at, rank); }
unsigned cluster_rank() { return engine().rank(); }
unsigned cluster_size() { return engine().size(); }
void arrive_cluster(const char* call, Where where) { engine().arrive_cluster({call, where}); }
void wait_cluster(const char* call, Where where) { engine().wait_cluster({call, where}); }
unsigned lane() { return engine().lane(); }

std::uint64_t meet_warp(const char* call, unsigned mask, std::uint64_t value, int source, Combine combine,
                        Where where) {
  return engine().meet_warp({call, where}, mask, value, source, combine);
}

Votes meet_block(const char* call, bool predicate, Where where) {
  return engine().meet_block({call, where}, predicate);
}

void launch_erased(const char* name, const void* kernel, unsigned cluster, dim3 grid, dim3 block,
                   std::size_t shared_bytes, void (*run)(void*), void* body) {
  Engine& one = engine();
  const std::lock_guard lock(one.mutex);
  if (one.in_kernel()) one.fail("a kernel launched a kernel, which the simulator does not run");
  if (!launch_allowed(kernel, cluster, grid, block, shared_bytes)) return;
  one.launch(name, cluster, grid, block, shared_bytes, run, body);
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
