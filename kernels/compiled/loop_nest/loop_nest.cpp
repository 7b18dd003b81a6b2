// Convolution as its definition has it: seven loops, direct sums, no buffers. Whatever the limit on workspace is, this
// runs. Vectors are neighbouring outputs of a row (forward, backward data) or channels (backward filter); operands that
// do not lie next to each other, or are in half precision, are copied to the stack, a few hundred at a time.
#include "common/stage.h"
#include "loop_nest/loops.h"

using namespace loop_nest;

namespace {

void require_call(const Geometry& g, const TensorArgument& x, const TensorArgument& w, const TensorArgument& y,
                  int threads) {
  require_images(g, x, y, FLOAT64);
  require_equal("the memory format of y", y.channels_last, x.channels_last);
  w.require_filter(g.groups, g.r, g.s, FLOAT64);
  require_equal("the type of elements of the filter", w.element, x.element);
  require_equal("the number of filters", w.n, y.c);
  require_equal("the number of channels of a filter", w.c, x.c / g.groups);
  require_threads(threads);
}

}  // namespace

// The entries that library.py calls. All return 0, or why they refused (checks.h).
#pragma GCC visibility push(default)
extern "C" {

// Forward: x -> y. Backward data: in = dy, out = dx.
int64_t mucudnn_loop_nest_forward(const Geometry* g, int backward_data, const TensorArgument* in,
                                  const TensorArgument* w, void* bias, int64_t bias_bytes, const TensorArgument* out,
                                  int threads) {
  return refusable([&]() -> int64_t {
    require_call(*g, backward_data ? *out : *in, *w, backward_data ? *in : *out, threads);
    const Elements of_channels = checked_bias(bias, bias_bytes, *out);
    visit(in->elements(), [&](const auto* first) {
      correlate(*g, backward_data, *in, *w, of_channels.as<std::remove_pointer_t<decltype(first)>>(), *out, threads);
    });
    return 0;
  });
}

// Adds to dw.
int64_t mucudnn_loop_nest_add_filter_gradient(const Geometry* g, const TensorArgument* x, const TensorArgument* dy,
                                              const TensorArgument* dw, int threads) {
  return refusable([&]() -> int64_t {
    require_call(*g, *x, *dw, *dy, threads);
    visit(x->elements(), [&](auto* first) {
      add_gradient<std::remove_pointer_t<decltype(first)>>(*g, *x, *dy, *dw, threads);
    });
    return 0;
  });
}

int64_t mucudnn_loop_nest_stage(const Stage* stage, void* x, void* w, void* y, void* bias, float* prepared, float*,
                                const EpilogueArgument* epilogue) {
  return refusable([&] {
    require_equal("an epilogue of the loop nest", epilogue != nullptr, 0);
    const Geometry* g = &stage->geometry;
    const bool backward = stage->operation == BACKWARD_DATA;
    const int threads = stage->thread_count();
    TensorArgument filter = stage->w;
    filter.data = w;
    const auto nothing = [](const TensorArgument&) -> int64_t { return 0; };
    const auto step = [&](const TensorArgument& in, const TensorArgument& out) -> int64_t {
      if (stage->operation == BACKWARD_FILTER)
        return mucudnn_loop_nest_add_filter_gradient(g, &in, &out, &filter, threads);
      return mucudnn_loop_nest_forward(g, backward, backward ? &out : &in, &filter, bias, stage->bias_bytes,
                                       backward ? &in : &out, threads);
    };
    return run_stage(*stage, {x, w, y}, prepared, nothing, step, nothing);
  });
}

}  // extern "C"
#pragma GCC visibility pop
