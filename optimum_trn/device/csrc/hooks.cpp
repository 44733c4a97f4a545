// What PyTorch asks an accelerator for: counts, generators, pinned memory, resizing a storage.
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "alias.h"
#include "allocator.h"
#include "device.h"
#include "generator.h"
#include "pinned.h"

namespace neuron {

namespace {
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override { ensure_configured(); }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return existing_arena(index) != nullptr; }

  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto previous = getCurrentDevice();
    set_current_device(index);
    return previous;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  at::Device getDeviceFromPtr(void* pointer) const override {
    Arena* owner = arena_of(pointer);
    TORCH_CHECK(owner, "The pointer does not belong to a NeuronCore.");
    return {kNeuron, static_cast<c10::DeviceIndex>(owner->device())};
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(index < 0 ? current_device() : index); }

  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(*storage.unsafeGetStorageImpl(), bytes); }
};

// Never destroyed: PyTorch may ask until the very end of the process.
const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);
}  // namespace

}  // namespace neuron
