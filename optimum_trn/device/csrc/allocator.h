// Where device tensors live: the cores' arenas, PyTorch's allocator for them, and the switch that sends kernels' outputs there.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>

#include "arena.h"

namespace neuron {

Arena& arena(int device);                 // created on first use
Arena* existing_arena(int device);        // null before that
Arena* arena_of(const void* pointer);     // null for host memory
void require_supported(c10::ScalarType);  // raises TypeError for what the hardware has no type for

c10::Allocator* device_allocator();

// While one lives, CPU tensors made on this thread are allocated in `device`'s HBM.
class AllocateOnCore {
 public:
  explicit AllocateOnCore(int device) : previous_(current_) { current_ = device; }
  ~AllocateOnCore() { current_ = previous_; }
  AllocateOnCore(const AllocateOnCore&) = delete;
  AllocateOnCore& operator=(const AllocateOnCore&) = delete;
  static int current() { return current_; }

 private:
  static thread_local int current_;  // -1: the host
  int previous_;
};

// Thrown by the CPU allocator while a kernel runs; never leaves the operator boundary (see raise_out_of_memory).
struct ArenaFull : std::exception {
  explicit ArenaFull(const Shortage& s) : shortage(s) {}
  const char* what() const noexcept override { return "NeuronCore HBM out of memory."; }
  Shortage shortage;
};

[[noreturn]] void raise_out_of_memory(const Shortage& shortage);

// Runs what may allocate on a core, and turns a shortage into the error a user sees, when the temporaries of `work` are gone.
template <class Work>
decltype(auto) at_operator_boundary(Work&& work) {
  std::optional<Shortage> shortage;
  try {
    return work();
  } catch (const ArenaFull& full) {
    shortage = full.shortage;
  }
  raise_out_of_memory(*shortage);
}

// The CPU storage behind a device storage. A device storage is a shell: its data pointer's context owns the CPU storage.
c10::StorageImpl* cpu_storage(const c10::StorageImpl& device_storage);
// A data pointer for a device storage that shares ownership of `storage`, which becomes a tensor's storage of its core.
c10::DataPtr own(c10::intrusive_ptr<c10::StorageImpl> storage, int device);

}  // namespace neuron
