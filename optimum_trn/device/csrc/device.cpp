// Core selection, first use and fork.
#include "device.h"

#include <pthread.h>

#include <atomic>
#include <mutex>

#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

namespace neuron {

namespace {
std::atomic<bool> configured{false};
bool forked = false;
int visible = 0;
int default_core = 0;
size_t bytes_per_core = 0;
thread_local int selected = -1;  // -1: the process's default, so that every thread starts on the same core

// Other backends count on the C++ side too; before first use the answer still comes from torch.neuron, which creates nothing.
pybind11::object runtime() { return pybind11::module_::import("torch").attr("neuron"); }
}  // namespace

void configure(int count, size_t hbm_bytes, int core) {
  TORCH_CHECK(count > 0 && 0 <= core && core < count, "Core ", core, " of ", count, " does not exist.");
  visible = count;
  bytes_per_core = hbm_bytes;
  default_core = core;
  if (!configured.exchange(true)) {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
  }
}

void require_not_forked() {
  TORCH_CHECK(
      !forked,
      "Cannot re-initialize Neuron runtime in forked subprocess. To use Neuron with multiprocessing, use the 'spawn' start method");
}

bool forked_after_use() { return forked; }

void ensure_configured() {
  if (C10_LIKELY(configured.load(std::memory_order_acquire))) return require_not_forked();
  pybind11::gil_scoped_acquire gil;
  runtime().attr("_lazy_init")();
  TORCH_CHECK(configured, "torch.neuron._lazy_init() did not configure the device.");
}

int device_count() {
  if (configured.load(std::memory_order_acquire)) return visible;
  pybind11::gil_scoped_acquire gil;
  return runtime().attr("device_count")().cast<int>();
}

size_t hbm_bytes() {
  ensure_configured();
  return bytes_per_core;
}

int current_device() {
  if (selected >= 0) return selected;
  ensure_configured();
  return default_core;
}

void set_current_device(int index) {
  if (index < 0) return;
  const int count = device_count();
  TORCH_CHECK_VALUE(index < count, "Invalid device id: ", index, ". Valid range is 0 to ", count - 1);
  selected = index;
}

int resolve(const c10::Device& device) {
  if (!device.has_index()) return current_device();
  const int count = device_count();
  TORCH_CHECK_VALUE(device.index() < count, "Invalid device id: ", int(device.index()), ". Valid range is 0 to ", count - 1);
  return device.index();
}

}  // namespace neuron
