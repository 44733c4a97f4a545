// The device guard: selecting cores, streams and events. Work is finished when an operator returns, so streams are names only.
#include <array>
#include <atomic>
#include <chrono>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "device.h"

namespace neuron {

namespace {
using Clock = std::chrono::steady_clock;

constexpr size_t kMaxCores = 256;  // c10::DeviceIndex is a signed byte; a stream is kept for each possible index
thread_local std::array<c10::StreamId, kMaxCores> selected_stream{};
std::atomic<c10::StreamId> next_stream{1};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kNeuron;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kNeuron; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device previous = getDevice();
    set_current_device(device.index());
    return previous;
  }
  c10::Device getDevice() const override { return {kNeuron, static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    try {
      set_current_device(device.index());
    } catch (const std::exception&) {  // the interface says noexcept: a core that is gone stays unselected
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    try {
      return static_cast<c10::DeviceIndex>(device_count());
    } catch (const std::exception&) {
      return 0;
    }
  }

  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, with_index(device), selected_stream[resolve(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, with_index(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, with_index(device), next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& slot = selected_stream[resolve(stream.device())];
    const c10::Stream previous(c10::Stream::UNSAFE, with_index(stream.device()), slot);
    slot = stream.id();
    return previous;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Clock::time_point*>(event); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(start && end, "Both events must be recorded before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(*static_cast<Clock::time_point*>(end) - *static_cast<Clock::time_point*>(start)).count();
  }

 private:
  static c10::Device with_index(c10::Device device) { return {kNeuron, static_cast<c10::DeviceIndex>(resolve(device))}; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Nothing to remember: no stream can still be reading a tensor when its memory is freed.
void record_stream(at::Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) { library.impl("record_stream", record_stream); }
}  // namespace

}  // namespace neuron
