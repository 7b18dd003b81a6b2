// Convolution by its definition: loops, direct sums, no workspace, so that it runs under any workspace limit.
// Vectors are neighbouring outputs of a row (forward, backward data) or channels (backward filter); operands that are
// not contiguous, or are in half precision, are copied to the stack, a few hundred at a time.
#include "common/stage.h"
#include "loop_nest/loops.h"

using namespace loop_nest;

namespace {

struct LoopNest {
  static constexpr Element LAST_ELEMENT = FLOAT64;
  static constexpr bool NORMALIZES = false;

  static void require(const Stage& stage) {
    const Geometry& g = stage.geometry;
    require_between("the memory format", stage.x.memory_format, CONTIGUOUS, CHANNELS_LAST);
    require_equal("the depth of y", stage.y.d, output_size(stage.x.d, 2 * g.pad_d, g.taps, g.dilation_d, g.stride_d));
    require_equal("the depth of the filter", stage.w.d, g.taps);
  }

  static int64_t prepared_bytes(const Stage&) { return 0; }

  static int64_t scratch_bytes(const Stage&) { return 0; }

  static void open(const Stage&, float*) {}

  static void correlate(const Slice& slice) {
    require_equal("an epilogue of the loop nest", bool(slice.epilogue), 0);
    visit(slice.in().elements(), [&](const auto* first) {
      using Value = std::remove_pointer_t<decltype(first)>;
      loop_nest::correlate(slice.geometry, slice.backward_data(), slice.in(), slice.w, slice.bias.as<Value>(),
                           slice.out(), slice.thread_count());
    });
  }

  static void accumulate(const Slice& slice) {
    visit(slice.x.elements(), [&](auto* first) {
      add_gradient<std::remove_pointer_t<decltype(first)>>(slice.geometry, slice.x, slice.y, slice.w,
                                                           slice.thread_count());
    });
  }

  static void close(const Stage&, float*) {}
};

}  // namespace

MUCUDNN_ENTRIES(loop_nest, LoopNest)
