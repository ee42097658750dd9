// The vector types, with CUDA's alignments (a misaligned access through them is reported, as a GPU would), and dim3.
#pragma once

#define CUDASIM_VECTOR1(T, name) \
  struct name##1 { T x; };       \
  inline name##1 make_##name##1(T x) { return {x}; }
#define CUDASIM_VECTOR2(T, name)                     \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; }; \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }
#define CUDASIM_VECTOR3(T, name) \
  struct name##3 { T x, y, z; }; \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }
#define CUDASIM_VECTOR4(T, name)                                                     \
  struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; }; \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
#define CUDASIM_VECTORS(T, name) \
  CUDASIM_VECTOR1(T, name) CUDASIM_VECTOR2(T, name) CUDASIM_VECTOR3(T, name) CUDASIM_VECTOR4(T, name)

CUDASIM_VECTORS(signed char, char)
CUDASIM_VECTORS(unsigned char, uchar)
CUDASIM_VECTORS(short, short)
CUDASIM_VECTORS(unsigned short, ushort)
CUDASIM_VECTORS(int, int)
CUDASIM_VECTORS(unsigned int, uint)
CUDASIM_VECTORS(long, long)
CUDASIM_VECTORS(unsigned long, ulong)
CUDASIM_VECTORS(long long, longlong)
CUDASIM_VECTORS(unsigned long long, ulonglong)
CUDASIM_VECTORS(float, float)
CUDASIM_VECTORS(double, double)

#undef CUDASIM_VECTORS
#undef CUDASIM_VECTOR1
#undef CUDASIM_VECTOR2
#undef CUDASIM_VECTOR3
#undef CUDASIM_VECTOR4

struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};
