// Module.to(): a parameter that moves between host and core stays the same object, as it does for CUDA.
//
// PyTorch asks whether a tensor may take over the other's memory in place. Its default answer for an out-of-tree device is no;
// then Module.to() makes new Parameters, which unties tied weights and leaves optimizers with stale ones.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace {
bool dense_on_host_or_core(const at::Tensor& tensor) {
  const auto keys = tensor.key_set();
  return keys.has_any(c10::DispatchKeySet(c10::DispatchKey::Dense)) &&
      keys.has_any(c10::DispatchKeySet({c10::BackendComponent::CPUBit, c10::BackendComponent::PrivateUse1Bit}));
}

bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  return self.key_set() == from.key_set() || (dense_on_host_or_core(self) && dense_on_host_or_core(from));
}
}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type); }
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type); }
