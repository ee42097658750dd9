// Runs kernels of csrc/cpu/simd, at the level of this processor, on pseudo-random inputs. It prints the level, and
// their results, a line of words in hexadecimal for each: tests/test_arm64.py compares those of two processors.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cpu/simd/dispatch.h"

namespace pdkernels::cpu {
void run_parallel(int64_t begin, int64_t end, int64_t, void (*body)(int64_t, int64_t, void*), void* context) {
  body(begin, end, context);
}
int64_t max_threads() { return 1; }
char* thread_scratch(int64_t bytes) {
  static std::vector<char> memory;
  memory.resize(static_cast<size_t>(bytes) + 64);
  return memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
}
}  // namespace pdkernels::cpu

#ifdef __aarch64__
using Half = __fp16;  // GCC 12 knows the other name in C only
#else
using Half = _Float16;
#endif

using namespace pdkernels;
using namespace pdkernels::cpu;

// As the bindings call a kernel.
#define RUN(kernel, args) [&] { PDK_DISPATCH(kernel, args) }()

static uint64_t state = 1;
static uint32_t word() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 33);
}
static float number() { return static_cast<float>(static_cast<int>(word() % 4001) - 2000) / 1024.0f; }

static uint16_t narrow(Element element, float x) {
  if (element == Element::kBfloat16) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>(bits >> 16);
  }
  Half half = static_cast<Half>(x);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

// Values of an element, exact in all of them.
struct Values {
  Element element;
  std::vector<float> wide;
  std::vector<uint16_t> words;
  Values(Element kind, size_t count) : element(kind), wide(count), words(count) {
    for (size_t i = 0; i < count; ++i) {
      wide[i] = static_cast<float>(static_cast<int>(word() % 129) - 64) / 32.0f;
      words[i] = kind == Element::kFloat ? 0 : narrow(kind, wide[i]);
    }
  }
  void* data() { return element == Element::kFloat ? static_cast<void*>(wide.data()) : words.data(); }
};

static void print(const char* kind, const char* name, int a, int b, const float* x, size_t count) {
  std::printf("%s %s-%d-%d", kind, name, a, b);
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &x[i], 4);
    std::printf(" %08x", bits);
  }
  std::puts("");
}

static void print(const char* kind, const char* name, int a, int b, const Values& x, size_t count) {
  if (x.element == Element::kFloat) return print(kind, name, a, b, x.wide.data(), count);
  std::vector<float> wide(count);
  for (size_t i = 0; i < count; ++i) {
    if (x.element == Element::kBfloat16) {
      const uint32_t bits = static_cast<uint32_t>(x.words[i]) << 16;
      std::memcpy(&wide[i], &bits, 4);
    } else {
      Half half;
      std::memcpy(&half, &x.words[i], 2);
      wide[i] = static_cast<float>(half);
    }
  }
  print(kind, name, a, b, wide.data(), count);
}

static void products(Element element, Element weight_element, int rows) {
  const int64_t width = 200, outputs = 70;
  Values x(element, rows * width), weight(weight_element, outputs * width), out(element, rows * outputs);
  LinearArgs args{};
  args.element = element;
  args.weight_element = weight_element;
  args.x = {x.data(), width};
  args.out = {out.data(), outputs};
  args.weight = weight.data();
  args.weight_stride = width;
  args.rows = rows;
  args.width = width;
  args.outputs = outputs;
  std::vector<float> wide(rows * args.padded_width() + 16);
  args.wide = wide.data() + (64 - reinterpret_cast<uintptr_t>(wide.data()) % 64) % 64 / 4;
  RUN(linear, args);
  print("close", "linear", static_cast<int>(element) * 3 + static_cast<int>(weight_element), rows, out, rows * outputs);
}

static void packed(const char* name, QuantizedLayout layout, int rows) {
  const int64_t width = 512, outputs = 48;
  const int64_t bytes = QuantizedLayout::tiles(outputs) * layout.tile_bytes(width);
  auto* memory = static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64));
  // Bytes below 0x40 make finite scales whatever they are read as.
  for (int64_t i = 0; i < bytes; ++i) memory[i] = static_cast<uint8_t>(word() & 0x3f);
  Values x(Element::kFloat, rows * width), out(Element::kFloat, rows * outputs);
  for (float& value : x.wide) value = number();
  QuantizedLinearArgs args{};
  args.element = Element::kFloat;
  args.x = {x.data(), width};
  args.out = {out.data(), outputs};
  args.parts[0] = {layout, memory, outputs};
  args.part_count = 1;
  args.rows = rows;
  args.width = width;
  args.quantized.blocks = layout.blocks(width);
  auto* blocks = std::aligned_alloc(64, (args.quantized.bytes(rows) + 127) / 64 * 64);
  args.quantized.data = static_cast<QuantizedBlock*>(blocks);
  RUN(quantized_linear, args);
  print("same", name, rows, 0, out, rows * outputs);
  std::free(blocks);
  std::free(memory);
}

static void norms(Element element) {
  const int64_t rows = 5, width = 190;
  Values x(element, rows * width), residual(element, rows * width), weight(element, width);
  Values sum(element, rows * width), next(element, rows * width), gate(element, rows * width), up(element, rows * 95);
  AddRmsNormArgs args{};
  args.element = element;
  args.x = {x.data(), width};
  args.residual = {residual.data(), width};
  args.y = {sum.data(), width};
  args.next = {next.data(), width};
  args.next_weight = weight.data();
  args.rows = rows;
  args.width = width;
  args.eps = 1e-5f;
  RUN(add_rms_norm, args);
  print("close", "sum", static_cast<int>(element), 0, sum, rows * width);
  print("close", "norm", static_cast<int>(element), 0, next, rows * width);
  SiluAndMulArgs silu{{element, {gate.data(), width}, {up.data(), 95}, rows, 95}};
  RUN(silu_and_mul, silu);
  print("close", "silu", static_cast<int>(element), 0, up, rows * 95);
  GeluAndMulArgs gelu{{element, {gate.data(), width}, {up.data(), 95}, rows, 95}};
  RUN(gelu_and_mul, gelu);
  print("close", "gelu", static_cast<int>(element), 0, up, rows * 95);
}

static void statistics(Element element, double temperature, double top_p) {
  const int64_t rows = 3, width = 9000;
  Values logits(element, rows * width);
  std::vector<int64_t> ids(rows), top(rows * 4);
  std::vector<float> figures(rows * 8);
  TokenStatisticsArgs args{};
  args.element = element;
  args.logits = {logits.data(), width};
  args.rows = args.source_rows = rows;
  args.width = width;
  args.seeds.all = 7;
  args.temperature = temperature;
  args.top_p = top_p;
  args.typical_p = 1;
  args.top_k = 4;
  std::vector<TokenPart> parts(rows * args.num_parts());
  args.ids = ids.data();
  args.top_ids = top.data();
  args.probs = figures.data();
  args.margin = figures.data() + rows;
  args.entropy = figures.data() + 2 * rows;
  args.logsumexp = figures.data() + 3 * rows;
  args.top_probs = figures.data() + 4 * rows;
  args.parts = parts.data();
  std::vector<Passing> passing(rows);
  std::vector<float> workspace(rows * args.workspace_width(false) + 16);
  args.passing = passing.data();
  args.workspace = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) / 4 % 16;
  RUN(token_statistics, args);
  std::printf("same tokens-%d-%d", static_cast<int>(element), static_cast<int>(temperature * 10));
  for (int64_t id : ids) std::printf(" %08x", static_cast<unsigned>(id));
  for (int64_t id : top) std::printf(" %08x", static_cast<unsigned>(id));
  std::puts("");
  print("close", "statistics", static_cast<int>(element), static_cast<int>(temperature * 10), figures.data(), rows * 8);
}

int main() {
  std::printf("level %s\n", name_of(cpu_isa()));
  using L = QuantizedLayout;
  using S = QuantizedScales;
  const struct {
    const char* name;
    L layout;
  } layouts[] = {
      {"Q8_0", {S::kHalf, 8, 1}},    {"Q4_0", {S::kHalf, 4, 1}},          {"Q5_0", {S::kHalf, 5, 1}},
      {"Q4_1", {S::kHalfMin, 4, 1}}, {"Q5_1", {S::kHalfMin, 5, 1}},       {"Q4_K", {S::kSuper, 4, 8}},
      {"Q5_K", {S::kSuper, 5, 8}},   {"Q6_K", {S::kSuper16, 6, 8}},       {"int8", {S::kFloat, 8, 0}},
      {"int4", {S::kFloat, 4, 2}},   {"zero_half", {S::kHalfZero, 4, 4}}, {"zero_float", {S::kFloatZero, 8, 4}},
  };
  for (int rows : {1, 3, 8, 21})
    for (const auto& one : layouts) packed(one.name, one.layout, rows);
  const Element elements[] = {Element::kFloat, Element::kHalf, Element::kBfloat16};
  for (Element element : elements) {
    for (int rows : {1, 2, 5, 12}) products(element, element, rows);
    norms(element);
    statistics(element, 0, 1);
    statistics(element, 0.7, 0.9);
  }
  return 0;
}
