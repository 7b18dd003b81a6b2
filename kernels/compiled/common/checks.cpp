#include "common/checks.h"

#include <cstdio>

static thread_local char refusal_text[256] = "";

extern "C" __attribute__((visibility("default"))) const char* mucudnn_refusal() { return refusal_text; }

[[noreturn]] void refuse(Refusal refusal, const std::string& text) {
  std::snprintf(refusal_text, sizeof refusal_text, "%s", text.c_str());
  throw Refused{refusal};
}

int64_t without_memory() {
  std::snprintf(refusal_text, sizeof refusal_text, "there is no memory for the tables of a compiled algorithm");
  return NO_MEMORY;
}

void require_between(const char* what, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return;
  refuse(value < least ? MISMATCH : TOO_LARGE, std::string(what) + " is " + std::to_string(value) + "; allowed is " +
                                                   std::to_string(least) + " to " + std::to_string(most));
}

void require_size(const char* what, int64_t value) { require_between(what, value, 1, LARGEST_SIZE); }

void require_equal(const char* what, int64_t value, int64_t expected) {
  if (value == expected) return;
  refuse(MISMATCH, std::string(what) + " is " + std::to_string(value) + "; the other operands make it " +
                       std::to_string(expected));
}

void require_divides(int64_t groups, int64_t channels) {
  require_size("the number of groups", groups);
  require_equal("what is left of the channels, or filters, of equal groups", channels % groups, 0);
}

void require_bytes(const char* buffer, int64_t holds, int64_t needs) {
  if (holds >= needs) return;
  refuse(TOO_SMALL,
         std::string(buffer) + " holds " + std::to_string(holds) + " bytes; the call needs " + std::to_string(needs));
}

void require_all_bytes(const char* tensor, int64_t holds, int64_t elements, int64_t element_bytes) {
  const int64_t needs = times(elements, element_bytes);
  if (holds == needs) return;
  refuse(TOO_SMALL, std::string(tensor) + " holds " + std::to_string(holds) + " bytes; in elements of " +
                        std::to_string(element_bytes) + " bytes its sizes are " + std::to_string(needs) + " bytes");
}

void require_threads(int64_t threads) { require_between("the number of threads", threads, 1, INT32_MAX); }
