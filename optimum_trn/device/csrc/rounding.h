// Stochastic rounding to bfloat16 and float16, as NeuronCores do it where NEURON_RT_STOCHASTIC_ROUNDING_EN is 1.
#pragma once

#include <string_view>

#include <ATen/core/Tensor.h>

namespace neuron {

bool rounds_stochastically();
void set_stochastic_rounding(bool enabled, uint64_t seed);

inline bool is_narrow(c10::ScalarType type) { return type == c10::ScalarType::BFloat16 || type == c10::ScalarType::Half; }
// Whether the operator computes, so that its results have to be rounded; what only moves data keeps every bit.
bool is_arithmetic(std::string_view operator_name);
// Rounds each element of `wide` (float32) to one of its two neighbours in the type of `narrow`, with the probability of its
// distance from the other, so that the expectation is the element; both are CPU tensors of the same sizes.
void round_stochastically(const at::Tensor& wide, const at::Tensor& narrow);

}  // namespace neuron
