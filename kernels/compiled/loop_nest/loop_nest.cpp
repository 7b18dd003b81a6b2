// Convolution by its definition: loops, direct sums, no workspace, so that it runs under any workspace limit.
// Vectors are neighbouring outputs of a row (forward, backward data) or channels (backward filter); operands that are
// not contiguous, or are in half precision, are copied to the stack, a few hundred at a time.
#include "common/stage.h"
#include "loop_nest/loops.h"

using namespace loop_nest;

namespace {

struct LoopNest {
  static int64_t prepared_bytes(const Stage&) { return 0; }

  static int64_t scratch_bytes(const Stage&) { return 0; }

  static void open(const Stage&, const TensorArgument&, float*) {}

  static void correlate(const Stage& stage, const Slice& slice) {
    const TensorArgument &in = slice.in(stage), &out = slice.out(stage);
    const int threads = require_call(stage, slice);
    require_equal("an epilogue of the loop nest", slice.epilogue.added != nullptr || slice.epilogue.activation, 0);
    const Elements of_channels = checked_bias(slice.bias, stage.bias_bytes, out);
    visit(in.elements(), [&](const auto* first) {
      using Value = std::remove_pointer_t<decltype(first)>;
      loop_nest::correlate(stage.geometry, stage.backward_data(), in, slice.w, of_channels.as<Value>(), out, threads);
    });
  }

  static void accumulate(const Stage& stage, const Slice& slice) {
    const int threads = require_call(stage, slice);
    visit(slice.x.elements(), [&](auto* first) {
      add_gradient<std::remove_pointer_t<decltype(first)>>(stage.geometry, slice.x, slice.y, slice.w, threads);
    });
  }

  static void close(const Stage&, const TensorArgument&, float*) {}

 private:
  static int require_call(const Stage& stage, const Slice& slice) {
    const TensorArgument &x = slice.x, &w = slice.w, &y = slice.y;
    const Geometry& g = stage.geometry;
    x.require("x", FLOAT64);
    y.require("y", FLOAT64);
    require_volumes(g, x, y, FLOAT64);
    require_equal("the depth of y", y.d, output_size(x.d, 2 * g.pad_d, g.taps, g.dilation_d, g.stride_d));
    require_equal("the first tap", g.first_tap, 0);
    require_between("the memory format", x.memory_format, CONTIGUOUS, CHANNELS_LAST);
    require_equal("the memory format of y", y.memory_format, x.memory_format);
    w.require_filter(g.groups, g.r, g.s, FLOAT64, g.taps);
    require_equal("the type of elements of the filter", w.element, x.element);
    require_equal("the number of filters", w.n, y.c);
    require_equal("the number of channels of a filter", w.c, x.c / g.groups);
    return stage.thread_count();
  }
};

}  // namespace

MUCUDNN_ENTRIES(loop_nest, LoopNest)
