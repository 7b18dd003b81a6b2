// One parallel region for all steps of a program. A region for each step would fork and join its threads by the OpenMP
// runtime, which puts them to sleep and wakes them each time if there are more of them than processors.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>

// The threads of one parallel region. The primary thread runs a program, which hands one function at a time to all; the
// others wait for it: they spin for a while, then sleep.
class Team {
 public:
  // Call program() in the primary thread of a team. It has up to `threads` threads, and no more than there are
  // processors on which this thread may run. program: may throw.
  template <class Program>
  static void run(int threads, Program program) {
    Team team;
    std::exception_ptr thrown;  // no exception may leave a parallel region
#pragma omp parallel num_threads(std::min(threads, team.processors_))
    if (omp_get_thread_num() > 0) {
      team.work();
    } else {
      const Running is_running(team);
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

  // Call body() by all threads, and wait for them.
  template <class Body>
  void call(Body& body) {
    if (workers_ > 0) start([](void* of) { (*static_cast<Body*>(of))(); }, &body);
    body();
    if (workers_ > 0) wait(finished_, [&] { return working_.load() == 0; });
  }

 private:
  typedef void (*Function)(void*);

  // What threads sleep for. Without sleepers, a signal takes no lock.
  struct Event {
    std::mutex mutex;
    std::condition_variable condition;
    std::atomic<int> sleepers{0};

    void signal() {
      if (sleepers.load() == 0) return;
      { const std::lock_guard<std::mutex> lock(mutex); }  // until a thread that is about to sleep does
      condition.notify_all();
    }
  };

  // Holds while the primary thread runs a program.
  struct Running {
    Team& team;

    explicit Running(Team& of) : team(of) {
      team.workers_ = omp_get_num_threads() - 1;
      threads_of_all += omp_get_num_threads();
      current = &team;
    }
    ~Running() {
      current = nullptr;
      threads_of_all -= omp_get_num_threads();
      if (team.workers_ > 0) team.start(nullptr, nullptr);
    }
  };

  // Let the other threads call a function; null lets them leave.
  void start(Function function, void* argument) {
    function_ = function;
    argument_ = argument;
    working_.store(workers_);
    calls_.fetch_add(1);
    started_.signal();
  }

  // Call functions as they are started.
  void work() {
    for (uint32_t seen = 0;; ++seen) {
      wait(started_, [&] { return calls_.load() != seen; });
      if (!function_) return;
      function_(argument_);
      if (working_.fetch_sub(1) == 1) finished_.signal();
    }
  }

  // Wait until is_over() holds. What it reads changes before the event is signalled.
  template <class Condition>
  void wait(Event& event, Condition is_over) {
    constexpr int SPINS = 20000, SPINS_IF_OVERSUBSCRIBED = 100;  // 0.5 ms and 2.5 us on Zen 3
    const int spins = threads_of_all.load() > processors_ ? SPINS_IF_OVERSUBSCRIBED : SPINS;
    for (int i = 0; i < spins; ++i) {
      if (is_over()) return;
      pause();
    }
    std::unique_lock<std::mutex> lock(event.mutex);
    ++event.sleepers;
    event.condition.wait(lock, is_over);
    --event.sleepers;
  }

  static void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
  }

  static inline thread_local Team* current = nullptr;
  static inline std::atomic<int> threads_of_all{0};  // teams of the process

  const int processors_ = omp_get_num_procs();  // on which this thread may run
  Event started_, finished_;
  int workers_ = 0;  // threads beside the primary one
  Function function_ = nullptr;
  void* argument_ = nullptr;
  alignas(64) std::atomic<uint32_t> calls_{0};
  alignas(64) std::atomic<int> working_{0};
};

// Call body() by all threads of a parallel region: of the team that runs a program, or of a new one.
template <class Body>
void in_parallel(int threads, Body body) {
  if (Team* team = Team::of_this_thread()) return team->call(body);
#pragma omp parallel num_threads(threads)
  body();
}
