// Runs csrc/cpu/parallel.cpp without torch: every loop must cover its items once, whatever else happens in the process.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "parallel.h"

using pdkernels::cpu::parallel_for;

namespace {

thread_local int64_t threads = 4;

void require(bool fact, const char* what) {
  if (fact) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::_Exit(1);
}

// Not atomic: a checker of races sees two threads on one item, and results that are read before they are finished.
void cover(int64_t items, int64_t grain) {
  std::vector<int> seen(items, 0);
  parallel_for(3, 3 + items, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ++seen[i - 3];
  });
  for (int count : seen) require(count == 1, "an item was not visited once");
}

void nest() {
  std::vector<int64_t> sums(64, 0);
  parallel_for(0, 64, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto own = std::this_thread::get_id();
      parallel_for(0, 100, 1, [&](int64_t first, int64_t last) {
        require(std::this_thread::get_id() == own, "a loop inside a loop left its thread");
        for (int64_t j = first; j < last; ++j) sums[i] += j;
      });
    }
  });
  for (int64_t sum : sums) require(sum == 4950, "a loop inside a loop did not end before its outer one");
}

void throw_from(int64_t at) {
  std::atomic<int> running{0};
  try {
    parallel_for(0, 1000, 1, [&](int64_t begin, int64_t end) {
      ++running;
      for (int64_t i = begin; i < end; ++i) {
        if (i == at) {
          --running;
          throw std::runtime_error(std::to_string(at));
        }
      }
      --running;
    });
    require(false, "an exception was lost");
  } catch (const std::runtime_error& error) {
    require(error.what() == std::to_string(at), "another exception came");
    require(running == 0, "an exception came while ranges were running");
  }
}

// Whether another thread ever took part.
bool is_helped() {
  std::atomic<bool> helped{false};
  const auto own = std::this_thread::get_id();
  for (int attempt = 0; attempt < 2000 && !helped; ++attempt) {
    parallel_for(0, 16, 1, [&](int64_t, int64_t) {
      if (std::this_thread::get_id() != own) helped = true;
      usleep(100);
    });
  }
  return helped;
}

void many_callers() {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 24; ++caller) {
    callers.emplace_back([caller] {
      for (int i = 0; i < 200; ++i) {
        threads = 1 + (caller + i) % 5;
        cover(1 + i, 1 + caller % 3);
        if (i % 50 == caller) throw_from(i);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// Helpers that are stuck in one caller's ranges, as if the system had set them aside, must not hold up another caller.
void work_beside_stuck_helpers() {
  std::atomic<bool> free{false};
  std::thread stuck([&] {
    parallel_for(0, 16, 1, [&](int64_t, int64_t) {
      while (!free) usleep(100);
    });
  });
  for (int i = 0; i < 1000; ++i) cover(100, 1);
  free = true;
  stuck.join();
}

void fork_child() {
  const pid_t child = fork();
  if (child == 0) {
    for (int i = 0; i < 200; ++i) cover(100 + i, 1);
    std::_Exit(is_helped() ? 0 : 2);
  }
  int status = 0;
  waitpid(child, &status, 0);
  require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child did not run loops on threads of its own");
}

}  // namespace

int64_t pdkernels::cpu::max_threads() { return threads; }

int main(int argc, char**) {
  require(is_helped(), "no other thread took part");
  for (int i = 0; i < 5000; ++i) {
    threads = 1 + i % 7;
    cover(i % 300 + 1, 1 + i % 5);
  }
  threads = 100;
  for (int i = 0; i < 50; ++i) cover(1000, 1);
  threads = 4;
  nest();
  for (int64_t at : {0, 1, 499, 999}) throw_from(at);
  many_callers();
  work_beside_stuck_helpers();
  if (argc == 1) {  // sanitizers do not support threads in a forked child
    fork_child();
    std::thread(fork_child).join();
  }
  threads = 1;
  parallel_for(0, 100, 1,
               [](int64_t begin, int64_t end) { require(begin == 0 && end == 100, "one thread cuts a loop"); });
  std::puts("done");
}
