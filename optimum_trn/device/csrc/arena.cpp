// Best-fit allocation with coalescing over a sparse shared-memory file.
#include "arena.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>

#include <c10/util/Exception.h>

namespace neuron {

namespace {
constexpr size_t kPage = 4096;
size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

void raise_peak(int64_t now, int64_t& peak) { peak = std::max(peak, now); }
}  // namespace

Arena::Arena(int device, char* base, size_t span, size_t limit) : device_(device), base_(base), span_(span), limit_(limit) {
  fd_ = memfd_create("neuron-hbm", MFD_CLOEXEC);
  TORCH_CHECK(fd_ >= 0 && ftruncate(fd_, static_cast<off_t>(span)) == 0, "Cannot create shared memory for NeuronCore ", device, ": errno ", errno);
  void* mapped = mmap(base, span, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd_, 0);
  void* owners = mmap(nullptr, span / kAlignment * sizeof(Index), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(mapped != MAP_FAILED && owners != MAP_FAILED, "Cannot map the HBM of NeuronCore ", device, ": errno ", errno);
  madvise(base, span, MADV_DONTDUMP);  // a core dump should hold the host, not gigabytes of HBM
  owners_ = static_cast<Index*>(owners);
}

Arena::Index Arena::new_node() {
  if (unused_ == 0) {
    nodes_.emplace_back();
    return static_cast<Index>(nodes_.size() - 1);
  }
  Index index = unused_;
  unused_ = nodes_[index].next;
  nodes_[index] = Node{};
  return index;
}

void Arena::insert_free(Index index) {
  Node& node = nodes_[index];
  node.state = Node::State::kFree;
  const size_t bin = node.size / kAlignment - 1;
  if (bin >= kBins) {
    large_.emplace(node.size, index);
    return;
  }
  node.previous = 0;
  node.next = bins_[bin];
  if (node.next) nodes_[node.next].previous = index;
  bins_[bin] = index;
  occupied_[bin / 64] |= uint64_t(1) << (bin % 64);
}

void Arena::remove_free(Index index) {
  Node& node = nodes_[index];
  const size_t bin = node.size / kAlignment - 1;
  if (bin >= kBins) {
    for (auto [it, end] = large_.equal_range(node.size); it != end; ++it) {
      if (it->second == index) {
        large_.erase(it);
        return;
      }
    }
    return;
  }
  if (node.next) nodes_[node.next].previous = node.previous;
  if (node.previous) {
    nodes_[node.previous].next = node.next;
  } else {
    bins_[bin] = node.next;
    if (!node.next) occupied_[bin / 64] &= ~(uint64_t(1) << (bin % 64));
  }
}

Arena::Index Arena::find_best_fit(size_t size) {
  const size_t bin = size / kAlignment - 1;
  if (bin < kBins) {
    size_t word = bin / 64;
    uint64_t bits = occupied_[word] & (~uint64_t(0) << (bin % 64));
    while (!bits && ++word < occupied_.size()) bits = occupied_[word];
    if (bits) return bins_[word * 64 + std::countr_zero(bits)];
  }
  auto it = large_.lower_bound(size);
  return it == large_.end() ? 0 : it->second;
}

// A new block at the top of the arena, extending the last one where that is free.
Arena::Index Arena::grow(size_t size, Shortage& shortage) {
  const bool extends = last_ && nodes_[last_].state == Node::State::kFree;
  const size_t start = extends ? nodes_[last_].offset : top_;
  const size_t end = start + size;
  if (end > committed_) {
    const size_t target = std::min(round_up(end, kChunk), span_);
    const size_t available = host_bytes_available();
    // Asking for the pages now makes every other process on this host see them taken, touched or not.
    const bool fits = end <= span_ && target - committed_ <= available &&
        fallocate(fd_, 0, static_cast<off_t>(committed_), static_cast<off_t>(target - committed_)) == 0;
    if (!fits) {
      shortage.of = Shortage::Of::kHost;
      shortage.limit = available;
      return 0;
    }
    committed_ = target;
  }
  Index index = last_;
  if (extends) {
    remove_free(index);
    nodes_[index].size = size;
  } else {
    index = new_node();
    Node& node = nodes_[index];
    node.offset = start;
    node.size = size;
    node.before = last_;
    if (last_) nodes_[last_].after = index;
    owner(start) = index;
    last_ = index;
  }
  top_ = end;
  return index;
}

void* Arena::allocate(size_t bytes, Shortage& shortage) {
  const size_t size = round_up(std::max<size_t>(bytes, 1), kAlignment);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto refuse = [&]() -> void* {
    shortage.device = device_;
    shortage.requested = bytes;
    shortage.tensors = stats_.tensor_bytes;
    shortage.scratch = stats_.scratch_bytes;
    ++stats_.num_ooms;
    return nullptr;
  };
  if (stats_.tensor_bytes + stats_.scratch_bytes + size > limit_) {
    shortage.of = Shortage::Of::kCore;
    shortage.limit = limit_;
    return refuse();
  }
  Index index = find_best_fit(size);
  if (index) {
    remove_free(index);
    Node& node = nodes_[index];
    if (node.size > size) {
      const Index rest = new_node();  // may move nodes_
      Node& taken = nodes_[index];
      Node& left = nodes_[rest];
      left.offset = taken.offset + size;
      left.size = taken.size - size;
      left.backed = taken.backed - std::min(taken.backed, size);
      taken.backed -= left.backed;
      taken.size = size;
      left.before = index;
      left.after = taken.after;
      if (left.after) {
        nodes_[left.after].before = rest;
      } else {
        last_ = rest;
      }
      taken.after = rest;
      owner(left.offset) = rest;
      insert_free(rest);
    }
  } else {
    index = grow(size, shortage);
    if (!index) return refuse();
  }
  Node& node = nodes_[index];
  node.state = Node::State::kScratch;
  stats_.reserved_bytes += static_cast<int64_t>(size - node.backed);
  node.backed = size;
  stats_.scratch_bytes += static_cast<int64_t>(size);
  raise_peak(stats_.scratch_bytes, stats_.scratch_peak);
  raise_peak(stats_.reserved_bytes, stats_.reserved_peak);
  if (stats_.reserved_bytes > static_cast<int64_t>(limit_)) give_back_free_pages();
  return base_ + node.offset;
}

void Arena::adopt(void* block, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Node& node = nodes_[owner(static_cast<char*>(block) - base_)];
  if (node.state != Node::State::kScratch) return;
  const auto size = static_cast<int64_t>(node.size);
  node.state = Node::State::kTensor;
  node.requested = bytes;
  stats_.scratch_bytes -= size;
  stats_.tensor_bytes += size;
  stats_.requested_bytes += static_cast<int64_t>(bytes);
  stats_.allocated_total += size;
  ++stats_.allocations;
  ++stats_.num_allocated_total;
  raise_peak(stats_.tensor_bytes, stats_.tensor_peak);
  raise_peak(stats_.requested_bytes, stats_.requested_peak);
  raise_peak(stats_.allocations, stats_.allocations_peak);
}

void Arena::release(void* block) {
  std::lock_guard<std::mutex> lock(mutex_);
  Index index = owner(static_cast<char*>(block) - base_);
  {
    Node& node = nodes_[index];
    const auto size = static_cast<int64_t>(node.size);
    if (node.state == Node::State::kTensor) {
      stats_.tensor_bytes -= size;
      stats_.requested_bytes -= static_cast<int64_t>(node.requested);
      stats_.freed_total += size;
      --stats_.allocations;
      ++stats_.num_freed_total;
    } else {
      stats_.scratch_bytes -= size;
    }
  }
  // `low` takes in `high`, its neighbour in address order.
  const auto merge = [this](Index low, Index high) {
    Node& kept = nodes_[low];
    Node& gone = nodes_[high];
    kept.size += gone.size;
    kept.backed += gone.backed;
    kept.after = gone.after;
    if (kept.after) {
      nodes_[kept.after].before = low;
    } else {
      last_ = low;
    }
    gone = Node{};
    gone.next = unused_;
    unused_ = high;
  };
  const Index after = nodes_[index].after, before = nodes_[index].before;
  if (after && nodes_[after].state == Node::State::kFree) {
    remove_free(after);
    merge(index, after);
  }
  if (before && nodes_[before].state == Node::State::kFree) {
    remove_free(before);
    merge(before, index);
    index = before;
  }
  insert_free(index);
}

void Arena::give_back_free_pages() {
  const auto punch = [this](size_t from, size_t to) {
    from = round_up(from, kPage);
    to = to / kPage * kPage;
    if (from < to) fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(from), static_cast<off_t>(to - from));
  };
  for (Node& node : nodes_) {
    if (node.state != Node::State::kFree || node.backed == 0) continue;
    punch(node.offset, node.offset + node.size);
    stats_.reserved_bytes -= static_cast<int64_t>(node.backed);
    node.backed = 0;
  }
  if (committed_ > top_) punch(top_, committed_);
  committed_ = std::min(committed_, round_up(top_, kPage));
  ++stats_.num_cache_flushes;
}

void Arena::empty_cache() {
  std::lock_guard<std::mutex> lock(mutex_);
  give_back_free_pages();
}

ArenaStats Arena::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

void Arena::reset_peak() {
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.tensor_peak = stats_.tensor_bytes;
  stats_.scratch_peak = stats_.scratch_bytes;
  stats_.reserved_peak = stats_.reserved_bytes;
  stats_.requested_peak = stats_.requested_bytes;
  stats_.allocations_peak = stats_.allocations;
}

void Arena::reset_accumulated() {
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.allocated_total = stats_.freed_total = 0;
  stats_.num_allocated_total = stats_.num_freed_total = 0;
  stats_.num_cache_flushes = stats_.num_ooms = 0;
}

void Arena::set_limit(size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  limit_ = std::min(bytes, span_);
}

}  // namespace neuron
