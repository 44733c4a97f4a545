// What a process group refuses before it does anything: arguments that contradict each other, with the numbers in the text.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <ATen/ATen.h>

#include <numeric>

#include "work.h"

namespace neuron {

using at::Tensor;
using c10d::OpType;
using c10d::ReduceOp;
using TensorLists = std::vector<Tensors>;

class CheckedGroup : public c10d::Backend {
 protected:
  using Backend::Backend;

  std::vector<int64_t> split_bytes(const Tensor& tensor, const std::vector<int64_t>& rows, const char* which) const {
    TORCH_CHECK_VALUE(tensor.dim() > 0, "all_to_all_single: the ", which, " must have a dimension to split.");
    const int64_t length = tensor.size(0);
    const int64_t row_bytes = length ? int64_t(tensor.nbytes()) / length : 0;
    std::vector<int64_t> result;
    if (rows.empty()) {
      TORCH_CHECK_VALUE(length % size_ == 0, "all_to_all_single: dimension 0 of the ", which, " is ", length, ", which ", size_, " ranks do not divide; give split sizes.");
      result.assign(size_, length / size_ * row_bytes);
    } else {
      TORCH_CHECK_VALUE(int(rows.size()) == size_, "all_to_all_single: ", rows.size(), " ", which, " split sizes for ", size_, " ranks.");
      const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t(0));
      TORCH_CHECK_VALUE(total == length, "all_to_all_single: the ", which, " split sizes add up to ", total, ", but dimension 0 is ", length, ".");
      for (int64_t row : rows) result.push_back(row * row_bytes);
    }
    return result;
  }

  template <typename T>
  static const T& one(const std::vector<T>& values, const char* name) {
    TORCH_CHECK_VALUE(values.size() == 1, name, ": one tensor per rank, not ", values.size(), ".");
    return values[0];
  }

  static void check_type(const Tensor& a, const Tensor& b, const char* name) {
    TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), name, ": input and output differ in type, ", a.scalar_type(), " and ", b.scalar_type(), ".");
  }

  void check_list(const Tensors& list, const Tensor& tensor, const char* name) const {
    TORCH_CHECK_VALUE(int(list.size()) == size_, name, ": a list of ", list.size(), " tensors for ", size_, " ranks.");
    for (const auto& entry : list) {
      check_type(entry, tensor, name);
      TORCH_CHECK_VALUE(entry.numel() == tensor.numel(), name, ": the list holds a tensor of ", entry.numel(), " elements where the other side has ", tensor.numel(), ".");
    }
  }

  void check_scattered(const Tensors& list, const Tensor& output) const {
    TORCH_CHECK_VALUE(int(list.size()) == size_, "reduce_scatter: ", list.size(), " input tensors for ", size_, " ranks.");
    TORCH_CHECK_VALUE(list[rank_].sizes() == output.sizes(), "reduce_scatter: the output has sizes ", output.sizes(), ", but input ", rank_, " has ", list[rank_].sizes(), ".");
    for (const auto& part : list) check_type(part, output, "reduce_scatter");
  }

  void check_scattered(const Tensors& outputs, const Tensors& inputs, const char* name) const {
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), name, ": ", outputs.size(), " outputs for ", inputs.size(), " inputs.");
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_type(inputs[i], outputs[i], name);
      TORCH_CHECK_VALUE(inputs[i].numel() == outputs[i].numel() * size_, name, ": the input has ", inputs[i].numel(), " elements, but ", size_, " ranks receive ", outputs[i].numel(), " each.");
    }
  }

  void check_gathered(const Tensors& outputs, const Tensor& input, const char* name) const {
    TORCH_CHECK_VALUE(int(outputs.size()) == size_, name, ": ", outputs.size(), " output tensors for ", size_, " ranks.");
    for (const auto& tensor : outputs) check_type(input, tensor, name);
    TORCH_CHECK_VALUE(outputs[rank_].numel() == input.numel(), name, ": rank ", rank_, " sends ", input.numel(), " elements, but its place in the outputs has ", outputs[rank_].numel(), ".");
  }

  void check_gathered_into(const Tensors& outputs, const Tensors& inputs, const char* name) const {
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), name, ": ", outputs.size(), " outputs for ", inputs.size(), " inputs.");
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_type(inputs[i], outputs[i], name);
      TORCH_CHECK_VALUE(outputs[i].numel() == inputs[i].numel() * size_, name, ": the output has ", outputs[i].numel(), " elements, but ", size_, " ranks send ", inputs[i].numel(), " each.");
    }
  }

  void check_exchanged(const Tensors& outputs, const Tensors& inputs) const {
    TORCH_CHECK_VALUE(int(inputs.size()) == size_ && int(outputs.size()) == size_, "all_to_all: ", inputs.size(), " input and ", outputs.size(), " output tensors for ", size_, " ranks.");
    for (int r = 0; r < size_; ++r) check_type(inputs[r], outputs[r], "all_to_all");
  }

  void check_rank(int64_t rank, const char* name, const char* argument) const {
    TORCH_CHECK_VALUE(0 <= rank && rank < size_, name, ": ", argument, " is group rank ", rank, ", but the group has ", size_, " ranks.");
  }

  void check_peer(int rank, const char* name, const char* argument) const {
    check_rank(rank, name, argument);
    TORCH_CHECK_VALUE(rank != rank_, name, ": ", argument, " is this rank itself.");
  }
};

}  // namespace neuron
