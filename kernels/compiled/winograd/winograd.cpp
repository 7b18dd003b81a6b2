// Winograd convolution, F(M x M, R x R), forward, backward data (forward with the turned filter) and backward filter.
//
// The tiles of a micro-batch are taken block by block: transform a block of tiles, multiply each of the SIZE x SIZE
// points with the filter's, transform back. A block is small enough to stay in a core's cache, so that the transformed
// data, which is larger than x, never goes to memory (L3 fusion: Gelashvili, Shavit, Zlateski 2019).
#include <omp.h>

#include "common/matmul.h"
#include "common/stage.h"
#include "winograd/cook_toom.h"

namespace {

using namespace winograd;

// Where tile t of an image batch is.
struct Tiling {
  int64_t count;
  int rows, columns;
};

Tiling tiling_of(int m, int64_t n, int p, int q) {
  const int rows = ceil_div(p, m), columns = ceil_div(q, m);
  return {times(n, int64_t(rows) * columns), rows, columns};
}

// Planes of a transformed operand, one for each of POINTS points: a blocked matrix [column_blocks][rows][VL] each.
// Planes start an odd number of cache lines apart: a tile is written to all planes at once, and must not hit one cache
// set.
struct Planes {
  float* data;
  int rows, column_blocks;
  static ptrdiff_t stride(int rows, int column_blocks) { return (ptrdiff_t(rows) * column_blocks | 1) * VL; }
  ptrdiff_t stride() const { return stride(rows, column_blocks); }
  float* at(int point, int column_block = 0, int row = 0) const {
    return data + point * stride() + (ptrdiff_t(column_block) * rows + row) * VL;
  }
};

// How the tiles are cut into blocks, and whether each thread takes blocks of its own or all share one block.
struct Schedule {
  int tiles;
  bool shared;
};

struct Plan {
  Tiling tiling;
  Schedule schedule;
  int64_t scratch_floats;
};

constexpr int64_t CACHE_FLOATS = 192 * 1024;  // of one core's L2 (1 MiB and more today), for a block's tiles
constexpr int SMALLEST_BLOCK = 2 * MR, LARGEST_OWN_BLOCK = 6 * MR, LARGEST_SHARED_BLOCK = 12 * MR;

int even_blocks(int64_t tiles, int64_t largest, int64_t multiple) {
  const int64_t rounds = ceil_div(tiles, largest * multiple);
  return int(ceil_div(tiles, rounds * multiple));
}

// Blocks of one's own stay in one's own cache, but each of them streams the whole filter past; a shared block streams
// it once, but its data crosses from core to core (twice the price, as measured). The choice is whatever moves fewer
// floats, of which there may be more than 64 bits count.
Schedule forward_schedule(int64_t tiles, int points, int c, int k, int threads) {
  const double filter = double(points) * blocks_of(c) * blocks_of(k) * VL * VL;
  const int64_t per_tile = int64_t(points) * (blocks_of(c) + blocks_of(k)) * VL;
  const int wanted = int(std::clamp<int64_t>(CACHE_FLOATS / per_tile, SMALLEST_BLOCK, LARGEST_OWN_BLOCK));
  const Schedule own{even_blocks(tiles, wanted, threads), false};
  const Schedule shared{even_blocks(tiles, LARGEST_SHARED_BLOCK, 1), true};
  const double own_floats = double(ceil_div(tiles, int64_t{own.tiles})) * filter;
  const double shared_floats =
      double(ceil_div(tiles, int64_t{shared.tiles})) * filter + 4.0 * double(per_tile) * double(tiles);
  return own_floats <= shared_floats && own.tiles >= MR ? own : shared;
}

int filter_gradient_block(int64_t tiles, int points, int c, int k) {
  const int64_t per_tile = int64_t(points) * (blocks_of(c) + blocks_of(k)) * VL;
  return int(std::min(tiles, std::clamp<int64_t>(8 * CACHE_FLOATS / per_tile, 128, 256)));
}

template <int M, int R>
struct Winograd {
  static constexpr int SIZE = M + R - 1, POINTS_2D = SIZE * SIZE;
  static constexpr int STRIP = (32 - (R - 1)) / M;  // tiles that are gathered together: two transposes of 16 columns
  // Tiles of 8 multiply the rounding of sums the most. With smaller ones the shorter sums cost more than they give.
  static constexpr int SUMMED_CHANNELS = SIZE == 8 ? 64 : 256;
  using Data = ToPointsFromData<SIZE>;
  using Filter = ToPoints<SIZE, R, true>;
  using Gradient = ToPoints<SIZE, M, false>;
  using Output = FromPoints<SIZE, M, false>;
  using FilterGradient = FromPoints<SIZE, R, true>;

  // Calls body(t, count, region) for the strips of tiles [begin, end): PATCH x PATCH windows, M apart.
  template <int PATCH, class Body>
  static void for_strips(const Tiling& tiling, int64_t begin, int64_t end, int pad_h, int pad_w, Body body) {
    for (int64_t t = begin; t < end;) {
      const int column = int(t % tiling.columns), row = int(t / tiling.columns % tiling.rows);
      const int count = int(std::min<int64_t>({STRIP, tiling.columns - column, end - t}));
      body(t, count,
           Region{t / tiling.columns / tiling.rows, 0, row * M - pad_h, column * M - pad_w, PATCH,
                  (count - 1) * M + PATCH});
      t += count;
    }
  }

  // Tiles [begin, end) of x, channel blocks [first, last), into the planes; row 0 of the planes is tile `origin`.
  template <class Map>
  static void to_planes(const Images& x, const Tiling& tiling, int pad_h, int pad_w, int64_t begin, int64_t end,
                        int64_t origin, int first, int last, const Planes& planes) {
    alignas(64) float buffer[SIZE * 32 * VL];
    for_strips<Map::IN>(tiling, begin, end, pad_h, pad_w, [&](int64_t t, int count, Region region) {
      for (int block = first; block < last; ++block) {
        region.channel = block * VL;
        const Window window = gather(x, region, buffer);
        for (int i = 0; i < count; ++i)
          transform<Map>(window.data + i * M * window.column, window.row, window.column,
                         planes.at(0, block, int(t + i - origin)), SIZE * planes.stride(), planes.stride());
      }
    });
  }

  static void from_planes(const Planes& planes, const Finish& finish, const Images& y, const Tiling& tiling,
                          int64_t begin, int64_t end, int64_t origin, int first, int last) {
    alignas(64) float buffer[M * 32 * VL];
    for_strips<M>(tiling, begin, end, 0, 0, [&](int64_t t, int count, Region region) {
      for (int block = first; block < last; ++block) {
        region.channel = block * VL;
        const Vec offset = finish.bias ? load_first(finish.bias + block * VL, y.c - block * VL) : Vec{};
        const Window window = target(y, region, buffer);
        for (int i = 0; i < count; ++i)
          transform<Output>(planes.at(0, block, int(t + i - origin)), SIZE * planes.stride(), planes.stride(),
                            window.data + i * M * window.column, window.row, window.column, offset);
        if (finish.epilogue) apply(finish.epilogue, y, region, window);
        scatter(y, region, window, buffer);
      }
    });
  }

  static int64_t filter_floats(int c, int k) {
    return times(POINTS_2D, Planes::stride(blocks_of(c) * VL, blocks_of(k)));
  }

  static int64_t block_floats(int tiles, int c, int k) {
    return POINTS_2D * (Planes::stride(tiles, blocks_of(c)) + Planes::stride(tiles, blocks_of(k)));
  }

  static Plan forward_plan(int64_t n, int c, int k, int p, int q, int threads) {
    const Tiling tiling = tiling_of(M, n, p, q);
    const Schedule schedule = forward_schedule(tiling.count, POINTS_2D, c, k, threads);
    return {tiling, schedule, times(schedule.shared ? 1 : threads, block_floats(schedule.tiles, c, k))};
  }

  static Planes input_planes(float* scratch, int tiles, int c) { return {scratch, tiles, blocks_of(c)}; }
  static Planes output_planes(float* scratch, int tiles, int c, int k) {
    return {scratch + POINTS_2D * Planes::stride(tiles, blocks_of(c)), tiles, blocks_of(k)};
  }

  static void multiply_points(int begin, int end, int tiles, const Planes& v, const Planes& u, const Planes& m) {
    for (int point = begin; point < end; ++point)
      multiply(tiles, u.rows, u.column_blocks, v.at(point), u.at(point), m.at(point), SUMMED_CHANNELS);
  }

  static void forward(const Images& x, const Planes& u, const Finish& finish, const Images& y, int pad_h, int pad_w,
                      const Plan& plan, float* scratch, int threads) {
    if (plan.schedule.shared)
      forward_shared(x, u, finish, y, pad_h, pad_w, plan.tiling, plan.schedule.tiles, scratch, threads);
    else
      forward_private(x, u, finish, y, pad_h, pad_w, plan.tiling, plan.schedule.tiles, scratch, threads);
  }

  static void forward_private(const Images& x, const Planes& u, const Finish& finish, const Images& y, int pad_h,
                              int pad_w, const Tiling& tiling, int block, float* scratch, int threads) {
    const ptrdiff_t own = block_floats(block, x.c, y.c);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t begin = 0; begin < tiling.count; begin += block) {
      const int64_t end = std::min(begin + block, tiling.count);
      const int tiles = int(end - begin);
      float* mine = scratch + omp_get_thread_num() * own;
      const Planes v = input_planes(mine, tiles, x.c), m = output_planes(mine, tiles, x.c, y.c);
      to_planes<Data>(x, tiling, pad_h, pad_w, begin, end, begin, 0, v.column_blocks, v);
      multiply_points(0, POINTS_2D, tiles, v, u, m);
      from_planes(m, finish, y, tiling, begin, end, begin, 0, m.column_blocks);
    }
  }

  static void forward_shared(const Images& x, const Planes& u, const Finish& finish, const Images& y, int pad_h,
                             int pad_w, const Tiling& tiling, int block, float* scratch, int threads) {
#pragma omp parallel num_threads(threads)
    for (int64_t begin = 0; begin < tiling.count; begin += block) {
      const int64_t end = std::min(begin + block, tiling.count);
      const int tiles = int(end - begin);
      const Planes v = input_planes(scratch, tiles, x.c), m = output_planes(scratch, tiles, x.c, y.c);
#pragma omp for
      for (int i = 0; i < v.column_blocks; ++i)
        to_planes<Data>(x, tiling, pad_h, pad_w, begin, end, begin, i, i + 1, v);
#pragma omp for schedule(dynamic)
      for (int point = 0; point < POINTS_2D; ++point) multiply_points(point, point + 1, tiles, v, u, m);
#pragma omp for
      for (int i = 0; i < m.column_blocks; ++i) from_planes(m, finish, y, tiling, begin, end, begin, i, i + 1);
    }
  }

  static Plan filter_gradient_plan(int64_t n, int c, int k, int p, int q) {
    const Tiling tiling = tiling_of(M, n, p, q);
    const int block = filter_gradient_block(tiling.count, POINTS_2D, c, k);
    return {tiling, {block, true}, block_floats(block, c, k)};
  }

  // du += sum over tiles of (B^T d B)^T (A dy A^T), point by point; du: rows C (padded), columns K.
  static void accumulate(const Images& x, const Images& dy, const Planes& du, int pad_h, int pad_w, const Plan& plan,
                         float* scratch, int threads) {
    const Tiling& tiling = plan.tiling;
    const int block = plan.schedule.tiles;
#pragma omp parallel num_threads(threads)
    for (int64_t begin = 0; begin < tiling.count; begin += block) {
      const int64_t end = std::min(begin + block, tiling.count);
      const int tiles = int(end - begin);
      const Planes v = input_planes(scratch, tiles, x.c), d = output_planes(scratch, tiles, x.c, dy.c);
      const int pieces = ceil_div(tiles, 32);
#pragma omp for schedule(dynamic)
      for (int i = 0; i < pieces; ++i) {
        const int64_t from = begin + tiles * i / pieces, to = begin + tiles * (i + 1) / pieces;
        to_planes<Data>(x, tiling, pad_h, pad_w, from, to, begin, 0, v.column_blocks, v);
        to_planes<Gradient>(dy, tiling, 0, 0, from, to, begin, 0, d.column_blocks, d);
      }
#pragma omp for schedule(dynamic)
      for (int point = 0; point < POINTS_2D; ++point)
        add_multiply_transposed(du.rows, tiles, du.column_blocks, v.at(point), d.at(point), du.at(point));
    }
  }

  static void transform_filter(const FilterView& w, const Planes& u, int threads) {
#pragma omp parallel for collapse(2) num_threads(threads)
    for (int block = 0; block < u.column_blocks; ++block)
      for (int first = 0; first < u.rows; first += VL) {
        alignas(64) float taps[VL * R * R * VL];
        load_filter_block({w, block * VL, first}, taps);
        for (int i = 0; i < VL; ++i)
          transform<Filter>(taps + i * R * R * VL, R * VL, VL, u.at(0, block, first + i), SIZE * u.stride(),
                            u.stride());
      }
  }

  static void add_filter_gradient(const Planes& du, const FilterView& dw, int threads) {
#pragma omp parallel for collapse(2) num_threads(threads)
    for (int block = 0; block < du.column_blocks; ++block)
      for (int first = 0; first < du.rows; first += VL) {
        alignas(64) float taps[VL * R * R * VL];
        for (int i = 0; i < VL; ++i)
          transform<FilterGradient>(du.at(0, block, first + i), SIZE * du.stride(), du.stride(), taps + i * R * R * VL,
                                    R * VL, VL);
        add_filter_block({dw, block * VL, first}, taps);
      }
  }
};

// Calls body with the template for F(m, r).
template <class Body>
int64_t dispatch(int m, int r, Body body) {
  if (m == 2 && r == 3) return body(Winograd<2, 3>{});
  if (m == 4 && r == 3) return body(Winograd<4, 3>{});
  if (m == 6 && r == 3) return body(Winograd<6, 3>{});
  if (m == 2 && r == 5) return body(Winograd<2, 5>{});
  if (m == 4 && r == 5) return body(Winograd<4, 5>{});
  refuse(NOT_BUILT, "F(" + std::to_string(m) + ", " + std::to_string(r) + ") is not among the compiled ones");
}

Planes filter_planes(float* data, int rows, int lanes) { return {data, blocks_of(rows) * VL, blocks_of(lanes)}; }

template <class Transforms>
int64_t prepared_bytes(Transforms, int64_t groups, int64_t c, int64_t k) {
  return bytes_of(times(groups, Transforms::filter_floats(int(c), int(k))));
}

// Checks of the images that entries go through. x: what is read, padded; y: of the size of the output.
void require_images(int r, int64_t groups, int64_t pad_h, int64_t pad_w, const TensorArgument& x,
                    const TensorArgument& y, int64_t threads) {
  x.require("the input");
  y.require("the output");
  require_same_elements(x, y);
  require_groups(groups, x.c, y.c);
  require_equal("the number of samples of the output", y.n, x.n);
  for (const int64_t pad : {pad_h, pad_w}) require_between("the padding", pad, -LARGEST_SIZE, LARGEST_SIZE);
  require_equal("the height of the output", y.h, x.h + 2 * pad_h - r + 1);
  require_equal("the width of the output", y.w, x.w + 2 * pad_w - r + 1);
  require_threads(threads);
}

template <class Transforms>
void require_filter(Transforms winograd, bool lanes_are_c, int r, int64_t groups, const TensorArgument& w,
                    int64_t prepared, int64_t threads) {
  w.require_filter(groups, r, r);
  const FilterView view = w.filter(0, groups, lanes_are_c);
  require_bytes("prepared", prepared, prepared_bytes(winograd, groups, view.rows, view.lanes));
  require_threads(threads);
}

}  // namespace

// The entries that library.py calls. All return 0, a size, or why they refused (checks.h). c, k: channels of one group.
#pragma GCC visibility push(default)
extern "C" {

int64_t mucudnn_vector_length() { return VL; }

const char* mucudnn_refusal() { return refusal_text; }

// Size of the transformed filter, or of its gradient's accumulator.
int64_t mucudnn_winograd_prepared_bytes(int m, int r, int64_t groups, int64_t c, int64_t k) {
  return refusable([&] {
    for (const int64_t size : {groups, c, k}) require_size("a number of groups or channels", size);
    return dispatch(m, r, [&](auto winograd) { return prepared_bytes(winograd, groups, c, k); });
  });
}

// Scratch for n samples with outputs of p x q.
int64_t mucudnn_winograd_scratch_bytes(int m, int r, int backward_filter, int64_t n, int64_t c, int64_t k, int64_t p,
                                       int64_t q, int threads) {
  return refusable([&] {
    for (const int64_t size : {c, k, p, q}) require_size("a number of channels or pixels", size);
    require_between("the number of samples", n, 1, INT64_MAX);
    require_threads(threads);
    return dispatch(m, r, [&](auto winograd) {
      const Plan plan = backward_filter ? winograd.filter_gradient_plan(n, int(c), int(k), int(p), int(q))
                                        : winograd.forward_plan(n, int(c), int(k), int(p), int(q), threads);
      return bytes_of(plan.scratch_floats);
    });
  });
}

// w -> u. backward_data: turned by 180 degrees, C and K exchanged.
int64_t mucudnn_winograd_transform_filter(int m, int r, int64_t groups, int backward_data, const TensorArgument* w,
                                          float* u, int64_t u_bytes, int threads) {
  return refusable([&] {
    return dispatch(m, r, [&](auto winograd) -> int64_t {
      require_filter(winograd, backward_data, r, groups, *w, u_bytes, threads);
      for (int64_t g = 0; g < groups; ++g) {
        const FilterView view = w->filter(g, groups, backward_data, backward_data);
        const Planes planes =
            filter_planes(u + g * winograd.filter_floats(view.rows, view.lanes), view.rows, view.lanes);
        winograd.transform_filter(view, planes, threads);
      }
      return 0;
    });
  });
}

// y = x * w + bias, with an epilogue or null; backward data with x = dy, y = dx, padding r - 1 - padding and the turned filter.
int64_t mucudnn_winograd_forward(int m, int r, int64_t groups, int64_t pad_h, int64_t pad_w, const TensorArgument* x,
                                 float* u, int64_t u_bytes, void* bias, int64_t bias_bytes,
                                 const TensorArgument* y, float* scratch, int64_t scratch_bytes, int threads,
                                 const EpilogueArgument* of_y) {
  return refusable([&] {
    return dispatch(m, r, [&](auto winograd) -> int64_t {
      require_images(r, groups, pad_h, pad_w, *x, *y, threads);
      Images from = x->images(groups), to = y->images(groups);
      const Plan plan = winograd.forward_plan(to.n, from.c, to.c, to.h, to.w, threads);
      require_bytes("prepared", u_bytes, prepared_bytes(winograd, groups, from.c, to.c));
      require_bytes("scratch", scratch_bytes, bytes_of(plan.scratch_floats));
      const Elements of_bias = checked_bias(bias, bias_bytes, *y);
      const Epilogue epilogue = checked_epilogue(of_y, *y);
      for (int64_t g = 0; g < groups; ++g) {
        const Planes planes = filter_planes(u + g * winograd.filter_floats(from.c, to.c), from.c, to.c);
        winograd.forward(from.group(g), planes, {of_bias + g * to.c, epilogue}, to.group(g), int(pad_h), int(pad_w), plan,
                         scratch, threads);
      }
      return 0;
    });
  });
}

// du += the gradient of the filter, in the transform domain.
int64_t mucudnn_winograd_accumulate(int m, int r, int64_t groups, int64_t pad_h, int64_t pad_w,
                                    const TensorArgument* x, const TensorArgument* dy, float* du, int64_t du_bytes,
                                    float* scratch, int64_t scratch_bytes, int threads) {
  return refusable([&] {
    return dispatch(m, r, [&](auto winograd) -> int64_t {
      require_images(r, groups, pad_h, pad_w, *x, *dy, threads);
      const Images left = x->images(groups), right = dy->images(groups);
      const Plan plan = winograd.filter_gradient_plan(right.n, left.c, right.c, right.h, right.w);
      require_bytes("prepared", du_bytes, prepared_bytes(winograd, groups, left.c, right.c));
      require_bytes("scratch", scratch_bytes, bytes_of(plan.scratch_floats));
      for (int64_t g = 0; g < groups; ++g) {
        const Planes planes = filter_planes(du + g * winograd.filter_floats(left.c, right.c), left.c, right.c);
        winograd.accumulate(left.group(g), right.group(g), planes, int(pad_h), int(pad_w), plan, scratch, threads);
      }
      return 0;
    });
  });
}

// dw += du, transformed back.
int64_t mucudnn_winograd_add_filter_gradient(int m, int r, int64_t groups, float* du, int64_t du_bytes,
                                             const TensorArgument* dw, int threads) {
  return refusable([&] {
    return dispatch(m, r, [&](auto winograd) -> int64_t {
      require_filter(winograd, false, r, groups, *dw, du_bytes, threads);
      for (int64_t g = 0; g < groups; ++g) {
        const FilterView view = dw->filter(g, groups, false);
        const Planes planes =
            filter_planes(du + g * winograd.filter_floats(view.rows, view.lanes), view.rows, view.lanes);
        winograd.add_filter_gradient(planes, view, threads);
      }
      return 0;
    });
  });
}

int64_t mucudnn_winograd_stage(const Stage* stage, void* x, void* w, void* y, void* bias, float* prepared,
                               float* scratch, const EpilogueArgument* epilogue) {
  return refusable([&] {
    const Geometry& g = stage->geometry;
    g.require();
    require_between("the number of outputs of a tile", stage->tile, 1, LARGEST_SIZE);
    const bool backward = stage->operation == BACKWARD_DATA;
    const int m = int(stage->tile), r = int(g.r), threads = stage->thread_count();
    const int64_t pad_h = backward ? r - 1 - g.pad_h : g.pad_h, pad_w = backward ? r - 1 - g.pad_w : g.pad_w;
    const auto open = [&](const TensorArgument& of_w) {
      return mucudnn_winograd_transform_filter(m, r, g.groups, backward, &of_w, prepared, stage->prepared_bytes,
                                               threads);
    };
    const auto step = [&](const TensorArgument& of_x, const TensorArgument& of_y) {
      if (stage->operation == BACKWARD_FILTER)
        return mucudnn_winograd_accumulate(m, r, g.groups, pad_h, pad_w, &of_x, &of_y, prepared,
                                           stage->prepared_bytes, scratch, stage->scratch_bytes, threads);
      const EpilogueArgument of_outputs = of_slice(epilogue, *stage, y, of_y);
      return mucudnn_winograd_forward(m, r, g.groups, pad_h, pad_w, backward ? &of_y : &of_x, prepared,
                                      stage->prepared_bytes, bias, stage->bias_bytes, backward ? &of_x : &of_y,
                                      scratch, stage->scratch_bytes, threads, &of_outputs);
    };
    const auto close = [&](const TensorArgument& of_w) {
      return mucudnn_winograd_add_filter_gradient(m, r, g.groups, prepared, stage->prepared_bytes, &of_w, threads);
    };
    return run_stage(*stage, {x, w, y}, prepared, open, step, close);
  });
}

}  // extern "C"
#pragma GCC visibility pop
