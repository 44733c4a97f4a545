// Ordinary copies, and copies with non-temporal stores.
#include "copies.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace neuron {

#if defined(__x86_64__)
namespace {
const bool has_avx = __builtin_cpu_supports("avx");

// Whole cache lines, to an address at the start of one.
__attribute__((target("avx"))) void stream_lines(char* to, const char* from, size_t lines) {
  for (; lines != 0; --lines, to += 64, from += 64) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), high);
  }
}
}  // namespace

void copy(char* to, const char* from, size_t bytes, bool streaming) {
  if (to == from || bytes == 0) return;
  if (streaming && has_avx) {
    const size_t head = std::min<size_t>(bytes, (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64);
    const size_t body = (bytes - head) / 64 * 64;
    std::memcpy(to, from, head);
    stream_lines(to + head, from + head, body / 64);
    to += head + body;
    from += head + body;
    bytes -= head + body;
  }
  std::memcpy(to, from, bytes);
}

void finish_streaming() { _mm_sfence(); }
#else
void copy(char* to, const char* from, size_t bytes, bool) {
  if (to != from && bytes != 0) std::memcpy(to, from, bytes);
}

void finish_streaming() {}
#endif

}  // namespace neuron
