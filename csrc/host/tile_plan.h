// Cuts a segment mask into tiles. Cost grows with rows of tiles, segments and partial tiles, never with pairs or full
// tiles.
//
// For each query tile: ranges [first, last) of key tiles that are full, every pair visible and all of it inside the
// lengths; then a list of the other key tiles that hold a visible pair, each with the number of a bitmap (a partial
// tile) or -1 (every pair inside the lengths is visible, but the tile reaches beyond them). The same transposed for
// each key tile. Ranges and lists ascend, except for the -1, of which a list has at most one: it comes first, where it
// follows the full tiles as the last of them. Bitmap layout: word [r][c / 32], bit c % 32 is the pair (row r, column c)
// of the tile; bits outside the lengths are 0.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <unordered_map>
#include <vector>

#include "host/segment_mask.h"

namespace pdkernels {

// All arrays are in one block, so that one copy moves a plan; each begins at a multiple of 32 words (128 bytes).
//
//   rows:    for each query tile, then for each key tile, four words: its ranges are the pairs [word 0, word 1) of
//            `lists`, its list the pairs [word 1, word 2); word 3 is a tile of the same side, those with most visits
//            first.
//   lists:   pairs of words, (first, last) of a range or (tile, bitmap).
//   bitmaps: block_q rows of block_k bits each.
struct TilePlan {
  enum Part { kRows, kLists, kBitmaps, kParts };
  struct Extent {
    int64_t begin, size;
  };

  std::vector<int32_t> words;
  std::array<Extent, kParts> extents{};
  int64_t visible_pairs = 0, visits = 0;
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
    single_.assign(k_tiles_, 0);
    repeated_.assign(k_tiles_ + 1, 0);
    touched_at_.assign(k_tiles_, -1);
    opened_.assign(k_tiles_, 0);
    rows_.reserve(4 * static_cast<size_t>(q_tiles_ + k_tiles_));
    for (int32_t tile = 0; tile < q_tiles_; ++tile) {
      collect_pieces(tile);
      count_pairs();
      emit_row_of_tiles(tile);
    }
    follow_columns(q_tiles_, {});
    emit_columns_of_tiles();
    write_order(0, q_tiles_, k_tiles_);
    write_order(q_tiles_, k_tiles_, q_tiles_);
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
      const int32_t stop = std::min(mask_.row_end(segment), end);
      if (stop <= row) continue;  // an empty segment
      const size_t first = spans_.size();
      mask_.append_spans(segment, row, spans_);
      const bool causal = mask_.inside(segment) == Inside::kCausal;
      pieces_.push_back({row - begin, stop - begin, first, spans_.size(), causal, mask_.column_of_row(row)});
      row = stop;
    }
  }

  // Visible pairs of each key tile: single_[t] plus the sum of repeated_ up to t; touched_ has the tiles where either
  // is not 0. A span takes O(1), however long it is.
  void count_pairs() {
    for (const Piece& piece : pieces_) {
      const int32_t rows = piece.row_end - piece.row_begin;
      for (size_t i = piece.first; i < piece.last; ++i) {
        const auto [begin, end] = spans_[i];
        const int32_t low = begin / block_k_, high = (end - 1) / block_k_;
        touch(low);
        if (low == high) {
          single_[low] += rows * (end - begin);
          continue;
        }
        touch(low + 1);
        touch(high);
        single_[low] += rows * ((low + 1) * block_k_ - begin);
        single_[high] += rows * (end - high * block_k_);
        repeated_[low + 1] += rows * block_k_;
        repeated_[high] -= rows * block_k_;
      }
      if (!piece.causal || piece.diagonal >= mask_.kv_len()) continue;
      const int32_t begin = std::max(piece.diagonal, 0), end = std::min(piece.diagonal + rows, mask_.kv_len());
      for (int32_t tile = begin / block_k_; tile * block_k_ < end; ++tile) {
        const int32_t low = std::max(begin, tile * block_k_), high = std::min(end, (tile + 1) * block_k_);
        touch(tile);
        single_[tile] += static_cast<int32_t>(pairs_of_triangle(piece.diagonal + 1 - low, rows, high - low));
      }
    }
  }

  void touch(int32_t tile) {
    if (touched_at_[tile] == now_) return;
    touched_at_[tile] = now_;
    touched_.push_back(tile);
  }

  // Sum over i < rows of (start + i) held to [0, width].
  static int64_t pairs_of_triangle(int64_t start, int64_t rows, int64_t width) {
    const auto below = [width](int64_t z) -> int64_t {  // the sum over all values up to z
      if (z <= 0) return 0;
      return z <= width ? z * (z + 1) / 2 : width * (width + 1) / 2 + (z - width) * width;
    };
    return below(start + rows - 1) - below(start - 1);
  }

  void emit_row_of_tiles(int32_t tile) {
    const int32_t rows = std::min(block_q_, mask_.q_len() - tile * block_q_);
    ++now_;
    if (touched_.size() * 4 < static_cast<size_t>(k_tiles_)) {
      std::sort(touched_.begin(), touched_.end());
    } else {
      touched_.resize(k_tiles_);
      std::iota(touched_.begin(), touched_.end(), 0);
    }
    ranges_.clear(), entries_.clear();
    bool ragged = false;  // the last key tile is one of those that count as full, but reach beyond the lengths
    const int64_t visits = visits_;
    int32_t repeated = 0, next = 0;
    const auto emit = [&](int32_t first, int32_t last, int32_t visible) {
      if (visible == 0 || first == last) return;
      visits_ += last - first;
      visible_pairs_ += int64_t{visible} * (last - first);
      const int32_t columns = std::min(block_k_, mask_.kv_len() - first * block_k_);
      if (visible < rows * columns) {
        const int32_t bitmap = bitmap_of(first * block_k_, columns);  // tiles in which no span begins or ends are alike
        for (int32_t key_tile = first; key_tile < last; ++key_tile) entries_.push_back({key_tile, bitmap});
      } else if (columns < block_k_) {
        ragged = true;
      } else if (!ranges_.empty() && ranges_.back().end == first) {
        ranges_.back().end = last;
      } else {
        ranges_.push_back({first, last});
      }
    };
    for (const int32_t key_tile : touched_) {
      emit(next, key_tile, repeated);
      repeated += repeated_[key_tile];
      emit(key_tile, key_tile + 1, repeated + single_[key_tile]);
      single_[key_tile] = repeated_[key_tile] = 0;
      next = key_tile + 1;
    }
    touched_.clear();

    const auto begin = static_cast<int32_t>(lists_.size());
    lists_.insert(lists_.end(), ranges_.begin(), ranges_.end());
    const auto middle = static_cast<int32_t>(lists_.size());
    if (ragged) lists_.push_back({k_tiles_ - 1, -1});
    lists_.insert(lists_.end(), entries_.begin(), entries_.end());
    rows_.insert(rows_.end(), {begin, middle, static_cast<int32_t>(lists_.size()), 0});
    row_visits_.push_back(static_cast<int32_t>(visits_ - visits));

    if (ragged) {
      if (!ranges_.empty() && ranges_.back().end == k_tiles_ - 1) {
        ranges_.back().end = k_tiles_;
      } else {
        ranges_.push_back({k_tiles_ - 1, k_tiles_});
      }
    }
    if (rows == block_q_) {
      follow_columns(tile, ranges_);
    } else {
      follow_columns(tile, {});
      for (const auto [first, last] : ranges_) {
        for (int32_t key_tile = first; key_tile < last; ++key_tile) column_entries_.push_back({key_tile, tile, -1});
      }
    }
    for (const auto [key_tile, bitmap] : entries_) partial_columns_.push_back({key_tile, tile, bitmap});
  }

  // Ranges of query tiles begin and end where the full tiles of a row of tiles differ from those of the row before.
  void follow_columns(int32_t row, const std::vector<KeySpan>& full) {
    for_difference(full_before_, full, [&](int32_t tile) { column_ranges_.push_back({tile, opened_[tile], row}); });
    for_difference(full, full_before_, [&](int32_t tile) { opened_[tile] = row; });
    full_before_ = full;
  }

  // Calls body(number) for all that are in `some` but not in `others`; both ascend.
  template <class Body>
  static void for_difference(const std::vector<KeySpan>& some, const std::vector<KeySpan>& others, const Body& body) {
    auto other = others.begin();
    for (const auto [first, last] : some) {
      for (int32_t at = first; at < last;) {
        while (other != others.end() && other->end <= at) ++other;
        const int32_t end = other == others.end() ? last : std::min(other->begin, last);
        for (; at < end; ++at) body(at);
        if (at < last) at = other->end;
      }
    }
  }

  // The transposed lists. Their entries are in the order of query tiles, so a stable sort by key tile suffices: ranges,
  // then a ragged last query tile, then partial ones.
  void emit_columns_of_tiles() {
    column_entries_.insert(column_entries_.end(), partial_columns_.begin(), partial_columns_.end());
    const auto begin = static_cast<int32_t>(lists_.size());
    std::vector<int32_t> ranges(k_tiles_, 0), entries(k_tiles_, 0);
    row_visits_.resize(q_tiles_ + k_tiles_, 0);
    for (const Column& column : column_ranges_) {
      ++ranges[column.tile];
      row_visits_[q_tiles_ + column.tile] += column.second - column.first;
    }
    for (const Column& column : column_entries_) {
      ++entries[column.tile];
      ++row_visits_[q_tiles_ + column.tile];
    }
    int32_t at = begin;
    for (int32_t tile = 0; tile < k_tiles_; ++tile) {
      const int32_t middle = at + ranges[tile], end = middle + entries[tile];
      rows_.insert(rows_.end(), {at, middle, end, 0});
      ranges[tile] = at, entries[tile] = middle, at = end;
    }
    lists_.resize(at);
    for (const Column& column : column_ranges_) lists_[ranges[column.tile]++] = {column.first, column.second};
    for (const Column& column : column_entries_) lists_[entries[column.tile]++] = {column.first, column.second};
  }

  // Tiles in descending order of visits, so that the longest does not start last.
  void write_order(int32_t begin, int32_t tiles, int32_t max_visits) {
    std::vector<int32_t> next(max_visits + 2, 0);
    for (int32_t tile = 0; tile < tiles; ++tile) ++next[max_visits - row_visits_[begin + tile] + 1];
    std::partial_sum(next.begin(), next.end(), next.begin());
    for (int32_t tile = 0; tile < tiles; ++tile) {
      const int32_t rank = next[max_visits - row_visits_[begin + tile]]++;
      rows_[4 * static_cast<size_t>(begin + rank) + 3] = tile;
    }
  }

  // A summary of the visible pairs of one key tile in a few words. Equal summaries mean equal bitmaps, so most bitmaps
  // are never built.
  int32_t bitmap_of(int32_t column, int32_t columns) {
    summary_.clear();
    const auto put = [&](int64_t value) { summary_.push_back(static_cast<char32_t>(static_cast<int32_t>(value))); };
    for (Piece& piece : pieces_) {
      // Tiles come in ascending order, so spans that ended before this tile are done with.
      while (piece.first < piece.last && spans_[piece.first].end <= column) ++piece.first;
      const bool triangle = piece.causal && piece.diagonal < column + columns &&
                            piece.diagonal + piece.row_end - piece.row_begin > column;
      size_t last = piece.first;
      while (last < piece.last && spans_[last].begin < column + columns) ++last;
      if (last == piece.first && !triangle) continue;
      put(piece.row_begin), put(piece.row_end), put(last - piece.first), put(triangle ? columns : 0),
          put(piece.diagonal - column);
      if (!triangle) summary_.back() = 0;
      for (size_t i = piece.first; i < last; ++i) {
        put(std::max(spans_[i].begin - column, 0)), put(std::min(spans_[i].end - column, columns));
      }
    }
    if (const auto known = by_summary_.find(summary_); known != by_summary_.end()) return known->second;
    paint();
    const auto [entry, is_new] = by_content_.try_emplace(bitmap_, static_cast<int32_t>(by_content_.size()));
    if (is_new) bitmaps_.insert(bitmaps_.end(), bitmap_.begin(), bitmap_.end());
    by_summary_.emplace(summary_, entry->second);
    return entry->second;
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

  TilePlan assemble() {
    static_assert(sizeof(KeySpan) == 2 * sizeof(int32_t));
    const std::array<std::pair<const void*, size_t>, TilePlan::kParts> parts{
        {{rows_.data(), rows_.size()}, {lists_.data(), 2 * lists_.size()}, {bitmaps_.data(), bitmaps_.size()}}};
    TilePlan plan;
    plan.visible_pairs = visible_pairs_, plan.visits = visits_;
    int64_t end = 0;
    for (int part = 0; part < TilePlan::kParts; ++part) {
      plan.extents[part] = {end, static_cast<int64_t>(parts[part].second)};
      end += (plan.extents[part].size + 31) / 32 * 32;
    }
    plan.words.resize(std::max<int64_t>(end, 1));  // Python does not accept empty buffers
    for (int part = 0; part < TilePlan::kParts; ++part) {
      if (parts[part].second == 0) continue;
      std::memcpy(plan.words.data() + plan.extents[part].begin, parts[part].first,
                  parts[part].second * sizeof(int32_t));
    }
    return plan;
  }

  // Of key tile `tile`: a range of query tiles, or a query tile and its bitmap.
  struct Column {
    int32_t tile, first, second;
  };

  const SegmentMask& mask_;
  const int32_t block_q_, block_k_, q_tiles_, k_tiles_, words_;

  std::vector<Piece> pieces_;
  std::vector<KeySpan> spans_;
  std::vector<int32_t> single_, repeated_, touched_, touched_at_;
  int32_t now_ = 0;
  std::u32string summary_, bitmap_;
  std::unordered_map<std::u32string, int32_t> by_summary_, by_content_;

  std::vector<KeySpan> ranges_, entries_, full_before_;  // of one row of tiles; entries are (tile, bitmap)
  std::vector<int32_t> opened_;  // for each key tile that the row before sees in full: the first such row of its run
  std::vector<Column> column_ranges_, column_entries_, partial_columns_;

  std::vector<int32_t> rows_, row_visits_, bitmaps_;
  std::vector<KeySpan> lists_;
  int64_t visible_pairs_ = 0, visits_ = 0;
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
