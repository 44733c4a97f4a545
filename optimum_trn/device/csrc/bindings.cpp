// The Python module of the extension.
#include "bindings.h"

#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include "allocator.h"
#include "generator.h"
#include "neuron.h"
#include "pinned.h"
#include "rounding.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  m.doc() = "The simulated NeuronCores of one process.";
  neuron::register_kernels();

  m.def("configure", &neuron::configure, py::arg("count"), py::arg("hbm_bytes"), py::arg("core") = 0);
  m.def("device_count", &neuron::device_count);
  m.def("current_device", &neuron::current_device);
  m.def("set_device", &neuron::set_current_device);
  m.def("default_generator", [](int device) { return neuron::default_generator(device); });

  m.def("to_cpu", &neuron::to_cpu, "A CPU tensor over the same memory.");
  m.def("from_cpu", [](const at::Tensor& tensor, int device) { return neuron::from_cpu(tensor, device < 0 ? neuron::current_device() : device); }, py::arg("tensor"), py::arg("device") = -1);

  m.def("is_pinned", [](uintptr_t address) { return neuron::is_pinned(reinterpret_cast<const void*>(address)); }, py::arg("address"));
  m.def("run_on_core", [](const py::function& function, const py::object& argument, int device) {
    neuron::AllocateOnCore on_core(device < 0 ? neuron::current_device() : device);
    return function(argument);
  }, py::arg("function"), py::arg("argument"), py::arg("device") = -1, "function(argument), with the CPU tensors that it makes in the core's HBM.");

  m.def("allow_unsupported_types", &neuron::allow_unsupported_types, py::arg("allow"));
  m.def("unsupported_types_allowed", &neuron::unsupported_types_allowed);
  m.def("set_stochastic_rounding", &neuron::set_stochastic_rounding, py::arg("enabled"), py::arg("seed") = 0);
  m.def("rounds_stochastically", &neuron::rounds_stochastically);
  m.def("set_limit", [](int device, size_t bytes) { neuron::arena(device).set_limit(bytes); }, py::arg("device"), py::arg("bytes"));
  m.def("arena_stats", [](int device) {
    py::dict result;
    if (neuron::Arena* arena = neuron::existing_arena(device)) {
      const auto s = arena->stats();
      result["tensor_bytes"] = s.tensor_bytes;
      result["tensor_peak"] = s.tensor_peak;
      result["scratch_bytes"] = s.scratch_bytes;
      result["scratch_peak"] = s.scratch_peak;
      result["reserved_bytes"] = s.reserved_bytes;
      result["reserved_peak"] = s.reserved_peak;
      result["limit"] = arena->limit();
      result["fd"] = arena->fd();
    }
    return result;
  }, py::arg("device"));
  neuron::bind_recorder(m);
  neuron::bind_process_group(m);
}
