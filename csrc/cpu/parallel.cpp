// The threads behind parallel_for.
//
// A loop is cut into more chunks than threads, and a chunk runs on the thread that claims it first. The caller claims
// chunks too, so it only waits for chunks that another thread has begun. A thread that is not awake yet, or that the
// system preempts between chunks, delays nobody.
#include "parallel.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <atomic>
#include <exception>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace pdkernels::cpu {
namespace {

// Each chunk begins a stream of weights and fetches beyond its end.
constexpr int64_t kChunksPerThread = 2;
constexpr int64_t kLoops = 16;     // concurrent loops with helpers; any further loop runs on its caller alone
constexpr int64_t kHelpers = 511;  // per loop
constexpr int64_t kWoken = 2;      // threads that the caller wakes, as does each helper while more are needed

// Decoding starts a loop every few microseconds; waking a thread for each costs more than spinning until the next one.
constexpr int64_t kIdleSpin = 100'000, kWakingTime = 300'000;  // ns
// A spinning thread that sees the clock jump this far was preempted: other threads need its core, so it stops spinning.
constexpr int64_t kPreempted = 100'000;
constexpr int kModestRounds = 64;  // waits without spinning after a preemption

using Word = std::atomic<uint32_t>;

#ifdef __linux__
void sleep_while(Word& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake(Word& word, int64_t count) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, static_cast<int>(count), nullptr, nullptr, 0);
}
#else
void sleep_while(Word& word, uint32_t value) { word.wait(value); }
void wake(Word& word, int64_t count) { count > 1 ? word.notify_all() : word.notify_one(); }
#endif

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Rounding mode and flushing of subnormals of this thread: results must not depend on the thread that computes them.
uint64_t float_control() {
#if defined(__x86_64__)
  return _mm_getcsr() & ~uint32_t{0x3f};  // without the exception flags
#elif defined(__aarch64__)
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  return control;
#else
  return 0;
#endif
}
void set_float_control([[maybe_unused]] uint64_t control) {
  if (control == float_control()) return;
#if defined(__x86_64__)
  _mm_setcsr(static_cast<uint32_t>(control));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" ::"r"(control));
#endif
}

thread_local bool inside_a_loop = false;

// A loop lives on the stack of its caller until all chunks are finished.
struct Loop {
  RangeFunction function;
  void* context;
  int64_t begin, items, chunks;
  uint64_t floats;
  std::atomic<bool> failed{false};
  std::exception_ptr error{};

  int64_t start_of(int64_t chunk) const { return begin + items / chunks * chunk + std::min(chunk, items % chunks); }

  void run(int64_t chunk) {
    if (failed.load(std::memory_order_relaxed)) return;
    try {
      function(start_of(chunk), start_of(chunk + 1), context);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  }
};

// A slot in which a loop is offered to other threads. Slots are reused: a late thread finds another generation in
// `claims` and claims nothing.
struct alignas(64) Place {
  static constexpr int kOfHelpers = 22, kOfGeneration = 32;
  static constexpr uint64_t kChunk = 1, kHelper = uint64_t{1} << kOfHelpers, kGeneration = uint64_t{1} << kOfGeneration;
  static constexpr uint64_t kChunks = kHelper - 1, kHelpersWanted = (kGeneration - 1) & ~kChunks;
  static constexpr uint32_t kCallerSleeps = uint32_t{1} << 31;

  std::atomic<bool> taken;
  std::atomic<uint64_t> claims;  // generation, helpers wanted, unclaimed chunks
  std::atomic<Loop*> loop;
  Word unfinished;  // chunks, and kCallerSleeps

  uint64_t open(Loop& offered, int64_t helpers) {
    loop.store(&offered, std::memory_order_relaxed);
    unfinished.store(static_cast<uint32_t>(offered.chunks), std::memory_order_relaxed);
    const uint64_t generation = (claims.load(std::memory_order_relaxed) >> kOfGeneration) + 1;
    claims.store(generation << kOfGeneration | static_cast<uint64_t>(helpers) << kOfHelpers |
                     static_cast<uint64_t>(offered.chunks),
                 std::memory_order_release);
    return generation << kOfGeneration >> kOfGeneration;
  }

  int64_t claim(uint64_t generation, const Loop& of) {
    uint64_t seen = claims.load(std::memory_order_relaxed);
    while (seen >> kOfGeneration == generation && (seen & kChunks) != 0) {
      if (claims.compare_exchange_weak(seen, seen - kChunk, std::memory_order_acq_rel)) {
        return of.chunks - static_cast<int64_t>(seen & kChunks);
      }
    }
    return -1;
  }

  // Runs `chunk` and then any unclaimed chunks. The loop may be destroyed as soon as its last chunk is counted as
  // finished.
  void run_from(int64_t chunk, uint64_t generation, Loop& own) {
    uint32_t finished = 0;
    inside_a_loop = true;
    for (; chunk >= 0; chunk = claim(generation, own), ++finished) own.run(chunk);
    inside_a_loop = false;
    if (finished == 0) return;
    if (unfinished.fetch_sub(finished, std::memory_order_acq_rel) == (finished | kCallerSleeps)) wake(unfinished, 1);
  }

  bool done() const { return (unfinished.load(std::memory_order_acquire) & ~kCallerSleeps) == 0; }

  void wait(int64_t patience) {
    for (const int64_t start = now(); now() - start < patience;) {
      for (int i = 0; i < 16; ++i, pause()) {
        if (done()) return;
      }
    }
    uint32_t left = unfinished.fetch_or(kCallerSleeps, std::memory_order_acq_rel) | kCallerSleeps;
    for (; left != kCallerSleeps; left = unfinished.load(std::memory_order_acquire)) sleep_while(unfinished, left);
  }
};

struct alignas(64) Alone {
  Word word;
};

// Static and trivially destroyed: the threads run until the process ends.
Place places[kLoops];
Alone published;  // counts loops; idle threads look at it, or sleep on it
Alone sleepers;
std::atomic<int64_t> places_used, threads_started;
std::atomic<bool> starting, refused;

// A forked child has neither these threads nor the loops of other callers.
void forget_threads() {
  for (Place& place : places) {
    place.claims.store(0, std::memory_order_relaxed);
    place.taken.store(false, std::memory_order_relaxed);
  }
  sleepers.word.store(0, std::memory_order_relaxed);
  threads_started.store(0, std::memory_order_relaxed);
  starting.store(false, std::memory_order_relaxed);
  refused.store(false, std::memory_order_relaxed);
}

void call_for_help(int64_t helpers) {
  if (sleepers.word.load() > 0) wake(published.word, std::min(helpers, kWoken));
}

bool help(Place& place) {
  Loop* loop;
  uint64_t seen = place.claims.load(std::memory_order_acquire);
  do {
    if ((seen & Place::kChunks) == 0 || (seen & Place::kHelpersWanted) == 0) return false;
    loop = place.loop.load(std::memory_order_relaxed);  // of this generation, if the exchange succeeds
  } while (!place.claims.compare_exchange_weak(seen, seen - Place::kHelper - Place::kChunk, std::memory_order_acq_rel,
                                               std::memory_order_acquire));
  set_float_control(loop->floats);
  const auto helpers = static_cast<int64_t>((seen & Place::kHelpersWanted) >> Place::kOfHelpers) - 1;
  if (helpers > 0 && (seen & Place::kChunks) > 1) call_for_help(helpers);
  place.run_from(loop->chunks - static_cast<int64_t>(seen & Place::kChunks), seen >> Place::kOfGeneration, *loop);
  return true;
}

// Returns once another loop was published after `seen`.
class Idle {
 public:
  void wait(uint32_t seen) {
    const int64_t start = now();
    if (modest_ > 0) {
      --modest_;
    } else if (spins_ && spin(seen, start)) {
      return;
    }
    const bool in_vain = spins_;
    sleepers.word.fetch_add(1);
    while (published.word.load() == seen) sleep_while(published.word, seen);
    sleepers.word.fetch_sub(1);
    spins_ = !in_vain && now() - start < kWakingTime + kIdleSpin;  // spinning would have been cheaper
  }

 private:
  bool spin(uint32_t seen, int64_t start) {
    for (int64_t last = start, time; last - start < kIdleSpin; last = time) {
      for (int i = 0; i < 32; ++i, pause()) {
        if (published.word.load(std::memory_order_relaxed) != seen) return true;
      }
      time = now();
      if (time - last > kPreempted) {
        modest_ = kModestRounds;
        return false;
      }
    }
    return false;
  }

  bool spins_ = true;
  int modest_ = 0;
};

void* work(void*) {
  for (Idle idle;;) {
    const uint32_t seen = published.word.load();
    bool helped = false;
    for (int64_t i = 0; i < places_used.load(std::memory_order_acquire); ++i) helped |= help(places[i]);
    if (!helped) idle.wait(seen);
  }
}

bool start_thread() {
  pthread_attr_t attributes;
  if (pthread_attr_init(&attributes) != 0) return false;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_t thread;
  const bool started = pthread_create(&thread, &attributes, work, nullptr) == 0;
  pthread_attr_destroy(&attributes);
#ifdef __linux__
  if (started) pthread_setname_np(thread, "pdkernels");
#endif
  return started;
}

void start_threads(int64_t count) {
  if (threads_started.load(std::memory_order_relaxed) >= count || refused.load(std::memory_order_relaxed)) return;
  if (starting.exchange(true, std::memory_order_acquire)) return;
  static const int registered = pthread_atfork(nullptr, nullptr, forget_threads);
  // Signals are handled by the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (registered == 0 && threads_started.load(std::memory_order_relaxed) < count) {
    if (!start_thread()) {
      refused.store(true, std::memory_order_relaxed);
      break;
    }
    threads_started.fetch_add(1, std::memory_order_relaxed);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  starting.store(false, std::memory_order_release);
}

Place* take_place(int64_t helpers) {
  static const int64_t cores = sysconf(_SC_NPROCESSORS_ONLN);
  for (int64_t i = 0; i < kLoops; ++i) {
    Place& place = places[i];
    if (place.taken.load(std::memory_order_relaxed) || place.taken.exchange(true, std::memory_order_acquire)) continue;
    if (places_used.load(std::memory_order_relaxed) <= i) places_used.store(i + 1, std::memory_order_release);
    // Other callers need helpers too, as long as there are cores for them.
    start_threads(std::min(kHelpers, std::max(helpers, std::min((i + 1) * helpers, cores - 1))));
    return &place;
  }
  return nullptr;
}

}  // namespace

void run_parallel(int64_t begin, int64_t end, int64_t grain, RangeFunction function, void* context) {
  const int64_t items = end - begin, size = std::max<int64_t>(1, grain);
  const int64_t threads =
      inside_a_loop ? 1 : std::min((items + size - 1) / size, std::min(max_threads(), kHelpers + 1));
  Place* place = threads > 1 ? take_place(threads - 1) : nullptr;
  if (place == nullptr) return function(begin, end, context);

  const int64_t start = now(), min_items = std::max<int64_t>(1, size / kChunksPerThread);
  Loop loop{
      function,       context, begin, items, std::min(threads * kChunksPerThread, (items + min_items - 1) / min_items),
      float_control()};
  const uint64_t generation = place->open(loop, threads - 1);
  published.word.fetch_add(1);
  call_for_help(threads - 1);
  place->run_from(place->claim(generation, loop), generation, loop);
  if (!place->done()) place->wait(std::clamp<int64_t>((now() - start) / 4, 20'000, 1'000'000));
  place->taken.store(false, std::memory_order_release);
  if (loop.error) std::rethrow_exception(loop.error);
}

}  // namespace pdkernels::cpu
