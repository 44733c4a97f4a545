// Scaled-dot-product attention takes the CPU's fused kernel, on real and on fake tensors alike.
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <torch/library.h>

namespace neuron {

namespace {
// The conditions of the CPU's flash kernel, from sizes, strides and types only: a fake tensor has no memory to look at.
bool fused_kernel_takes(const sdp::sdp_params& params) {
  const auto unit_stride = [](const at::Tensor& tensor) { return tensor.sym_stride(-1) == 1; };
  const auto type = params.query.scalar_type();
  return (type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf) && params.key.scalar_type() == type &&
      params.value.scalar_type() == type && sdp::check_runtime_disabled_flash(params, false) && sdp::check_nested_tensor(params, false) &&
      sdp::check_for_dropout(params, false) && sdp::check_tensor_shapes(params, false) &&
      sdp::check_batch_size_and_num_heads_dense</*supports_gqa=*/true, /*requires_same_num_heads=*/true>(params, false) &&
      sdp::check_attn_mask_shape(params, false) && params.query.sym_size(-1) == params.value.sym_size(-1) &&
      sdp::check_nonzero_sequence_lengths_dense(params, false) && unit_stride(params.query) && unit_stride(params.key) && unit_stride(params.value);
}

int64_t choose(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const std::optional<at::Tensor>& mask,
    double dropout,
    bool is_causal,
    std::optional<double> /*scale*/,
    bool enable_gqa) {
  const sdp::sdp_params params{query, key, value, mask, dropout, is_causal, enable_gqa};
  return static_cast<int64_t>(fused_kernel_takes(params) ? sdp::SDPBackend::flash_attention : sdp::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) { library.impl("_fused_sdp_choice", choose); }
}  // namespace

}  // namespace neuron

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &neuron::choose)
}
