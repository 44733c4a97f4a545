// Convolutions: PyTorch sends a PrivateUse1 backend's to two overrideable operators, which call the CPU's.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "fallback.h"

namespace neuron {

namespace {
std::vector<int64_t> ints(c10::SymIntArrayRef values) { return C10_AS_INTARRAYREF_SLOW(values).vec(); }

at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  torch::jit::Stack stack;
  torch::jit::push(
      stack, input, weight, bias, ints(stride), ints(padding), ints(dilation), transposed, ints(output_padding), groups.expect_int());
  run_on_aliases(op, &stack);
  return stack[0].toTensor();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad_output,
    const at::Tensor& input,
    const at::Tensor& weight,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups,
    std::array<bool, 3> output_mask) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  // A transposed convolution's weight is (in, out / groups, ...).
  const std::vector<int64_t> bias_sizes{transposed ? weight.size(1) * groups.expect_int() : weight.size(0)};
  torch::jit::Stack stack;
  torch::jit::push(
      stack,
      grad_output,
      input,
      weight,
      bias_sizes,
      ints(stride),
      ints(padding),
      ints(dilation),
      transposed,
      ints(output_padding),
      groups.expect_int(),
      std::vector<bool>(output_mask.begin(), output_mask.end()));
  run_on_aliases(op, &stack);
  const auto tensor = [&](size_t i) { return stack[i].isTensor() ? stack[i].toTensor() : at::Tensor(); };
  return {tensor(0), tensor(1), tensor(2)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
}
}  // namespace

}  // namespace neuron
