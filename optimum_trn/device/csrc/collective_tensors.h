// What a collective sees of the tensors it is given: their elements in memory order, as CPU aliases; and what it refuses.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace neuron {

// All elements in memory order, as a 1-D CPU tensor over the same memory. Raises ValueError for tensors that are not dense.
at::Tensor flat(const at::Tensor& tensor, const char* name);
at::Tensor bytes(const at::Tensor& tensor, const char* name);
// The same of a list, whose tensors must be contiguous.
std::vector<at::Tensor> bytes(const std::vector<at::Tensor>& tensors, const char* name);
// Raises TypeError where `op` makes no sense for the type.
void check_reducible(c10::ScalarType type, c10d::ReduceOp::RedOpType op, const char* name);
// Multiplies in place by the factor that PREMUL_SUM carries; other reductions have none.
void scale_before_sum(at::Tensor& buffer, const c10d::ReduceOp& op, const char* name);

}  // namespace neuron
