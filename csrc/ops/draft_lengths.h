// The lengths of drafts that pay, shared by the CPU and the CUDA kernel: pdkernels/ops/draft_lengths.py.
#pragma once

#include "common/index_view.h"

namespace pdkernels {

// A tensor of any strides, in elements.
template <class T>
struct Numbers {
  T* data = nullptr;
  int64_t strides[3] = {0, 0, 0};

  PDK_HD T& at(int64_t i, int64_t j = 0, int64_t k = 0) const {
    return data[i * strides[0] + j * strides[1] + k * strides[2]];
  }
};

struct DraftLengthsArgs {
  // What a call keeps of each sequence.
  struct Memory {
    double* chance;  // [batch]: that the guesses taken so far and the next one are all accepted
    int64_t* room;   // [batch]: guesses that it may have
    int64_t* taken;  // [batch]
  };

  IndexView lengths;              // of the last draft, then of the next one
  IndexView accepted, remaining;  // of the last draft; of the sequence
  Numbers<double> seen;           // [batch][2][slots]: acceptances, and how often a place was reached
  Numbers<double> balance;        // [batch]
  Numbers<const bool> ready;      // [batch]
  Numbers<const double> costs;    // [2][at least batch * slots]: of rows without and with guesses
  int64_t batch = 0;
  int64_t slots = 0;
  double wake = 0, of_sequence = 0, of_guess = 0, kept = 0, hope = 0, slack = 0;
  bool padded = false;

  static constexpr int64_t kMostSequences = 1024, kMostSlots = 256;

  PDK_HD int64_t memory_bytes() const { return 24 * batch; }
  PDK_HD Memory memory(void* base) const {
    auto* numbers = static_cast<double*>(base);
    auto* counts = reinterpret_cast<int64_t*>(numbers + batch);
    return {numbers, counts, counts + batch};
  }

  // Bad values are clamped; on the CPU they have already been refused.
  PDK_HD static int64_t clamped(int64_t value, int64_t most) { return value < 0 ? 0 : value > most ? most : value; }

  PDK_HD double seconds(int64_t sequences, int64_t guesses) const {
    const double step = costs.at(guesses > 0, sequences + guesses - 1);
    return step + of_guess * static_cast<double>(guesses) + of_sequence * static_cast<double>(sequences - 1);
  }
  // What a token more saves: its share of a step where all advance alike, by drafts of one length; else between that
  // and what the step takes less without its sequence, if the others go on.
  PDK_HD double token(int64_t sequences) const {
    const double step = seconds(sequences, 0), share = step / static_cast<double>(sequences);
    if (padded) return share;
    const double alone = sequences > 1 ? step - seconds(sequences - 1, 0) : share;
    return (share + (alone < 0 ? 0 : alone < share ? alone : share)) / 2;
  }
  // What the guesses of a step cost, in tokens.
  PDK_HD double extra(int64_t sequences, int64_t guesses) const {
    return (seconds(sequences, guesses) - seconds(sequences, 0)) / token(sequences);
  }

  // Counts the last draft of a sequence.
  PDK_HD void count(int64_t b) const {
    const int64_t own = clamped(lengths.load(b), slots), right = clamped(accepted.load(b), own);
    for (int64_t place = 0; place < slots; ++place) {
      double &count = seen.at(b, 0, place), &reached = seen.at(b, 1, place);
      count = kept * count + (place < own && place < right ? 1 : 0);
      reached = kept * reached + (place < own && place <= right ? 1 : 0);
    }
  }

  // Pays for the last step: the sequences that took part share what is left.
  PDK_HD void pay() const {
    int64_t ran = 0, guesses = 0, longest = 0;
    double pool = 0;
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t own = clamped(lengths.load(b), slots), right = clamped(accepted.load(b), own);
      if (own == 0) continue;
      ++ran, guesses += own - 1, longest = own - 1 > longest ? own - 1 : longest;
      pool += balance.at(b) + static_cast<double>(right) * (1 + slack) - 1 - (own == 1 && ready.at(b) ? wake : 0);
    }
    if (ran == 0) return;
    if (guesses > 0) pool -= extra(ran, padded ? ran * longest : guesses);
    for (int64_t b = 0; b < batch; ++b) {
      if (clamped(lengths.load(b), slots) > 0) balance.at(b) = pool / static_cast<double>(ran);
    }
  }

  // That the guess for a place is accepted if all before it are, with one imagined draft.
  PDK_HD double share(int64_t b, int64_t place) const {
    return (seen.at(b, 0, place) + (place > 0 ? hope : 1)) / (seen.at(b, 1, place) + 1);
  }

  PDK_HD void restart(const Memory& memory, int64_t b) const {
    memory.taken[b] = 0;
    memory.chance[b] = share(b, 0) * (slots > 1 ? share(b, 1) : 0);
  }
  // Gives a sequence its next guess.
  PDK_HD void take(const Memory& memory, int64_t b) const {
    const int64_t next = ++memory.taken[b] + 1;
    if (next < slots) memory.chance[b] *= share(b, next);
  }
  // The sequence whose next guess is most likely; on ties the one with fewer, then the first.
  PDK_HD int64_t next(const Memory& memory) const {
    int64_t best = -1;
    for (int64_t b = 0; b < batch; ++b) {
      if (memory.taken[b] >= memory.room[b]) continue;
      const double difference = best < 0 ? 1 : memory.chance[b] - memory.chance[best];
      if (difference > 0 || (difference == 0 && memory.taken[b] < memory.taken[best])) best = b;
    }
    return best;
  }

  // Shares rows among `live` sequences, whose guesses may cost `spare` tokens.
  PDK_HD void choose_rows(const Memory& memory, int64_t live, double spare) const {
    double tokens = static_cast<double>(live), worth = 1;  // tokens over the cost of the step, in tokens
    int64_t best = 0;
    for (int64_t total = 1, b = next(memory); b >= 0; ++total, b = next(memory)) {
      tokens += memory.chance[b];
      take(memory, b);
      const double cost = extra(live, total), found = tokens / (static_cast<double>(live) + cost);
      if (cost <= spare && found > worth) worth = found, best = total;
    }
    for (int64_t b = 0; b < batch; ++b) restart(memory, b);
    for (int64_t total = 0; total < best; ++total) take(memory, next(memory));
  }

  // Chooses one length for all.
  PDK_HD void choose_width(const Memory& memory, int64_t live, double spare) const {
    double tokens = static_cast<double>(live), worth = 1;
    int64_t width = 0;
    for (int64_t guesses = 1; guesses < slots; ++guesses) {
      bool more = false;
      for (int64_t b = 0; b < batch; ++b) {
        if (memory.taken[b] >= memory.room[b]) continue;
        tokens += memory.chance[b], more = true;
        take(memory, b);
      }
      if (!more) break;
      const double cost = extra(live, live * guesses), found = tokens / (static_cast<double>(live) + cost);
      if (cost <= spare && found > worth) worth = found, width = guesses;
    }
    for (int64_t b = 0; b < batch; ++b) memory.taken[b] = clamped(width, memory.room[b]);
  }

  // After all sequences have been counted.
  PDK_HD void choose(const Memory& memory) const {
    pay();
    int64_t live = 0;
    double spare = 0;
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t left = remaining.load(b);
      memory.room[b] = left > 0 ? clamped(left, slots) - 1 : 0;
      restart(memory, b);
      if (left > 0) ++live, spare += balance.at(b) + slack - (ready.at(b) ? 0 : wake);
    }
    if (live > 0) padded ? choose_width(memory, live, spare) : choose_rows(memory, live, spare);
    for (int64_t b = 0; b < batch; ++b) lengths.store(remaining.load(b) > 0 ? memory.taken[b] + 1 : 0, b);
  }
};

PDK_KERNEL(draft_lengths, DraftLengthsArgs)

}  // namespace pdkernels
