// Cuts a segment mask into tiles. Cost grows with tiles and with what the segments see, never with pairs.
//
// For each query tile: the key tiles that hold a visible pair, each with -1 (a full tile: every pair visible) or the
// number of a bitmap (a partial one); the same transposed for each key tile. In a ragged last tile "every pair" means
// every pair inside the lengths. Lists hold the full tiles first, ascending, then the partial ones, ascending: kernels
// need no mask up to the first tile that is partial or ragged, and a ragged full tile, being the last one, ends the
// full ones. Bitmap layout: word [r][c / 32], bit c % 32 is the pair (row r, column c) of the tile; bits outside the
// lengths are 0.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <string>
#include <unordered_map>
#include <vector>

#include "pdkernels/segment_mask.h"

namespace pdkernels {

// All arrays lie in one block, so that one copy moves a plan; each begins at a multiple of 32 words (128 bytes).
struct TilePlan {
  enum Part { kKvOffsets, kKvTiles, kKvBitmaps, kQOffsets, kQTiles, kQBitmaps, kQOrder, kKOrder, kBitmaps, kParts };
  struct Extent {
    int64_t begin, size;
  };

  std::vector<int32_t> words;
  std::array<Extent, kParts> extents{};
  int64_t visible_pairs = 0;
};

class TilePlanner {
 public:
  TilePlanner(const SegmentMask& mask, int32_t block_q, int32_t block_k)
      : mask_(mask),
        block_q_(block_q),
        block_k_(block_k),
        q_tiles_((mask.q_len() + block_q - 1) / block_q),
        k_tiles_((mask.kv_len() + block_k - 1) / block_k),
        words_((block_k + 31) / 32) {}

  TilePlan plan() {
    kv_offsets_.assign(1, 0);
    single_.assign(k_tiles_, 0);
    repeated_.assign(k_tiles_ + 1, 0);
    for (int32_t tile = 0; tile < q_tiles_; ++tile) {
      collect_pieces(tile);
      count_pairs();
      emit_row_of_tiles(std::min(block_q_, mask_.q_len() - tile * block_q_));
      kv_offsets_.push_back(static_cast<int32_t>(kv_tiles_list_.size()));
    }
    return assemble();
  }

 private:
  // Rows [row_begin, row_end) of the tile, all of one segment: each sees spans [first, last) and, if causal, the keys
  // from `diagonal` up to its own, where `diagonal` is the column of the token in row_begin.
  struct Piece {
    int32_t row_begin, row_end;
    size_t first, last;
    bool causal;
    int32_t diagonal;
  };

  void collect_pieces(int32_t tile) {
    pieces_.clear();
    spans_.clear();
    const int32_t begin = tile * block_q_, end = std::min(begin + block_q_, mask_.q_len());
    int32_t segment = mask_.segment_of_row(begin);
    for (int32_t row = begin; row < end; ++segment) {
      const int32_t behind = std::min(mask_.row_behind(segment), end);
      if (behind <= row) continue;  // an empty segment
      const size_t first = spans_.size();
      mask_.append_spans(segment, row, spans_);
      const bool causal = mask_.inside(segment) == Inside::kCausal;
      pieces_.push_back({row - begin, behind - begin, first, spans_.size(), causal, mask_.column_of_row(row)});
      row = behind;
    }
  }

  // Visible pairs of each key tile: single_[t] plus the sum of repeated_ up to t. A span costs O(1) however long it is.
  void count_pairs() {
    for (const Piece& piece : pieces_) {
      const int32_t rows = piece.row_end - piece.row_begin;
      for (size_t i = piece.first; i < piece.last; ++i) {
        const auto [begin, end] = spans_[i];
        const int32_t low = begin / block_k_, high = (end - 1) / block_k_;
        if (low == high) {
          single_[low] += rows * (end - begin);
          continue;
        }
        single_[low] += rows * ((low + 1) * block_k_ - begin);
        single_[high] += rows * (end - high * block_k_);
        repeated_[low + 1] += rows * block_k_;
        repeated_[high] -= rows * block_k_;
      }
      if (!piece.causal || piece.diagonal >= mask_.kv_len()) continue;
      const int32_t begin = std::max(piece.diagonal, 0), end = std::min(piece.diagonal + rows, mask_.kv_len());
      for (int32_t tile = begin / block_k_; tile * block_k_ < end; ++tile) {
        const int32_t low = std::max(begin, tile * block_k_), high = std::min(end, (tile + 1) * block_k_);
        single_[tile] += static_cast<int32_t>(pairs_of_triangle(piece.diagonal + 1 - low, rows, high - low));
      }
    }
  }

  // Sum over i < rows of (start + i) held to [0, width].
  static int64_t pairs_of_triangle(int64_t start, int64_t rows, int64_t width) {
    const auto below = [width](int64_t z) -> int64_t {  // the sum over all values up to z
      if (z <= 0) return 0;
      return z <= width ? z * (z + 1) / 2 : width * (width + 1) / 2 + (z - width) * width;
    };
    return below(start + rows - 1) - below(start - 1);
  }

  void emit_row_of_tiles(int32_t rows) {
    int32_t repeated = 0;
    for (int32_t tile = 0; tile < k_tiles_; ++tile) {
      repeated += repeated_[tile];
      const int32_t visible = single_[tile] + repeated;
      single_[tile] = repeated_[tile] = 0;
      if (visible == 0) continue;
      visible_pairs_ += visible;
      const int32_t columns = std::min(block_k_, mask_.kv_len() - tile * block_k_);
      if (visible == rows * columns) {
        kv_tiles_list_.push_back(tile);
        continue;
      }
      partial_tiles_.push_back(tile);
      partial_bitmaps_.push_back(bitmap_of(tile * block_k_, columns));
    }
    repeated_[k_tiles_] = 0;
    kv_bitmaps_list_.resize(kv_tiles_list_.size(), -1);
    kv_tiles_list_.insert(kv_tiles_list_.end(), partial_tiles_.begin(), partial_tiles_.end());
    kv_bitmaps_list_.insert(kv_bitmaps_list_.end(), partial_bitmaps_.begin(), partial_bitmaps_.end());
    partial_tiles_.clear();
    partial_bitmaps_.clear();
  }

  // What the pieces show of one key tile, in few words; equal words mean equal bitmaps, so most tiles are never
  // painted.
  int32_t bitmap_of(int32_t column, int32_t columns) {
    summary_.clear();
    const auto put = [&](int64_t value) { summary_.push_back(static_cast<char32_t>(static_cast<int32_t>(value))); };
    for (Piece& piece : pieces_) {
      // Tiles come in ascending order, so spans that ended before this tile are done with.
      while (piece.first < piece.last && spans_[piece.first].end <= column) ++piece.first;
      const bool triangle = piece.causal && piece.diagonal < column + columns &&
                            piece.diagonal + piece.row_end - piece.row_begin > column;
      size_t behind = piece.first;
      while (behind < piece.last && spans_[behind].begin < column + columns) ++behind;
      if (behind == piece.first && !triangle) continue;
      put(piece.row_begin), put(piece.row_end), put(behind - piece.first), put(triangle ? columns : 0),
          put(piece.diagonal - column);
      if (!triangle) summary_.back() = 0;
      for (size_t i = piece.first; i < behind; ++i) {
        put(std::max(spans_[i].begin - column, 0)), put(std::min(spans_[i].end - column, columns));
      }
    }
    if (const auto known = by_summary_.find(summary_); known != by_summary_.end()) return known->second;
    paint();
    const auto [place, is_new] = by_content_.try_emplace(bitmap_, static_cast<int32_t>(by_content_.size()));
    if (is_new) bitmaps_.insert(bitmaps_.end(), bitmap_.begin(), bitmap_.end());
    by_summary_.emplace(summary_, place->second);
    return place->second;
  }

  void paint() {
    bitmap_.assign(static_cast<size_t>(block_q_) * words_, 0);
    for (size_t at = 0; at < summary_.size();) {
      const auto next = [&] { return static_cast<int32_t>(summary_[at++]); };
      const int32_t row_begin = next(), row_end = next(), spans = next(), columns = next(), diagonal = next();
      char32_t* line = bitmap_.data() + static_cast<size_t>(row_begin) * words_;
      for (int32_t i = 0; i < spans; ++i) {
        const int32_t begin = next(), end = next();
        set_bits(line, begin, end);
      }
      for (int32_t row = row_begin + 1; row < row_end; ++row)
        std::copy(line, line + words_, line + (row - row_begin) * words_);
      if (columns == 0) continue;
      for (int32_t row = row_begin; row < row_end; ++row, line += words_) {
        set_bits(line, std::max(diagonal, 0), std::min(diagonal + row - row_begin + 1, columns));
      }
    }
  }

  static void set_bits(char32_t* words, int32_t begin, int32_t end) {
    for (int32_t low = begin; low < end;) {
      const int32_t high = std::min(end, (low / 32 + 1) * 32);
      words[low / 32] |= static_cast<char32_t>((~uint32_t{0} >> (32 - (high - low))) << (low % 32));
      low = high;
    }
  }

  // Tiles with the longest lists first: what takes longest must not start last.
  static std::vector<int32_t> longest_first(const std::vector<int32_t>& offsets) {
    std::vector<int32_t> order(offsets.size() - 1);
    std::iota(order.begin(), order.end(), 0);
    const auto length = [&](int32_t tile) { return offsets[tile + 1] - offsets[tile]; };
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return length(a) > length(b); });
    return order;
  }

  TilePlan assemble() {
    std::vector<int32_t> q_offsets(k_tiles_ + 1, 0), q_tiles(kv_tiles_list_.size()), q_bitmaps(kv_tiles_list_.size());
    std::vector<int32_t> full(k_tiles_, 0);
    for (size_t i = 0; i < kv_tiles_list_.size(); ++i) {
      ++q_offsets[kv_tiles_list_[i] + 1];
      full[kv_tiles_list_[i]] += kv_bitmaps_list_[i] < 0;
    }
    std::partial_sum(q_offsets.begin(), q_offsets.end(), q_offsets.begin());
    std::vector<int32_t> next_full(q_offsets.begin(), q_offsets.end() - 1), next_partial(next_full);
    for (int32_t tile = 0; tile < k_tiles_; ++tile) next_partial[tile] += full[tile];
    for (int32_t row = 0; row < q_tiles_; ++row) {
      for (int32_t i = kv_offsets_[row]; i < kv_offsets_[row + 1]; ++i) {
        const int32_t slot = (kv_bitmaps_list_[i] < 0 ? next_full : next_partial)[kv_tiles_list_[i]]++;
        q_tiles[slot] = row;
        q_bitmaps[slot] = kv_bitmaps_list_[i];
      }
    }
    const std::vector<int32_t> q_order = longest_first(kv_offsets_), k_order = longest_first(q_offsets);

    const std::array<const std::vector<int32_t>*, TilePlan::kParts> parts{
        &kv_offsets_, &kv_tiles_list_, &kv_bitmaps_list_, &q_offsets, &q_tiles,
        &q_bitmaps,   &q_order,        &k_order,          &bitmaps_};
    TilePlan plan;
    plan.visible_pairs = visible_pairs_;
    int64_t end = 0;
    for (int part = 0; part < TilePlan::kParts; ++part) {
      plan.extents[part] = {end, static_cast<int64_t>(parts[part]->size())};
      end += (plan.extents[part].size + 31) / 32 * 32;
    }
    plan.words.resize(end);
    for (int part = 0; part < TilePlan::kParts; ++part) {
      std::copy(parts[part]->begin(), parts[part]->end(), plan.words.begin() + plan.extents[part].begin);
    }
    return plan;
  }

  const SegmentMask& mask_;
  const int32_t block_q_, block_k_, q_tiles_, k_tiles_, words_;

  std::vector<Piece> pieces_;
  std::vector<KeySpan> spans_;
  std::vector<int32_t> single_, repeated_, partial_tiles_, partial_bitmaps_;
  std::u32string summary_, bitmap_;
  std::unordered_map<std::u32string, int32_t> by_summary_, by_content_;

  std::vector<int32_t> kv_offsets_, kv_tiles_list_, kv_bitmaps_list_, bitmaps_;
  int64_t visible_pairs_ = 0;
};

// Tile sizes are multiples of 16 and at most 1024.
inline TilePlan plan_tiles(const SegmentMask& mask, int64_t block_q, int64_t block_k) {
  for (const auto& [name, size] : {std::pair{"block_q", block_q}, {"block_k", block_k}}) {
    if (size < 16 || size > 1024 || size % 16 != 0) {
      fail_mask(std::string("plan: ") + name + " must be a multiple of 16 in [16, 1024], got " + std::to_string(size) +
                ".");
    }
  }
  return TilePlanner(mask, static_cast<int32_t>(block_q), static_cast<int32_t>(block_k)).plan();
}

}  // namespace pdkernels
