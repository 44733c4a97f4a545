// Zero-copy aliases of storages and tensors, in both directions.
#include "alias.h"

#include <cstring>

#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <c10/core/CPUAllocator.h>

#include "allocator.h"
#include "device.h"

namespace neuron {

namespace {
at::Tensor like(const at::Tensor& other, c10::Storage&& storage, c10::DispatchKeySet keys) {
  const c10::TensorImpl* from = other.unsafeGetTensorImpl();
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, from->dtype());
  c10::TensorImpl* to = result.unsafeGetTensorImpl();
  to->set_storage_offset(from->storage_offset());
  to->set_sizes_and_strides(from->sizes(), from->strides());
  if (other.is_conj()) to->_set_conj(true);
  if (other.is_neg()) to->_set_neg(true);
  if (from->is_wrapped_number()) to->set_wrapped_number(true);
  return result;
}

// A device storage that somebody else made (a pointer from outside): the CPU storage borrows it and keeps it alive.
c10::intrusive_ptr<c10::StorageImpl> borrow(const c10::Storage& storage) {
  c10::DataPtr data(
      const_cast<void*>(storage.data()), new c10::Storage(storage), [](void* context) { delete static_cast<c10::Storage*>(context); }, c10::kCPU);
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), /*resizable=*/true);
}

// Make a device storage show what its CPU storage has become.
void refresh(c10::StorageImpl& storage, c10::StorageImpl& cpu) {
  if (storage.data() == cpu.data() && storage.nbytes() == cpu.nbytes()) return;
  const int device = storage.device().index();
  storage.set_data_ptr_noswap(own(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(&cpu), device));
  storage.set_nbytes(cpu.nbytes());
}
}  // namespace

at::Tensor to_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kNeuron) return tensor;
  const c10::Storage& storage = tensor.storage();
  c10::StorageImpl* known = cpu_storage(*storage.unsafeGetStorageImpl());
  auto cpu = known ? c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(known) : borrow(storage);
  return like(tensor, c10::Storage(std::move(cpu)), c10::DispatchKeySet(c10::DispatchKey::CPU));
}

at::Tensor from_cpu(const at::Tensor& tensor, int device) {
  if (!tensor.defined() || tensor.device().type() != c10::kCPU) return tensor;
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == c10::kStrided, "NeuronCores hold dense tensors only, and this would be one of layout ", tensor.layout(), "; compute it on the CPU.");
  require_supported(tensor.scalar_type());
  auto cpu = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl());
  const size_t bytes = cpu->nbytes();
  if (bytes != 0 && arena_of(cpu->data()) != existing_arena(device)) {
    AllocateOnCore on_core(device);
    auto inside = at_operator_boundary([&] {
      return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, c10::GetCPUAllocator(), /*resizable=*/true);
    });
    std::memcpy(inside->mutable_data(), cpu->data(), bytes);
    cpu = std::move(inside);
  }
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, own(std::move(cpu), device), device_allocator(), /*resizable=*/true));
  return like(tensor, std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1));
}

at::Tensor view_of(const at::Tensor& base, const at::Tensor& cpu) {
  return like(cpu, c10::Storage(base.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1));
}

void follow(const at::Tensor& tensor, const at::Tensor& cpu) {
  c10::TensorImpl* to = tensor.unsafeGetTensorImpl();
  const c10::TensorImpl* from = cpu.unsafeGetTensorImpl();
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  c10::StorageImpl* written = cpu.storage().unsafeGetStorageImpl();
  if (cpu_storage(*storage) == written) {
    refresh(*storage, *written);
  } else if (storage->data() != written->data()) {  // the kernel gave its output another storage
    to->set_storage_keep_dtype(from_cpu(cpu, storage->device().index()).storage());
  }
  if (to->storage_offset() != from->storage_offset() || to->sizes() != from->sizes() || to->strides() != from->strides()) {
    to->set_storage_offset(from->storage_offset());
    to->set_sizes_and_strides(from->sizes(), from->strides());
  }
}

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  require_not_forked();
  const int device = storage.device().index();
  c10::StorageImpl* cpu = cpu_storage(storage);
  TORCH_CHECK(cpu, "Trying to resize storage that is not resizable");
  AllocateOnCore on_core(device);
  at_operator_boundary([&] { at::native::resize_bytes_cpu(cpu, bytes); });
  refresh(storage, *cpu);
}

}  // namespace neuron
