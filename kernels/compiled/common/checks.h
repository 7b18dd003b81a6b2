// Argument checks that every entry point makes before it touches memory, in every build: sizes fit the arithmetic,
// operands match each other, and buffers are large enough.
#pragma once

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>

// Return values of refused calls; mucudnn_refusal() returns the message.
enum Refusal : int64_t { NOT_BUILT = -1, TOO_LARGE = -2, MISMATCH = -3, TOO_SMALL = -4, NO_MEMORY = -5 };

// The limit of every size except the batch size, padded sizes included: the sum of any two fits an int.
constexpr int64_t LARGEST_SIZE = 1 << 30;

struct Refused {
  Refusal refusal;
};

[[noreturn]] void refuse(Refusal refusal, const std::string& text);

// Return NO_MEMORY, with its message.
int64_t without_memory();

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
  return without_memory();
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

void require_between(const char* what, int64_t value, int64_t least, int64_t most);
void require_size(const char* what, int64_t value);
void require_equal(const char* what, int64_t value, int64_t expected);
void require_divides(int64_t groups, int64_t channels);
void require_bytes(const char* buffer, int64_t holds, int64_t needs);

// Require the exact size of a dense tensor: any other size would mean another element type.
void require_all_bytes(const char* tensor, int64_t holds, int64_t elements, int64_t element_bytes);

void require_threads(int64_t threads);
