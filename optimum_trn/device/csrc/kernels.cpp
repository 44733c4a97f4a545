// Kernels that are the device's own: making tensors, views, copies between host and device, and storages.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "alias.h"
#include "allocator.h"
#include "device.h"
#include "recorder.h"
#include "rounding.h"

namespace neuron {

namespace {
using at::Tensor;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// The core that a factory's device argument names is selected while its allocator runs.
class OnDevice {
 public:
  explicit OnDevice(std::optional<c10::Device> device) : previous_(current_device()) {
    if (device) set_current_device(resolve(*device));
  }
  explicit OnDevice(const Tensor& tensor) : OnDevice(std::optional<c10::Device>(tensor.device())) {}
  ~OnDevice() { set_current_device(previous_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int previous_;
};

c10::ScalarType supported(std::optional<c10::ScalarType> type) {
  const auto chosen = c10::dtype_or_default(type);
  require_supported(chosen);
  return chosen;
}

Tensor empty(
    c10::SymIntArrayRef size,
    std::optional<c10::ScalarType> type,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory,
    std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == c10::kStrided, "neuron tensors are dense; layout ", *layout, " is not supported.");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
  OnDevice on(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(), kKeys, supported(type), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<c10::ScalarType> type,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
  OnDevice on(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_allocator(), kKeys, supported(type));
}

// A tensor of zeros without memory, which autograd uses for gradients that are known to vanish.
Tensor efficient_zero_tensor(
    c10::IntArrayRef size, std::optional<c10::ScalarType> type, std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  at::native::ZeroTensorAllocator no_memory(c10::Device(kNeuron, static_cast<c10::DeviceIndex>(device ? resolve(*device) : current_device())));
  return at::detail::empty_generic(size, &no_memory, kKeys | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor), supported(type), std::nullopt);
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  at::native::setStrided(result, size, stride, offset.value_or(self.storage_offset()));
  return result;
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  const auto inferred = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(size), self.numel());
  const auto stride = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(
      stride.has_value(),
      "view size is not compatible with input tensor's size and stride (at least one dimension spans across two contiguous subspaces). "
      "Use .reshape(...) instead.");
  auto result = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  result.unsafeGetTensorImpl()->set_storage_offset(self.storage_offset());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(inferred, *stride);
  return result;
}

// A view as another type is made without an allocation, so the type is checked here.
Tensor view_as_type(const Tensor& self, c10::ScalarType type) {
  require_supported(type);
  return at::native::view_dtype(self, type);
}

// Copies on cores are operations, and those to the host end a graph; those from the host are its inputs, which its operations show.
void record_copy(const Tensor& self, const Tensor& destination) {
  static const uint32_t name = number_of_operator("aten::_copy_from");
  if (self.device().type() != kNeuron) return Recorder::current().note_input(destination);
  if (destination.device().type() != kNeuron) return Recorder::current().read("copy");
  record(name, {destination, self}, {}, self.device().index());
}

Tensor copy_from(const Tensor& self, const Tensor& destination, bool non_blocking) {
  require_not_forked();
  if (const Recording recorded; recorded) record_copy(self, destination);
  AllocateOnCore on_core(destination.device().type() == kNeuron ? destination.device().index() : -1);
  // The core rounds what it makes narrower itself; what is narrowed on the host is rounded as the host does.
  const bool rounds = rounds_stochastically() && self.device().type() == kNeuron && is_narrow(destination.scalar_type()) &&
      at::isFloatingType(self.scalar_type()) && !is_narrow(self.scalar_type());
  at_operator_boundary([&] {
    if (rounds) {
      round_stochastically(to_cpu(self).to(at::kFloat).expand(destination.sizes()), to_cpu(destination));
    } else {
      to_cpu(destination).copy_(to_cpu(self), non_blocking);
    }
  });
  return destination;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& destination) {
  destination.resize_(self.sizes());
  return copy_from(self, destination, false);
}

c10::Scalar local_scalar_dense(const Tensor& self) {
  require_not_forked();
  if (const Recording recorded; recorded) Recorder::current().read("value");
  return at::_local_scalar_dense(to_cpu(self));
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  OnDevice on(self);
  Tensor cpu = to_cpu(self);
  {
    AllocateOnCore on_core(self.device().index());
    at_operator_boundary([&] { cpu.resize_(C10_AS_INTARRAYREF_SLOW(size), format); });
  }
  follow(self, cpu);
  return self;
}

Tensor& set_source_storage_offset(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), false);
  at::native::setStrided(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

Tensor& set_source_storage(Tensor& self, at::Storage source) {
  const int64_t elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
  const c10::SymInt size[] = {elements}, stride[] = {1};
  return set_source_storage_offset(self, std::move(source), 0, size, stride);
}

Tensor& set_source_tensor(Tensor& self, const Tensor& source) {
  if (self.unsafeGetTensorImpl() == source.unsafeGetTensorImpl()) return self;
  return set_source_storage_offset(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

Tensor& set_(Tensor& self) {
  OnDevice on(self);
  at::Storage storage(at::Storage::use_byte_size_t(), 0, device_allocator(), /*resizable=*/true);
  const c10::SymInt size[] = {0}, stride[] = {1};
  return set_source_storage_offset(self, std::move(storage), 0, size, stride);
}

// Copy-on-write would put its own context in place of the shell's; an eager copy is what it promises to look like.
Tensor lazy_clone(const Tensor& self) { return self.clone(); }

// Dropout as one operator, which the CPU would do with its own generator: the mask is drawn on the core.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  static const uint32_t name = number_of_operator("aten::native_dropout");
  const Recording recorded;
  if (recorded) record(name, {input}, {p, train}, input.device().index());
  if (input.numel() == 0) return {input.clone(), at::empty_like(input, input.options().dtype(at::kBool))};
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  const double keep = 1 - p;
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(keep);
  Tensor output = input.mul(mask).mul_(keep == 0 ? 0. : 1. / keep);
  return {std::move(output), std::move(mask)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_efficientzerotensor", efficient_zero_tensor);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("view.dtype", view_as_type);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_source_storage_offset);
  library.impl("set_.source_Storage", set_source_storage);
  library.impl("set_.source_Tensor", set_source_tensor);
  library.impl("set_", set_);
  library.impl("_lazy_clone", lazy_clone);
  library.impl("native_dropout", native_dropout);
}

// Copies carry the conjugate and negative bits of their arguments over to the aliases, so nothing has to be materialised first.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
}  // namespace

}  // namespace neuron
