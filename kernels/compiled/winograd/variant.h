// Winograd convolution with one tile, filter and stride.
#pragma once

#include <omp.h>

#include "common/matmul.h"
#include "winograd/arithmetic.h"
#include "winograd/cook_toom.h"
#include "winograd/winograd.h"

namespace winograd {

constexpr int64_t CACHE_FLOATS = 192 * 1024;  // of one core's L2 (1 MiB and more today), for a block's tiles
constexpr int SMALLEST_BLOCK = 2 * MR, LARGEST_OWN_BLOCK = 6 * MR, LARGEST_SHARED_BLOCK = 12 * MR;

inline int even_blocks(int64_t tiles, int64_t largest, int64_t multiple) {
  const int64_t rounds = ceil_div(tiles, largest * multiple);
  return int(ceil_div(tiles, rounds * multiple));
}

// Choose the schedule that moves fewer floats. A thread's own block stays in its core's cache, but every block reads
// the whole filter; a shared block reads it once, but moves its data between cores, which measurements show to cost
// twice as much. The counts may exceed 64 bits. per_tile: floats of a tile, transformed, on both sides.
inline Schedule forward_schedule(int64_t tiles, double filter, int64_t per_tile, int threads) {
  const int wanted = int(std::clamp<int64_t>(CACHE_FLOATS / per_tile, SMALLEST_BLOCK, LARGEST_OWN_BLOCK));
  const Schedule own{even_blocks(tiles, wanted, threads), false};
  const Schedule shared{even_blocks(tiles, LARGEST_SHARED_BLOCK, 1), true};
  const double own_floats = double(ceil_div(tiles, int64_t{own.tiles})) * filter;
  const double shared_floats =
      double(ceil_div(tiles, int64_t{shared.tiles})) * filter + 4.0 * double(per_tile) * double(tiles);
  return own_floats <= shared_floats && own.tiles >= MR ? own : shared;
}

inline int filter_gradient_block(int64_t tiles, int64_t per_tile) {
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
class Variant final : public Winograd {
 public:
  int64_t filter_floats(bool of_gradient, int c, int k) const override {
    return times(FILTER_SIZE * FILTER_SIZE, filter_planes(of_gradient, nullptr, c, k).stride());
  }
  // The elements of a gradient are always floats.
  Planes filter_planes(bool of_gradient, float* data, int c, int k) const override {
    return {data, (of_gradient ? blocks_of(c) : summed_blocks(c)) * VL, blocks_of(k)};
  }

  Plan plan_of(const Stage& stage, const Images& from, const Images& to, int threads) const override {
    const Tiling tiling = tiling_of(stage.geometry, stage.backward_data(), to.n, to.h, to.w);
    if (stage.operation == BACKWARD_FILTER) return filter_gradient_plan(tiling, from.c, to.c);
    if (stage.operation == BACKWARD_DATA) return plan<BackwardData>(tiling, from.c, to.c, threads);
    return plan<Forward>(tiling, from.c, to.c, threads);
  }

  void correlate(bool backward_data, const Images& x, const Planes& u, const Finish& finish, const Images& y,
                 const Plan& plan, float* scratch, int threads) const override {
    (backward_data ? correlate_in<BackwardData> : correlate_in<Forward>)(x, u, finish, y, plan, scratch, threads);
  }

  // Add the sum over tiles of (B^T d B)^T (A dy A^T) to du, product by product. du: rows C (padded), columns K. The
  // last planes of the filter have the most products, so they are processed first.
  void accumulate(const Images& x, const Images& dy, const Planes& du, const Plan& plan, float* scratch,
                  int threads) const override {
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
          Arithmetic<Step>::add_transposed(du.rows, rows, du.column_blocks, v.at(product), d.at(y_plane(product)),
                                           du.at(plane));
        });
    }
  }

  void transform_filter(const FilterView& w, const Planes& u, int threads) const override {
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
              store(u.at(point, block, first + i), paired(load(points[0] + point * VL), load(points[1] + point * VL)));
          }
        }
      }
  }

  void add_filter_gradient(const Planes& du, const FilterView& dw, int threads) const override {
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

 private:
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
  static Tiling tiling_of(const Geometry& g, bool backward_data, int64_t n, int64_t h, int64_t w) {
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
    return {
        tiling, schedule,
        times(schedule.shared ? 1 : threads, block_floats<Direction>(schedule.tiles, summed_blocks(c), blocks_of(k)))};
  }

  // Compute the products of planes [begin, end) of the target.
  static void multiply_planes(Forward, int begin, int end, int tiles, const Planes& v, const Planes& u,
                              const Planes& m) {
    for (int plane = begin; plane < end; ++plane) {
      bool is_first = true;
      for_products_of(plane, y_plane, [&](int product) {
        const float *from = v.at(product), *filter = u.at(filter_plane(product));
        Arithmetic<Step>::multiply(!is_first, tiles, u.rows, u.column_blocks, from, filter, m.at(plane),
                                   SUMMED_CHANNELS);
        is_first = false;
      });
    }
  }
  static void multiply_planes(BackwardData, int begin, int end, int tiles, const Planes& v, const Planes& u,
                              const Planes& m) {
    for (int plane = begin; plane < end; ++plane)
      Arithmetic<Step>::multiply(false, tiles, u.rows, u.column_blocks, v.at(y_plane(plane)), u.at(filter_plane(plane)),
                                 m.at(plane), SUMMED_CHANNELS);
  }

  template <class Direction>
  static void correlate_in(const Images& x, const Planes& u, const Finish& finish, const Images& y, const Plan& plan,
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
};

}  // namespace winograd
