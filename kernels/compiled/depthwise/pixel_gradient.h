// Backward filter by the loops over pixels.
#pragma once

#include <omp.h>

#include "depthwise/pixel_plan.h"

namespace depthwise {

// The plan of backward filter. Each part of the mini-batch's rows has its own sums, so that the number of threads does
// not affect results. x is the plan's input, dy its output.
struct PixelGradientPlan {
  PixelPlan<AddProductsOfTile> tiles;
  int parts;

  int64_t thread_floats() const { return tiles.thread_floats(); }
};

PixelGradientPlan pixel_gradient_plan(const Geometry& g, const Axes& axes, const TensorArgument& x,
                                      const TensorArgument& y, bool normalizes) {
  const auto tiles = pixel_plan<AddProductsOfTile>(g, axes, x, y, normalizes);
  return {tiles, parts_of_batch(tiles.filter)};
}

// Add the products of a band of dy. plane: floats from one summed channel of x to the next.
void add_products_of_rows(const PixelPlan<AddProductsOfTile>& plan, const Band& band, const Run& run, const Window& x,
                          ptrdiff_t plane, const Window& dy, float* sums) {
  float* elements = sums + plan.filter.at(run.lane, 0);
  for (int row = band.first; row < band.first + band.rows; ++row)
    for_tiles<false>(plan, x, plane, row,
                     [&](const PixelPhase<AddProductsOfTile>& phase, int column, TileInput in, auto loops) {
                       TileFilter<float> of_plane = plan.filter_of(phase, elements);
                       const TileOutput<const float> of_dy{dy.data + row * dy.row + column * dy.column, dy.column};
                       for (int i = 0; i < in.planes; ++i, in.data += plane, of_plane.data += of_plane.plane())
                         loops(in, of_plane, of_dy, run.blocks);
                     });
}

void add_products_of_gathered(const PixelPlan<AddProductsOfTile>& plan, const Images& x, const Band& band,
                              const Run& run, const Images& dy, const Prologue& prologue, float* sums,
                              float* scratch) {
  const int first = plan.first_input(band.first), last = plan.last_input(band.first, band.rows);
  const Window of_x = gather_rows(plan.channels, x, band.image, run.lane, first, last, scratch, prologue);
  Window of_dy = in_place(dy, band.image, run.lane);
  if (!is_window(dy, {band.image, run.lane, band.first, 0, band.rows, dy.w}))
    of_dy = gather_rows({{1, 1}, plan.channels.lanes()}, dy, band.image, run.lane, band.first,
                        band.first + band.rows, scratch + plan.gathered_inputs());
  add_products_of_rows(plan, band, run, of_x, (last - first) * of_x.row, of_dy, sums);
}

void add_products_of_copied(const PixelPlan<AddProductsOfTile>& plan, CopiedRows& rows, const Band& band,
                            const Run& run, const Images& dy, float* sums, float* scratch) {
  const Window of_x = rows.of(plan.first_input(band.first), plan.last_input(band.first, band.rows));
  if (dy.data.type == FLOAT32)
    return add_products_of_rows(plan, band, run, of_x, 0, in_place(dy, band.image, run.lane), sums);
  for (int row = band.first; row < band.first + band.rows; ++row)
    add_products_of_rows(plan, {band.image, row, 1}, run, of_x, 0,
                         copy_rows(dy, band.image, run, row, row + 1, {}, scratch + plan.gathered_inputs()), sums);
}

void accumulate_pixels(const PixelGradientPlan& gradient, const Images& x, const Images& dy, const Prologue& prologue,
                       float* sums, float* scratch, int threads) {
  const PixelPlan<AddProductsOfTile>& plan = gradient.tiles;
  const int64_t rows = dy.n * dy.h, tasks = int64_t(plan.runs.size()) * gradient.parts;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t part = task % gradient.parts;
    const Run& run = plan.runs[task / gradient.parts];
    const int64_t end = share_before(rows, gradient.parts, part + 1);
    float *of_part = sums + part * plan.filter.floats(), *mine = scratch + omp_get_thread_num() * plan.thread_floats();
    CopiedRows copied{x, prologue, -1, run, mine};
    for (int64_t row = share_before(rows, gradient.parts, part); row < end;) {
      Band band{row / dy.h, int(row % dy.h), 0};
      band.rows = int(std::min<int64_t>(end - row, dy.h - band.first));
      if (run.reading != Reading::IN_PLACE) band.rows = std::min(band.rows, plan.band);
      if (run.reading == Reading::IN_PLACE) {
        add_products_of_rows(plan, band, run, in_place(x, band.image, run.lane), 0, in_place(dy, band.image, run.lane),
                             of_part);
      } else if (run.reading == Reading::COPIED) {
        if (copied.image != band.image) copied.image = band.image, copied.first = copied.last = 0;
        add_products_of_copied(plan, copied, band, run, dy, of_part, mine);
      } else {
        add_products_of_gathered(plan, x, band, run, dy, prologue, of_part, mine);
      }
      row += band.rows;
    }
  }
}

}  // namespace depthwise
