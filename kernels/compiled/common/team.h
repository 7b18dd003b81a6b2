// Threads that stay together for all steps of a program. A parallel region for each step would fork and join through the
// OpenMP runtime, which puts threads to sleep and wakes them wherever there are more of them than processors.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>

// The threads of one parallel region. The first one runs a program, and gives a job at a time to all; the others wait
// for it, first in a loop, then asleep.
class Team {
 public:
  // Call program() with a team of up to `threads` threads, no more than there are processors on which this thread may
  // run. program: may throw.
  template <class Program>
  static void run(int threads, Program program) {
    Team team;
    std::exception_ptr thrown;  // no exception may leave a parallel region
#pragma omp parallel num_threads(std::min(threads, team.processors_))
    if (omp_get_thread_num() > 0) {
      team.serve();
    } else {
      const Member member(team);
      try {
        program();
      } catch (...) {
        thrown = std::current_exception();
      }
    }
    if (thrown) std::rethrow_exception(thrown);
  }

  // The team for which this thread runs a program; null if there is none.
  static Team* of_this_thread() { return current; }

  // Call body() by all threads.
  template <class Body>
  void call(Body& body) {
    if (workers_ > 0) give([](void* of) { (*static_cast<Body*>(of))(); }, &body);
    body();
    if (workers_ > 0) wait(done_, [&] { return working_.load() == 0; });
  }

 private:
  typedef void (*Job)(void*);

  // A place to sleep, whose waiters are woken at no cost if there are none.
  struct Bed {
    std::mutex mutex;
    std::condition_variable woken;
    std::atomic<int> sleepers{0};

    void wake() {
      if (sleepers.load() == 0) return;
      { const std::lock_guard<std::mutex> lock(mutex); }
      woken.notify_all();
    }
  };

  // The first thread of a team while it runs a program.
  struct Member {
    Team& team;

    explicit Member(Team& of) : team(of) {
      team.workers_ = omp_get_num_threads() - 1;
      running += omp_get_num_threads();
      current = &team;
    }
    ~Member() {
      current = nullptr;
      running -= omp_get_num_threads();
      if (team.workers_ > 0) team.give(nullptr, nullptr);
    }
  };

  void give(Job job, void* of) {
    job_ = job;
    of_ = of;
    working_.store(workers_);
    turn_.fetch_add(1);
    given_.wake();
  }

  // Run jobs until there are no more.
  void serve() {
    for (uint32_t turn = 0;; ++turn) {
      wait(given_, [&] { return turn_.load() != turn; });
      if (!job_) return;
      job_(of_);
      if (working_.fetch_sub(1) == 1) done_.wake();
    }
  }

  // Wait until is_over() holds. What it reads changes before `bed` is woken.
  template <class Condition>
  void wait(Bed& bed, Condition is_over) {
    constexpr int MOST_TURNS = 20000, CROWDED_TURNS = 100;  // 0.3 to 1 ms; if others need the processors, a few us
    const int turns = running.load() > processors_ ? CROWDED_TURNS : MOST_TURNS;
    for (int i = 0; i < turns; ++i) {
      if (is_over()) return;
      pause();
    }
    std::unique_lock<std::mutex> lock(bed.mutex);
    ++bed.sleepers;
    bed.woken.wait(lock, is_over);
    --bed.sleepers;
  }

  static void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
  }

  static inline thread_local Team* current = nullptr;
  static inline std::atomic<int> running{0};  // threads of all teams of the process

  const int processors_ = omp_get_num_procs();  // on which this thread may run
  Bed given_, done_;
  int workers_ = 0;
  Job job_ = nullptr;
  void* of_ = nullptr;
  alignas(64) std::atomic<uint32_t> turn_{0};
  alignas(64) std::atomic<int> working_{0};
};

// Call body() by all threads of a parallel region: of the team that runs a program, or of a new one.
template <class Body>
void in_parallel(int threads, Body body) {
  if (Team* team = Team::of_this_thread()) return team->call(body);
#pragma omp parallel num_threads(threads)
  body();
}
