// Argument checks that every entry point makes before it touches memory, in every build: sizes fit the arithmetic,
// operands match each other, and buffers are large enough.
#pragma once

#include <cstdint>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>

// Return values of refused calls; mucudnn_refusal() returns the message.
enum Refusal : int64_t { NOT_BUILT = -1, TOO_LARGE = -2, MISMATCH = -3, TOO_SMALL = -4, NO_MEMORY = -5 };

// The limit of every size except the batch size, padded sizes included: the sum of any two fits an int.
constexpr int64_t LARGEST_SIZE = 1 << 30;

inline thread_local char refusal_text[256] = "";

struct Refused {
  Refusal refusal;
};

[[noreturn]] inline void refuse(Refusal refusal, const std::string& text) {
  std::snprintf(refusal_text, sizeof refusal_text, "%s", text.c_str());
  throw Refused{refusal};
}

// Run the body of an entry point: no exception may leave a C function. Bodies throw only outside parallel regions.
template <class Body>
int64_t refusable(Body body) {
  try {
    return body();
  } catch (const Refused& refused) {
    return refused.refusal;
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {  // more elements than any std::vector holds
  }
  std::snprintf(refusal_text, sizeof refusal_text, "there is no memory for the tables of a compiled algorithm");
  return NO_MEMORY;
}

inline int64_t times(int64_t a, int64_t b) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product)) refuse(TOO_LARGE, "sizes whose product needs more than 64 bits");
  return product;
}

inline int64_t plus(int64_t a, int64_t b) {
  int64_t sum;
  if (__builtin_add_overflow(a, b, &sum)) refuse(TOO_LARGE, "sizes whose sum needs more than 64 bits");
  return sum;
}

inline int64_t bytes_of(int64_t floats) { return times(floats, sizeof(float)); }

inline void require_between(const char* what, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return;
  refuse(value < least ? MISMATCH : TOO_LARGE, std::string(what) + " is " + std::to_string(value) + "; allowed is " +
                                                   std::to_string(least) + " to " + std::to_string(most));
}

inline void require_size(const char* what, int64_t value) { require_between(what, value, 1, LARGEST_SIZE); }

inline void require_equal(const char* what, int64_t value, int64_t expected) {
  if (value == expected) return;
  refuse(MISMATCH, std::string(what) + " is " + std::to_string(value) + "; the other operands make it " +
                       std::to_string(expected));
}

inline void require_divides(int64_t groups, int64_t channels) {
  require_size("the number of groups", groups);
  require_equal("what is left of the channels, or filters, of equal groups", channels % groups, 0);
}

inline void require_bytes(const char* buffer, int64_t holds, int64_t needs) {
  if (holds >= needs) return;
  refuse(TOO_SMALL, std::string(buffer) + " holds " + std::to_string(holds) + " bytes; the call needs " +
                        std::to_string(needs));
}

// Require the exact size of a dense tensor: any other size would mean another element type.
inline void require_all_bytes(const char* tensor, int64_t holds, int64_t elements, int64_t element_bytes) {
  const int64_t needs = times(elements, element_bytes);
  if (holds == needs) return;
  refuse(TOO_SMALL, std::string(tensor) + " holds " + std::to_string(holds) + " bytes; in elements of " +
                        std::to_string(element_bytes) + " bytes its sizes are " + std::to_string(needs) + " bytes");
}

inline void require_threads(int64_t threads) { require_between("the number of threads", threads, 1, INT32_MAX); }
