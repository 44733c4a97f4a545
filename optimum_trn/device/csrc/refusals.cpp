// What no NeuronCore has, refused by name with the way out, instead of PyTorch's list of dispatch keys.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace {
void refuse_quantized(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_TYPE(
      false,
      op.schema().name(),
      ": NeuronCores have no quantized tensor types (quint8, qint8, qint32). Keep weights in bfloat16, or quantize by hand to int8 with "
      "a scale tensor beside it; Tensor.dequantize() on the CPU gives back a plain tensor.");
}
}  // namespace

TORCH_LIBRARY_IMPL(_, QuantizedPrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_quantized>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : {"quantize_per_tensor", "quantize_per_tensor.tensor_qparams", "quantize_per_tensor_dynamic", "quantize_per_channel",
                           "_empty_affine_quantized", "_empty_per_channel_affine_quantized", "empty_quantized"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_quantized>());
  }
}
