// One operation in compact form: the bytes that the recorder compares, and what Python sees of them.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace neuron {

// A number for an operator's name, the same for the same name in this process.
uint32_t number_of_operator(const std::string& name);
const std::string& operator_of_number(uint32_t number);

// Writes an operation: its name, then shapes and types of tensors, and values, one after the other.
class Entry {
 public:
  // `run_time_numbers`: numbers are inputs of the graph here, so that their values do not belong to the operation.
  void start(uint32_t name, bool run_time_numbers);
  void tensor(const at::Tensor& tensor);
  void value(const c10::IValue& value);   // what is no tensor, in lists as well
  void number(const c10::IValue& value);  // a `Scalar` of the schema, which may be passed at run time
  void list(size_t length);
  void ranks(const std::vector<int64_t>& ranks);  // all ranks compile one graph, so only their number belongs to it
  void nothing() { put('-'); }            // an argument that is no part of the code: a device, a generator
  std::string_view bytes() const { return {bytes_.data(), bytes_.size()}; }

 private:
  void put(char tag) { bytes_.push_back(tag); }
  template <class T>
  void put(char tag, const T& value) {
    const size_t end = bytes_.size();
    bytes_.resize(end + 1 + sizeof(T));
    bytes_[end] = tag;
    std::memcpy(bytes_.data() + end + 1, &value, sizeof(T));
  }

  std::vector<char> bytes_;
  bool run_time_numbers_ = false;
};

// The same bytes in every process: with the operator's name instead of its number.
std::string content_of(std::string_view entry);
// (name, in the optimizer's step, [arguments]); a tensor is (dtype, shape), an argument that is no part of the code is Ellipsis.
pybind11::tuple decode(std::string_view entry);

}  // namespace neuron
