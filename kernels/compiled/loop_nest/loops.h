// The loops of a convolution by its definition. Each element of a result is summed by one thread, in an order that
// depends only on the problem. Products with the padding are left out.
#pragma once

#include "common/tasks.h"
#include "loop_nest/tile.h"

namespace loop_nest {

// The indices i < count, from begin to end - 1, for which input first + i * step is within 0 ... size - 1.
struct Range {
  int begin, end;

  Range(int64_t first, int64_t step, int64_t size, int count) {
    begin = first >= 0 ? 0 : int(std::min<int64_t>(count, ceil_div(-first, step)));
    end = first >= size ? 0 : int(std::min<int64_t>(count, ceil_div(size - first, step)));
  }
};

// Strides of the filter, or its gradient, in elements.
struct Filter {
  ptrdiff_t k, c, t, r, s;

  explicit Filter(const TensorArgument& w)
      : k(w.stride_n()), c(w.stride_c()), t(w.stride_d()), r(w.stride_h()), s(w.stride_w()) {}
};

// View each image as one row, which is equivalent for a 1x1 filter with stride 1 and no padding.
inline void flatten(TensorArgument& image) {
  image.w *= image.h;
  image.h = 1;
}

// Compute forward (x -> y) or backward data (in = dy, out = dx). bias: one value per channel of out, or null.
template <class T>
void correlate(const Geometry& g, bool backward, TensorArgument in, const TensorArgument& w, const T* bias,
               TensorArgument out, int threads) {
  if (g.r * g.s == 1 && g.stride_h * g.stride_w == 1 && g.pad_h == 0 && g.pad_w == 0) {
    flatten(in);
    flatten(out);
  }
  const Axis frames = g.frames(backward), rows = g.rows(backward), columns = g.columns(backward);
  const Filter filter(w);
  const ptrdiff_t filter_out = backward ? filter.c : filter.k, filter_in = backward ? filter.k : filter.c;
  const int64_t outs = out.c / g.groups, ins = in.c / g.groups, blocks = ceil_div(outs, int64_t{OUT});
  const T* const taps = static_cast<const T*>(w.data);

  const auto sum_row = [&](int64_t n, int64_t group, int64_t first_out, int64_t frame, int64_t row) {
    const int count_out = int(std::min<int64_t>(OUT, outs - first_out));
    const T* const image = static_cast<const T*>(in.data) + n * in.stride_n() + group * ins * in.stride_c();
    const T* const of_outs = taps + group * w.n / g.groups * filter.k + first_out * filter_out;
    const int64_t channel = group * outs + first_out;
    T* const to = static_cast<T*>(out.data) + n * out.stride_n() + channel * out.stride_c() +
                  frame * out.stride_d() + row * out.stride_h();
    Sums<Number<T>> sums;
    Number<T> copies[IN][LANES];
    const Number<T>* rows_in[IN];

    for (int64_t residue = 0; residue < std::min(columns.every(), out.w); ++residue)
      for (int64_t left = residue; left < out.w; left += LANES * columns.every()) {
        const int count = int(std::min<int64_t>(LANES, ceil_div(out.w - left, columns.every())));
        for (int i = 0; i < count_out; ++i) sums.fill(i, count, bias ? value_of(bias[channel + i]) : 0);
        for (int64_t s = 0; s < g.s; ++s) {
          int64_t column, frame_in, row_in;
          if (!columns.meets(left, s, column)) continue;
          const Range range(column, columns.step(), in.w, count);
          if (range.begin >= range.end) continue;
          const ptrdiff_t first = (column + range.begin * columns.step()) * in.stride_w();
          for (int64_t t = 0, r = 0; t < g.taps; r + 1 < g.r ? ++r : (r = 0, ++t)) {
            if (!frames.meets_image(frame, t, in.d, frame_in) || !rows.meets_image(row, r, in.h, row_in)) continue;
            const T* const from = image + frame_in * in.stride_d() + row_in * in.stride_h() + first;
            const T* const tap = of_outs + t * filter.t + r * filter.r + s * filter.s;
            for (int64_t c = 0; c < ins; c += IN) {
              const int count_in = int(std::min<int64_t>(IN, ins - c));
              for (int j = 0; j < count_in; ++j) {
                rows_in[j] = numbers(from + (c + j) * in.stride_c(), columns.step() * in.stride_w(),
                                     range.end - range.begin, copies[j]);
                for (int i = 0; i < count_out; ++i)
                  sums.factors[i][j] = value_of(tap[i * filter_out + (c + j) * filter_in]);
              }
              sums.add(count_out, count_in, rows_in, range.begin, range.end - range.begin);
            }
          }
        }
        for (int i = 0; i < count_out; ++i)
          store_row(sums.rows[i], count, to + i * out.stride_c() + left * out.stride_w(),
                    columns.every() * out.stride_w());
      }
  };

  const int64_t rows_of_out = out.d * out.h, tasks = out.n * g.groups * blocks * rows_of_out;
  parallel_tasks(threads, tasks, true, [&](int64_t task) {
    const int64_t block = task / rows_of_out % blocks, image = task / rows_of_out / blocks;
    sum_row(image / g.groups, image % g.groups, block * OUT, task / out.h % out.d, task % out.h);
  });
}

// Add the gradient to dw. It is summed in double for every element type, and rounded once.
template <class T>
void add_gradient(const Geometry& g, const TensorArgument& x, const TensorArgument& dy, const TensorArgument& dw,
                  int threads) {
  const Axis frames = g.frames(false), rows = g.rows(false), columns = g.columns(false);
  const Filter filter(dw);
  const int64_t outs = dy.c / g.groups, ins = x.c / g.groups;
  const int64_t out_blocks = ceil_div(outs, int64_t{OUT}), in_blocks = ceil_div(ins, int64_t{LANES});

  const auto sum_tap = [&](int64_t group, int64_t k, int64_t c, int64_t t, int64_t r, int64_t s) {
    const int count_out = int(std::min<int64_t>(OUT, outs - k)), count = int(std::min<int64_t>(LANES, ins - c));
    T* const to = static_cast<T*>(dw.data) + (group * outs + k) * filter.k + c * filter.c + t * filter.t +
                  r * filter.r + s * filter.s;
    const T* const of_x = static_cast<const T*>(x.data) + (group * ins + c) * x.stride_c();
    const T* const of_dy = static_cast<const T*>(dy.data) + (group * outs + k) * dy.stride_c();
    Sums<double> sums;
    Number<T> copies[IN][LANES];
    const Number<T>* pixels[IN];
    for (int i = 0; i < count_out; ++i)
      for (int j = 0; j < count; ++j) sums.rows[i][j] = value_of(to[i * filter.k + j * filter.c]);

    int64_t frame, row, column;
    columns.meets(0, s, column);
    const Range range(column, g.stride_w, x.w, int(dy.w));
    for (int64_t n = 0; n < x.n; ++n)
      for (int64_t o = 0, p = 0; o < dy.d; p + 1 < dy.h ? ++p : (p = 0, ++o)) {
        if (!frames.meets_image(o, t, x.d, frame) || !rows.meets_image(p, r, x.h, row)) continue;
        const T* const row_x = of_x + n * x.stride_n() + frame * x.stride_d() + row * x.stride_h();
        const T* const row_dy = of_dy + n * dy.stride_n() + o * dy.stride_d() + p * dy.stride_h();
        for (int64_t q = range.begin; q < range.end; q += IN) {
          const int count_in = int(std::min<int64_t>(IN, range.end - q));
          for (int j = 0; j < count_in; ++j) {
            const T* const pixel = row_x + (column + (q + j) * g.stride_w) * x.stride_w();
            pixels[j] = numbers(pixel, x.stride_c(), count, copies[j]);
            for (int i = 0; i < count_out; ++i)
              sums.factors[i][j] = value_of(row_dy[i * dy.stride_c() + (q + j) * dy.stride_w()]);
          }
          sums.add(count_out, count_in, pixels, 0, count);
        }
      }
    for (int i = 0; i < count_out; ++i) store_row(sums.rows[i], count, to + i * filter.k, filter.c);
  };

  const int64_t taps = g.taps * g.r * g.s, tasks = g.groups * out_blocks * in_blocks * taps;
#pragma omp parallel for num_threads(threads)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t block = task / taps, c = block % in_blocks, k = block / in_blocks % out_blocks;
    const int64_t t = task / g.s / g.r % g.taps, r = task / g.s % g.r, s = task % g.s;
    sum_tap(block / in_blocks / out_blocks, k * OUT, c * LANES, t, r, s);
  }
}

}  // namespace loop_nest
