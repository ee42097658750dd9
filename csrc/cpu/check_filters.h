// The values of LogitFilters that kernels rely on.
#pragma once

#include "common/logit_filters.h"
#include "fault.h"

namespace pdkernels::cpu {

// Throws if an id is out of range.
inline void check_filters(const char* op, const LogitFilters& filters, int64_t rows, int64_t width) {
  const auto check = [&](const char* name, const SharedIds& given, int64_t least) {
    for (int64_t r = 0; r < rows && given.count > 0; r += given.span) {
      for (int64_t i = 0; i < given.count; ++i) {
        const int64_t id = given.at(r, i);
        if (id >= least && id < width) continue;
        fail(op, std::string(name) + " must hold ids in [" + std::to_string(least) + ", " + std::to_string(width - 1) +
                     "], got " + std::to_string(id) + " for row " + std::to_string(r) + ".");
      }
    }
  };
  check("recent", filters.recent, -1 - width);
  check("banned", filters.banned, -1);
}

}  // namespace pdkernels::cpu
