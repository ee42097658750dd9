// Warp, block and cluster collectives. As in CUDA every live lane named in the mask has to make the same call with the
// same mask; here a violation is an error with both source lines instead of undefined behaviour.
#pragma once

#include <bit>
#include <concepts>
#include <cstring>
#include <functional>

#include "engine.h"

namespace cudasim {

template <class T, class... Choices>
concept OneOf = (std::same_as<T, Choices> || ...);

// What __shfl_sync actually moves: 32 or 64 bits. Smaller integers are promoted to int, as nvcc's overloads do.
template <class T>
concept Shuffled = std::is_arithmetic_v<T> && sizeof(T) <= 8;
template <Shuffled T>
using Promoted = decltype(+T{});

template <class T>
std::uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
T from_bits(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A lane that reads from one that did not take part gets garbage, since CUDA leaves that value undefined.
inline constexpr std::uint64_t kUndefinedValue = 0xbadbadbadbadbad1u;

inline void combine_shuffle(LaneSlot* lanes, unsigned arrived) {
  for (int l = 0; l < warpSize; ++l) {
    if (!(arrived >> l & 1)) continue;
    const int source = lanes[l].source;
    lanes[l].result = arrived >> source & 1 ? lanes[source].value : kUndefinedValue;
  }
}

inline void combine_ballot(LaneSlot* lanes, unsigned arrived) {
  unsigned yes = 0;
  for (int l = 0; l < warpSize; ++l) {
    if ((arrived >> l & 1) && lanes[l].value) yes |= 1u << l;
  }
  // The high half tells __all_sync which lanes took part.
  for (int l = 0; l < warpSize; ++l) {
    if (arrived >> l & 1) lanes[l].result = yes | std::uint64_t{arrived} << 32;
  }
}

inline void combine_match(LaneSlot* lanes, unsigned arrived) {
  for (int l = 0; l < warpSize; ++l) {
    if (!(arrived >> l & 1)) continue;
    unsigned same = 0;
    for (int other = 0; other < warpSize; ++other) {
      if ((arrived >> other & 1) && lanes[other].value == lanes[l].value) same |= 1u << other;
    }
    lanes[l].result = same | std::uint64_t{arrived} << 32;
  }
}

template <class T, class Fold>
void combine_fold(LaneSlot* lanes, unsigned arrived) {
  T total = from_bits<T>(lanes[std::countr_zero(arrived)].value);
  for (int l = std::countr_zero(arrived) + 1; l < warpSize; ++l) {
    if (arrived >> l & 1) total = Fold{}(total, from_bits<T>(lanes[l].value));
  }
  for (int l = 0; l < warpSize; ++l) {
    if (arrived >> l & 1) lanes[l].result = to_bits(total);
  }
}

template <class T>
Promoted<T> shuffle(const char* call, unsigned mask, T value, int source, Where where) {
  const Promoted<T> wide = value;
  return from_bits<Promoted<T>>(meet_warp(call, mask, to_bits(wide), source, combine_shuffle, where));
}

inline int segment_end(int width, const char* call) {
  if (width < 1 || width > warpSize || !std::has_single_bit(static_cast<unsigned>(width))) {
    fail(std::string(call) + " has width " + std::to_string(width) + "; it must be a power of two up to 32");
  }
  return static_cast<int>(lane()) | (width - 1);
}

inline std::uint64_t ballot(const char* call, unsigned mask, bool predicate, Where where) {
  return meet_warp(call, mask, predicate, 0, combine_ballot, where);
}

template <class T, class Fold>
T reduce(const char* call, unsigned mask, T value, Where where) {
  return from_bits<T>(meet_warp(call, mask, to_bits(value), 0, combine_fold<T, Fold>, where));
}

struct FoldAdd {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
  }  // wraps
};
struct FoldMin {
  template <class T>
  T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};
struct FoldMax {
  template <class T>
  T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

}  // namespace cudasim

#define CUDASIM_WHERE cudasim::Where where = cudasim::Where::current()

template <cudasim::Shuffled T>
auto __shfl_sync(unsigned mask, T value, int source, int width = warpSize, CUDASIM_WHERE) {
  const int last = cudasim::segment_end(width, "__shfl_sync");
  return cudasim::shuffle("__shfl_sync", mask, value, (last & ~(width - 1)) | (source & (width - 1)), where);
}

template <cudasim::Shuffled T>
auto __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, CUDASIM_WHERE) {
  const int first = cudasim::segment_end(width, "__shfl_up_sync") & ~(width - 1);
  const int self = static_cast<int>(cudasim::lane());
  const std::int64_t source = self - static_cast<std::int64_t>(delta);
  return cudasim::shuffle("__shfl_up_sync", mask, value, source < first ? self : static_cast<int>(source), where);
}

template <cudasim::Shuffled T>
auto __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, CUDASIM_WHERE) {
  const int last = cudasim::segment_end(width, "__shfl_down_sync");
  const int self = static_cast<int>(cudasim::lane());
  const std::int64_t source = self + static_cast<std::int64_t>(delta);
  return cudasim::shuffle("__shfl_down_sync", mask, value, source > last ? self : static_cast<int>(source), where);
}

template <cudasim::Shuffled T>
auto __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize, CUDASIM_WHERE) {
  const int last = cudasim::segment_end(width, "__shfl_xor_sync");
  const int self = static_cast<int>(cudasim::lane());
  const int source = self ^ (lane_mask & (warpSize - 1));  // may read an earlier segment, never a later one
  return cudasim::shuffle("__shfl_xor_sync", mask, value, source > last ? self : source, where);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, CUDASIM_WHERE) {
  return static_cast<unsigned>(cudasim::ballot("__ballot_sync", mask, predicate != 0, where));
}
inline int __any_sync(unsigned mask, int predicate, CUDASIM_WHERE) {
  return static_cast<unsigned>(cudasim::ballot("__any_sync", mask, predicate != 0, where)) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUDASIM_WHERE) {
  const std::uint64_t votes = cudasim::ballot("__all_sync", mask, predicate != 0, where);
  return static_cast<unsigned>(votes) == static_cast<unsigned>(votes >> 32);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, CUDASIM_WHERE) {
  cudasim::ballot("__syncwarp", mask, false, where);
}
// CUDA promises only the calling lane, so code that relies on a converged warp fails here.
inline unsigned __activemask() { return 1u << cudasim::lane(); }

template <cudasim::Shuffled T>
unsigned __match_any_sync(unsigned mask, T value, CUDASIM_WHERE) {
  return static_cast<unsigned>(
      cudasim::meet_warp("__match_any_sync", mask, cudasim::to_bits(value), 0, cudasim::combine_match, where));
}
template <cudasim::Shuffled T>
unsigned __match_all_sync(unsigned mask, T value, int* all_same, CUDASIM_WHERE) {
  const std::uint64_t same =
      cudasim::meet_warp("__match_all_sync", mask, cudasim::to_bits(value), 0, cudasim::combine_match, where);
  *all_same = static_cast<unsigned>(same) == static_cast<unsigned>(same >> 32);
  return *all_same ? static_cast<unsigned>(same) : 0;
}

#define CUDASIM_REDUCE(name, Fold, ...)                         \
  template <cudasim::OneOf<__VA_ARGS__> T>                      \
  T name(unsigned mask, T value, CUDASIM_WHERE) {               \
    return cudasim::reduce<T, Fold>(#name, mask, value, where); \
  }
CUDASIM_REDUCE(__reduce_add_sync, cudasim::FoldAdd, int, unsigned)
CUDASIM_REDUCE(__reduce_min_sync, cudasim::FoldMin, int, unsigned)
CUDASIM_REDUCE(__reduce_max_sync, cudasim::FoldMax, int, unsigned)
CUDASIM_REDUCE(__reduce_and_sync, std::bit_and<>, unsigned)
CUDASIM_REDUCE(__reduce_or_sync, std::bit_or<>, unsigned)
CUDASIM_REDUCE(__reduce_xor_sync, std::bit_xor<>, unsigned)
#undef CUDASIM_REDUCE

inline void __syncthreads(CUDASIM_WHERE) { cudasim::meet_block("__syncthreads", false, where); }
inline int __syncthreads_count(int predicate, CUDASIM_WHERE) {
  return cudasim::meet_block("__syncthreads_count", predicate != 0, where).yes;
}
inline int __syncthreads_or(int predicate, CUDASIM_WHERE) {
  return cudasim::meet_block("__syncthreads_or", predicate != 0, where).yes != 0;
}
inline int __syncthreads_and(int predicate, CUDASIM_WHERE) {
  const cudasim::Votes votes = cudasim::meet_block("__syncthreads_and", predicate != 0, where);
  return votes.yes == votes.threads;
}

inline unsigned __clusterRelativeBlockRank() { return cudasim::cluster_rank(); }
inline unsigned __clusterSizeInBlocks() { return cudasim::cluster_size(); }
inline void* __cluster_map_shared_rank(const void* at, unsigned rank) { return cudasim::map_shared(at, rank); }
inline void __cluster_barrier_arrive(CUDASIM_WHERE) { cudasim::arrive_cluster("__cluster_barrier_arrive", where); }
inline void __cluster_barrier_arrive_relaxed(CUDASIM_WHERE) {
  cudasim::arrive_cluster("__cluster_barrier_arrive_relaxed", where);
}
inline void __cluster_barrier_wait(CUDASIM_WHERE) { cudasim::wait_cluster("__cluster_barrier_wait", where); }

#undef CUDASIM_WHERE
