// Winograd convolution with one tile, filter and stride.
#pragma once

#include <omp.h>

#include "common/matmul.h"
#include "common/tasks.h"
#include "winograd/arithmetic.h"
#include "winograd/cook_toom.h"
#include "winograd/winograd.h"

namespace winograd {

constexpr int64_t CACHE_FLOATS = 192 * 1024;  // of one core's L2 (1 MiB and more today), for a block's tiles
// The tiles of a frame that are transformed together, if there are more frames: a strip of them is gathered at a time.
constexpr int LEAST_TILES = 6, LEAST_TILES_OF_GRADIENT = 16;
constexpr int SMALLEST_BLOCK = 2 * MR, LARGEST_OWN_BLOCK = 6 * MR, LARGEST_SHARED_BLOCK = 12 * MR;

inline int even_blocks(int64_t tiles, int64_t largest, int64_t multiple) {
  const int64_t rounds = ceil_div(tiles, largest * multiple);
  return int(ceil_div(tiles, rounds * multiple));
}

// Return the most frames of the target to compute at once, in chunks of nearly equal size.
template <class Fits>
int frames_of_chunk(int64_t frames, int64_t most, Fits fits) {
  int64_t some = std::min(frames, most);
  while (some > 1 && !fits(int(some))) --some;
  return int(ceil_div(frames, ceil_div(frames, some)));
}

// Choose the schedule that moves fewer floats. A thread's own block stays in its core's cache, but every block reads
// the whole filter; a shared block reads it once, but moves its data between cores, which measurements show to cost
// twice as much. The counts may exceed 64 bits. filter: floats of all taps. per_tile(frames): floats of a tile,
// transformed, on both sides, in so many frames of the target. Rows of products are tiles of all frames of a chunk.
template <class PerTile>
Schedule forward_schedule(int64_t tiles, int64_t frames, double filter, PerTile per_tile, int threads) {
  const int own_frames = frames_of_chunk(frames, LARGEST_OWN_BLOCK / LEAST_TILES,
                                         [&](int some) { return LEAST_TILES * per_tile(some) <= CACHE_FLOATS; });
  const int shared_frames = frames_of_chunk(frames, LARGEST_SHARED_BLOCK / LEAST_TILES, [](int) { return true; });
  const int wanted = int(std::clamp<int64_t>(CACHE_FLOATS / per_tile(own_frames), ceil_div(SMALLEST_BLOCK, own_frames),
                                             LARGEST_OWN_BLOCK / own_frames));
  const Schedule own{even_blocks(tiles, wanted, threads), own_frames, false};
  const Schedule shared{even_blocks(tiles, LARGEST_SHARED_BLOCK / shared_frames, 1), shared_frames, true};
  const auto passes = [&](const Schedule& of) {
    return double(ceil_div(tiles, int64_t{of.tiles})) * double(ceil_div(frames, int64_t{of.frames}));
  };
  const double own_floats = passes(own) * filter;
  const double shared_floats =
      passes(shared) * (filter + 4.0 * double(per_tile(shared_frames)) * double(shared.tiles));
  return own_floats <= shared_floats && own.tiles * own.frames >= MR ? own : shared;
}

template <class PerTile>
Schedule filter_gradient_schedule(int64_t tiles, int64_t frames, PerTile per_tile) {
  const int some = frames_of_chunk(frames, 256 / LEAST_TILES_OF_GRADIENT, [](int) { return true; });
  const int64_t block =
      std::clamp<int64_t>(8 * CACHE_FLOATS / per_tile(some), ceil_div(128, some), 256 / some);
  return {int(std::min(tiles, block)), some, true};
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
  // The elements of a gradient are always floats.
  int filter_rows(bool of_gradient, int c) const override {
    return (of_gradient ? blocks_of(c) : summed_blocks(c)) * VL;
  }
  int64_t filter_floats(int rows, int k) const override {
    return times(FILTER_SIZE * FILTER_SIZE, Planes::stride(rows, blocks_of(k)));
  }

  Plan plan_of(const Stage& stage) const override {
    const Images from = stage.images_in(), to = stage.images_out();
    const Depth depth(stage);
    const int threads = stage.thread_count();
    const Tiling tiling = tiling_of(stage.geometry, stage.backward_data(), to.n, to.h, to.w);
    if (stage.operation == BACKWARD_FILTER) return filter_gradient_plan(tiling, depth, from.c, to.c);
    if (stage.operation == BACKWARD_DATA) return plan<BackwardData>(tiling, depth, from.c, to.c, threads);
    return plan<Forward>(tiling, depth, from.c, to.c, threads);
  }

  void correlate(bool backward_data, const Images& x, const Planes& u, const Finish& finish, const Images& y,
                 const Plan& plan, const Chunks& chunks, float* scratch, int threads) const override {
    const auto run = backward_data ? correlate_in<BackwardData> : correlate_in<Forward>;
    run(x, u, finish, y, plan, chunks, scratch, threads);
  }

  // Add the sum over tiles of (B^T d B)^T (A dy A^T) to du, product by product. du: rows C (padded), columns K. The
  // last planes of the filter have the most products, so they are processed first.
  void accumulate(const Images& x, const Images& dy, const Planes& du, const Plan& plan, const Chunks& chunks,
                  float* scratch, int threads) const override {
    const Tiling& tiling = plan.tiling;
    const int c = blocks_of(x.c), taps = plan.depth.taps;
#pragma omp parallel num_threads(threads)
    for (int64_t begin = 0; begin < tiling.count; begin += plan.schedule.tiles) {
      const int64_t end = std::min(begin + plan.schedule.tiles, tiling.count);
      const int tiles = int(end - begin);
      const Frames frames = frames_of(plan, rows_of(tiles));
      const Planes v = source_planes(scratch, frames, c), d = target_planes<Forward>(v, frames, blocks_of(dy.c));
      const int pieces = ceil_div(tiles, 32);
      const auto first_of = [&](int piece) {
        return begin + (piece == pieces ? tiles : tiles * piece / pieces / Step::NUMBERS * Step::NUMBERS);
      };
      for (const Depth::Chunk& chunk : chunks) {
        const int read = int(chunk.end - chunk.begin - chunk.kept);
        if (chunk.kept) {
#pragma omp for
          for (int plane = 0; plane < X_SIZE * X_SIZE; ++plane) keep(chunk, v, frames.rows, plane);
        }
#pragma omp for schedule(dynamic)
        for (int i = 0; i < pieces * (read + chunk.frames); ++i) {
          const int64_t from = first_of(i % pieces), to = first_of(i % pieces + 1);
          const int frame = i / pieces, slot = int(chunk.kept) + frame;
          if (frame < read)
            to_planes<typename Forward::Source, PAIRS>(x.frame(chunk.begin + slot), tiling, tiling.padding, from, to,
                                                       begin, 0, c, v.from_row(slot * frames.rows));
          else
            to_planes<Gradient, PAIRS>(dy.frame(chunk.first + frame - read), tiling, tiling.skipped, from, to, begin, 0,
                                       d.column_blocks, d.from_row((frame - read) * frames.rows));
        }
#pragma omp for schedule(dynamic)
        for (int plane = FILTER_SIZE * FILTER_SIZE - 1; plane >= 0; --plane)
          for_products_of(plane, filter_plane, [&](int product) {
            Arithmetic<Step>::add_transposed(chunk.runs, frames, taps, du.rows / taps, du.column_blocks, v.at(product),
                                             d.at(y_plane(product)), du.at(plane));
          });
      }
    }
  }

  void transform_filter(const FilterView& w, const Planes& u, int threads) const override {
    const int64_t down = summed_blocks(w.rows);
    parallel_tasks(threads, u.column_blocks * down, true, [&](int64_t task) {
      transform_block(w, u, int(task / down), int(task % down) * VL);
    });
  }

  void add_filter_gradient(const Planes& du, const FilterView& dw, int threads) const override {
#pragma omp parallel for collapse(2) num_threads(threads)
    for (int block = 0; block < du.column_blocks; ++block)
      for (int first = 0; first < dw.rows; first += VL) {
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
        for (int i = 0; i < count; ++i) {
          float* tile = window.data + i * Side::STEP * window.column;
          if (window.data != buffer)
            for (int pixel = 0; pixel < Side::STEP * Side::STEP; ++pixel)
              prefetch_to_write(tile + pixel / Side::STEP * window.row + pixel % Side::STEP * window.column, VL);
          transform<Map>(planes.at(0, block, int(t + i - origin)), Map::IN * planes.stride(), planes.stride(), tile,
                         window.row, window.column, offset);
        }
        if (finish.epilogue) apply(finish.epilogue, y, region, window);
        scatter(y, region, window, buffer);
        if (finish.epilogue.moments) finish.epilogue.moments.add(y, region, std::min(VL, y.c - region.channel));
      }
    });
  }

  // The planes of a block of tiles: those of the source, with c column blocks, then those of the target.
  static Frames frames_of(const Plan& plan, int rows) {
    const int frames = plan.schedule.frames;
    return {rows, int(plan.depth.tap_step()), int(plan.depth.most_read(frames)), frames};
  }
  static Planes source_planes(float* scratch, const Frames& frames, int c) {
    return {scratch, frames.of_a * frames.rows, c};
  }
  template <class Direction>
  static Planes target_planes(const Planes& source, const Frames& frames, int k) {
    return {source.at(Direction::SOURCE_SIZE * Direction::SOURCE_SIZE), frames.of_c * frames.rows, k};
  }
  template <class Direction>
  static int64_t block_floats(const Plan& plan, int rows, int c, int k) {
    const Frames frames = frames_of(plan, rows);
    for (const int of_operand : {frames.of_a, frames.of_c})
      require_size("the number of rows of transformed frames", times(of_operand, rows));
    return plus(times(Direction::SOURCE_SIZE * Direction::SOURCE_SIZE, Planes::stride(frames.of_a * rows, c)),
                times(Direction::TARGET_SIZE * Direction::TARGET_SIZE, Planes::stride(frames.of_c * rows, k)));
  }

  // Return the floats of a tile in `frames` frames of the target.
  template <class Direction>
  static int64_t floats_of_tile(const Depth& depth, int64_t frames, int c, int k) {
    constexpr int64_t SOURCE = Direction::SOURCE_SIZE, TARGET = Direction::TARGET_SIZE;
    return (SOURCE * SOURCE * summed_blocks(c) * depth.most_read(frames) + TARGET * TARGET * blocks_of(k) * frames) *
           VL;
  }

  template <class Direction>
  static Plan plan(const Tiling& tiling, const Depth& depth, int c, int k, int threads) {
    const double filter = double(FILTER_SIZE * FILTER_SIZE) * depth.taps * summed_blocks(c) * blocks_of(k) * VL * VL;
    const auto per_tile = [&](int frames) { return floats_of_tile<Direction>(depth, frames, c, k); };
    Plan of{tiling, depth, forward_schedule(tiling.count, depth.targets, filter, per_tile, threads), 0};
    const int64_t of_block = block_floats<Direction>(of, of.schedule.tiles, summed_blocks(c), blocks_of(k));
    of.scratch_floats = times(of.schedule.shared ? 1 : threads, of_block);
    return of;
  }

  // Move one plane of the frames of the source that the chunk before has read, too.
  static void keep(const Depth::Chunk& chunk, const Planes& v, int rows, int plane) {
    for (int i = 0; i < v.column_blocks; ++i)
      std::memmove(v.at(plane, i), v.at(plane, i, chunk.moved * rows), chunk.kept * rows * VL * sizeof(float));
  }

  // Compute the products of planes [begin, end) of the target.
  static void multiply_planes(Forward, int begin, int end, const std::vector<Run>& runs, const Frames& frames, int taps,
                              const Planes& v, const Planes& u, const Planes& m) {
    for (int plane = begin; plane < end; ++plane) {
      bool is_first = true;
      for_products_of(plane, y_plane, [&](int product) {
        const float *from = v.at(product), *filter = u.at(filter_plane(product));
        Arithmetic<Step>::multiply(!is_first, runs, frames, taps, u.rows / taps, u.column_blocks, from, filter,
                                   m.at(plane), SUMMED_CHANNELS);
        is_first = false;
      });
    }
  }
  static void multiply_planes(BackwardData, int begin, int end, const std::vector<Run>& runs, const Frames& frames,
                              int taps, const Planes& v, const Planes& u, const Planes& m) {
    for (int plane = begin; plane < end; ++plane)
      Arithmetic<Step>::multiply(false, runs, frames, taps, u.rows / taps, u.column_blocks, v.at(y_plane(plane)),
                                 u.at(filter_plane(plane)), m.at(plane), SUMMED_CHANNELS);
  }

  // Transform VL rows, or pairs of rows, of one block of lanes of the filter.
  static void transform_block(const FilterView& w, const Planes& u, int block, int first) {
    constexpr int SIZE = FILTER_SIZE, POINTS = SIZE * SIZE;
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

  template <class Direction>
  static void correlate_in(const Images& x, const Planes& u, const Finish& finish, const Images& y, const Plan& plan,
                           const Chunks& chunks, float* scratch, int threads) {
    const auto run = plan.schedule.shared ? correlate_shared<Direction> : correlate_private<Direction>;
    run(x, u, finish, y, plan, chunks, scratch, threads);
  }

  template <class Direction>
  static void correlate_private(const Images& x, const Planes& u, const Finish& finish, const Images& y,
                                const Plan& plan, const Chunks& chunks, float* scratch, int threads) {
    constexpr int SOURCES = Direction::SOURCE_SIZE * Direction::SOURCE_SIZE;
    constexpr int TARGETS = Direction::TARGET_SIZE * Direction::TARGET_SIZE;
    const Tiling& tiling = plan.tiling;
    const int summed = summed_blocks(x.c), written = blocks_of(y.c), block = plan.schedule.tiles;
    const ptrdiff_t own = plan.scratch_floats / threads;
    const bool in_shares = finish.epilogue.moments || may_stay_in_caches(x, y, threads);
    parallel_tasks(threads, ceil_div(tiling.count, int64_t{block}), in_shares, [&](int64_t task) {
      const int64_t begin = task * block, end = std::min(begin + block, tiling.count);
      const int tiles = int(end - begin);
      const Frames frames = frames_of(plan, tiles);
      const Planes v = source_planes(scratch + omp_get_thread_num() * own, frames, summed);
      const Planes m = target_planes<Direction>(v, frames, written);
      for (const Depth::Chunk& chunk : chunks) {
        for (int plane = 0; chunk.kept && plane < SOURCES; ++plane) keep(chunk, v, tiles, plane);
        for (int64_t i = chunk.begin + chunk.kept; i < chunk.end; ++i)
          to_planes<typename Direction::Source>(x.frame(i), tiling, tiling.padding, begin, end, begin, 0, summed,
                                                v.from_row((i - chunk.begin) * tiles));
        multiply_planes(Direction{}, 0, TARGETS, chunk.runs, frames, plan.depth.taps, v, u, m);
        for (int i = 0; i < chunk.frames; ++i)
          from_planes<typename Direction::Target>(m.from_row(i * tiles), finish, y.frame(chunk.first + i), tiling,
                                                  begin, end, begin, 0, written);
      }
    });
  }

  template <class Direction>
  static void correlate_shared(const Images& x, const Planes& u, const Finish& finish, const Images& y,
                               const Plan& plan, const Chunks& chunks, float* scratch, int threads) {
    constexpr int SOURCES = Direction::SOURCE_SIZE * Direction::SOURCE_SIZE;
    constexpr int TARGETS = Direction::TARGET_SIZE * Direction::TARGET_SIZE;
    const Tiling& tiling = plan.tiling;
    const int summed = summed_blocks(x.c), written = blocks_of(y.c), block = plan.schedule.tiles;
    const auto run_block = [&](int64_t begin) {
      const int64_t end = std::min(begin + block, tiling.count);
      const int tiles = int(end - begin);
      const Frames frames = frames_of(plan, tiles);
      const Planes v = source_planes(scratch, frames, summed), m = target_planes<Direction>(v, frames, written);
      for (const Depth::Chunk& chunk : chunks) {
        if (chunk.kept) {
#pragma omp for
          for (int plane = 0; plane < SOURCES; ++plane) keep(chunk, v, tiles, plane);
        }
#pragma omp for collapse(2)
        for (int64_t i = chunk.begin + chunk.kept; i < chunk.end; ++i)
          for (int j = 0; j < summed; ++j)
            to_planes<typename Direction::Source>(x.frame(i), tiling, tiling.padding, begin, end, begin, j, j + 1,
                                                  v.from_row((i - chunk.begin) * tiles));
#pragma omp for schedule(dynamic)
        for (int plane = 0; plane < TARGETS; ++plane)
          multiply_planes(Direction{}, plane, plane + 1, chunk.runs, frames, plan.depth.taps, v, u, m);
#pragma omp for collapse(2)
        for (int i = 0; i < chunk.frames; ++i)
          for (int j = 0; j < written; ++j)
            from_planes<typename Direction::Target>(m.from_row(i * tiles), finish, y.frame(chunk.first + i), tiling,
                                                    begin, end, begin, j, j + 1);
      }
    };
    in_parallel(threads, [&] {
      for (int64_t begin = 0; begin < tiling.count; begin += block) run_block(begin);
    });
  }

  // Return the rows of planes that are summed over tiles.
  static int rows_of(int tiles) { return ceil_div(tiles, Step::NUMBERS); }

  static Plan filter_gradient_plan(const Tiling& tiling, const Depth& depth, int c, int k) {
    const auto per_tile = [&](int frames) { return floats_of_tile<Forward>(depth, frames, c, k); };
    Plan of{tiling, depth, filter_gradient_schedule(tiling.count, depth.targets, per_tile), 0};
    of.scratch_floats = block_floats<Forward>(of, rows_of(of.schedule.tiles), blocks_of(c), blocks_of(k));
    return of;
  }
};

}  // namespace winograd
