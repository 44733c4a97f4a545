// Switches that only Python turns.
#pragma once

namespace neuron {
void allow_unsupported_types(bool allow);
bool unsupported_types_allowed();
void register_kernels();  // every operator that a backend fallback would not see; called once, when the module loads
}  // namespace neuron
