// What the rest of the extension (the process group) may rely on.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "alias.h"
#include "device.h"

namespace neuron {

void bind_process_group(pybind11::module_& module);
void bind_recorder(pybind11::module_& module);

}  // namespace neuron
