// The cores this process sees, which one a thread has selected, and what a fork does to them.
#pragma once

#include <c10/core/Device.h>

namespace neuron {

constexpr c10::DeviceType kNeuron = c10::DeviceType::PrivateUse1;

// What is simulated. Called once by torch.neuron on first use; `core` is what every thread starts with.
void configure(int count, size_t hbm_bytes, int core);
// Asks torch.neuron to configure this process if that has not happened; raises in a child forked after first use.
void ensure_configured();
int device_count();
size_t hbm_bytes();

int current_device();
void set_current_device(int index);
// An index from a device argument: the current core when it names none. Raises for one that is not there.
int resolve(const c10::Device& device);

bool forked_after_use();
void require_not_forked();

}  // namespace neuron
