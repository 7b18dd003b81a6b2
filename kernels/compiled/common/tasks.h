// How threads share the tasks of a call.
#pragma once

#include "common/image.h"
#include "common/team.h"

// Return whether images are so small that a core may have in its own cache what it wrote in the call before, which is
// what the next layer reads.
inline bool may_stay_in_caches(const Images& x, const Images& y, int threads) {
  constexpr int64_t OF_THREAD = 1024 * 1024;  // elements
  const auto elements = [](const Images& of) { return of.n * of.c * of.h * of.w; };
  return elements(x) + elements(y) <= OF_THREAD * threads;
}

// Call body(task) for all tasks, by all threads of a parallel region, which do not wait for each other. in_shares:
// whether each thread gets the same share of consecutive tasks in every call; otherwise it gets another one whenever it
// is done, as other programs may be running on its core.
template <class Body>
INLINE void share_tasks(int64_t tasks, bool in_shares, Body body) {
  if (in_shares) {
#pragma omp for schedule(static) nowait
    for (int64_t task = 0; task < tasks; ++task) body(task);
  } else {
#pragma omp for schedule(dynamic) nowait
    for (int64_t task = 0; task < tasks; ++task) body(task);
  }
}

// Call body(task) for all tasks, by the threads of a parallel region. A single task runs on the calling thread.
template <class Body>
INLINE void parallel_tasks(int threads, int64_t tasks, bool in_shares, Body body) {
  if (tasks == 1) return body(int64_t{0});
  in_parallel(threads, [&] { share_tasks(tasks, in_shares, body); });
}
