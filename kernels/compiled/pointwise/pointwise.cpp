// 1x1 convolutions as matrix products on activations in their own layout (product.h, gradient.h): any stride and
// groups, no padding. A strided filter reads only every stride-th pixel.
#include "common/stage.h"
#include "pointwise/gradient.h"

using namespace pointwise;

namespace {

constexpr int PACKED_TOGETHER = 8;  // blocks of lanes: whole cache lines if the lanes of a filter are contiguous

// Pack blocks of VL lanes from `first_block` on, as Product::filter_offset has them. If there are pairs of rows, a step
// is a pair.
void pack_lanes(const FilterView& view, int first_block, const Product& product, float* packed) {
  const int last_block = std::min(blocks_of(view.lanes), first_block + PACKED_TOGETHER);
  const bool of_pairs = product.of_pairs;
  const int numbers = of_pairs ? 2 : 1;
  for (int row = 0; row < view.rows; row += VL)
    for (int block = first_block; block < last_block; ++block) {
      const int step = row / numbers, first_step = step / product.steps() * product.steps();
      float* to = packed + product.filter_offset(first_step, block) + (step - first_step) * VL;
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

struct Pointwise : TakesImages {
  static constexpr bool NORMALIZES = true;

  static void require(const Stage& stage) {
    TakesImages::require(stage);
    const Geometry& g = stage.geometry;
    for (const int64_t size : {g.r, g.s}) require_equal("the size of the filter", size, 1);
    for (const int64_t pad : {g.pad_h, g.pad_w, g.pad_below}) require_equal("the padding", pad, 0);
  }

  static int64_t prepared_bytes(const Stage& stage) {
    return bytes_of(times(stage.geometry.groups, floats_of_group(stage)));
  }

  static int64_t scratch_bytes(const Stage& stage) {
    return bytes_of(stage.backward_filter() ? gradient_of(stage).scratch_floats() : product_of(stage).scratch_floats());
  }

  static void open(const Stage& stage, float* packed) {
    const Product product = product_of(stage);
    const int64_t of_group = floats_of_group(stage);
    const int64_t parts = ceil_div(int64_t(product.blocks()), int64_t(PACKED_TOGETHER));
    parallel_tasks(stage.thread_count(), stage.geometry.groups * parts, true, [&](int64_t task) {
      const int64_t group = task / parts, part = task % parts;
      pack_lanes(stage.filter(group), int(part * PACKED_TOGETHER), product, packed + group * of_group);
    });
  }

  static void correlate(const Slice& slice) {
    const Product product = product_of(slice);
    const int64_t of_group = floats_of_group(slice);
    float* const scratch = slice.scratch(bytes_of(product.scratch_floats()));
    const AsFloats of_channels(slice.bias, slice.out().c);
    const float* offsets = of_channels.data();
    for (int64_t i = 0; i < slice.geometry.groups; ++i) {
      Product of_i = product;
      of_i.in = product.in.group(i);
      of_i.out.whole = product.out.whole.group(i);
      of_i.prologue = slice.prologue + i * (slice.x.c / slice.geometry.groups);
      multiply(of_i, slice.prepared + i * of_group, offsets ? offsets + i * product.channels() : nullptr,
               slice.epilogue, scratch);
    }
  }

  // Add to dw and to its copies, which start at zero.
  static void accumulate(const Slice& slice) {
    const FilterGradient gradient = gradient_of(slice);
    float* const scratch = slice.scratch(bytes_of(gradient.scratch_floats()));
    for (int64_t i = 0; i < slice.geometry.groups; ++i)
      add_gradient({gradient.x.group(i), gradient.dy.group(i), slice.thread_count(),
                    slice.prologue + i * (slice.x.c / slice.geometry.groups)},
                   slice.w.elements() + i * filter_floats(slice), slice.prepared + i * floats_of_group(slice), scratch);
  }

  static void close(const Stage& stage, const float* sums) {
    const int64_t count = copies(stage), of_group = filter_floats(stage);
    if (count == 0) return;
    stage.w.elements().visit([&](auto* first) {
#pragma omp parallel for num_threads(stage.thread_count()) collapse(2)
      for (int64_t group = 0; group < stage.geometry.groups; ++group)
        for (int64_t i = 0; i < of_group; i += VL)
          add_copies(first + group * of_group + i, int(std::min<int64_t>(VL, of_group - i)),
                     sums + group * count * of_group + i, count, of_group);
    });
  }

 private:
  static int64_t filter_floats(const Stage& stage) { return times(stage.w.c, stage.w.n / stage.geometry.groups); }

  // Return how many copies of a group's gradient there are beside dw.
  static int64_t copies(const Stage& stage) {
    return FilterGradient::copies(filter_floats(stage), Element(stage.w.element), stage.thread_count());
  }

  // Return the floats of a group's packed filter, or of the copies of its gradient.
  static int64_t floats_of_group(const Stage& stage) {
    if (stage.backward_filter()) return times(copies(stage), filter_floats(stage));
    const Product product = product_of(stage);
    return times(product.in.c, int64_t(product.blocks()) * VL);
  }

  // Images of one pixel, which are in both memory formats at once, are viewed as channels-last.
  static Images images_of(TensorArgument images, const Stage& stage) {
    if (stage.x.h * stage.x.w == 1) images.memory_format = CHANNELS_LAST;
    return images.images(stage.geometry.groups);
  }

  static Product product_of(const Stage& stage) {
    const Geometry& g = stage.geometry;
    const Images x = images_of(stage.x, stage), y = images_of(stage.y, stage);
    if (stage.backward_data()) return Product(y, {x, g.stride_h, g.stride_w}, stage.thread_count(), false);
    return Product(every(x, g.stride_h, g.stride_w), {y, 1, 1}, stage.thread_count(), stage.normalizes);
  }

  static FilterGradient gradient_of(const Stage& stage) {
    const Images x = every(images_of(stage.x, stage), stage.geometry.stride_h, stage.geometry.stride_w);
    return {x, images_of(stage.y, stage), stage.thread_count()};
  }
};

}  // namespace

MUCUDNN_ENTRIES(pointwise, Pointwise)
