// HBM of one simulated NeuronCore: one shared-memory file, mapped once and carved into blocks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace neuron {

// Why a block could not be had; the operator boundary turns it into an error (see allocator.h).
struct Shortage {
  enum class Of { kCore, kHost } of = Of::kCore;
  int device = 0;
  size_t requested = 0;
  size_t limit = 0;         // the core's HBM, or what the host says it has left
  size_t tensors = 0;       // bytes of live tensors on the core
  size_t scratch = 0;       // bytes of live temporaries inside kernels
};

struct ArenaStats {
  int64_t tensor_bytes = 0, tensor_peak = 0;        // storages of device tensors
  int64_t scratch_bytes = 0, scratch_peak = 0;      // temporaries of the kernel that is running
  int64_t reserved_bytes = 0, reserved_peak = 0;    // taken from the host and not given back
  int64_t requested_bytes = 0, requested_peak = 0;  // tensor bytes before rounding up to kAlignment
  int64_t allocations = 0, allocations_peak = 0;    // live tensor storages
  int64_t allocated_total = 0, freed_total = 0;     // bytes since start or reset_accumulated
  int64_t num_allocated_total = 0, num_freed_total = 0;
  int64_t num_cache_flushes = 0, num_ooms = 0;
};

// Best-fit allocator with immediate coalescing over a sparse memfd. The file has no name, so nothing is left behind however the
// process ends. Thread safe. `allocate` never exceeds `limit` bytes of live blocks, and asks the host for pages before using them,
// so that a full host is an answer here and not a SIGKILL later.
class Arena {
 public:
  static constexpr size_t kAlignment = 512;

  // `base` is an address range of `span` bytes reserved by the caller; the arena maps its file over it.
  Arena(int device, char* base, size_t span, size_t limit);

  // A block of at least `bytes`, as scratch until `adopt`ed; null when the core or the host has no room (then `shortage` is filled).
  void* allocate(size_t bytes, Shortage& shortage);
  // The block becomes a tensor's storage of `bytes` bytes and counts as such until it is freed.
  void adopt(void* block, size_t bytes);
  void release(void* block);
  // Give the pages of all free blocks back to the host.
  void empty_cache();

  ArenaStats stats() const;
  void reset_peak();
  void reset_accumulated();
  void set_limit(size_t bytes);
  size_t limit() const { return limit_; }
  int device() const { return device_; }
  int fd() const { return fd_; }
  char* base() const { return base_; }

 private:
  using Index = uint32_t;  // into nodes_; 0 is "none"
  struct Node {
    size_t offset = 0, size = 0;
    size_t backed = 0;     // of a free block: bytes still reserved from the host
    size_t requested = 0;  // of a tensor: bytes before rounding
    Index before = 0, after = 0;        // neighbours in address order
    Index previous = 0, next = 0;       // neighbours in a bin of free blocks of one size
    enum class State : uint8_t { kUnused, kFree, kScratch, kTensor } state = State::kUnused;
  };
  static constexpr size_t kBins = 1024;  // exact sizes up to kBins * kAlignment = 512 KiB, one bit each
  static constexpr size_t kChunk = size_t(4) << 20;  // the arena grows in steps of this many bytes

  Index new_node();
  void insert_free(Index index);
  void remove_free(Index index);
  Index find_best_fit(size_t size);
  Index grow(size_t size, Shortage& shortage);
  void give_back_free_pages();
  Index& owner(size_t offset) { return owners_[offset / kAlignment]; }

  const int device_;
  char* const base_;
  const size_t span_;
  size_t limit_;
  int fd_ = -1;
  mutable std::mutex mutex_;
  std::vector<Node> nodes_{1};
  Index unused_ = 0;                    // chain of unused nodes through `next`
  std::array<Index, kBins> bins_{};     // bin b holds free blocks of exactly (b + 1) * kAlignment bytes
  std::array<uint64_t, kBins / 64> occupied_{};
  std::multimap<size_t, Index> large_;  // free blocks above the bins, by size
  Index* owners_ = nullptr;             // block start / kAlignment -> node; lazily backed
  size_t top_ = 0, committed_ = 0;      // carved so far; pages asked from the host so far
  Index last_ = 0;                      // the block that ends at top_
  ArenaStats stats_;
};

// Bytes the host can still give this process: MemAvailable and every cgroup limit above it, minus a safety margin.
size_t host_bytes_available();

}  // namespace neuron
