// Zero-copy aliases: a device tensor and its CPU alias are two views of one storage.
#pragma once

#include <ATen/core/Tensor.h>

namespace neuron {

// A CPU tensor over the memory of `tensor`; a CPU or undefined tensor is returned as it is.
at::Tensor to_cpu(const at::Tensor& tensor);
// A device tensor over the memory of a CPU tensor, which is copied only if it does not lie in the core's HBM.
at::Tensor from_cpu(const at::Tensor& tensor, int device);
// A device tensor with the sizes, strides and type of `cpu` over the storage of `base`.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& cpu);
// After a kernel wrote to `cpu`, the alias of `tensor`: take over a new size, type or storage.
void follow(const at::Tensor& tensor, const at::Tensor& cpu);
// Grow or shrink a device storage, keeping its content.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

}  // namespace neuron
