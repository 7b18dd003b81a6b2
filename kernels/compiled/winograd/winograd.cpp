// Winograd convolution, F(M x M, R x R), forward, backward data (forward with the turned filter) and backward filter.
//
// The tiles of a micro-batch are processed in blocks: a block is transformed, multiplied by the filter at each of the
// SIZE x SIZE points, and transformed back. A block is small enough to stay in a core's cache, so that the transformed
// data, which is larger than x, never goes to memory (L3 fusion: Gelashvili, Shavit, Zlateski 2019).
#include <omp.h>

#include "common/matmul.h"
#include "common/stage.h"
#include "winograd/cook_toom.h"

namespace {

using namespace winograd;

// The division of an image batch into tiles. In each dimension, the first tile reads from `padding` pixels before the
// source on, and writes from `skipped` pixels before the target on.
struct Tiling {
  int64_t count;
  int rows, columns;
  int padding[2], skipped[2];
};

// The planes of a transformed operand, one per point, each a blocked matrix [column_blocks][rows][VL]. Planes start an
// odd number of cache lines apart, since a tile is written to all planes at once and must not fill one cache set.
struct Planes {
  float* data;
  int rows, column_blocks;
  static ptrdiff_t stride(int rows, int column_blocks) { return (ptrdiff_t(rows) * column_blocks | 1) * VL; }
  ptrdiff_t stride() const { return stride(rows, column_blocks); }
  float* at(int point, int column_block = 0, int row = 0) const {
    return data + point * stride() + (ptrdiff_t(column_block) * rows + row) * VL;
  }
};

// The number of tiles of a block, and whether all threads share one block or each has its own.
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

// Choose the schedule that moves fewer floats. A thread's own block stays in its core's cache, but every block reads
// the whole filter; a shared block reads it once, but moves its data between cores, which measurements show to cost
// twice as much. The counts may exceed 64 bits. per_tile: floats of a tile, transformed, on both sides.
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

// Columns that are gathered at a time: two transposes of 16.
constexpr int STRIP_COLUMNS = 32;

// Windows of PATCH x PATCH pixels, STEP apart, which Map reads or writes.
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

// Winograd convolution with tiles of M x M pixels of y, or of every phase of dx. Each plane of x belongs to one
// product, with one plane of the filter and one of y. Step: of the products. Pairs are of the channels in the same lane
// of two neighbouring blocks; in backward filter, of two neighbouring tiles.
template <int M, int R, int S, class Step = Singles>
struct Winograd {
  using Of = Phases<M, R, S>;
  static constexpr bool PAIRS = Step::NUMBERS == 2;
  static constexpr int TILE = M, X_SIZE = Of::WINDOW, Y_SIZE = Of::SIZE, FILTER_SIZE = Of::FILTERS;
  // Tiles of 8 amplify rounding errors of sums the most. For smaller tiles, shorter sums cost more than they gain.
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

  // Call body(product) for the products that plane_of maps to `plane`.
  template <class PlaneOf, class Body>
  static void for_products_of(int plane, PlaneOf plane_of, Body body) {
    if constexpr (S == 1) return body(plane);  // each plane is one product
    for (int product = 0; product < X_SIZE * X_SIZE; ++product)
      if (plane_of(product) == plane) body(product);
  }

  // Return the tiling. h, w: of the target. dx is a correlation of dy with the turned filter. Its tiles begin with the
  // phases that have one tap fewer, so that the first tile begins at or before the edge of the image.
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

  // Call body(t, count, region) for the strips of tiles [begin, end). The first tile of an image begins at -before.
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

  // Return the number of blocks of a step's channels.
  static int summed_blocks(int channels) { return ceil_div(blocks_of(channels), Step::NUMBERS); }

  // Transform tiles [begin, end) of x, column blocks [first, last) of the planes, whose row 0 is tile `origin`.
  template <class Side, bool PAIRS_TILES = false>
  static void to_planes(const Images& x, const Tiling& tiling, const int (&before)[2], int64_t begin, int64_t end,
                        int64_t origin, int first, int last, const Planes& planes) {
    using Map = typename Side::Map;
    constexpr int BLOCKS = PAIRS && !PAIRS_TILES ? 2 : 1, POINTS = Map::OUT * Map::OUT;
    alignas(64) float buffer[BLOCKS][Side::PATCH * STRIP_COLUMNS * VL];
    alignas(64) float points[PAIRS ? 2 : 1][PAIRS ? POINTS * VL : 1] = {};
    for_strips<Side>(tiling, begin, end, before, [&](int64_t t, int count, Region region) {
      for (int block = first; block < last; ++block) {
        Window windows[BLOCKS] = {};
        int gathered = 0;
        for (int channel = block * BLOCKS * VL; gathered < BLOCKS && channel < x.c; ++gathered, channel += VL) {
          region.channel = channel;
          windows[gathered] = gather(x, region, buffer[gathered]);
        }
        for (int i = 0; i < count; ++i) {
          const int row = int(t + i - origin);
          const auto transform_to = [&](float* to, ptrdiff_t plane, const Window& window) INLINE_LAMBDA {
            transform<Map>(window.data + i * Side::STEP * window.column, window.row, window.column, to,
                           Map::OUT * plane, plane);
          };
          if constexpr (!PAIRS) {
            transform_to(planes.at(0, block, row), planes.stride(), windows[0]);
          } else {
            for (int j = 0; j < gathered; ++j) transform_to(points[j], VL, windows[j]);
            for (int point = 0; point < POINTS; ++point) {
              float* const to = planes.at(point, block, PAIRS_TILES ? row / 2 : row);
              const Vec value = load(points[0] + point * VL);
              if (PAIRS_TILES && row % 2)
                store(to, (Vec)((Bits)load(to) | (Bits)paired(Vec{}, value)));
              else
                store(to, paired(value, gathered == 2 ? load(points[1] + point * VL) : Vec{}));
            }
          }
        }
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

  // Return the planes of the filter, or of its gradient, whose elements are always floats.
  static Planes filter_planes(bool of_gradient, float* data, int c, int k) {
    return {data, (of_gradient ? blocks_of(c) : summed_blocks(c)) * VL, blocks_of(k)};
  }
  static int64_t filter_floats(bool of_gradient, int c, int k) {
    return times(FILTER_SIZE * FILTER_SIZE, filter_planes(of_gradient, nullptr, c, k).stride());
  }

  // The planes of a block of tiles: those of the source, with c column blocks, then those of the target.
  template <class Direction>
  static int64_t source_floats(int rows, int c) {
    return Direction::SOURCE_SIZE * Direction::SOURCE_SIZE * Planes::stride(rows, c);
  }
  template <class Direction>
  static int64_t block_floats(int rows, int c, int k) {
    return source_floats<Direction>(rows, c) +
           Direction::TARGET_SIZE * Direction::TARGET_SIZE * Planes::stride(rows, k);
  }
  template <class Direction>
  static Planes target_planes(float* scratch, int rows, int c, int k) {
    return {scratch + source_floats<Direction>(rows, c), rows, k};
  }

  template <class Direction>
  static int64_t floats_of_tile(int c, int k) {
    constexpr int64_t SOURCE = Direction::SOURCE_SIZE, TARGET = Direction::TARGET_SIZE;
    return (SOURCE * SOURCE * summed_blocks(c) + TARGET * TARGET * blocks_of(k)) * VL;
  }

  template <class Direction>
  static Plan plan(const Tiling& tiling, int c, int k, int threads) {
    const double filter = double(FILTER_SIZE * FILTER_SIZE) * summed_blocks(c) * blocks_of(k) * VL * VL;
    const Schedule schedule = forward_schedule(tiling.count, filter, floats_of_tile<Direction>(c, k), threads);
    return {tiling, schedule,
            times(schedule.shared ? 1 : threads,
                  block_floats<Direction>(schedule.tiles, summed_blocks(c), blocks_of(k)))};
  }

  // Compute the products of planes [begin, end) of the target.
  static void multiply_planes(Forward, int begin, int end, int tiles, const Planes& v, const Planes& u,
                              const Planes& m) {
    for (int plane = begin; plane < end; ++plane) {
      bool is_first = true;
      for_products_of(plane, y_plane, [&](int product) {
        const float *from = v.at(product), *filter = u.at(filter_plane(product));
        multiply<Step>(!is_first, tiles, u.rows, u.column_blocks, from, filter, m.at(plane), SUMMED_CHANNELS);
        is_first = false;
      });
    }
  }
  static void multiply_planes(BackwardData, int begin, int end, int tiles, const Planes& v, const Planes& u,
                              const Planes& m) {
    for (int plane = begin; plane < end; ++plane)
      multiply<Step>(false, tiles, u.rows, u.column_blocks, v.at(y_plane(plane)), u.at(filter_plane(plane)),
                            m.at(plane), SUMMED_CHANNELS);
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
    const int summed = summed_blocks(x.c), written = blocks_of(y.c);
    const ptrdiff_t own = block_floats<Direction>(block, summed, written);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t begin = 0; begin < tiling.count; begin += block) {
      const int64_t end = std::min(begin + block, tiling.count);
      const int tiles = int(end - begin);
      float* mine = scratch + omp_get_thread_num() * own;
      const Planes v{mine, tiles, summed}, m = target_planes<Direction>(mine, tiles, summed, written);
      to_planes<typename Direction::Source>(x, tiling, tiling.padding, begin, end, begin, 0, v.column_blocks, v);
      multiply_planes(Direction{}, 0, Direction::TARGET_SIZE * Direction::TARGET_SIZE, tiles, v, u, m);
      from_planes<typename Direction::Target>(m, finish, y, tiling, begin, end, begin, 0, m.column_blocks);
    }
  }

  template <class Direction>
  static void correlate_shared(const Images& x, const Planes& u, const Finish& finish, const Images& y,
                               const Tiling& tiling, int block, float* scratch, int threads) {
    const int summed = summed_blocks(x.c), written = blocks_of(y.c);
#pragma omp parallel num_threads(threads)
    for (int64_t begin = 0; begin < tiling.count; begin += block) {
      const int64_t end = std::min(begin + block, tiling.count);
      const int tiles = int(end - begin);
      const Planes v{scratch, tiles, summed}, m = target_planes<Direction>(scratch, tiles, summed, written);
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

  // Return the rows of planes that are summed over tiles.
  static int rows_of(int tiles) { return ceil_div(tiles, Step::NUMBERS); }

  static Plan filter_gradient_plan(const Tiling& tiling, int c, int k) {
    const int block = filter_gradient_block(tiling.count, floats_of_tile<Forward>(c, k));
    return {tiling, {block, true}, block_floats<Forward>(rows_of(block), blocks_of(c), blocks_of(k))};
  }

  // Add the sum over tiles of (B^T d B)^T (A dy A^T) to du, product by product. du: rows C (padded), columns K. The
  // last planes of the filter have the most products, so they are processed first.
  static void accumulate(const Images& x, const Images& dy, const Planes& du, const Plan& plan, float* scratch,
                         int threads) {
    const Tiling& tiling = plan.tiling;
    const int block = plan.schedule.tiles;
#pragma omp parallel num_threads(threads)
    for (int64_t begin = 0; begin < tiling.count; begin += block) {
      const int64_t end = std::min(begin + block, tiling.count);
      const int tiles = int(end - begin);
      const int rows = rows_of(tiles), c = blocks_of(x.c);
      const Planes v{scratch, rows, c}, d = target_planes<Forward>(scratch, rows, c, blocks_of(dy.c));
      const int pieces = ceil_div(tiles, 32);
      const auto first_of = [&](int piece) {
        return begin + (piece == pieces ? tiles : tiles * piece / pieces / Step::NUMBERS * Step::NUMBERS);
      };
#pragma omp for schedule(dynamic)
      for (int i = 0; i < pieces; ++i) {
        const int64_t from = first_of(i), to = first_of(i + 1);
        to_planes<typename Forward::Source, PAIRS>(x, tiling, tiling.padding, from, to, begin, 0, v.column_blocks, v);
        to_planes<Gradient, PAIRS>(dy, tiling, tiling.skipped, from, to, begin, 0, d.column_blocks, d);
      }
#pragma omp for schedule(dynamic)
      for (int plane = FILTER_SIZE * FILTER_SIZE - 1; plane >= 0; --plane)
        for_products_of(plane, filter_plane, [&](int product) {
          add_multiply_transposed<Step>(du.rows, rows, du.column_blocks, v.at(product), d.at(y_plane(product)),
                                        du.at(plane));
        });
    }
  }

  static void transform_filter(const FilterView& w, const Planes& u, int threads) {
    constexpr int SIZE = FILTER_SIZE, POINTS = SIZE * SIZE;
#pragma omp parallel for collapse(2) num_threads(threads)
    for (int block = 0; block < u.column_blocks; ++block)
      for (int first = 0; first < u.rows; first += VL) {
        alignas(64) float taps[Step::NUMBERS][VL * R * R * VL] = {};
        for (int j = 0, row = first * Step::NUMBERS; j < Step::NUMBERS && row < w.rows; ++j, row += VL)
          load_filter_block({w, block * VL, row}, taps[j]);
        for (int i = 0; i < VL; ++i) {
          const float* const of_row = taps[0] + i * R * R * VL;
          if constexpr (!PAIRS) {
            transform<Filter>(of_row, R * VL, VL, u.at(0, block, first + i), SIZE * u.stride(), u.stride());
          } else {
            alignas(64) float points[2][POINTS * VL];
            for (int j = 0; j < 2; ++j)
              transform<Filter>(of_row + j * VL * R * R * VL, R * VL, VL, points[j], SIZE * VL, VL);
            for (int point = 0; point < POINTS; ++point)
              store(u.at(point, block, first + i),
                    paired(load(points[0] + point * VL), load(points[1] + point * VL)));
          }
        }
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

// Call body with the template for F(m, r) and the stage's stride.
template <class Body>
auto dispatch(const Stage& stage, Body body) {
  const Geometry& g = stage.geometry;
  g.require();
  require_between("the number of outputs of a tile", stage.tile, 1, LARGEST_SIZE);
  const auto is = [&](int tile, int taps, int stride) {
    return stage.tile == tile && g.r == taps && g.s == taps && g.stride_h == stride && g.stride_w == stride &&
           g.dilation_h == 1 && g.dilation_w == 1;
  };
  if (is(2, 3, 1)) {
    if (stage.x.element == BFLOAT16 && multiplies_pairs()) return body(Winograd<2, 3, 1, Pairs>{});
    return body(Winograd<2, 3, 1>{});
  }
  if (is(4, 3, 1)) return body(Winograd<4, 3, 1>{});
  if (is(6, 3, 1)) return body(Winograd<6, 3, 1>{});
  if (is(2, 5, 1)) return body(Winograd<2, 5, 1>{});
  if (is(4, 5, 1)) return body(Winograd<4, 5, 1>{});
  if (is(2, 3, 2)) return body(Winograd<2, 3, 2>{});
  if (is(4, 3, 2)) return body(Winograd<4, 3, 2>{});
  if (is(4, 5, 2)) return body(Winograd<4, 5, 2>{});
  const auto by = [](int64_t a, int64_t b) { return std::to_string(a) + "x" + std::to_string(b); };
  refuse(NOT_BUILT, "F(" + by(stage.tile, stage.tile) + ", " + by(g.r, g.s) + ") with the stride " +
                        by(g.stride_h, g.stride_w) + " and the dilation " + by(g.dilation_h, g.dilation_w) +
                        " is not among the compiled ones");
}

// Return the bytes of the transformed filter, or of its gradient's accumulator. c, k: channels read, written per group.
template <class Transforms>
int64_t filter_bytes(Transforms, const Stage& stage, int64_t c, int64_t k) {
  const bool of_gradient = stage.operation == BACKWARD_FILTER;
  return bytes_of(times(stage.geometry.groups, Transforms::filter_floats(of_gradient, int(c), int(k))));
}

// Call body with the planes and the filter of each group: turned by 180 degrees in backward data, C and K exchanged.
template <class Transforms, class Body>
void for_groups(Transforms winograd, const Stage& stage, const TensorArgument& w, float* planes, Body body) {
  const int64_t groups = stage.geometry.groups;
  const bool backward_data = stage.backward_data();
  w.require_filter(groups, stage.geometry.r, stage.geometry.s);
  const FilterView first = w.filter(0, groups, backward_data);
  stage.require_prepared(filter_bytes(winograd, stage, first.rows, first.lanes));
  const bool of_gradient = stage.operation == BACKWARD_FILTER;
  for (int64_t i = 0; i < groups; ++i) {
    const FilterView view = w.filter(i, groups, backward_data, backward_data);
    float* const of_group = planes + i * Transforms::filter_floats(of_gradient, view.rows, view.lanes);
    body(Transforms::filter_planes(of_gradient, of_group, view.rows, view.lanes), view);
  }
}

// Return the plan of a call. from, to: the tensors that are read and written; in backward filter, x and dy.
template <class Transforms>
Plan plan_of(Transforms winograd, const Stage& stage, const Images& from, const Images& to, int threads) {
  const Tiling tiling = winograd.tiling(stage.geometry, stage.backward_data(), to.n, to.h, to.w);
  if (stage.operation == BACKWARD_FILTER) return winograd.filter_gradient_plan(tiling, from.c, to.c);
  if (stage.operation == BACKWARD_DATA)
    return winograd.template plan<typename Transforms::BackwardData>(tiling, from.c, to.c, threads);
  return winograd.template plan<typename Transforms::Forward>(tiling, from.c, to.c, threads);
}

struct CompiledWinograd {
  static int64_t prepared_bytes(const Stage& stage) {
    require_shapes(stage.geometry, stage.x, stage.y);
    const int64_t groups = stage.geometry.groups;
    return dispatch(stage, [&](auto winograd) {
      return filter_bytes(winograd, stage, stage.in().c / groups, stage.out().c / groups);
    });
  }

  static int64_t scratch_bytes(const Stage& stage) {
    require_shapes(stage.geometry, stage.x, stage.y);
    require_between("the operation", stage.operation, FORWARD, BACKWARD_FILTER);
    const int64_t groups = stage.geometry.groups;
    return dispatch(stage, [&](auto winograd) {
      const Images from = stage.in().images(groups), to = stage.out().images(groups);
      return bytes_of(plan_of(winograd, stage, from, to, stage.thread_count()).scratch_floats);
    });
  }

  static void open(const Stage& stage, const TensorArgument& w, float* u) {
    const int threads = stage.thread_count();
    dispatch(stage, [&](auto winograd) {
      for_groups(winograd, stage, w, u, [&](const Planes& planes, const FilterView& view) {
        winograd.transform_filter(view, planes, threads);
      });
    });
  }

  static void correlate(const Stage& stage, const Slice& slice) {
    dispatch(stage, [&](auto winograd) {
      using Of = decltype(winograd);
      if (stage.backward_data())
        correlate<typename Of::BackwardData>(winograd, stage, slice);
      else
        correlate<typename Of::Forward>(winograd, stage, slice);
    });
  }

  // Add the filter gradient to du, in the transform domain.
  static void accumulate(const Stage& stage, const Slice& slice) {
    const int threads = stage.thread_count();
    dispatch(stage, [&](auto winograd) {
      const auto add = [&](int64_t, const Images& x, const Images& dy, const Planes& du, const Plan& plan) {
        winograd.accumulate(x, dy, du, plan, slice.scratch, threads);
      };
      for_planes(winograd, stage, slice, add);
    });
  }

  // Add du, transformed back, to dw.
  static void close(const Stage& stage, const TensorArgument& dw, float* du) {
    const int threads = stage.thread_count();
    dispatch(stage, [&](auto winograd) {
      for_groups(winograd, stage, dw, du, [&](const Planes& planes, const FilterView& view) {
        winograd.add_filter_gradient(planes, view, threads);
      });
    });
  }

 private:
  template <class Direction, class Transforms>
  static void correlate(Transforms winograd, const Stage& stage, const Slice& slice) {
    const TensorArgument& out = slice.out(stage);
    const Elements bias = checked_bias(slice.bias, stage.bias_bytes, out);
    const Epilogue epilogue = checked_epilogue(&slice.epilogue, out);
    const int threads = stage.thread_count();
    const auto run = [&](int64_t i, const Images& from, const Images& to, const Planes& u, const Plan& plan) {
      winograd.template correlate<Direction>(from, u, {bias + i * to.c, epilogue}, to, plan, slice.scratch, threads);
    };
    for_planes(winograd, stage, slice, run);
  }

  // Call body with each group, the images that it reads and writes, its planes of the filter, and the plan.
  template <class Transforms, class Body>
  static void for_planes(Transforms winograd, const Stage& stage, const Slice& slice, Body body) {
    const int64_t groups = stage.geometry.groups;
    require_images(stage.geometry, slice.x, slice.y);
    const Images from = slice.in(stage).images(groups), to = slice.out(stage).images(groups);
    const Plan plan = plan_of(winograd, stage, from, to, stage.thread_count());
    stage.require_prepared(filter_bytes(winograd, stage, from.c, to.c));
    const bool of_gradient = stage.operation == BACKWARD_FILTER;
    stage.require_scratch(bytes_of(plan.scratch_floats));
    for (int64_t i = 0; i < groups; ++i) {
      float* const planes = slice.prepared + i * winograd.filter_floats(of_gradient, from.c, to.c);
      body(i, from.group(i), to.group(i), winograd.filter_planes(of_gradient, planes, from.c, to.c), plan);
    }
  }
};

}  // namespace

MUCUDNN_ENTRIES(winograd, CompiledWinograd)

extern "C" {
__attribute__((visibility("default"))) int64_t mucudnn_vector_length() { return VL; }

__attribute__((visibility("default"))) int64_t mucudnn_products() { return best_products(); }

__attribute__((visibility("default"))) const char* mucudnn_refusal() { return refusal_text; }
}
