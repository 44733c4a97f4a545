// Aliases and refusals for collectives.
#include "collective_tensors.h"

#include <ATen/ATen.h>

#include "alias.h"

namespace neuron {

using at::Tensor;
using c10d::ReduceOp;

Tensor flat(const Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, name, ": a ", tensor.layout(), " tensor; collectives move dense tensors, see Tensor.to_dense().");
  TORCH_CHECK_VALUE(!tensor.is_conj() && !tensor.is_neg(), name, ": a tensor with a lazy conjugate or negation; pass tensor.resolve_conj().resolve_neg().");
  TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(), name, ": a tensor of sizes ", tensor.sizes(), " and strides ", tensor.strides(), " is not contiguous; pass tensor.contiguous().");
  return to_cpu(tensor.detach()).as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

Tensor bytes(const Tensor& tensor, const char* name) {
  Tensor alias = flat(tensor, name);
  return at::from_blob(alias.data_ptr(), {int64_t(alias.nbytes())}, [alias](void*) {}, at::TensorOptions(at::kByte));
}

std::vector<Tensor> bytes(const std::vector<Tensor>& tensors, const char* name) {
  std::vector<Tensor> result;
  for (const auto& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.is_contiguous(), name, ": a tensor of sizes ", tensor.sizes(), " and strides ", tensor.strides(), " in a list is not contiguous; pass tensor.contiguous().");
    result.push_back(bytes(tensor, name));
  }
  return result;
}

void check_reducible(c10::ScalarType type, ReduceOp::RedOpType op, const char* name) {
  TORCH_CHECK_TYPE(
      !at::isFloat8Type(type) && !at::isBarebonesUnsignedType(type), name, ": ", type, " cannot be reduced; convert it to bfloat16 or float32 (unsigned: int64) first.");
  if (type == at::kBool) {
    TORCH_CHECK_TYPE(op != ReduceOp::AVG && op != ReduceOp::PREMUL_SUM, name, ": a bool has no average; convert it to float32 first.");
    return;
  }
  if (at::isComplexType(type)) {
    TORCH_CHECK_TYPE(op == ReduceOp::SUM || op == ReduceOp::AVG || op == ReduceOp::PREMUL_SUM, name, ": complex numbers can be summed and averaged only.");
    return;
  }
  if (op == ReduceOp::AVG) TORCH_CHECK_TYPE(at::isFloatingType(type), name, ": ReduceOp.AVG of ", type, " would round; use ReduceOp.SUM and divide.");
  if (op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR) {
    TORCH_CHECK_TYPE(at::isIntegralType(type, false), name, ": a bitwise reduction of ", type, "; it needs integers or bool.");
  }
}

void scale_before_sum(Tensor& buffer, const ReduceOp& op, const char* name) {
  if (op.op_ != ReduceOp::PREMUL_SUM) return;
  const auto* factor = dynamic_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(factor, name, ": PREMUL_SUM without a factor; make it with torch.distributed._make_nccl_premul_sum(factor).");
  if (factor->tensor_factor.defined()) {
    buffer.mul_(to_cpu(factor->tensor_factor));
  } else {
    buffer.mul_(factor->double_factor);
  }
}

}  // namespace neuron
