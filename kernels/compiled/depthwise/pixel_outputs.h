// Forward and backward data by the loops over pixels.
#pragma once

#include <omp.h>

#include "common/epilogue.h"
#include "common/planar_rows.h"
#include "common/tasks.h"
#include "depthwise/pixel_plan.h"

namespace depthwise {

typedef PixelPlan<ComputeTile> PixelOutputPlan;

constexpr int TASKS_OF_THREAD = 8;  // at least, if there are enough rows

// Compute rows of outputs of one run of channels. plane: floats from one plane of x to the next. epilogue: may be null.
void compute_rows(const PixelOutputPlan& plan, const Band& band, const Run& run, const Window& x, ptrdiff_t plane,
                  const float* filter, const float* bias, const Epilogue* epilogue, const Window& y) {
  const float* elements = filter + plan.filter.at(run.lane, 0);
  const ptrdiff_t next = y.column * plan.columns.every;
  for (int row = band.first; row < band.first + band.rows; ++row)
    for_tiles<true>(plan, x, plane, row,
                    [&](const PixelPhase<ComputeTile>& phase, int column, const TileInput& in, auto loops) {
                      loops(in, plan.filter_of(phase, elements), bias, epilogue,
                            {y.data + row * y.row + column * y.column, next}, run.blocks);
                    });
}

void add_moments(const Epilogue& epilogue, const Images& out, const Band& band, const Run& run) {
  if (epilogue.moments)
    epilogue.moments.add(out, {band.image, run.lane, band.first, 0, band.rows, out.w},
                         std::min(run.blocks * VL, out.c - run.lane));
}

// Compute in pieces, whose moments are added while they are in the nearest caches.
void compute_in_place(const PixelOutputPlan& plan, const Images& in, const Band& band, const Run& run,
                      const float* filter, const float* bias, const Epilogue& epilogue, const Images& out) {
  constexpr int NEAR_FLOATS = 16 * 1024;  // of a core's caches
  const int most = epilogue.moments ? std::max(1, NEAR_FLOATS / (out.w * run.blocks * VL)) : band.rows;
  for (int row = 0; row < band.rows; row += most) {
    const Band piece{band.image, band.first + row, std::min(most, band.rows - row)};
    compute_rows(plan, piece, run, in_place(in, band.image, run.lane), 0, filter, bias, epilogue ? &epilogue : nullptr,
                 in_place(out, band.image, run.lane));
    add_moments(epilogue, out, piece, run);
  }
}

void compute_gathered(const PixelOutputPlan& plan, const Images& in, const Band& band, const Run& run,
                      const float* filter, const float* bias, const Prologue& prologue, const Epilogue& epilogue,
                      const Images& out, float* scratch) {
  const int first = plan.first_input(band.first), last = plan.last_input(band.first, band.rows);
  const int lanes = std::min(VL, out.c - run.lane);
  float *results = scratch + plan.gathered_inputs(), *of_bias = results + plan.gathered_outputs();
  if (bias) store(of_bias, load_first(bias + run.lane, lanes));
  const Window x = gather_rows(plan.channels, in, band.image, run.lane, first, last, scratch, prologue);
  const Region written{band.image, run.lane, band.first, 0, band.rows, out.w};
  const Window y = target(out, written, results);
  compute_rows(plan, band, run, x, (last - first) * x.row, filter, bias ? of_bias : nullptr, nullptr,
               from_row(y, band.first));
  if (epilogue) apply(epilogue, out, written, y);
  if (y.data == results && out.sw == 1)  // contiguous rows are scattered as one
    out.data.visit([&](auto* pixels) {
      scatter_planar_row(results, band.rows * out.w, pixels + out.offset(band.image, run.lane, band.first, 0), out.sc,
                         lanes);
    });
  else
    scatter(out, written, y, results);
  add_moments(epilogue, out, band, run);
}

// Compute row by row, and round each row at once if it is in half precision.
void compute_copied(const PixelOutputPlan& plan, CopiedRows& rows, const Band& band, const Run& run,
                    const float* filter, const float* bias, const Epilogue& epilogue, const Images& out,
                    float* results) {
  const int lanes = run.blocks * VL;
  const Window x = rows.of(plan.first_input(band.first), plan.last_input(band.first, band.rows));
  if (out.data.type == FLOAT32) {
    compute_rows(plan, band, run, x, 0, filter, bias ? bias + run.lane : nullptr, epilogue ? &epilogue : nullptr,
                 in_place(out, band.image, run.lane));
    return add_moments(epilogue, out, band, run);
  }
  for (int row = band.first; row < band.first + band.rows; ++row) {
    compute_rows(plan, {band.image, row, 1}, run, x, 0, filter, bias ? bias + run.lane : nullptr, nullptr,
                 {results, 0, lanes});
    out.data.visit([&](auto* pixels) {
      for_copied(out, band.image, run, row, row + 1, [&](ptrdiff_t to, ptrdiff_t from) {
        if (epilogue) apply(epilogue, out.data + to, results + from, lanes);
        copy_elements(results + from, lanes, pixels + to);
      });
    });
  }
  add_moments(epilogue, out, band, run);
}

void run_pixels(const PixelOutputPlan& plan, const Images& in, const float* filter, const float* bias,
                const Prologue& prologue, const Epilogue& epilogue, const Images& out, float* scratch, int threads) {
  const int64_t runs = int64_t(plan.runs.size());
  const int64_t wanted = ceil_div(TASKS_OF_THREAD * int64_t{threads}, out.n * runs);
  const int band = int(ceil_div(int64_t{out.h}, wanted)), bands = ceil_div(out.h, band);
  const bool in_shares = epilogue.moments || may_stay_in_caches(in, out, threads);
  parallel_tasks(threads, out.n * bands * runs, in_shares, [&](int64_t task) {
    const int first = int(task / runs % bands) * band;
    const Band rows{task / runs / bands, first, std::min(band, out.h - first)};
    const Run& run = plan.runs[task % runs];
    float* mine = scratch + omp_get_thread_num() * plan.thread_floats();
    if (run.reading == Reading::IN_PLACE) {
      compute_in_place(plan, in, rows, run, filter, bias ? bias + run.lane : nullptr, epilogue, out);
      return;
    }
    CopiedRows copied{in, prologue, rows.image, run, mine};
    for (Band piece = rows; piece.first < rows.first + rows.rows; piece.first += plan.band) {
      piece.rows = std::min(plan.band, rows.first + rows.rows - piece.first);
      if (run.reading == Reading::COPIED)
        compute_copied(plan, copied, piece, run, filter, bias, epilogue, out, mine + plan.gathered_inputs());
      else
        compute_gathered(plan, in, piece, run, filter, bias, prologue, epilogue, out, mine);
    }
  });
}

}  // namespace depthwise
