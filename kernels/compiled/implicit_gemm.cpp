// Convolution as a matrix product whose left side, the im2col matrix, is never written down: the register tile reads it
// straight from a small packed window of the image. Any stride, padding, dilation and groups.
//
// A window holds VL channels a vector (*blocked*), or, where an image has so few channels that most of a vector would
// be padding, one plane a channel (*planar*; first layers). Backward data with stride is one such product for each
// residue of the output position: within a residue the filter elements that take part are the same, and the stride
// is 1.
#include <omp.h>

#include <utility>
#include <vector>

#include "matmul.h"
#include "stage.h"

namespace {

// The size of y along one dimension.
int64_t output_size(int64_t size, int64_t pad, int64_t taps, int64_t dilation, int64_t stride) {
  const int64_t padded = size + 2 * pad, extent = dilation * (taps - 1) + 1;
  require_size("a size of the padded input", padded);
  require_between("the extent of the filter", extent, 1, padded);
  return (padded - extent) / stride + 1;
}

// x and y as in forward.
void require_images(const Geometry& g, const TensorArgument& x, const TensorArgument& y) {
  g.require();
  x.require("x", FLOAT16);
  y.require("y", FLOAT16);
  require_same_elements(x, y);
  require_groups(g.groups, x.c, y.c);
  require_equal("the number of samples of y", y.n, x.n);
  require_equal("the height of y", y.h, output_size(x.h, g.pad_h, g.r, g.dilation_h, g.stride_h));
  require_equal("the width of y", y.w, output_size(x.w, g.pad_w, g.s, g.dilation_w, g.stride_w));
}

// Filter element (r, s), and which input pixel it meets: (output row * stride + row, output column * stride + column).
struct Tap {
  int row, column, r, s;
};
using Taps = std::vector<Tap>;

struct Span {
  int first, last;
  int size() const { return last - first + 1; }
};

template <class Member>
Span span_of(const Taps& taps, Member member) {
  Span span{taps.empty() ? 0 : taps[0].*member, taps.empty() ? 0 : taps[0].*member};
  for (const Tap& tap : taps) span = {std::min(span.first, tap.*member), std::max(span.last, tap.*member)};
  return span;
}

constexpr bool is_planar(int channels) { return blocks_of(channels) * VL >= 2 * channels; }
constexpr int padded(int channels) { return is_planar(channels) ? channels : blocks_of(channels) * VL; }

// One convolution with `taps`, from x to y; h and w of y say how many outputs.
struct Product {
  Taps taps;
  int stride_h, stride_w;
  ptrdiff_t filter_offset;  // where its part of the packed filter begins, in floats

  // The outputs of a whole window are one long row: that of the next output row goes on where this one ends.
  bool joins_rows() const { return taps.size() == 1 && stride_h == 1 && stride_w == 1; }
};

Taps forward_taps(const Geometry& g) {
  Taps taps;
  for (int r = 0; r < g.r; ++r)
    for (int s = 0; s < g.s; ++s)
      taps.push_back({int(r * g.dilation_h - g.pad_h), int(s * g.dilation_w - g.pad_w), r, s});
  return taps;
}

// The residues modulo the stride of those rows (or columns) of dx that any of the taps reaches.
std::vector<int> reached(int64_t taps, int64_t stride, int64_t pad, int64_t dilation) {
  std::vector<int> residues;
  for (int64_t tap = 0; tap < taps; ++tap) {
    const int64_t remainder = (tap * dilation - pad) % stride;
    residues.push_back(int(remainder < 0 ? remainder + stride : remainder));
  }
  std::sort(residues.begin(), residues.end());
  residues.erase(std::unique(residues.begin(), residues.end()), residues.end());
  return residues;
}

std::vector<int> reached_rows(const Geometry& g) { return reached(g.r, g.stride_h, g.pad_h, g.dilation_h); }
std::vector<int> reached_columns(const Geometry& g) { return reached(g.s, g.stride_w, g.pad_w, g.dilation_w); }

// The taps that reach dx pixels (a + stride_h * i, b + stride_w * j); they read dy at (i + row, j + column).
Taps backward_data_taps(const Geometry& g, int a, int b) {
  Taps taps;
  for (int r = 0; r < g.r; ++r)
    for (int s = 0; s < g.s; ++s) {
      const int64_t row = a + g.pad_h - r * g.dilation_h, column = b + g.pad_w - s * g.dilation_w;
      if (row % g.stride_h == 0 && column % g.stride_w == 0)
        taps.push_back({int(row / g.stride_h), int(column / g.stride_w), r, s});
    }
  return taps;
}

Images every(Images x, int64_t stride_h, int64_t stride_w) {
  x.h = ceil_div(x.h, int(stride_h));
  x.w = ceil_div(x.w, int(stride_w));
  x.sh *= stride_h;
  x.sw *= stride_w;
  return x;
}

// Calls body(product, view of y) for the one product of forward, or for each residue of backward data that any tap
// reaches.
template <class Body>
void for_products(const Geometry& g, bool backward_data, int rows, const Images& y, Body body) {
  if (!backward_data) return body(Product{forward_taps(g), int(g.stride_h), int(g.stride_w), 0}, y);
  ptrdiff_t offset = 0;
  const std::vector<int> columns = reached_columns(g);
  for (const int a : reached_rows(g))
    for (const int b : columns) {
      Product product{backward_data_taps(g, a, b), 1, 1, offset};
      Images view = y;
      view.data = y.data + a * y.sh + b * y.sw;
      view.h = y.h - a;
      view.w = y.w - b;
      view = every(view, g.stride_h, g.stride_w);
      offset += ptrdiff_t(product.taps.size()) * padded(rows) * blocks_of(y.c) * VL;
      if (view.h > 0 && view.w > 0) body(std::move(product), view);
    }
}

// The work of one group. A 1x1 filter without padding sees only every stride-th pixel: as if there were no others.
struct Call {
  Geometry geometry;
  Images x, y;
};

Call make_call(Geometry g, bool backward_data, const Images& x, const Images& y) {
  if (g.r != 1 || g.s != 1 || g.pad_h != 0 || g.pad_w != 0) return {g, x, y};
  const int64_t stride_h = std::exchange(g.stride_h, 1), stride_w = std::exchange(g.stride_w, 1);
  return backward_data ? Call{g, x, every(y, stride_h, stride_w)} : Call{g, every(x, stride_h, stride_w), y};
}

// Are there pixels of dx that no tap reaches?
bool leaves_gaps(const Geometry& g) {
  return int64_t(reached_rows(g).size()) < g.stride_h || int64_t(reached_columns(g).size()) < g.stride_w;
}

// ---- windows -------------------------------------------------------------------------------------------------------

// The input of rows x columns outputs. Blocked: [C / VL][height][width][VL]. Planar: [C][height][stride_w][width]: the
// columns of one residue next to each other, so that neighbouring outputs read neighbouring floats.
struct WindowShape {
  bool planar;
  int channels, height, width, residues;
  ptrdiff_t row() const { return ptrdiff_t(width) * (planar ? residues : VL); }
  ptrdiff_t plane() const { return row() * height; }
  int planes() const { return planar ? channels : blocks_of(channels); }
  ptrdiff_t floats() const { return plane() * planes(); }
  ptrdiff_t at(int down, int right) const {
    return down * row() + (planar ? ptrdiff_t(right % residues) * width + right / residues : ptrdiff_t(right) * VL);
  }
};

WindowShape window_shape(bool planar, int channels, const Taps& taps, int stride_h, int stride_w, int residues,
                         int rows, int columns) {
  const int64_t height = int64_t(rows - 1) * stride_h + span_of(taps, &Tap::row).size();
  const int64_t width = int64_t(columns - 1) * stride_w + span_of(taps, &Tap::column).size();
  for (const int64_t size : {height, width}) require_size("a size of the padded input", size);
  const WindowShape shape{planar, channels, int(height), ceil_div(int(width), residues), residues};
  times(times(shape.row(), height), shape.planes());  // floats() is no more than 64 bits hold
  return shape;
}

template <class T>
void fill_planar(const T* first_element, const Images& x, const Region& r, const WindowShape& shape, float* to) {
  std::memset(to, 0, shape.floats() * sizeof(float));
  const int top = std::max(0, -r.top), bottom = std::min(shape.height, x.h - r.top);
  for (int c = 0; c < shape.channels; ++c)
    for (int i = top; i < bottom; ++i)
      for (int residue = 0; residue < shape.residues; ++residue) {
        const int left = r.left + residue;  // columns left + j * residues, of which those in the image are copied
        const int first = left < 0 ? ceil_div(-left, shape.residues) : 0;
        const int last = std::min(shape.width, left < x.w ? ceil_div(x.w - left, shape.residues) : 0);
        const T* from = first_element + x.offset(r.image, c, r.top + i, left);
        const ptrdiff_t step = shape.residues * x.sw;
        float* row = to + c * shape.plane() + i * shape.row() + ptrdiff_t(residue) * shape.width;
        for (int j = first; j < last; ++j) row[j] = value_of(from[j * step]);
      }
}

// `r` without channel: all channels of the image.
void fill_window(const Images& x, Region r, const WindowShape& shape, float* to) {
  if (shape.planar) return x.data.visit([&](const auto* first) { fill_planar(first, x, r, shape, to); });
  for (int block = 0; block < blocks_of(x.c); ++block) {
    r.channel = block * VL;
    fill(x, r, to + block * shape.plane());
  }
}

// ---- forward and backward data -------------------------------------------------------------------------------------

constexpr int WINDOW_FLOATS = 96 * 1024;  // of a core's L2, for one window; the filter streams through the rest

struct Band {
  int rows, columns;
};

// Outputs that are computed from one window: few enough for the cache and for all threads to have work.
Band choose_band(const Product& product, int channels, const Images& y, int threads) {
  Band band{y.h, std::min(y.w, 8 * MR)};
  band.columns = ceil_div(y.w, ceil_div(y.w, band.columns));
  const auto floats = [&] {
    return window_shape(is_planar(channels), channels, product.taps, product.stride_h, product.stride_w,
                        is_planar(channels) ? product.stride_w : 1, band.rows, band.columns)
        .floats();
  };
  const auto bands = [&] { return times(y.n, int64_t(ceil_div(y.h, band.rows)) * ceil_div(y.w, band.columns)); };
  while (band.rows > 1 && (floats() > WINDOW_FLOATS || bands() < int64_t{4} * threads)) {
    band.rows = ceil_div(band.rows, 2);
  }
  while (band.columns > MR && (floats() > WINDOW_FLOATS || bands() < threads)) band.columns = ceil_div(band.columns, 2);
  return band;
}

// The buffers in which one thread computes a product's bands.
struct ProductScratch {
  WindowShape window;
  Band band;
  int result_rows;
  int64_t floats() const { return plus(window.floats(), times(int64_t(NV) * VL * result_rows, band.columns)); }
};

ProductScratch product_scratch(const Product& product, int channels, const Images& y, int threads) {
  const Band band = choose_band(product, channels, y, threads);
  const bool planar = is_planar(channels);
  return {window_shape(planar, channels, product.taps, product.stride_h, product.stride_w,
                       planar ? product.stride_w : 1, band.rows, band.columns),
          band, product.joins_rows() ? band.rows : 1};
}

// Distance of each block of the product's inner dimension from a window's start: (channel or channel block, tap).
std::vector<ptrdiff_t> inner_offsets(const Taps& taps, const WindowShape& shape) {
  std::vector<ptrdiff_t> offsets;
  const Span rows = span_of(taps, &Tap::row), columns = span_of(taps, &Tap::column);
  for (int c = 0; c < shape.planes(); ++c)
    for (const Tap& tap : taps)
      offsets.push_back(c * shape.plane() + shape.at(tap.row - rows.first, tap.column - columns.first));
  return offsets;
}

// One row of outputs, NV vectors of output channels: to[vector][column][VL].
template <int VECTORS, int ROW, int STEP>
void multiply_row(Layout<ROW, STEP> layout, const float* window, const std::vector<ptrdiff_t>& offsets, int steps,
                  int columns, const float* filter, ptrdiff_t filter_stream, float* to) {
  for_row_tiles(columns, [&](int first, int count) {
    const float* from = window + first * layout.row();
    const auto block_of = [&](int block) { return from + offsets[block]; };
    register_tile_of<MR, VECTORS, false>(count, layout, block_of, int(offsets.size()), steps, filter, filter_stream,
                                         to + ptrdiff_t(first) * VL, ptrdiff_t(columns) * VL);
  });
}

template <int VECTORS>
void multiply_row(const WindowShape& shape, int stride_w, const float* window, const std::vector<ptrdiff_t>& offsets,
                  int columns, const float* filter, ptrdiff_t filter_stream, float* to) {
  if (shape.planar)
    multiply_row<VECTORS>(Layout<1, 1>{}, window, offsets, 1, columns, filter, filter_stream, to);
  else if (stride_w == 1)
    multiply_row<VECTORS>(Layout<VL, 1>{}, window, offsets, VL, columns, filter, filter_stream, to);
  else if (stride_w == 2)
    multiply_row<VECTORS>(Layout<2 * VL, 1>{}, window, offsets, VL, columns, filter, filter_stream, to);
  else
    multiply_row<VECTORS>(Layout<AT_RUN_TIME, 1>{stride_w * VL, 1}, window, offsets, VL, columns, filter, filter_stream,
                          to);
}

void add_to_all(float* vectors, int count, Vec offset) {
  for (int i = 0; i < count; ++i) store(vectors + i * VL, load(vectors + i * VL) + offset);
}

// A product of a call, and all of it that is the same for every group; y: the view of the first group's.
struct Plan {
  Product product;
  Images y;
  ProductScratch scratch;
};

std::vector<Plan> plans_of(const Geometry& g, bool backward_data, int rows, const Images& y, int threads) {
  std::vector<Plan> plans;
  for_products(g, backward_data, rows, y, [&](Product product, const Images& view) {
    const ProductScratch scratch = product_scratch(product, rows, view, threads);
    plans.push_back({std::move(product), view, scratch});
  });
  return plans;
}

int64_t scratch_bytes_of(const std::vector<Plan>& plans, int threads) {
  int64_t most = 0;
  for (const Plan& plan : plans) most = std::max(most, plan.scratch.floats());
  return bytes_of(times(most, threads));
}

void run(const Plan& plan, const Images& x, const float* filter, Elements bias, const Images& y, float* scratch,
         int threads) {
  const Product& product = plan.product;
  const ProductScratch& layout = plan.scratch;
  const Band band = layout.band;
  const std::vector<ptrdiff_t> offsets = inner_offsets(product.taps, layout.window);
  const Span rows = span_of(product.taps, &Tap::row), columns = span_of(product.taps, &Tap::column);
  const ptrdiff_t stream = ptrdiff_t(product.taps.size()) * padded(x.c) * VL;
  const int64_t down = ceil_div(y.h, band.rows), across = ceil_div(y.w, band.columns), tasks = y.n * down * across;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t image = task / (down * across);
    const int top = int(task / across % down) * band.rows, left = int(task % across) * band.columns;
    const int height = std::min(band.rows, y.h - top), width = std::min(band.columns, y.w - left);
    float* window = scratch + omp_get_thread_num() * layout.floats();
    float* result = window + layout.window.floats();
    fill_window(x,
                {image, 0, top * product.stride_h + rows.first, left * product.stride_w + columns.first,
                 layout.window.height, layout.window.width},
                layout.window, window);
    const int together = product.joins_rows() && width == band.columns ? height : 1;
    for_column_blocks(blocks_of(y.c), [&](auto vectors, int k) {
      for (int i = 0; i < height; i += together) {
        const int outputs = together * width;
        multiply_row<vectors.value>(layout.window, product.stride_w,
                                    window + i * product.stride_h * layout.window.row(), offsets, outputs,
                                    filter + product.filter_offset + k * stream, stream, result);
        for (int j = 0; j < vectors.value; ++j) {
          float* lanes = result + ptrdiff_t(j) * outputs * VL;
          if (bias) add_to_all(lanes, outputs, load_first(bias + (k + j) * VL, y.c - (k + j) * VL));
          scatter(y, {image, (k + j) * VL, top + i, left, together, width}, {lanes, ptrdiff_t(width) * VL, VL}, lanes);
        }
      }
    });
  }
}

// Each thread's buffers for one block of the filter: allocated where a failure can be caught, before threads begin.
class TapBuffers {
 public:
  TapBuffers(int taps, int threads) : floats_(size_t(VL) * taps * VL), memory_(times(floats_, threads)) {}
  float* mine() { return memory_.data() + omp_get_thread_num() * floats_; }

 private:
  size_t floats_;
  std::vector<float> memory_;
};

// [lane block][row or row block][tap][row in block][VL]: in the order in which a register tile reads it.
void pack_filter(const FilterView& w, const Taps& taps, float* to, int threads) {
  const int rows = padded(w.rows), in_block = is_planar(w.rows) ? 1 : VL, count = int(taps.size());
  TapBuffers buffers(w.taps(), threads);
#pragma omp parallel num_threads(threads)
  {
    float* buffer = buffers.mine();
#pragma omp for collapse(2)
    for (int block = 0; block < blocks_of(w.lanes); ++block)
      for (int first = 0; first < rows; first += VL) {
        load_filter_block({w, block * VL, first}, buffer);
        for (int row = first; row < std::min(first + VL, rows); ++row)
          for (int t = 0; t < count; ++t) {
            const ptrdiff_t outer = ptrdiff_t(block) * (rows / in_block) + row / in_block;
            const float* vector =
                buffer + (ptrdiff_t(row - first) * w.taps() + taps[t].r * w.s + taps[t].s) * VL;
            store(to + ((outer * count + t) * in_block + row % in_block) * VL, load(vector));
          }
      }
  }
}

// ---- backward filter -----------------------------------------------------------------------------------------------

constexpr int UNIT_PIXELS = 256;           // of dy that one register tile sums up before it touches the accumulator
constexpr int64_t BATCH_FLOATS = 1 << 20;  // of packed units between two barriers

// The reduction over n, p, q in units of some rows of one image; some units are packed at a time, then all threads take
// (channel block, tap) pairs of the accumulator.
struct FilterGradient {
  Taps taps;
  WindowShape window;
  int rows, units_per_image, units_at_once, k;
  int stride_h, stride_w, q;

  int64_t dy_floats() const { return times(int64_t(blocks_of(k)) * VL, int64_t(rows) * q); }
  int64_t unit_floats() const { return plus(window.floats(), dy_floats()); }
  int64_t scratch_bytes() const { return bytes_of(times(units_at_once, unit_floats())); }
};

FilterGradient filter_gradient(const Geometry& g, int64_t n, int c, int k, int p, int q) {
  FilterGradient f;
  f.taps = forward_taps(g);
  f.k = k;
  f.q = q;
  f.stride_h = int(g.stride_h);
  f.stride_w = int(g.stride_w);
  f.rows = std::clamp(UNIT_PIXELS / q, 1, p);
  f.units_per_image = ceil_div(p, f.rows);
  f.window = window_shape(is_planar(c), c, f.taps, f.stride_h, f.stride_w, 1, f.rows, q);
  f.units_at_once = int(std::clamp<int64_t>(BATCH_FLOATS / f.unit_floats(), 2, 64));
  f.units_at_once = int(std::min<int64_t>(f.units_at_once, times(n, f.units_per_image)));
  return f;
}

struct Unit {
  const float* window;
  const float* dy;
  int rows;
};

// Blocked: accumulator [C / VL][tap][K / VL][VL][VL], task = (channel block, tap).
template <int STEP>
void accumulate_blocked(Layout<1, STEP> layout, const FilterGradient& f, const Unit& unit, ptrdiff_t offset,
                        float* sum) {
  for_column_blocks(blocks_of(f.k), [&](auto vectors, int k) {
    for (int i = 0; i < VL; i += MR_TRANSPOSED) {
      const auto block_of = [&](int row) { return unit.window + offset + i + row * f.stride_h * f.window.row(); };
      register_tile<MR_TRANSPOSED, vectors.value, true>(
          layout, block_of, unit.rows, f.q, unit.dy + ptrdiff_t(k) * unit.rows * f.q * VL,
          ptrdiff_t(unit.rows) * f.q * VL, sum + (ptrdiff_t(k) * VL + i) * VL, ptrdiff_t(VL) * VL);
    }
  });
}

// Planar: accumulator [C][R][K / VL][S][VL], task = (channel, filter row); a register tile spans the filter's columns.
void accumulate_planar(const FilterGradient& f, const Unit& unit, ptrdiff_t offset, int s, int dilation_w, float* sum) {
  const Layout<AT_RUN_TIME, AT_RUN_TIME> layout{dilation_w, f.stride_w};
  for_column_blocks(blocks_of(f.k), [&](auto vectors, int k) {
    for_row_tiles(s, [&](int first, int count) {
      const auto block_of = [&](int row) {
        return unit.window + offset + first * dilation_w + row * f.stride_h * f.window.row();
      };
      register_tile_of<MR, vectors.value, true>(
          count, layout, block_of, unit.rows, f.q, unit.dy + ptrdiff_t(k) * unit.rows * f.q * VL,
          ptrdiff_t(unit.rows) * f.q * VL, sum + (ptrdiff_t(k) * s + first) * VL, ptrdiff_t(s) * VL);
    });
  });
}

void accumulate_task(const Geometry& g, const FilterGradient& f, const Unit& unit, int64_t task, float* du) {
  const Span rows = span_of(f.taps, &Tap::row), columns = span_of(f.taps, &Tap::column);
  if (f.window.planar) {
    const int64_t c = task / g.r, r = task % g.r;
    const ptrdiff_t offset = c * f.window.plane() + r * g.dilation_h * f.window.row();
    return accumulate_planar(f, unit, offset, int(g.s), int(g.dilation_w),
                             du + task * blocks_of(f.k) * g.s * VL);
  }
  const int64_t block = task / int64_t(f.taps.size());
  const Tap& tap = f.taps[task % f.taps.size()];
  const ptrdiff_t offset = block * f.window.plane() + f.window.at(tap.row - rows.first, tap.column - columns.first);
  float* sum = du + task * blocks_of(f.k) * VL * VL;
  if (f.stride_w == 1)
    accumulate_blocked(Layout<1, VL>{}, f, unit, offset, sum);
  else
    accumulate_blocked(Layout<1, AT_RUN_TIME>{1, f.stride_w * VL}, f, unit, offset, sum);
}

void accumulate(const Geometry& g, const FilterGradient& f, const Images& x, const Images& dy, float* du,
                float* scratch, int threads) {
  const int top = span_of(f.taps, &Tap::row).first, left = span_of(f.taps, &Tap::column).first;
  const int64_t units = dy.n * f.units_per_image;
  const int64_t tasks = f.window.planar ? x.c * g.r : blocks_of(x.c) * int64_t(f.taps.size());
  std::vector<Unit> packed(f.units_at_once);
#pragma omp parallel num_threads(threads)
  for (int64_t begin = 0; begin < units; begin += f.units_at_once) {
    const int count = int(std::min<int64_t>(f.units_at_once, units - begin));
#pragma omp for schedule(dynamic)
    for (int i = 0; i < count; ++i) {
      const int64_t image = (begin + i) / f.units_per_image;
      const int row = int((begin + i) % f.units_per_image) * f.rows;
      const int rows = std::min(f.rows, dy.h - row);
      float* window = scratch + i * f.unit_floats();
      float* gradient = window + f.window.floats();
      fill_window(x, {image, 0, row * f.stride_h + top, left, f.window.height, f.window.width}, f.window, window);
      for (int k = 0; k < blocks_of(dy.c); ++k)
        fill(dy, {image, k * VL, row, 0, rows, f.q}, gradient + ptrdiff_t(k) * rows * f.q * VL);
      packed[i] = {window, gradient, rows};
    }
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; ++task)
      for (int i = 0; i < count; ++i) accumulate_task(g, f, packed[i], task, du);
  }
}

void add_filter_gradient(const Geometry& g, const float* du, const FilterView& dw, int threads) {
  const bool planar = is_planar(dw.rows);
  const int taps = dw.taps(), blocks = blocks_of(dw.lanes);
  TapBuffers buffers(taps, threads);
#pragma omp parallel num_threads(threads)
  {
    float* buffer = buffers.mine();
#pragma omp for collapse(2)
    for (int k = 0; k < blocks; ++k)
      for (int first = 0; first < dw.rows; first += VL) {
        for (int c = first; c < std::min(first + VL, dw.rows); ++c)
          for (int t = 0; t < taps; ++t) {
            const int r = t / dw.s, s = t % dw.s;
            const ptrdiff_t vector = planar ? ((ptrdiff_t(c) * g.r + r) * blocks + k) * g.s + s
                                            : ((ptrdiff_t(c / VL) * taps + t) * blocks + k) * VL + c % VL;
            store(buffer + (ptrdiff_t(c - first) * taps + t) * VL, load(du + vector * VL));
          }
        add_filter_block({dw, k * VL, first}, buffer);
      }
  }
}

int64_t filter_floats(const Geometry& g, int rows, int lanes) {
  return times(g.r * g.s, times(padded(rows), blocks_of(lanes) * int64_t(VL)));
}

int64_t prepared_bytes(const Geometry& g, int rows, int lanes) {
  return bytes_of(times(g.groups, filter_floats(g, rows, lanes)));
}

void require_filter(const Geometry& g, bool lanes_are_c, const TensorArgument& w, int64_t prepared, int threads) {
  g.require();
  w.require_filter(g.groups, g.r, g.s, FLOAT16);
  const FilterView view = w.filter(0, g.groups, lanes_are_c);
  require_bytes("prepared", prepared, prepared_bytes(g, view.rows, view.lanes));
  require_threads(threads);
}

void require_sizes(const Geometry& g, int64_t n, std::initializer_list<int64_t> channels_and_pixels, int threads) {
  g.require();
  require_between("the number of samples", n, 1, INT64_MAX);
  for (const int64_t size : channels_and_pixels) require_size("a number of channels or pixels", size);
  require_threads(threads);
}

}  // namespace

// The entries that library.py calls. All return 0, a size, or why they refused (checks.h). c, k: channels of one group.
#pragma GCC visibility push(default)
extern "C" {

// Size of the packed filter, or of its gradient's accumulator. rows: channels that are summed over.
int64_t mucudnn_implicit_gemm_prepared_bytes(const Geometry* g, int64_t rows, int64_t lanes) {
  return refusable([&] {
    require_sizes(*g, 1, {rows, lanes}, 1);
    return prepared_bytes(*g, int(rows), int(lanes));
  });
}

// Scratch for n samples; rows: channels of the tensor that is read, lanes, h, w: of the one that is written.
int64_t mucudnn_implicit_gemm_scratch_bytes(const Geometry* g, int backward_data, int64_t n, int64_t rows,
                                            int64_t lanes, int64_t h, int64_t w, int threads) {
  return refusable([&] {
    require_sizes(*g, n, {rows, lanes, h, w}, threads);
    const Images y{{}, n, int(lanes), int(h), int(w), 0, 1, 0, 0};
    const Call call = make_call(*g, backward_data, Images{}, y);
    return scratch_bytes_of(plans_of(call.geometry, backward_data, int(rows), call.y, threads), threads);
  });
}

int64_t mucudnn_implicit_gemm_gradient_scratch_bytes(const Geometry* g, int64_t n, int64_t c, int64_t k, int64_t p,
                                                     int64_t q) {
  return refusable([&] {
    require_sizes(*g, n, {c, k, p, q}, 1);
    const Geometry seen = make_call(*g, false, Images{}, Images{}).geometry;
    return filter_gradient(seen, n, int(c), int(k), int(p), int(q)).scratch_bytes();
  });
}

int64_t mucudnn_implicit_gemm_pack_filter(const Geometry* g, int backward_data, const TensorArgument* w, float* packed,
                                          int64_t packed_bytes, int threads) {
  return refusable([&]() -> int64_t {
    require_filter(*g, backward_data, *w, packed_bytes, threads);
    for (int64_t i = 0; i < g->groups; ++i) {
      const FilterView view = w->filter(i, g->groups, backward_data);
      float* to = packed + i * filter_floats(*g, view.rows, view.lanes);
      const Images whole{{}, 1, view.lanes, int(g->stride_h), int(g->stride_w), 0, 1, 0, 0};
      const Call call = make_call(*g, backward_data, Images{}, whole);
      for_products(call.geometry, backward_data, view.rows, call.y, [&](const Product& product, const Images&) {
        pack_filter(view, product.taps, to + product.filter_offset, threads);
      });
    }
    return 0;
  });
}

// Forward: x -> y. Backward data: x = dy, y = dx.
int64_t mucudnn_implicit_gemm_forward(const Geometry* g, int backward_data, const TensorArgument* x,
                                      const float* packed, int64_t packed_bytes, void* bias, int64_t bias_bytes,
                                      const TensorArgument* y, float* scratch, int64_t scratch_bytes, int threads) {
  return refusable([&]() -> int64_t {
    require_images(*g, backward_data ? *y : *x, backward_data ? *x : *y);
    require_threads(threads);
    const Call call = make_call(*g, backward_data, x->images(g->groups), y->images(g->groups));
    const int rows = call.x.c, lanes = call.y.c;
    const std::vector<Plan> plans = plans_of(call.geometry, backward_data, rows, call.y, threads);
    require_bytes("prepared", packed_bytes, prepared_bytes(*g, rows, lanes));
    require_bytes("scratch", scratch_bytes, scratch_bytes_of(plans, threads));
    const Elements of_bias = checked_bias(bias, bias_bytes, *y);
    if (backward_data && leaves_gaps(*g)) set_to_zero(y->data, y->bytes, threads);
    for (int64_t i = 0; i < g->groups; ++i)
      for (const Plan& plan : plans)
        run(plan, call.x.group(i), packed + i * filter_floats(*g, rows, lanes), of_bias + i * lanes,
            plan.y.group(i), scratch, threads);
    return 0;
  });
}

int64_t mucudnn_implicit_gemm_accumulate(const Geometry* g, const TensorArgument* x, const TensorArgument* dy,
                                         float* du, int64_t du_bytes, float* scratch, int64_t scratch_bytes,
                                         int threads) {
  return refusable([&]() -> int64_t {
    require_images(*g, *x, *dy);
    require_threads(threads);
    const Call call = make_call(*g, false, x->images(g->groups), dy->images(g->groups));
    const Images& y = call.y;
    const FilterGradient f = filter_gradient(call.geometry, y.n, call.x.c, y.c, y.h, y.w);
    require_bytes("prepared", du_bytes, prepared_bytes(*g, call.x.c, y.c));
    require_bytes("scratch", scratch_bytes, f.scratch_bytes());
    for (int64_t i = 0; i < g->groups; ++i)
      accumulate(call.geometry, f, call.x.group(i), y.group(i), du + i * filter_floats(*g, call.x.c, y.c), scratch,
                 threads);
    return 0;
  });
}

int64_t mucudnn_implicit_gemm_add_filter_gradient(const Geometry* g, const float* du, int64_t du_bytes,
                                                  const TensorArgument* dw, int threads) {
  return refusable([&]() -> int64_t {
    require_filter(*g, false, *dw, du_bytes, threads);
    for (int64_t i = 0; i < g->groups; ++i) {
      const FilterView view = dw->filter(i, g->groups, false);
      add_filter_gradient(*g, du + i * filter_floats(*g, view.rows, view.lanes), view, threads);
    }
    return 0;
  });
}

int64_t mucudnn_implicit_gemm_stage(const Stage* stage, void* x, void* w, void* y, void* bias, float* prepared,
                                    float* scratch) {
  return refusable([&] {
    const Geometry* g = &stage->geometry;
    const bool backward = stage->operation == BACKWARD_DATA;
    const int threads = stage->thread_count();
    const auto open = [&](const TensorArgument& of_w) {
      return mucudnn_implicit_gemm_pack_filter(g, backward, &of_w, prepared, stage->prepared_bytes, threads);
    };
    const auto step = [&](const TensorArgument& of_x, const TensorArgument& of_y) {
      if (stage->operation == BACKWARD_FILTER)
        return mucudnn_implicit_gemm_accumulate(g, &of_x, &of_y, prepared, stage->prepared_bytes, scratch,
                                                stage->scratch_bytes, threads);
      return mucudnn_implicit_gemm_forward(g, backward, backward ? &of_y : &of_x, prepared, stage->prepared_bytes,
                                           bias, stage->bias_bytes, backward ? &of_x : &of_y, scratch,
                                           stage->scratch_bytes, threads);
    };
    const auto close = [&](const TensorArgument& of_w) {
      return mucudnn_implicit_gemm_add_filter_gradient(g, prepared, stage->prepared_bytes, &of_w, threads);
    };
    return run_stage(*stage, {x, w, y}, prepared, open, step, close);
  });
}

}  // extern "C"
#pragma GCC visibility pop
