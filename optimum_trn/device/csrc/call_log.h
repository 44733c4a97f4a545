// The latest collectives of a group on this rank: when one fails, the ranks compare theirs and name who went another way.
#pragma once

#include <deque>
#include <mutex>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace neuron {

class CallLog {
 public:
  CallLog(int rank, int size, c10::intrusive_ptr<c10d::Store> store) : rank_(rank), size_(size), store_(std::move(store)) {}

  // Notes a collective that every rank of the group must make next; `tensor` is its first input on this rank.
  void add(const char* name, const at::Tensor& tensor);
  // Where the ranks differ, as a sentence. Takes seconds: it gives the others time to find out that something is wrong.
  std::string difference();

 private:
  struct Call {
    const char* name;
    int64_t elements;
    c10::ScalarType type;
    bool on_host;  // then gloo carries it, which does not meet what NeuronLink carries
  };

  const int rank_, size_;
  const c10::intrusive_ptr<c10d::Store> store_;
  std::mutex mutex_, comparing_;
  std::deque<Call> latest_;
  uint64_t count_ = 0;
  std::string found_;
};

}  // namespace neuron
