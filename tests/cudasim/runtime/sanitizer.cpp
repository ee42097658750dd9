// Handlers for the checks that g++ puts into .cu files (-fsanitize=alignment,bounds,...; see build.py), so that what a
// GPU would refuse, or C++ leaves undefined, stops the kernel with an error. The layouts are those of libubsan.
#include <cstdint>
#include <string>

#include "cudasim/engine.h"

namespace {

struct SourcePlace {
  const char* file;
  std::uint32_t line;
  std::uint32_t column;
};

struct TypeName {
  std::uint16_t kind;
  std::uint16_t info;
  char name[1];  // really longer
};

struct TypeMismatch {
  SourcePlace place;
  const TypeName* type;
  unsigned char log_alignment;
  unsigned char access;
};

struct OutOfBounds {
  SourcePlace place;
  const TypeName* array;
  const TypeName* index;
};

[[noreturn]] void report(const SourcePlace& place, const std::string& what) {
  cudasim::fail(what + " (" + place.file + ":" + std::to_string(place.line) + ")");
}

}  // namespace

extern "C" {

[[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(const TypeMismatch* data, std::uintptr_t address) {
  const std::uintptr_t alignment = std::uintptr_t{1} << data->log_alignment;
  const std::string past = std::to_string(address % alignment);
  report(data->place, std::string("misaligned access to ") + data->type->name + ": the address is " + past +
                          " bytes past a multiple of " + std::to_string(alignment));
}

[[noreturn]] void __ubsan_handle_out_of_bounds_abort(const OutOfBounds* data, std::uintptr_t index) {
  report(data->place,
         "index " + std::to_string(static_cast<std::intptr_t>(index)) + " is out of bounds of " + data->array->name);
}

[[noreturn]] void __ubsan_handle_shift_out_of_bounds_abort(const SourcePlace* place, std::uintptr_t, std::uintptr_t) {
  report(*place, "a shift by a negative count, or by the width of its type or more");
}

[[noreturn]] void __ubsan_handle_divrem_overflow_abort(const SourcePlace* place, std::uintptr_t, std::uintptr_t) {
  report(*place, "a division by zero or one that overflows");
}

}  // extern "C"
