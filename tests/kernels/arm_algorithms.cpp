// Prints how far the compiled algorithms are from plain sums in double, one case a line: its name, and the relative L2
// error or a number of mistakes. It needs no Python, so that it runs for processors that this machine only emulates.
#include <array>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "common/matmul.h"
#include "common/stage.h"
#include "winograd/arithmetic.h"

using Entry = int64_t(const Stage*, void* x, void* w, void* y, void* bias, float* prepared, float* scratch,
                      const EpilogueArgument*);
extern "C" {
Entry mucudnn_winograd_stage, mucudnn_implicit_gemm_stage, mucudnn_pointwise_stage, mucudnn_depthwise_stage,
    mucudnn_loop_nest_stage;
const char* mucudnn_refusal();
}

using Values = std::vector<double>;

Values drawn(int64_t count) {  // eighths, which every type of elements holds
  static std::mt19937 generator(0);
  Values values(count);
  for (double& value : values) value = (int(generator() % 17) - 8) / 8.0;
  return values;
}

double relative_error(const Values& result, const Values& expected) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += (result[i] - expected[i]) * (result[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference / norm);
}

// A tensor of one type and memory format; its values are in the order of (size 0, size 1, size 2, size 3).
struct Tensor {
  TensorArgument argument;
  std::vector<float> memory;

  Tensor(int64_t a, int64_t b, int64_t c, int64_t d, bool channels_last, Element element)
      : argument{nullptr, 0, a, b, 1, c, d, channels_last, element}, memory(a * b * c * d) {
    argument.data = memory.data();
    argument.bytes = count() * argument.elements().element_bytes();
  }
  int64_t count() const { return int64_t(memory.size()); }

  template <class Body>  // body(element in memory, index in order)
  void for_each(Body body) {
    const TensorArgument& t = argument;
    t.elements().visit([&](auto* first) {
      int64_t index = 0;
      for (int64_t i = 0; i < t.n; ++i)
        for (int64_t j = 0; j < t.c; ++j)
          for (int64_t k = 0; k < t.h; ++k)
            for (int64_t l = 0; l < t.w; ++l)
              body(first + i * t.stride_n() + j * t.stride_c() + k * t.stride_h() + l * t.stride_w(), index++);
    });
  }
  void set(const Values& values) {
    for_each([&](auto* at, int64_t index) { store_first(at, broadcast(float(values[index])), 1); });
  }
  Values values() {
    Values result(count());
    for_each([&](auto* at, int64_t index) { result[index] = value_of(*at); });
    return result;
  }
};

struct Layer {
  const char* name;
  Entry* entry;
  int64_t c, h, w, k, tile;
  Geometry geometry;
};

struct Sizes {
  int64_t n, c, h, w, k, p, q;
};

// The definition of all three operations: each triple of x, w and y that belong together, handed to body as indices.
template <class Body>
void for_products(const Sizes& z, const Geometry& g, Body body) {
  const int64_t c_of_group = z.c / g.groups, k_of_group = z.k / g.groups;
  for (int64_t n = 0; n < z.n; ++n)
    for (int64_t k = 0; k < z.k; ++k)
      for (int64_t c = 0; c < c_of_group; ++c)
        for (int64_t p = 0; p < z.p; ++p)
          for (int64_t q = 0; q < z.q; ++q)
            for (int64_t r = 0; r < g.r; ++r)
              for (int64_t s = 0; s < g.s; ++s) {
                const int64_t i = p * g.stride_h + r * g.dilation_h - g.pad_h;
                const int64_t j = q * g.stride_w + s * g.dilation_w - g.pad_w;
                if (i < 0 || j < 0 || i >= z.h || j >= z.w) continue;
                const int64_t channel = k / k_of_group * c_of_group + c;
                body(((n * z.c + channel) * z.h + i) * z.w + j, ((k * c_of_group + c) * g.r + r) * g.s + s,
                     ((n * z.k + k) * z.p + p) * z.q + q);
              }
}

// The error of one operation, in slices of two samples and one, by two threads.
double error_of(const Layer& layer, Operation operation, bool channels_last, Element element) {
  const Geometry& g = layer.geometry;
  const Sizes z{3, layer.c, layer.h, layer.w, layer.k, output_size(layer.h, 2 * g.pad_h, g.r, g.dilation_h, g.stride_h),
                output_size(layer.w, 2 * g.pad_w, g.s, g.dilation_w, g.stride_w)};
  Tensor x(z.n, z.c, z.h, z.w, channels_last, element), y(z.n, z.k, z.p, z.q, channels_last, element);
  Tensor w(z.k, z.c / g.groups, g.r, g.s, channels_last, element), bias(1, z.k, 1, 1, false, element);
  Values of_x = drawn(x.count()), of_w = drawn(w.count()), of_y = drawn(y.count()), of_bias = drawn(z.k);
  x.set(of_x), y.set(of_y), bias.set(of_bias), w.set(operation == BACKWARD_FILTER ? Values(w.count()) : of_w);

  Values& expected = operation == FORWARD ? of_y : operation == BACKWARD_DATA ? of_x : of_w;
  for (size_t i = 0; i < expected.size(); ++i)
    expected[i] = operation == FORWARD ? of_bias[i / (z.p * z.q) % z.k] : 0;
  for_products(z, g, [&](int64_t of_image, int64_t tap, int64_t output) {
    if (operation == FORWARD) of_y[output] += of_x[of_image] * of_w[tap];
    if (operation == BACKWARD_DATA) of_x[of_image] += of_y[output] * of_w[tap];
    if (operation == BACKWARD_FILTER) of_w[tap] += of_x[of_image] * of_y[output];
  });

  constexpr int64_t FLOATS = 1 << 22;  // more than any of these layers needs
  alignas(64) static float prepared[FLOATS], scratch[FLOATS];
  const int64_t slices[] = {0, 2, 2, 1};
  Stage stage{};
  stage.geometry = g;
  stage.x = x.argument, stage.w = w.argument, stage.y = y.argument;
  stage.operation = operation;
  stage.phases = OPEN + STEP + CLOSE;
  stage.tile = layer.tile;
  stage.bias_bytes = operation == FORWARD ? bias.argument.bytes : 0;
  stage.prepared_bytes = stage.scratch_bytes = sizeof prepared;
  stage.threads = 2;
  stage.slice_count = 2;
  stage.slices = slices;
  void* of_forward = operation == FORWARD ? bias.memory.data() : nullptr;
  if (layer.entry(&stage, x.memory.data(), w.memory.data(), y.memory.data(), of_forward, prepared, scratch, nullptr) < 0) {
    std::printf("refused: %s\n", mucudnn_refusal());
    return INFINITY;
  }
  return relative_error(operation == FORWARD ? y.values() : operation == BACKWARD_DATA ? x.values() : w.values(),
                        expected);
}

Geometry of_images(const std::array<int64_t, 10>& of) {
  return {of[0], of[1], of[2], of[3], of[4], of[5], of[6], of[7], of[8], of[9], 1, 0, 1, 0, 1};
}

void print_layers() {
  const Geometry of_3x3 = of_images({3, 3, 1, 1, 1, 1, 1, 1, 1, 1}), of_5x5 = of_images({5, 5, 1, 1, 2, 2, 1, 1, 1, 2});
  const Layer layers[] = {
      {"winograd-2x2", mucudnn_winograd_stage, 9, 13, 11, 17, 2, of_3x3},
      {"winograd-4x4", mucudnn_winograd_stage, 9, 13, 11, 17, 4, of_3x3},
      {"winograd-6x6", mucudnn_winograd_stage, 9, 13, 11, 17, 6, of_3x3},
      {"winograd-2x2-5x5", mucudnn_winograd_stage, 9, 13, 11, 17, 2, of_5x5},
      {"winograd-4x4-5x5", mucudnn_winograd_stage, 9, 13, 11, 17, 4, of_5x5},
      {"winograd-4x4-stride2", mucudnn_winograd_stage, 9, 13, 11, 17, 4, of_images({3, 3, 2, 2, 1, 1, 1, 1, 1, 1})},
      {"winograd-4x4-5x5-stride2", mucudnn_winograd_stage, 9, 13, 11, 17, 4, of_images({5, 5, 2, 2, 2, 2, 1, 1, 1, 2})},
      {"implicit-gemm", mucudnn_implicit_gemm_stage, 10, 13, 11, 18, 0, of_images({3, 3, 2, 1, 1, 2, 1, 2, 2, 1})},
      {"implicit-gemm-first", mucudnn_implicit_gemm_stage, 3, 29, 31, 18, 0, of_images({7, 7, 2, 2, 3, 3, 1, 1, 1, 3})},
      {"pointwise", mucudnn_pointwise_stage, 37, 9, 10, 42, 0, of_images({1, 1, 1, 1, 0, 0, 1, 1, 1, 0})},
      {"depthwise", mucudnn_depthwise_stage, 11, 17, 13, 22, 0, of_images({3, 3, 2, 1, 1, 1, 1, 1, 11, 1})},
      {"loop-nest", mucudnn_loop_nest_stage, 10, 13, 11, 18, 0, of_images({3, 3, 2, 1, 1, 2, 1, 2, 2, 1})},
  };
  const char* operations[] = {"forward", "backward_data", "backward_filter"};
  const char* types[] = {"float32", "bfloat16", "float16"};
  for (const Layer& layer : layers)
    for (const Operation operation : {FORWARD, BACKWARD_DATA, BACKWARD_FILTER})
      for (const bool channels_last : {false, true})
        for (const Element element : {FLOAT32, BFLOAT16, FLOAT16})
          std::printf("%s %s %s %s %g\n", layer.name, operations[operation],
                      channels_last ? "channels_last" : "contiguous", types[element],
                      error_of(layer, operation, channels_last, element));
}

// The register tile: rows that no tile's height divides, an odd number of column blocks.
void print_product() {
  constexpr int ROWS = 3 * MR + 5, INNER = 8 * VL, BLOCKS = NV + 1, COLUMNS = BLOCKS * VL;
  const Values a = drawn(ROWS * INNER), b = drawn(INNER * COLUMNS);
  const auto blocked = [](const Values& values, int rows, int columns) {
    std::vector<float> result(values.size());
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < columns; ++j) result[(j / VL * rows + i) * VL + j % VL] = float(values[i * columns + j]);
    return result;
  };
  std::vector<float> c(ROWS * COLUMNS);
  const std::vector<winograd::Run> one_frame{{0, 1, 0, 1, 0, false}};
  winograd::Arithmetic<Singles>::multiply(false, one_frame, {ROWS, 0, 1, 1}, 1, INNER, BLOCKS,
                                          blocked(a, ROWS, INNER).data(), blocked(b, INNER, COLUMNS).data(), c.data(),
                                          VL);
  Values result(c.size()), expected(c.size());
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < COLUMNS; ++j) {
      result[i * COLUMNS + j] = c[(j / VL * ROWS + i) * VL + j % VL];
      for (int k = 0; k < INNER; ++k) expected[i * COLUMNS + j] += a[i * INNER + k] * b[k * COLUMNS + j];
    }
  std::printf("matmul float32 %g\n", relative_error(result, expected));
}

// Every half is what its bits say and comes back from its float; the middle of two neighbours is rounded to the even.
template <class Half>
void print_half(const char* name, int fraction_bits, int smallest_exponent) {
  int64_t mistakes = 0;
  const uint32_t infinity = ((1u << (15 - fraction_bits)) - 1) << fraction_bits;
  const auto meant = [&](uint32_t bits) {
    const int exponent = int(bits >> fraction_bits), fraction = int(bits & ((1u << fraction_bits) - 1));
    return std::ldexp(exponent ? fraction + (1 << fraction_bits) : fraction,
                      std::max(exponent, 1) + smallest_exponent);
  };
  const auto rounded = [](double value) { return Half::rounded(broadcast(float(value)))[0]; };
  for (uint32_t bits = 0; bits < infinity; ++bits) {
    const double value = meant(bits), middle = (value + meant(bits + 1)) / 2;
    mistakes += value_of(Half{uint16_t(bits)}) != float(value);
    mistakes += value_of(Half{uint16_t(bits | 0x8000)}) != -float(value);
    mistakes += rounded(value) != bits;
    mistakes += rounded(-value) != (bits | 0x8000);
    mistakes += rounded(middle) != bits + (bits & 1);
  }
  mistakes += value_of(Half{uint16_t(infinity)}) != INFINITY || rounded(INFINITY) != infinity;
  mistakes += !std::isnan(value_of(Half{uint16_t(infinity + 1)})) || (rounded(NAN) & 0x7fff) <= infinity;
  std::printf("halves %s %lld\n", name, static_cast<long long>(mistakes));
}

int main() {
  std::printf("vector length %d\n", VL);
  print_product();
  print_half<BFloat16>("bfloat16", 7, -126 - 7 - 1);
  print_half<Float16>("float16", 10, -14 - 10 - 1);
  print_layers();
}
