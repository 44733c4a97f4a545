// Element-wise reductions over the same slice of several ranks' tensors, in rank order and so bit-equal whoever computes them.
#pragma once

#include <cstdint>
#include <vector>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace neuron {

// Every one of `outputs` becomes inputs[0] op inputs[1] op ...; of floats then divided by `divisor`. An output may be an input.
// `streaming`: outputs that are no inputs are written past the caches. float16 and bfloat16 accumulate in float32 and are rounded once. `op` is SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
void reduce(
    c10::ScalarType type,
    c10d::ReduceOp::RedOpType op,
    const std::vector<const char*>& inputs,
    const std::vector<char*>& outputs,
    int64_t count,
    int divisor,
    bool streaming);

}  // namespace neuron
