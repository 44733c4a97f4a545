// PyTorch's allocator for `neuron`, and the CPU allocator that puts the outputs of kernels into HBM.
#include "allocator.h"

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings.h"
#include "device.h"

namespace neuron {

// ---------------------------------------------------------------------------------------------------------------- arenas

namespace {
constexpr int kMaxCores = 128;
// Address space per core; far more than any core's HBM, so that a fragmented arena can still grow at its top.
constexpr size_t kSpan = size_t(256) << 30;

std::array<std::atomic<Arena*>, kMaxCores> arenas{};
std::atomic<char*> first_byte{nullptr};  // of the address range of all arenas
size_t range_bytes = 0;
std::mutex creation;
}  // namespace

Arena* existing_arena(int device) { return arenas[device].load(std::memory_order_acquire); }

Arena& arena(int device) {
  require_not_forked();
  if (Arena* existing = existing_arena(device)) return *existing;
  ensure_configured();
  std::lock_guard<std::mutex> lock(creation);
  if (Arena* existing = existing_arena(device)) return *existing;
  TORCH_CHECK(device < device_count() && device < kMaxCores, "NeuronCore ", device, " does not exist.");
  if (!first_byte) {
    const size_t bytes = kSpan * std::min(device_count(), kMaxCores);
    void* reserved = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(reserved != MAP_FAILED, "Cannot reserve ", bytes >> 30, " GiB of address space for the NeuronCores; see `ulimit -v`.");
    range_bytes = bytes;
    first_byte.store(static_cast<char*>(reserved), std::memory_order_release);
  }
  // Never destroyed: tensors may outlive static destruction.
  auto* created = new Arena(device, first_byte + kSpan * device, kSpan, std::min(hbm_bytes(), kSpan));
  arenas[device].store(created, std::memory_order_release);
  return *created;
}

Arena* arena_of(const void* pointer) {
  const char* first = first_byte.load(std::memory_order_acquire);
  const auto* address = static_cast<const char*>(pointer);
  if (!first || address < first || address >= first + range_bytes) return nullptr;
  return existing_arena(static_cast<int>((address - first) / kSpan));
}

// ------------------------------------------------------------------------------------------------- kernels write into HBM

thread_local int AllocateOnCore::current_ = -1;

namespace {
// A forked child shares the parent's memory but not its bookkeeping: there is nothing to give back.
void release_block(void* block) {
  if (!forked_after_use()) arena_of(block)->release(block);
}

// The CPU allocator of this process: the host's, except on a thread that runs a kernel of a NeuronCore.
struct KernelAllocator final : c10::Allocator {
  explicit KernelAllocator(c10::Allocator* host) : host_(host), release_host_(host->raw_deleter()) {}

  c10::DataPtr allocate(size_t bytes) override {
    const int device = AllocateOnCore::current();
    if (C10_LIKELY(device < 0)) return host_->allocate(bytes);
    if (bytes == 0) return {nullptr, c10::kCPU};
    Shortage shortage;
    void* block = arena(device).allocate(bytes, shortage);
    if (!block) throw ArenaFull(shortage);
    return {block, block, &release_block, c10::kCPU};
  }
  // oneDNN pairs raw_allocate with a raw_deallocate on whatever thread, so the deleter goes by the address.
  c10::DeleterFnPtr raw_deleter() const override {
    static const c10::DeleterFnPtr release_host = release_host_;
    return [](void* pointer) { arena_of(pointer) ? release_block(pointer) : release_host(pointer); };
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  c10::Allocator* host_;
  c10::DeleterFnPtr release_host_;
};

const bool switched = [] {
  c10::SetCPUAllocator(new KernelAllocator(c10::GetCPUAllocator()), /*priority=*/1);
  return true;
}();

void release_shell(void* context) { c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(context)); }
}  // namespace

c10::StorageImpl* cpu_storage(const c10::StorageImpl& device_storage) {
  const c10::DataPtr& data = device_storage.data_ptr();
  return data.get_deleter() == &release_shell ? static_cast<c10::StorageImpl*>(data.get_context()) : nullptr;
}

c10::DataPtr own(c10::intrusive_ptr<c10::StorageImpl> storage, int device) {
  void* data = const_cast<void*>(storage->data());
  if (Arena* owner = arena_of(data)) owner->adopt(data, storage->nbytes());
  return {data, storage.release(), &release_shell, c10::Device(kNeuron, static_cast<c10::DeviceIndex>(device))};
}

// ------------------------------------------------------------------------------------------------- PyTorch's allocator

namespace {
struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    ensure_configured();
    AllocateOnCore on_core(device);
    return at_operator_boundary([&] {
      return own(
          c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, c10::GetCPUAllocator(), /*resizable=*/true), device);
    });
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (auto& slot : arenas) {
      if (Arena* existing = slot.load(std::memory_order_acquire)) existing->empty_cache();
    }
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // operators have finished when they return
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    using c10::CachingAllocator::Stat;
    c10::CachingDeviceAllocator::DeviceStats result;
    Arena* existing = existing_arena(device);
    if (!existing) return result;
    const ArenaStats s = existing->stats();
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    result.allocation[all] = {s.allocations, s.allocations_peak, s.num_allocated_total, s.num_freed_total};
    result.active[all] = result.allocation[all];
    result.allocated_bytes[all] = {s.tensor_bytes, s.tensor_peak, s.allocated_total, s.freed_total};
    result.active_bytes[all] = result.allocated_bytes[all];
    result.requested_bytes[all] = {s.requested_bytes, s.requested_peak, 0, 0};
    result.reserved_bytes[all] = {s.reserved_bytes, s.reserved_peak, 0, 0};
    result.num_alloc_retries = s.num_cache_flushes;
    result.num_ooms = s.num_ooms;
    return result;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    if (Arena* existing = existing_arena(device)) existing->reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    if (Arena* existing = existing_arena(device)) existing->reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Arena* existing = existing_arena(device);
    if (!existing) return {hbm_bytes(), hbm_bytes()};
    const ArenaStats s = existing->stats();
    return {existing->limit() - std::min<size_t>(existing->limit(), s.tensor_bytes + s.scratch_bytes), existing->limit()};
  }
};
}  // namespace

c10::Allocator* device_allocator() {
  static auto* instance = new DeviceAllocator;
  return instance;
}

namespace {
const bool registered = (c10::SetAllocator(kNeuron, device_allocator()), true);

bool read_switch() {
  const char* value = std::getenv("OPTIMUM_TRN_ALLOW_FLOAT64");
  return value && std::strcmp(value, "0") != 0 && *value;
}
std::atomic<bool> all_types{read_switch()};
}  // namespace

void allow_unsupported_types(bool allow) { all_types = allow; }
bool unsupported_types_allowed() { return all_types; }

// The types TorchNeuron lists as unsupported, and complex128, which is made of one of them
// (github.com/aws-neuron/aws-neuron-sdk, frameworks/torch/pytorch-native-overview.rst, 2026-08-21).
void require_supported(c10::ScalarType type) {
  using c10::ScalarType;
  const bool unsupported = type == ScalarType::Double || type == ScalarType::ComplexDouble || type == ScalarType::UInt16 ||
      type == ScalarType::UInt32 || type == ScalarType::UInt64;
  TORCH_CHECK_TYPE(
      !unsupported || all_types.load(std::memory_order_relaxed),
      "NeuronCores have no ",
      c10::toString(type),
      " type. Convert to a supported one before moving data to the device (float32 for float64, complex64 for complex128, int32 or int64 "
      "for unsigned integers wider than 8 bits). Numerical tests may set OPTIMUM_TRN_ALLOW_FLOAT64=1 to let the simulator compute in it.");
}

void raise_out_of_memory(const Shortage& shortage) {
  // The table is Python's business: it knows which tensors are parameters, gradients and optimizer states.
  pybind11::gil_scoped_acquire gil;
  try {
    pybind11::module_::import("optimum_trn.device.out_of_memory")
        .attr("raise_out_of_memory")(
            shortage.device,
            shortage.requested,
            shortage.limit,
            shortage.tensors,
            shortage.scratch,
            shortage.of == Shortage::Of::kHost);
  } catch (pybind11::error_already_set& error) {
    error.restore();
    python_error raised;
    raised.persist();
    throw raised;
  }
  TORCH_INTERNAL_ASSERT(false, "raise_out_of_memory() returned");
}

}  // namespace neuron
