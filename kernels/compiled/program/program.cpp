// Programs: the steps of a schedule, run one after another in one call.
#include <omp.h>

#include "program/copying.h"
#include "program/normalization.h"
#include "program/windows.h"

using namespace program;

namespace {

int64_t convolve(const Step& step, char* const* bases) {
  const auto at = [&](const Place& place) { return place.in<char>(bases); };
  EpilogueArgument epilogue{};
  epilogue.activation = step.operation;
  require_bytes("prepared", step.numbers[0], step.stage->prepared_bytes);
  require_bytes("scratch", step.numbers[1], step.stage->scratch_bytes);
  if (step.other.c) {
    epilogue.added = at(step.other.place);
    epilogue.bytes = step.stage->y.bytes;
  }
  const bool has_epilogue = epilogue.added || epilogue.activation != IDENTITY;
  void *in = at(step.x.place), *out = at(step.out.place);
  if (step.stage->backward_data()) std::swap(in, out);
  const auto floats = [&](const Place& place) { return place.in<float>(bases); };
  return step.entry(step.stage, in, at(step.places[0]), out, at(step.places[1]), floats(step.places[2]),
                    floats(step.places[3]), has_epilogue ? &epilogue : nullptr);
}

template <class T>
void compute(const Step& step, char* const* bases, int threads) {
  switch (step.kind) {
    case ELEMENTWISE: return program::elementwise<T>(step, bases, threads);
    case MAX_POOL: return program::max_pool<T>(step, bases, threads);
    case AVERAGE_POOL: return program::average_pool<T>(step, bases, threads);
    case RESIZE: return program::resize<T>(step, bases, threads);
    case SHUFFLE: return program::shuffle<T>(step, bases, threads);
    case MOMENTS: return program::moments<T>(step, bases, threads);
    case NORMALIZE: return program::normalize<T>(step, bases, threads);
    case SCALE: return program::scale<T>(step, bases, threads);
    default: refuse(MISMATCH, "a step of a kind that is not known");
  }
}

int64_t run(const Step& step, char* const* bases, int threads) {
  if (step.kind == CONVOLUTION) return convolve(step, bases);
  if (step.kind == COPY) program::copy(step, bases, threads);
  else
    Elements{step.x.place.in(bases), Element(step.x.element)}.visit([&](auto* elements) {
      compute<std::remove_pointer_t<decltype(elements)>>(step, bases, threads);
    });
  return 0;
}

}  // namespace

// Set how many threads the parallel regions of this thread get.
extern "C" __attribute__((visibility("default"))) int64_t mucudnn_set_threads(int64_t threads) {
  return refusable([&] {
    require_threads(threads);
    omp_set_num_threads(int(threads));
    return int64_t(0);
  });
}

// Run steps by one team of threads; bases: the addresses to which their places refer. Stops at the first refusal, and
// returns it.
extern "C" __attribute__((visibility("default"))) int64_t mucudnn_program_run(const Step* steps, int64_t count,
                                                                              char* const* bases, int64_t threads) {
  return refusable([&] {
    require_threads(threads);
    int64_t result = 0;
    Team::run(int(threads), [&] {
      for (int64_t i = 0; i < count && result >= 0; ++i) result = run(steps[i], bases, int(threads));
    });
    return std::min<int64_t>(result, 0);
  });
}
