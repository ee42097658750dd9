// Atomics, fences and cache-hint loads and stores. Fibers switch only inside collectives, so plain code is atomic.
#pragma once

#include <cstring>
#include <type_traits>

#include "collectives.h"

#define CUDASIM_ATOMIC(name, expression, ...)    \
  template <cudasim::OneOf<__VA_ARGS__> T>       \
  T name(T* at, std::type_identity_t<T> value) { \
    const T old = *at;                           \
    *at = expression;                            \
    return old;                                  \
  }
// The element types are those of CUDA, so that code which runs here compiles there.
CUDASIM_ATOMIC(atomicAdd, old + value, int, unsigned, unsigned long long, float, double)
CUDASIM_ATOMIC(atomicSub, old - value, int, unsigned)
CUDASIM_ATOMIC(atomicExch, value, int, unsigned, unsigned long long, float)
CUDASIM_ATOMIC(atomicMin, value < old ? value : old, int, unsigned, long long, unsigned long long)
CUDASIM_ATOMIC(atomicMax, old < value ? value : old, int, unsigned, long long, unsigned long long)
CUDASIM_ATOMIC(atomicAnd, old& value, int, unsigned, unsigned long long)
CUDASIM_ATOMIC(atomicOr, old | value, int, unsigned, unsigned long long)
CUDASIM_ATOMIC(atomicXor, old ^ value, int, unsigned, unsigned long long)
#undef CUDASIM_ATOMIC

inline unsigned atomicInc(unsigned* at, unsigned limit) {
  const unsigned old = *at;
  *at = old >= limit ? 0 : old + 1;
  return old;
}

template <cudasim::OneOf<int, unsigned, unsigned long long, unsigned short> T>
T atomicCAS(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> desired) {
  const T old = *at;
  if (old == expected) *at = desired;
  return old;
}

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

#define CUDASIM_LOAD(name) \
  template <class T>       \
  T name(const T* at) {    \
    return *at;            \
  }
CUDASIM_LOAD(__ldg)
CUDASIM_LOAD(__ldca)
CUDASIM_LOAD(__ldcg)
CUDASIM_LOAD(__ldcs)
CUDASIM_LOAD(__ldcv)
CUDASIM_LOAD(__ldlu)
#undef CUDASIM_LOAD

#define CUDASIM_STORE(name)                         \
  template <class T>                                \
  void name(T* at, std::type_identity_t<T> value) { \
    *at = value;                                    \
  }
CUDASIM_STORE(__stcg)
CUDASIM_STORE(__stcs)
CUDASIM_STORE(__stwb)
CUDASIM_STORE(__stwt)
#undef CUDASIM_STORE
