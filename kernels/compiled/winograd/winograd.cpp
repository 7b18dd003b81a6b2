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

// Where tile t of an image batch is. The first one reads from `padding` pixels before the source on, and makes the
// target from `skipped` pixels before it on, in both dimensions.
struct Tiling {
  int64_t count;
  int rows, columns;
  int padding[2], skipped[2];
};

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
// floats, of which there may be more than 64 bits count. per_tile: floats of a tile, transformed, on both sides.
Schedule forward_schedule(int64_t tiles, double filter, int64_t per_tile, int threads) {
  const int wanted = int(std::clamp<int64_t>(CACHE_FLOATS / per_tile, SMALLEST_BLOCK, LARGEST_OWN_BLOCK));
  const Schedule own{even_blocks(tiles, wanted, threads), false};
  const Schedule shared{even_blocks(tiles, LARGEST_SHARED_BLOCK, 1), true};
  const double own_floats = double(ceil_div(tiles, int64_t{own.tiles})) * filter;
  const double shared_floats =
      double(ceil_div(tiles, int64_t{shared.tiles})) * filter + 4.0 * double(per_tile) * double(tiles);
  return own_floats <= shared_floats && own.tiles >= MR ? own : shared;
}

int filter_gradient_block(int64_t tiles, int64_t per_tile) {
  return int(std::min(tiles, std::clamp<int64_t>(8 * CACHE_FLOATS / per_tile, 128, 256)));
}

// Columns that are gathered together: two transposes of 16.
constexpr int STRIP_COLUMNS = 32;

// Windows of PATCH x PATCH pixels, STEP apart, each mapped to Map's other side.
template <class MapOf, int STEP_OF, int PATCH_OF>
struct Side {
  using Map = MapOf;
  static constexpr int STEP = STEP_OF, PATCH = PATCH_OF, STRIP = (STRIP_COLUMNS - (PATCH - STEP)) / STEP;
  static_assert(STRIP > 0);
};
template <class Map, int STEP>
using Read = Side<Map, STEP, Map::IN>;
template <class Map>
using Written = Side<Map, Map::OUT, Map::OUT>;

// M x M pixels of y, or of every phase of dx, a tile. Of the planes of x each has one of y and one of the filter, by
// which it is multiplied.
template <int M, int R, int S>
struct Winograd {
  using Of = Phases<M, R, S>;
  static constexpr int TILE = M, X_SIZE = Of::WINDOW, Y_SIZE = Of::SIZE, FILTER_SIZE = Of::FILTERS;
  // Tiles of 8 multiply the rounding of sums the most. With smaller ones the shorter sums cost more than they give.
  static constexpr int SUMMED_CHANNELS = Y_SIZE == 8 ? 64 : 256;
  using Filter = ToFilters<Of>;
  using FilterGradient = FromFilters<Of>;
  using Gradient = Read<ToPoints<Y_SIZE, Y_SIZE, M, false>, M>;

  struct Forward {
    using Source = Read<ToProducts<Of>, S * M>;
    using Target = Written<FromPoints<Y_SIZE, Y_SIZE, M, false>>;
    static constexpr int SOURCE_SIZE = X_SIZE, TARGET_SIZE = Y_SIZE;
  };
  struct BackwardData {
    using Source = Read<ToPointsFromData<Y_SIZE>, M>;
    using Target = Written<FromProducts<Of>>;
    static constexpr int SOURCE_SIZE = Y_SIZE, TARGET_SIZE = X_SIZE;
  };

  static int y_plane(int product) {
    return Of::tables.point_of[product / X_SIZE] * Y_SIZE + Of::tables.point_of[product % X_SIZE];
  }
  static int filter_plane(int product) {
    return Of::tables.filter_of[product / X_SIZE] * FILTER_SIZE + Of::tables.filter_of[product % X_SIZE];
  }

  // Calls body(product) for those that plane_of maps to a plane.
  template <class PlaneOf, class Body>
  static void for_products_of(int plane, PlaneOf plane_of, Body body) {
    if constexpr (S == 1) return body(plane);  // each plane is one product
    for (int product = 0; product < X_SIZE * X_SIZE; ++product)
      if (plane_of(product) == plane) body(product);
  }

  // h, w: of the target. dx is a correlation of dy with the turned filter, in tiles that begin with the phases with a tap
  // fewer: the first one in or before the image.
  static Tiling tiling(const Geometry& g, bool backward_data, int64_t n, int64_t h, int64_t w) {
    Tiling t{};
    int64_t tiles[2];
    const int64_t pads[] = {g.pad_h, g.pad_w}, sizes[] = {h, w};
    for (int i = 0; i < 2; ++i) {
      const int64_t shift = pads[i] + Of::LATE;
      t.padding[i] = int(backward_data ? Of::TAPS - 1 - shift / S : pads[i]);
      t.skipped[i] = int(backward_data ? shift % S : 0);
      tiles[i] = ceil_div(sizes[i] + t.skipped[i], int64_t{backward_data ? S * M : M});
    }
    t.rows = int(tiles[0]), t.columns = int(tiles[1]);
    t.count = times(n, tiles[0] * tiles[1]);
    return t;
  }

  // Calls body(t, count, region) for the strips of tiles [begin, end), the first of which begins at -before.
  template <class Side, class Body>
  static void for_strips(const Tiling& tiling, int64_t begin, int64_t end, const int (&before)[2], Body body) {
    for (int64_t t = begin; t < end;) {
      const int column = int(t % tiling.columns), row = int(t / tiling.columns % tiling.rows);
      const int count = int(std::min<int64_t>({Side::STRIP, tiling.columns - column, end - t}));
      body(t, count,
           Region{t / tiling.columns / tiling.rows, 0, row * Side::STEP - before[0], column * Side::STEP - before[1],
                  Side::PATCH, (count - 1) * Side::STEP + Side::PATCH});
      t += count;
    }
  }

  // Tiles [begin, end) of x, channel blocks [first, last), into the planes; row 0 of the planes is tile `origin`.
  template <class Side>
  static void to_planes(const Images& x, const Tiling& tiling, const int (&before)[2], int64_t begin, int64_t end,
                        int64_t origin, int first, int last, const Planes& planes) {
    using Map = typename Side::Map;
    alignas(64) float buffer[Side::PATCH * STRIP_COLUMNS * VL];
    for_strips<Side>(tiling, begin, end, before, [&](int64_t t, int count, Region region) {
      for (int block = first; block < last; ++block) {
        region.channel = block * VL;
        const Window window = gather(x, region, buffer);
        for (int i = 0; i < count; ++i)
          transform<Map>(window.data + i * Side::STEP * window.column, window.row, window.column,
                         planes.at(0, block, int(t + i - origin)), Map::OUT * planes.stride(), planes.stride());
      }
    });
  }

  template <class Side>
  static void from_planes(const Planes& planes, const Finish& finish, const Images& y, const Tiling& tiling,
                          int64_t begin, int64_t end, int64_t origin, int first, int last) {
    using Map = typename Side::Map;
    alignas(64) float buffer[Side::PATCH * STRIP_COLUMNS * VL];
    for_strips<Side>(tiling, begin, end, tiling.skipped, [&](int64_t t, int count, Region region) {
      for (int block = first; block < last; ++block) {
        region.channel = block * VL;
        const Vec offset = finish.bias ? load_first(finish.bias + block * VL, y.c - block * VL) : Vec{};
        const Window window = target(y, region, buffer);
        for (int i = 0; i < count; ++i)
          transform<Map>(planes.at(0, block, int(t + i - origin)), Map::IN * planes.stride(), planes.stride(),
                         window.data + i * Side::STEP * window.column, window.row, window.column, offset);
        if (finish.epilogue) apply(finish.epilogue, y, region, window);
        scatter(y, region, window, buffer);
      }
    });
  }

  static int64_t filter_floats(int c, int k) {
    return times(FILTER_SIZE * FILTER_SIZE, Planes::stride(blocks_of(c) * VL, blocks_of(k)));
  }

  // The planes of a block of tiles, one side after the other.
  template <class Direction>
  static int64_t source_floats(int tiles, int c) {
    return Direction::SOURCE_SIZE * Direction::SOURCE_SIZE * Planes::stride(tiles, blocks_of(c));
  }
  template <class Direction>
  static int64_t block_floats(int tiles, int c, int k) {
    return source_floats<Direction>(tiles, c) +
           Direction::TARGET_SIZE * Direction::TARGET_SIZE * Planes::stride(tiles, blocks_of(k));
  }
  static Planes source_planes(float* scratch, int tiles, int c) { return {scratch, tiles, blocks_of(c)}; }
  template <class Direction>
  static Planes target_planes(float* scratch, int tiles, int c, int k) {
    return {scratch + source_floats<Direction>(tiles, c), tiles, blocks_of(k)};
  }

  template <class Direction>
  static int64_t floats_of_tile(int c, int k) {
    constexpr int64_t SOURCE = Direction::SOURCE_SIZE, TARGET = Direction::TARGET_SIZE;
    return (SOURCE * SOURCE * blocks_of(c) + TARGET * TARGET * blocks_of(k)) * VL;
  }

  template <class Direction>
  static Plan plan(const Tiling& tiling, int c, int k, int threads) {
    const double filter = double(FILTER_SIZE * FILTER_SIZE) * blocks_of(c) * blocks_of(k) * VL * VL;
    const Schedule schedule = forward_schedule(tiling.count, filter, floats_of_tile<Direction>(c, k), threads);
    return {tiling, schedule,
            times(schedule.shared ? 1 : threads, block_floats<Direction>(schedule.tiles, c, k))};
  }

  // The products of planes [begin, end) of the target.
  static void multiply_planes(Forward, int begin, int end, int tiles, const Planes& v, const Planes& u,
                              const Planes& m) {
    for (int plane = begin; plane < end; ++plane) {
      bool is_first = true;
      for_products_of(plane, y_plane, [&](int product) {
        const float *from = v.at(product), *filter = u.at(filter_plane(product));
        if (is_first)
          multiply<false>(tiles, u.rows, u.column_blocks, from, filter, m.at(plane), SUMMED_CHANNELS);
        else
          multiply<true>(tiles, u.rows, u.column_blocks, from, filter, m.at(plane), SUMMED_CHANNELS);
        is_first = false;
      });
    }
  }
  static void multiply_planes(BackwardData, int begin, int end, int tiles, const Planes& v, const Planes& u,
                              const Planes& m) {
    for (int plane = begin; plane < end; ++plane)
      multiply(tiles, u.rows, u.column_blocks, v.at(y_plane(plane)), u.at(filter_plane(plane)), m.at(plane),
               SUMMED_CHANNELS);
  }

  template <class Direction>
  static void correlate(const Images& x, const Planes& u, const Finish& finish, const Images& y, const Plan& plan,
                        float* scratch, int threads) {
    if (plan.schedule.shared)
      correlate_shared<Direction>(x, u, finish, y, plan.tiling, plan.schedule.tiles, scratch, threads);
    else
      correlate_private<Direction>(x, u, finish, y, plan.tiling, plan.schedule.tiles, scratch, threads);
  }

  template <class Direction>
  static void correlate_private(const Images& x, const Planes& u, const Finish& finish, const Images& y,
                                const Tiling& tiling, int block, float* scratch, int threads) {
    const ptrdiff_t own = block_floats<Direction>(block, x.c, y.c);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t begin = 0; begin < tiling.count; begin += block) {
      const int64_t end = std::min(begin + block, tiling.count);
      const int tiles = int(end - begin);
      float* mine = scratch + omp_get_thread_num() * own;
      const Planes v = source_planes(mine, tiles, x.c), m = target_planes<Direction>(mine, tiles, x.c, y.c);
      to_planes<typename Direction::Source>(x, tiling, tiling.padding, begin, end, begin, 0, v.column_blocks, v);
      multiply_planes(Direction{}, 0, Direction::TARGET_SIZE * Direction::TARGET_SIZE, tiles, v, u, m);
      from_planes<typename Direction::Target>(m, finish, y, tiling, begin, end, begin, 0, m.column_blocks);
    }
  }

  template <class Direction>
  static void correlate_shared(const Images& x, const Planes& u, const Finish& finish, const Images& y,
                               const Tiling& tiling, int block, float* scratch, int threads) {
#pragma omp parallel num_threads(threads)
    for (int64_t begin = 0; begin < tiling.count; begin += block) {
      const int64_t end = std::min(begin + block, tiling.count);
      const int tiles = int(end - begin);
      const Planes v = source_planes(scratch, tiles, x.c), m = target_planes<Direction>(scratch, tiles, x.c, y.c);
#pragma omp for
      for (int i = 0; i < v.column_blocks; ++i)
        to_planes<typename Direction::Source>(x, tiling, tiling.padding, begin, end, begin, i, i + 1, v);
#pragma omp for schedule(dynamic)
      for (int plane = 0; plane < Direction::TARGET_SIZE * Direction::TARGET_SIZE; ++plane)
        multiply_planes(Direction{}, plane, plane + 1, tiles, v, u, m);
#pragma omp for
      for (int i = 0; i < m.column_blocks; ++i)
        from_planes<typename Direction::Target>(m, finish, y, tiling, begin, end, begin, i, i + 1);
    }
  }

  static Plan filter_gradient_plan(const Tiling& tiling, int c, int k) {
    const int block = filter_gradient_block(tiling.count, floats_of_tile<Forward>(c, k));
    return {tiling, {block, true}, block_floats<Forward>(block, c, k)};
  }

  // du += sum over tiles of (B^T d B)^T (A dy A^T), product by product; du: rows C (padded), columns K. The planes of
  // the filter with the most products come last, so they are taken first.
  static void accumulate(const Images& x, const Images& dy, const Planes& du, const Plan& plan, float* scratch,
                         int threads) {
    const Tiling& tiling = plan.tiling;
    const int block = plan.schedule.tiles;
#pragma omp parallel num_threads(threads)
    for (int64_t begin = 0; begin < tiling.count; begin += block) {
      const int64_t end = std::min(begin + block, tiling.count);
      const int tiles = int(end - begin);
      const Planes v = source_planes(scratch, tiles, x.c), d = target_planes<Forward>(scratch, tiles, x.c, dy.c);
      const int pieces = ceil_div(tiles, 32);
#pragma omp for schedule(dynamic)
      for (int i = 0; i < pieces; ++i) {
        const int64_t from = begin + tiles * i / pieces, to = begin + tiles * (i + 1) / pieces;
        to_planes<typename Forward::Source>(x, tiling, tiling.padding, from, to, begin, 0, v.column_blocks, v);
        to_planes<Gradient>(dy, tiling, tiling.skipped, from, to, begin, 0, d.column_blocks, d);
      }
#pragma omp for schedule(dynamic)
      for (int plane = FILTER_SIZE * FILTER_SIZE - 1; plane >= 0; --plane)
        for_products_of(plane, filter_plane, [&](int product) {
          add_multiply_transposed(du.rows, tiles, du.column_blocks, v.at(product), d.at(y_plane(product)),
                                  du.at(plane));
        });
    }
  }

  static void transform_filter(const FilterView& w, const Planes& u, int threads) {
#pragma omp parallel for collapse(2) num_threads(threads)
    for (int block = 0; block < u.column_blocks; ++block)
      for (int first = 0; first < u.rows; first += VL) {
        alignas(64) float taps[VL * R * R * VL];
        load_filter_block({w, block * VL, first}, taps);
        for (int i = 0; i < VL; ++i)
          transform<Filter>(taps + i * R * R * VL, R * VL, VL, u.at(0, block, first + i), FILTER_SIZE * u.stride(),
                            u.stride());
      }
  }

  static void add_filter_gradient(const Planes& du, const FilterView& dw, int threads) {
#pragma omp parallel for collapse(2) num_threads(threads)
    for (int block = 0; block < du.column_blocks; ++block)
      for (int first = 0; first < du.rows; first += VL) {
        alignas(64) float taps[VL * R * R * VL];
        for (int i = 0; i < VL; ++i)
          transform<FilterGradient>(du.at(0, block, first + i), FILTER_SIZE * du.stride(), du.stride(),
                                    taps + i * R * R * VL, R * VL, VL);
        add_filter_block({dw, block * VL, first}, taps);
      }
  }
};

// Calls body with the template for F(m, r) and the geometry's stride.
template <class Body>
int64_t dispatch(const Geometry& g, int m, Body body) {
  g.require();
  const auto is = [&](int tile, int taps, int stride) {
    return m == tile && g.r == taps && g.s == taps && g.stride_h == stride && g.stride_w == stride &&
           g.dilation_h == 1 && g.dilation_w == 1;
  };
  if (is(2, 3, 1)) return body(Winograd<2, 3, 1>{});
  if (is(4, 3, 1)) return body(Winograd<4, 3, 1>{});
  if (is(6, 3, 1)) return body(Winograd<6, 3, 1>{});
  if (is(2, 5, 1)) return body(Winograd<2, 5, 1>{});
  if (is(4, 5, 1)) return body(Winograd<4, 5, 1>{});
  if (is(2, 3, 2)) return body(Winograd<2, 3, 2>{});
  if (is(4, 3, 2)) return body(Winograd<4, 3, 2>{});
  if (is(4, 5, 2)) return body(Winograd<4, 5, 2>{});
  const auto by = [](int64_t a, int64_t b) { return std::to_string(a) + "x" + std::to_string(b); };
  refuse(NOT_BUILT, "F(" + by(m, m) + ", " + by(g.r, g.s) + ") with the stride " + by(g.stride_h, g.stride_w) +
                        " and the dilation " + by(g.dilation_h, g.dilation_w) + " is not among the compiled ones");
}

Planes filter_planes(float* data, int rows, int lanes) { return {data, blocks_of(rows) * VL, blocks_of(lanes)}; }

template <class Transforms>
int64_t prepared_bytes(Transforms, int64_t groups, int64_t c, int64_t k) {
  return bytes_of(times(groups, Transforms::filter_floats(int(c), int(k))));
}

template <class Transforms>
void require_filter(Transforms winograd, bool lanes_are_c, const Geometry& g, const TensorArgument& w,
                    int64_t prepared, int64_t threads) {
  w.require_filter(g.groups, g.r, g.s);
  const FilterView view = w.filter(0, g.groups, lanes_are_c);
  require_bytes("prepared", prepared, prepared_bytes(winograd, g.groups, view.rows, view.lanes));
  require_threads(threads);
}

// Calls body with the planes and the filter of each group; backward_data: turned by 180 degrees, C and K exchanged.
template <class Transforms, class Body>
void for_groups(Transforms, const Geometry& g, const TensorArgument& w, bool backward_data, float* planes, Body body) {
  for (int64_t i = 0; i < g.groups; ++i) {
    const FilterView view = w.filter(i, g.groups, backward_data, backward_data);
    body(filter_planes(planes + i * Transforms::filter_floats(view.rows, view.lanes), view.rows, view.lanes), view);
  }
}

template <class Direction, class Transforms>
void correlate(Transforms winograd, const Geometry& g, const Tiling& tiling, const Images& from, float* u,
               int64_t u_bytes, const Elements& bias, const Epilogue& epilogue, const Images& to, float* scratch,
               int64_t scratch_bytes, int threads) {
  const Plan plan = winograd.template plan<Direction>(tiling, from.c, to.c, threads);
  require_bytes("prepared", u_bytes, prepared_bytes(winograd, g.groups, from.c, to.c));
  require_bytes("scratch", scratch_bytes, bytes_of(plan.scratch_floats));
  for (int64_t i = 0; i < g.groups; ++i) {
    const Planes planes = filter_planes(u + i * winograd.filter_floats(from.c, to.c), from.c, to.c);
    winograd.template correlate<Direction>(from.group(i), planes, {bias + i * to.c, epilogue}, to.group(i), plan,
                                           scratch, threads);
  }
}

}  // namespace

// The entries that library.py calls. All return 0, a size, or why they refused (checks.h). m: the outputs of a tile in
// one direction; c, k: channels of one group.
#pragma GCC visibility push(default)
extern "C" {

int64_t mucudnn_vector_length() { return VL; }

const char* mucudnn_refusal() { return refusal_text; }

// Size of the transformed filter, or of its gradient's accumulator.
int64_t mucudnn_winograd_prepared_bytes(const Geometry* g, int m, int64_t c, int64_t k) {
  return refusable([&] {
    for (const int64_t size : {c, k}) require_size("a number of channels", size);
    return dispatch(*g, m, [&](auto winograd) { return prepared_bytes(winograd, g->groups, c, k); });
  });
}

// Scratch for n samples, c channels of what is read, and k of what is written, of h x w; backward filter: of x and dy.
int64_t mucudnn_winograd_scratch_bytes(const Geometry* g, int m, int operation, int64_t n, int64_t c, int64_t k,
                                       int64_t h, int64_t w, int threads) {
  return refusable([&] {
    for (const int64_t size : {c, k, h, w}) require_size("a number of channels or pixels", size);
    require_between("the number of samples", n, 1, INT64_MAX);
    require_between("the operation", operation, FORWARD, BACKWARD_FILTER);
    require_threads(threads);
    return dispatch(*g, m, [&](auto winograd) {
      using Of = decltype(winograd);
      const Tiling tiling = winograd.tiling(*g, operation == BACKWARD_DATA, n, h, w);
      const Plan plan = operation == BACKWARD_FILTER ? winograd.filter_gradient_plan(tiling, int(c), int(k))
                        : operation == FORWARD
                            ? winograd.template plan<typename Of::Forward>(tiling, int(c), int(k), threads)
                            : winograd.template plan<typename Of::BackwardData>(tiling, int(c), int(k), threads);
      return bytes_of(plan.scratch_floats);
    });
  });
}

// w -> u. backward_data: turned by 180 degrees, C and K exchanged.
int64_t mucudnn_winograd_transform_filter(const Geometry* g, int m, int backward_data, const TensorArgument* w,
                                          float* u, int64_t u_bytes, int threads) {
  return refusable([&] {
    return dispatch(*g, m, [&](auto winograd) -> int64_t {
      require_filter(winograd, backward_data, *g, *w, u_bytes, threads);
      for_groups(winograd, *g, *w, backward_data, u, [&](const Planes& planes, const FilterView& view) {
        winograd.transform_filter(view, planes, threads);
      });
      return 0;
    });
  });
}

// out = in * w + bias, with an epilogue or null: y of x, or in backward data dx of dy.
int64_t mucudnn_winograd_forward(const Geometry* g, int m, int backward_data, const TensorArgument* in, float* u,
                                 int64_t u_bytes, void* bias, int64_t bias_bytes, const TensorArgument* out,
                                 float* scratch, int64_t scratch_bytes, int threads, const EpilogueArgument* of_out) {
  return refusable([&] {
    return dispatch(*g, m, [&](auto winograd) -> int64_t {
      using Of = decltype(winograd);
      require_images(*g, backward_data ? *out : *in, backward_data ? *in : *out);
      require_threads(threads);
      const Images from = in->images(g->groups), to = out->images(g->groups);
      const Elements of_bias = checked_bias(bias, bias_bytes, *out);
      const Epilogue epilogue = checked_epilogue(of_out, *out);
      const Tiling tiling = winograd.tiling(*g, backward_data, to.n, to.h, to.w);
      if (backward_data)
        correlate<typename Of::BackwardData>(winograd, *g, tiling, from, u, u_bytes, of_bias, epilogue, to, scratch,
                                             scratch_bytes, threads);
      else
        correlate<typename Of::Forward>(winograd, *g, tiling, from, u, u_bytes, of_bias, epilogue, to, scratch,
                                        scratch_bytes, threads);
      return 0;
    });
  });
}

// du += the gradient of the filter, in the transform domain.
int64_t mucudnn_winograd_accumulate(const Geometry* g, int m, const TensorArgument* x, const TensorArgument* dy,
                                    float* du, int64_t du_bytes, float* scratch, int64_t scratch_bytes, int threads) {
  return refusable([&] {
    return dispatch(*g, m, [&](auto winograd) -> int64_t {
      require_images(*g, *x, *dy);
      require_threads(threads);
      const Images left = x->images(g->groups), right = dy->images(g->groups);
      const Plan plan =
          winograd.filter_gradient_plan(winograd.tiling(*g, false, right.n, right.h, right.w), left.c, right.c);
      require_bytes("prepared", du_bytes, prepared_bytes(winograd, g->groups, left.c, right.c));
      require_bytes("scratch", scratch_bytes, bytes_of(plan.scratch_floats));
      for (int64_t i = 0; i < g->groups; ++i) {
        const Planes planes = filter_planes(du + i * winograd.filter_floats(left.c, right.c), left.c, right.c);
        winograd.accumulate(left.group(i), right.group(i), planes, plan, scratch, threads);
      }
      return 0;
    });
  });
}

// dw += du, transformed back.
int64_t mucudnn_winograd_add_filter_gradient(const Geometry* g, int m, float* du, int64_t du_bytes,
                                             const TensorArgument* dw, int threads) {
  return refusable([&] {
    return dispatch(*g, m, [&](auto winograd) -> int64_t {
      require_filter(winograd, false, *g, *dw, du_bytes, threads);
      for_groups(winograd, *g, *dw, false, du, [&](const Planes& planes, const FilterView& view) {
        winograd.add_filter_gradient(planes, view, threads);
      });
      return 0;
    });
  });
}

int64_t mucudnn_winograd_stage(const Stage* stage, void* x, void* w, void* y, void* bias, float* prepared,
                               float* scratch, const EpilogueArgument* epilogue) {
  return refusable([&] {
    require_between("the number of outputs of a tile", stage->tile, 1, LARGEST_SIZE);
    const int m = int(stage->tile);
    return run_packed_filter_stage(
        *stage, {x, w, y}, bias, prepared, scratch, epilogue,
        [m](const Geometry* g, auto... rest) { return mucudnn_winograd_transform_filter(g, m, rest...); },
        [m](const Geometry* g, auto... rest) { return mucudnn_winograd_forward(g, m, rest...); },
        [m](const Geometry* g, auto... rest) { return mucudnn_winograd_accumulate(g, m, rest...); },
        [m](const Geometry* g, auto... rest) { return mucudnn_winograd_add_filter_gradient(g, m, rest...); });
  });
}

}  // extern "C"
#pragma GCC visibility pop
