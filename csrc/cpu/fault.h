// The error message for a fault found in one sequence.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace pdkernels::cpu {

[[noreturn]] inline void fail(const char* op, const std::string& what) {
  throw std::invalid_argument("pdkernels." + std::string(op) + ": " + what);
}

[[noreturn]] inline void fail(const char* op, int64_t sequence, const std::string& argument,
                              const std::string& expectation, int64_t actual, const std::string& remedy) {
  fail(op, argument + " must " + expectation + ", got " + std::to_string(actual) + " for sequence " +
               std::to_string(sequence) + ". " + remedy);
}

}  // namespace pdkernels::cpu
