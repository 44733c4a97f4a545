// Running an operator's CPU kernel over aliases.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace neuron {
void run_on_aliases(const c10::OperatorHandle& op, torch::jit::Stack* stack);
}  // namespace neuron
