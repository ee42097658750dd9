// Clock and products of bytes of one thread, for the floor that bench/diffusion_step.py states: cc -O3
// -funroll-all-loops -mavx512f -mavx512vnni
#include <immintrin.h>
#include <stdio.h>
#include <time.h>

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

int main(void) {
  double adds = 1e9, products = 1e9;
  for (int round = 0; round < 20; ++round) {
    unsigned long x = 1;
    double start = now();
    // Each waits for the one before: a cycle each.
    for (long i = 0; i < 10000000; ++i) __asm__ volatile("add $1,%0\n\tadd $1,%0\n\tadd $1,%0\n\tadd $1,%0" : "+r"(x));
    double took = now() - start;
    if (took < adds) adds = took;
    __m512i sums[12], codes = _mm512_set1_epi8(3), own = _mm512_set1_epi8(1);
    for (int k = 0; k < 12; ++k) sums[k] = _mm512_setzero_si512();
    start = now();
    for (long i = 0; i < 2000000; ++i) {
      for (int k = 0; k < 12; ++k) __asm__ volatile("vpdpbusd %1,%2,%0" : "+v"(sums[k]) : "v"(codes), "v"(own));
    }
    took = now() - start;
    if (took < products) products = took;
  }
  printf("{\"ghz\": %.3f, \"gmacs\": %.1f}\n", 4e7 / adds / 1e9, 12 * 2e6 * 64 / products / 1e9);
}
