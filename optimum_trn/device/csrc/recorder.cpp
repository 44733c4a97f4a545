// The tree of graphs, and what Python is told about it.
#include "recorder.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>

#include <torch/csrc/Exceptions.h>

#include "allocator.h"
#include "device.h"
#include "neuron.h"

namespace neuron {

namespace py = pybind11;

namespace {
// Where a program never ends a graph, or never runs one twice, the memory for graphs stays bounded all the same.
constexpr uint32_t kLongest = 1 << 18;
constexpr size_t kMostNodes = size_t(1) << 21;

std::atomic<bool> enabled{[] {
  const char* value = std::getenv("OPTIMUM_TRN_RECORD");
  return !value || std::string_view(value) != "0";
}()};

// Functions of device/step_graphs.py. Leaked: they outlive the interpreter.
struct Listeners {
  py::object left_known, was_read;
};
std::atomic<Listeners*> listeners{nullptr};

// Calls Python on a thread that belongs to it. What `call` raises reaches the user: Ctrl-C, above all.
template <class Call>
void ask_python(const Call& call) {
  Listeners* to = listeners.load(std::memory_order_acquire);
  if (!to || !Py_IsInitialized() || !PyGILState_GetThisThreadState()) return;
  py::gil_scoped_acquire gil;
  try {
    call(*to);
  } catch (py::error_already_set& error) {
    error.restore();
    python_error raised;
    raised.persist();
    throw raised;
  }
}

int64_t live_bytes(int device) {
  Arena* existing = device < 0 ? nullptr : existing_arena(device);
  return existing ? existing->stats().tensor_bytes : 0;
}
}  // namespace

thread_local int Recording::depth_ = 0;

bool recording() { return enabled.load(std::memory_order_relaxed); }

Recorder& Recorder::current() {
  static thread_local std::unique_ptr<Recorder> own;
  if (C10_UNLIKELY(!own)) own = std::make_unique<Recorder>();
  return *own;
}

uint32_t Recorder::intern(std::string_view bytes) {
  const auto [found, added] = numbers_.emplace(bytes, static_cast<uint32_t>(entries_.size()));
  if (added) entries_.push_back(found->first);
  return found->second;
}

void Recorder::add(const Entry& entry, int device) {
  if (C10_UNLIKELY(length_ == kLongest)) cut();
  ++length_;
  results_wanted_ = false;
  uint32_t before = 0;
  for (uint32_t next = nodes_[at_].child; next != 0; before = next, next = nodes_[next].sibling) {
    if (entries_[nodes_[next].entry] != entry.bytes()) continue;
    if (before != 0) {  // the latest first
      nodes_[before].sibling = nodes_[next].sibling;
      nodes_[next].sibling = nodes_[at_].child;
      nodes_[at_].child = next;
    }
    at_ = next;
    return;
  }
  if (!left_known_) {
    left_known_ = true;
    leave(nodes_[at_].child, entry);
  }
  Node node;
  node.entry = intern(entry.bytes());
  node.parent = at_;
  node.sibling = nodes_[at_].child;
  node.live_before = live_bytes(device);
  nodes_.push_back(node);
  at_ = nodes_[at_].child = static_cast<uint32_t>(nodes_.size() - 1);
  results_wanted_ = true;
}

void Recorder::add_results(const Entry& results, int device) {
  nodes_[at_].results = intern(results.bytes());
  nodes_[at_].live_after = live_bytes(device);
  results_wanted_ = false;
}

// `expected` is what came next the last time, if anything did.
void Recorder::leave(uint32_t expected, const Entry& entry) {
  cause_.clear();
  if (graphs_.empty()) return;
  const std::string_view before = entries_[nodes_[expected].entry];
  const bool starts_over = begins_a_graph(entry.bytes()), should_start_over = begins_a_graph(before);
  const bool after_end = nodes_[at_].graph != 0;
  ask_python([&](Listeners& to) {
    const py::object known = expected ? py::object(decode(before)) : py::object(py::none());
    cause_ = to.left_known(known, decode(entry.bytes()), length_ - 1, step, after_end, starts_over, should_start_over).cast<std::string>();
  });
}

bool Recorder::begins_a_graph(std::string_view entry) const {
  for (uint32_t node = nodes_[0].child; node != 0; node = nodes_[node].sibling) {
    if (entries_[nodes_[node].entry] == entry) return true;
  }
  return false;
}

int64_t Recorder::cut() {
  if (at_ == 0) return -1;
  if (nodes_[at_].graph == 0) {
    graphs_.push_back({at_, length_, 0, step, std::move(cause_), !left_known_});
    nodes_[at_].graph = static_cast<uint32_t>(graphs_.size());
  }
  const uint32_t number = nodes_[at_].graph - 1;
  ++graphs_[number].runs;
  at_ = length_ = 0;
  left_known_ = false;
  cause_.clear();
  if (C10_UNLIKELY(nodes_.size() > kMostNodes)) forget();
  return number;
}

void Recorder::read(const char* kind) {
  if (!recording()) return;
  const int64_t ended = cut();
  ask_python([&](Listeners& to) { to.was_read(kind, ended, step); });
}

void Recorder::note_input(const at::Tensor& tensor) {
  constexpr size_t kMostInputs = 4096;
  if (inputs_.size() > kMostInputs) inputs_.clear();
  const c10::IntArrayRef sizes = tensor.sizes();
  inputs_[tensor.numel()].assign(sizes.begin(), sizes.end());
}

const std::vector<int64_t>* Recorder::input_of(int64_t elements) const {
  const auto found = inputs_.find(elements);
  return found == inputs_.end() ? nullptr : &found->second;
}

std::vector<Recorder::Operation> Recorder::operations(const Graph& graph) const {
  std::vector<Operation> found;
  for (uint32_t node = graph.end; node != 0; node = nodes_[node].parent) {
    found.push_back({entries_[nodes_[node].entry], entries_[nodes_[node].results], nodes_[node].live_before, nodes_[node].live_after});
  }
  std::reverse(found.begin(), found.end());
  return found;
}

void Recorder::forget() {
  Recorder empty;
  empty.step = step;
  empty.in_optimizer_ = in_optimizer_;
  empty.inputs_ = std::move(inputs_);
  empty.generation_ = generation_ + 1;
  *this = std::move(empty);
}

void record(uint32_t name, std::initializer_list<std::reference_wrapper<const at::Tensor>> tensors, std::initializer_list<c10::IValue> values, int device) {
  static thread_local Entry entry;
  Recorder& recorder = Recorder::current();
  entry.start(name, recorder.in_optimizer());
  for (const at::Tensor& tensor : tensors) entry.tensor(tensor);
  for (const c10::IValue& value : values) entry.value(value);
  recorder.add(entry, device);
}

void record_collective(const char* name, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs, const std::vector<int64_t>& ranks) {
  const auto on_core = [](const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kNeuron; };
  if (!recording() || !(std::any_of(inputs.begin(), inputs.end(), on_core) || std::any_of(outputs.begin(), outputs.end(), on_core))) return;
  static thread_local Entry entry;
  Recorder& recorder = Recorder::current();
  entry.start(number_of_operator(name), recorder.in_optimizer());
  entry.ranks(ranks);
  for (const auto* tensors : {&inputs, &outputs}) {
    entry.list(tensors->size());
    for (const at::Tensor& tensor : *tensors) entry.tensor(tensor);
  }
  recorder.add(entry, current_device());
}

// ------------------------------------------------------------------------------------------------------------- for Python

void bind_recorder(py::module_& m) {
  m.def("set_recording", [](bool on) { enabled = on; }, py::arg("on"));
  m.def("listen_to_recorder", [](py::object left_known, py::object was_read) {
    listeners.store(new Listeners{std::move(left_known), std::move(was_read)}, std::memory_order_release);
  }, py::arg("left_known"), py::arg("was_read"));
  m.def("cut_graph", [](bool ends_step) {
    Recorder& recorder = Recorder::current();
    const int64_t ended = recorder.cut();
    recorder.step += ends_step;
    return py::make_tuple(ended, recorder.step, recorder.generation(), recorder.graphs().size());
  }, py::arg("ends_step") = false, "End the graph of this thread: its number or -1; steps so far, how often all graphs were forgotten, graphs since.");
  m.def("in_optimizer", [](bool begins) { Recorder::current().begin_optimizer(begins); }, py::arg("begins"));
  m.def("input_of", [](int64_t elements) {
    const auto* shape = Recorder::current().input_of(elements);
    return shape ? py::object(py::tuple(py::cast(*shape))) : py::object(py::none());
  }, py::arg("elements"), "The shape of the latest tensor of so many elements that came from the host.");
  m.def("record_call", [](const std::string& name, const std::vector<at::Tensor>& tensors) {
    if (!recording()) return;
    Entry entry;
    Recorder& recorder = Recorder::current();
    entry.start(number_of_operator(name), recorder.in_optimizer());
    for (const at::Tensor& tensor : tensors) entry.tensor(tensor);
    recorder.add(entry, current_device());
  }, py::arg("name"), py::arg("tensors"), "Note that code which is no operator runs on the core.");
  m.def("graph_runs", [] {
    const Recorder& recorder = Recorder::current();
    std::vector<uint64_t> runs;
    for (const auto& graph : recorder.graphs()) runs.push_back(graph.runs);
    return py::make_tuple(recorder.generation(), runs);
  }, "How often all graphs of this thread were forgotten, and how often each has run since.");
  m.def("graph", [](size_t number) {
    const Recorder& recorder = Recorder::current();
    const auto& graph = recorder.graphs().at(number);
    std::string content;
    for (const auto& operation : recorder.operations(graph)) content += content_of(operation.entry);
    py::dict result;
    result["content"] = py::bytes(content);
    result["operations"] = graph.length;
    result["step"] = graph.step;
    result["cause"] = graph.cause;
    result["ended_early"] = graph.ended_early;
    return result;
  }, py::arg("number"), "One graph of this thread, by its place in graph_runs().");
  m.def("graph_operations", [](size_t number) {
    const Recorder& recorder = Recorder::current();
    py::list operations;
    for (const auto& operation : recorder.operations(recorder.graphs().at(number))) {
      const py::tuple known = decode(operation.entry);
      const py::object results = operation.results.empty() ? py::object(py::list()) : py::object(decode(operation.results)[2]);
      operations.append(py::make_tuple(known[0], known[1], known[2], results, operation.live_before, operation.live_after));
    }
    return operations;
  }, py::arg("number"), "(name, in the optimizer's step, arguments, results, bytes live before, bytes live after) of its operations.");
  m.def("forget_graphs", [] {
    Recorder::current().forget();
    Recorder::current().step = 0;
  });
}

}  // namespace neuron
