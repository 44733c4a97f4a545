// The random generator of a core: 16 bytes of state, seed and offset.
#pragma once

#include <ATen/core/Generator.h>

namespace neuron {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
// A CPU generator for one operator, determined by `generator`'s seed and offset alone; the offset moves on.
at::Generator draw(const at::Generator& generator);

}  // namespace neuron
