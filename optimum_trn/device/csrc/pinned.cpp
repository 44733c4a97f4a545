// Pinned host memory: ordinary host memory whose address ranges are remembered, so that `is_pinned` tells the truth.
#include "pinned.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

#include <c10/core/CPUAllocator.h>

namespace neuron {

namespace {
struct Ranges {
  std::mutex mutex;
  std::map<const char*, size_t> bytes_at;
};
// Never destroyed: tensors may outlive static destruction.
Ranges& ranges() {
  static auto* instance = new Ranges;
  return *instance;
}

void release(void* context) {
  auto* memory = static_cast<c10::DataPtr*>(context);
  {
    std::lock_guard<std::mutex> lock(ranges().mutex);
    ranges().bytes_at.erase(static_cast<const char*>(memory->get()));
  }
  delete memory;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* memory = new c10::DataPtr(c10::GetCPUAllocator()->allocate(std::max<size_t>(bytes, 1)));
    std::lock_guard<std::mutex> lock(ranges().mutex);
    ranges().bytes_at[static_cast<const char*>(memory->get())] = std::max<size_t>(bytes, 1);
    return {memory->get(), memory, &release, c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
}  // namespace

c10::Allocator* pinned_allocator() {
  static auto* instance = new PinnedAllocator;
  return instance;
}

bool is_pinned(const void* pointer) {
  const auto* address = static_cast<const char*>(pointer);
  std::lock_guard<std::mutex> lock(ranges().mutex);
  auto it = ranges().bytes_at.upper_bound(address);
  return it != ranges().bytes_at.begin() && address < std::prev(it)->first + std::prev(it)->second;
}

}  // namespace neuron
