// 1x1 convolutions as matrix products on activations in their own layout (product.h, gradient.h): any stride and
// groups, no padding. A strided filter reads only every stride-th pixel.
#include "common/stage.h"
#include "pointwise/gradient.h"

using namespace pointwise;

namespace {

void require_pointwise(const Geometry& g) {
  g.require();
  for (const int64_t size : {g.r, g.s}) require_equal("the size of the filter", size, 1);
  for (const int64_t pad : {g.pad_h, g.pad_w, g.pad_below}) require_equal("the padding", pad, 0);
}

// Treat images of one pixel, which are in both memory formats at once, as channels-last.
TensorArgument as_rows_if_both(TensorArgument tensor) {
  if (tensor.h * tensor.w == 1) tensor.memory_format = CHANNELS_LAST;
  return tensor;
}

struct Operands {
  TensorArgument x, y;

  Operands(const TensorArgument& given_x, const TensorArgument& given_y)
      : x(as_rows_if_both(given_x)), y(given_y) {
    y.memory_format = x.memory_format;
  }
};

Product product_of(const Geometry& g, bool backward_data, const Operands& of, int threads) {
  const Images x = of.x.images(g.groups), y = of.y.images(g.groups);
  if (backward_data) return Product(y, {x, g.stride_h, g.stride_w}, threads);
  return Product(every(x, g.stride_h, g.stride_w), {y, 1, 1}, threads);
}

FilterGradient gradient_of(const Geometry& g, const Operands& of, int threads) {
  return {every(of.x.images(g.groups), g.stride_h, g.stride_w), of.y.images(g.groups), threads};
}

int64_t packed_floats(int64_t rows, int64_t lanes) { return times(rows, ceil_div(lanes, int64_t(VL)) * VL); }

int64_t packed_bytes_of(const Geometry& g, int64_t rows, int64_t lanes) {
  return bytes_of(times(g.groups, packed_floats(rows, lanes)));
}

constexpr int PACKED_TOGETHER = 8;  // blocks of lanes: whole cache lines if the lanes of a filter are contiguous

// Pack blocks of VL lanes from `first_block` on: lane l of row r goes to packed[(l / VL * rows + r) * VL + l % VL]. If
// there are pairs of rows, r is the number of a pair, and rows that of pairs.
void pack_lanes(const FilterView& view, int first_block, bool of_pairs, float* packed) {
  const int last_block = std::min(blocks_of(view.lanes), first_block + PACKED_TOGETHER);
  const int numbers = of_pairs ? 2 : 1, rows = view.rows / numbers;
  for (int row = 0; row < view.rows; row += VL)
    for (int block = first_block; block < last_block; ++block) {
      float* to = packed + (ptrdiff_t(block) * rows + row / numbers) * VL;
      const FilterBlock of_view{view, block * VL, row};
      if (of_view.rows() == VL && !of_pairs) {
        load_filter_block(of_view, to);
        continue;
      }
      alignas(64) float loaded[VL * VL] = {};
      load_filter_block(of_view, loaded);
      for (int i = 0; i < of_view.rows() / numbers; ++i) {
        const float* at = loaded + i * numbers * VL;
        store(to + i * VL, of_pairs ? paired_exactly(load(at), load(at + VL)) : load(at));
      }
    }
}

int64_t copies_floats(int64_t element, int64_t c, int64_t k, int threads) {
  const int64_t filter = times(c, k);
  return times(FilterGradient::copies(filter, Element(element), threads), filter);
}

int64_t copies_bytes(const Geometry& g, int64_t element, int64_t c, int64_t k, int threads) {
  return bytes_of(times(g.groups, copies_floats(element, c, k, threads)));
}

struct Pointwise {
  static int64_t prepared_bytes(const Stage& stage) {
    const Geometry& g = stage.geometry;
    require_pointwise(g);
    require_shapes(g, stage.x, stage.y);
    const int64_t in = stage.in().c / g.groups, out = stage.out().c / g.groups;
    const int threads = stage.thread_count();
    return stage.operation == BACKWARD_FILTER ? copies_bytes(g, stage.x.element, in, out, threads)
                                              : packed_bytes_of(g, product_of(stage).in.c, out);
  }

  static int64_t scratch_bytes(const Stage& stage) {
    const Geometry& g = stage.geometry;
    require_pointwise(g);
    require_shapes(g, stage.x, stage.y);
    const int threads = stage.thread_count();
    const Operands of(stage.x, stage.y);
    if (stage.operation == BACKWARD_FILTER) return bytes_of(gradient_of(g, of, threads).scratch_floats());
    return bytes_of(product_of(stage).scratch_floats());
  }

  static void open(const Stage& stage, const TensorArgument& w, float* packed) {
    const Geometry& g = stage.geometry;
    const bool backward_data = stage.backward_data();
    const int threads = require_filter(stage, w);
    require_shapes(g, stage.x, stage.y);
    const Product product = product_of(stage);
    const int numbers = product.of_pairs ? 2 : 1, lanes = product.channels();
    const FilterView first = w.filter(0, g.groups, backward_data);
    stage.require_prepared(packed_bytes_of(g, ceil_div(first.rows, numbers), first.lanes));
    require_equal("the number of rows of the filter", first.rows, product.in.c * numbers);
    require_equal("the number of lanes of the filter", first.lanes, lanes);
    const int64_t of_group = packed_floats(product.in.c, lanes);
    const int64_t parts = ceil_div(int64_t(blocks_of(lanes)), int64_t(PACKED_TOGETHER));
#pragma omp parallel for num_threads(threads) collapse(2)
    for (int64_t group = 0; group < g.groups; ++group)
      for (int64_t part = 0; part < parts; ++part)
        pack_lanes(w.filter(group, g.groups, backward_data), int(part * PACKED_TOGETHER), product.of_pairs,
                   packed + group * of_group);
  }

  static void correlate(const Stage& stage, const Slice& slice) {
    const Geometry& g = stage.geometry;
    const TensorArgument& out = slice.out(stage);
    const int threads = require_call(stage, slice);
    const Product product = ::product_of(g, stage.backward_data(), {slice.x, slice.y}, threads);
    const int64_t of_group = packed_floats(product.in.c, product.channels());
    stage.require_prepared(packed_bytes_of(g, product.in.c, product.channels()));
    stage.require_scratch(bytes_of(product.scratch_floats()));
    const AsFloats of_channels(checked_bias(slice.bias, stage.bias_bytes, out), out.c);
    const float* offsets = of_channels.data();
    const Epilogue epilogue = checked_epilogue(&slice.epilogue, out);
    for (int64_t i = 0; i < g.groups; ++i) {
      Product of_i = product;
      of_i.in = product.in.group(i);
      of_i.out.whole = product.out.whole.group(i);
      multiply(of_i, slice.prepared + i * of_group, offsets ? offsets + i * product.channels() : nullptr, epilogue,
               slice.scratch);
    }
  }

  // Add to dw and to its copies, which start at zero.
  static void accumulate(const Stage& stage, const Slice& slice) {
    const Geometry& g = stage.geometry;
    const TensorArgument& dw = slice.w;
    const int threads = require_call(stage, slice);
    require_equal("the type of elements of dw", dw.element, slice.x.element);
    const FilterGradient gradient = gradient_of(g, {slice.x, slice.y}, threads);
    const int64_t c = gradient.x.c, k = gradient.dy.c;
    stage.require_prepared(copies_bytes(g, dw.element, c, k, threads));
    stage.require_scratch(bytes_of(gradient.scratch_floats()));
    require_filter(stage, dw);
    require_equal("the number of filters", dw.n, slice.y.c);
    require_equal("the number of channels of the filter", dw.c, c);
    for (int64_t i = 0; i < g.groups; ++i)
      add_gradient({gradient.x.group(i), gradient.dy.group(i), threads}, dw.elements() + i * c * k,
                   slice.prepared + i * copies_floats(dw.element, c, k, threads), slice.scratch);
  }

  static void close(const Stage& stage, const TensorArgument& dw, const float* copies) {
    const Geometry& g = stage.geometry;
    const int threads = require_filter(stage, dw);
    const int64_t c = dw.c, k = dw.n / g.groups, of_group = c * k;
    stage.require_prepared(copies_bytes(g, dw.element, c, k, threads));
    const int64_t count = FilterGradient::copies(of_group, Element(dw.element), threads);
    if (count == 0) return;
    dw.elements().visit([&](auto* first) {
#pragma omp parallel for num_threads(threads) collapse(2)
      for (int64_t group = 0; group < g.groups; ++group)
        for (int64_t i = 0; i < of_group; i += VL)
          add_copies(first + group * of_group + i, int(std::min<int64_t>(VL, of_group - i)),
                     copies + group * count * of_group + i, count, of_group);
    });
  }

 private:
  static Product product_of(const Stage& stage) {
    return ::product_of(stage.geometry, stage.backward_data(), {stage.x, stage.y}, stage.thread_count());
  }

  static int require_call(const Stage& stage, const Slice& slice) {
    require_pointwise(stage.geometry);
    require_images(stage.geometry, slice.x, slice.y);
    require_equal("the memory format of y", slice.y.memory_format, slice.x.memory_format);
    return stage.thread_count();
  }

  static int require_filter(const Stage& stage, const TensorArgument& w) {
    const Geometry& g = stage.geometry;
    require_pointwise(g);
    w.require_filter(g.groups, g.r, g.s);
    return stage.thread_count();
  }
};

}  // namespace

MUCUDNN_ENTRIES(pointwise, Pointwise)
