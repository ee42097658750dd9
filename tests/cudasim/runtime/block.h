// A block and its threads, as the engine runs them.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_runtime.h"
#include "fibers.h"
#include "shared_memory.h"

namespace cudasim {

inline std::string text(uint3 v) {
  return "(" + std::to_string(v.x) + ", " + std::to_string(v.y) + ", " + std::to_string(v.z) + ")";
}

inline std::string text(unsigned mask) {
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
  // Of the cluster's barrier.
  bool arrived = false, waits = false;
  std::uint64_t phase = 0;  // in which it arrived
};

struct Barrier {
  unsigned waiting = 0;
  int yes = 0;
  Call call;
  Votes outcome{};  // of the last meeting: the next cannot complete before all have read this one
};

struct Block {
  uint3 index{};
  unsigned rank = 0;  // in its cluster
  std::vector<std::unique_ptr<Thread>> threads;
  std::array<Warp, kMaxThreadsPerBlock / warpSize> warps;
  unsigned ready_warps = 0;
  unsigned live = 0;
  bool started = false;
  Barrier barrier;
  DynamicShared dynamic;
  SavedShared statics;  // while another block of the cluster runs

  void prepare(dim3 shape, void (*entry)()) {
    const unsigned count = shape.x * shape.y * shape.z;
    while (threads.size() < count) threads.push_back(std::make_unique<Thread>(entry));
    for (unsigned t = 0; t < count; ++t) {
      Thread& thread = *threads[t];
      thread.index = {t % shape.x, t / shape.x % shape.y, t / shape.x / shape.y};
      thread.warp = t / warpSize;
      thread.lane = t % warpSize;
    }
  }
  void reset(uint3 at, unsigned count) {
    index = at, live = count, started = false, barrier = {}, ready_warps = 0;
    for (unsigned t = 0; t < count; ++t) threads[t]->arrived = threads[t]->waits = false;
    for (unsigned w = 0; w * warpSize < count; ++w) {
      const unsigned left = count - w * warpSize;
      warps[w].live = left >= warpSize ? ~0u : (1u << left) - 1;
      warps[w].ready = 0;
      warps[w].groups_waiting = 0;
      set_ready(w, warps[w].live);
    }
  }
  void set_ready(unsigned warp, unsigned lanes) {
    warps[warp].ready |= lanes;
    if (warps[warp].ready != 0) ready_warps |= 1u << warp;
  }
  void clear_ready(unsigned warp, unsigned lanes) {
    warps[warp].ready &= ~lanes;
    if (warps[warp].ready == 0) ready_warps &= ~(1u << warp);
  }
};

}  // namespace cudasim
