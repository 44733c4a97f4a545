// Copies between tensors of different processes.
#pragma once

#include <cstddef>

namespace neuron {

// Bytes from which on a collective's tensors would only push each other out of the caches.
constexpr size_t kStreamFrom = size_t(8) << 20;

// `streaming` writes past the caches where the processor can: what is written is not read first, nor kept. The memory regions
// must be the same or not overlap.
void copy(char* to, const char* from, size_t bytes, bool streaming);
// Streamed writes of this thread are seen by others before what it writes from now on.
void finish_streaming();

}  // namespace neuron
