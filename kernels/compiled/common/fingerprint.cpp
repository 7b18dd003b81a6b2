// A fingerprint of all bytes of a tensor, computed as fast as memory can be read.
//
// The hash is NH of UMAC (Black, Halevi, Krawczyk, Krovetz, Rogaway 1999) with 64-bit words: each word is added to the
// key of its position, pairs are multiplied, and the 128-bit products are summed. Two different chunks collide for at
// most one in 2^64 choices of the keys. Each sum is mixed with the number of its chunk, and the results are added: the
// position of every word matters, the order of the threads does not.
#include <omp.h>

#include <array>
#include <cstdint>
#include <cstring>

namespace {

constexpr int WORDS = 512;  // in a chunk; the L1 cache holds a chunk and the keys
constexpr int64_t CHUNK_BYTES = WORDS * sizeof(uint64_t);
constexpr int64_t SMALLEST_SHARED = 64;        // chunks; with fewer, waking the threads costs more
constexpr uint64_t GAMMA = 0x9e3779b97f4a7c15;  // from SplitMix64 (Steele, Lea, Flood 2014), as is mix

constexpr uint64_t mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

constexpr std::array<uint64_t, WORDS> make_keys() {
  std::array<uint64_t, WORDS> keys{};
  for (int i = 0; i < WORDS; ++i) keys[i] = mix((i + 1) * GAMMA);
  return keys;
}

constexpr std::array<uint64_t, WORDS> KEYS = make_keys();

uint64_t keyed_word(const char* chunk, int index) {
  uint64_t word;
  std::memcpy(&word, chunk + index * sizeof(word), sizeof(word));
  return word + KEYS[index];
}

uint64_t digest(const char* chunk, int64_t number) {
  unsigned __int128 sum = 0;
#pragma GCC unroll 8
  for (int i = 0; i < WORDS; i += 2)
    sum += static_cast<unsigned __int128>(keyed_word(chunk, i)) * keyed_word(chunk, i + 1);
  return mix(uint64_t(sum) ^ mix(uint64_t(sum >> 64) + (number + 1) * GAMMA));
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Return the fingerprint, which is the same for every number of threads and in every build.
int64_t mucudnn_fingerprint(const char* data, int64_t size_bytes, int threads) {
  const int64_t whole = size_bytes / CHUNK_BYTES, rest = size_bytes % CHUNK_BYTES;
  uint64_t sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum) if (whole >= SMALLEST_SHARED)
  for (int64_t number = 0; number < whole; ++number) sum += digest(data + number * CHUNK_BYTES, number);
  if (rest) {
    char last[CHUNK_BYTES] = {};
    std::memcpy(last, data + whole * CHUNK_BYTES, rest);
    sum += digest(last, whole);
  }
  return int64_t(mix(sum ^ mix(uint64_t(size_bytes) + GAMMA)));
}

}  // extern "C"
#pragma GCC visibility pop
