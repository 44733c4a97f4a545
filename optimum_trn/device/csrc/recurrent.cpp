// The cells of LSTM and GRU, which PyTorch asks of every accelerator as one operator each and the CPU does not have.
// Equations as in the documentation of torch.nn.LSTM and torch.nn.GRU; the workspace keeps the gates for the backward pass.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace neuron {

namespace {
using at::Tensor;
using Bias = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const Bias& bias) { return bias && bias->defined() ? gates + *bias : gates; }
Tensor sigmoid_slope(const Tensor& y) { return y * (1 - y); }
Tensor tanh_slope(const Tensor& y) { return 1 - y * y; }
Tensor or_zeros(const std::optional<Tensor>& gradient, const Tensor& like) {
  return gradient && gradient->defined() ? *gradient : at::zeros_like(like);
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx, const Bias& input_bias, const Bias& hidden_bias) {
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const std::optional<Tensor>& maybe_grad_hy,
    const std::optional<Tensor>& maybe_grad_cy,
    const Tensor& cx,
    const Tensor& cy,
    const Tensor& workspace,
    bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  const Tensor grad_hy = or_zeros(maybe_grad_hy, cx), squashed = cy.tanh();
  const Tensor grad_cy = or_zeros(maybe_grad_cy, cx) + grad_hy * out * tanh_slope(squashed);
  Tensor grad_gates = at::cat(
      {grad_cy * cell * sigmoid_slope(in), grad_cy * cx * sigmoid_slope(forget), grad_cy * in * tanh_slope(cell), grad_hy * squashed * sigmoid_slope(out)}, 1);
  return {grad_gates, grad_cy * forget, has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx, const Bias& input_bias, const Bias& hidden_bias) {
  const auto input = with_bias(input_gates, input_bias).chunk(3, 1), hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor reset = (input[0] + hidden[0]).sigmoid(), update = (input[1] + hidden[1]).sigmoid();
  const Tensor candidate = (input[2] + reset * hidden[2]).tanh();
  return {candidate + update * (hx - candidate), at::cat({reset, update, candidate, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  const auto kept = workspace.chunk(5, 1);
  const Tensor &reset = kept[0], &update = kept[1], &candidate = kept[2], &hx = kept[3], &hidden_candidate = kept[4];
  const Tensor grad_candidate = grad_hy * (1 - update) * tanh_slope(candidate);
  const Tensor grad_reset = grad_candidate * hidden_candidate * sigmoid_slope(reset);
  const Tensor grad_update = grad_hy * (hx - candidate) * sigmoid_slope(update);
  Tensor grad_input = at::cat({grad_reset, grad_update, grad_candidate}, 1);
  Tensor grad_hidden = at::cat({grad_reset, grad_update, grad_candidate * reset}, 1);
  return {
      grad_input, grad_hidden, grad_hy * update, has_bias ? grad_input.sum(0) : Tensor(), has_bias ? grad_hidden.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}
}  // namespace

}  // namespace neuron
