// The c10d backend "neuron": NeuronLink between ranks of one host, for tensors on their cores; gloo for everything else.
//
// Which of the two is decided by what all ranks have in common: the group, and the device of the tensors that every rank gives.
#include "allocator.h"
#include "gloo_group.h"

namespace neuron {
namespace {

using Kind = Collective::Kind;

// The collectives of one operation, and what is to be done on this rank once they are finished.
struct Plan {
  std::vector<Collective> collectives;
  std::vector<Step> steps;
};

class ProcessGroupNeuron final : public GlooGroup {
 public:
  using GlooGroup::GlooGroup;

  // --------------------------------------------------------------------------------------------------------- reductions

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (!linked(one(tensors, "all_reduce"))) return GlooGroup::allreduce(tensors, options);
    return all_reduce(OpType::ALLREDUCE, "neuron:all_reduce", tensors, options);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    if (!linked(tensors)) return GlooGroup::allreduce_coalesced(tensors, options);
    return all_reduce(OpType::ALLREDUCE_COALESCED, "neuron:all_reduce_coalesced", tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const Tensor& tensor = one(tensors, "reduce");
    if (!linked(tensor)) return GlooGroup::reduce(tensors, options);
    at::AutoDispatchBelowADInplaceOrView guard;
    check_rank(options.rootRank, "reduce", "dst");
    const bool root = options.rootRank == rank_;
    Plan plan;
    Collective collective = reduction(Kind::kReduce, plan, tensor, options.reduceOp, "reduce", /*keep=*/!root, /*written=*/root);
    collective.root = static_cast<int>(options.rootRank);
    if (root) collective.receives = collective.sends;
    plan.collectives.push_back(std::move(collective));
    return start_linked(OpType::REDUCE, "neuron:reduce", tensors, tensors, std::move(plan), options);
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    const Tensors& list = one(inputs, "reduce_scatter");
    const Tensor& output = one(outputs, "reduce_scatter");
    if (!linked(list)) return GlooGroup::reduce_scatter(outputs, inputs, options);
    at::AutoDispatchBelowADInplaceOrView guard;
    check_scattered(list, output);
    Plan plan;
    scatter_sums_of(plan, list, output, options.reduceOp, "reduce_scatter");
    return start_linked(OpType::REDUCE_SCATTER, "neuron:reduce_scatter", list, outputs, std::move(plan), options);
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    if (!linked(input)) return GlooGroup::_reduce_scatter_base(output, input, options);
    return reduce_scatter_tensors(OpType::_REDUCE_SCATTER_BASE, "neuron:reduce_scatter_tensor", {output}, {input}, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    if (!linked(inputs)) return GlooGroup::reduce_scatter_tensor_coalesced(outputs, inputs, options);
    return reduce_scatter_tensors(OpType::REDUCE_SCATTER_TENSOR_COALESCED, "neuron:reduce_scatter_tensor_coalesced", outputs, inputs, options);
  }

  // ------------------------------------------------------------------------------------------------------------- moving

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const Tensor& tensor = one(tensors, "broadcast");
    if (!linked(tensor)) return GlooGroup::broadcast(tensors, options);
    at::AutoDispatchBelowADInplaceOrView guard;
    check_rank(options.rootRank, "broadcast", "src");
    Plan plan;
    Collective collective = exchange(Kind::kPull, static_cast<int>(options.rootRank));
    const bool root = options.rootRank == rank_;
    const Tensor data = shared(plan, bytes(tensor, "broadcast"), /*written=*/!root);
    if (root) {
      collective.sends.assign(size_, data);
      collective.sends[rank_] = Tensor();
    } else {
      collective.receives[options.rootRank] = data;
    }
    plan.collectives.push_back(std::move(collective));
    return start_linked(OpType::BROADCAST, "neuron:broadcast", tensors, tensors, std::move(plan), options);
  }

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    const Tensor& input = one(inputs, "all_gather");
    if (!linked(input)) return GlooGroup::allgather(outputs, inputs, options);
    return all_gather(OpType::ALLGATHER, "neuron:all_gather", {one(outputs, "all_gather")}, inputs, options);
  }

  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    if (!linked(inputs)) return GlooGroup::allgather_coalesced(outputs, inputs, options);
    return all_gather(OpType::ALLGATHER_COALESCED, "neuron:all_gather_coalesced", by_input(outputs, inputs), inputs, options);
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    if (!linked(input)) return GlooGroup::_allgather_base(output, input, options);
    return all_gather_into(OpType::_ALLGATHER_BASE, "neuron:all_gather_into_tensor", {output}, {input}, options);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    if (!linked(inputs)) return GlooGroup::allgather_into_tensor_coalesced(outputs, inputs, options);
    return all_gather_into(OpType::ALLGATHER_COALESCED, "neuron:all_gather_into_tensor_coalesced", outputs, inputs, options);
  }

  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const Tensor& input = one(inputs, "gather");
    if (!linked(input)) return GlooGroup::gather(outputs, inputs, options);
    at::AutoDispatchBelowADInplaceOrView guard;
    check_rank(options.rootRank, "gather", "dst");
    Plan plan;
    Collective collective = exchange(Kind::kPush, static_cast<int>(options.rootRank));
    collective.sends[options.rootRank] = shared(plan, bytes(input, "gather"), /*written=*/false);
    Tensors results;
    if (options.rootRank == rank_) {
      results = one(outputs, "gather");
      check_list(results, input, "gather");
      collective.receives = shared(plan, bytes(results, "gather"));
    } else {
      TORCH_CHECK_VALUE(outputs.empty(), "gather: only the destination rank gives a gather_list.");
    }
    plan.collectives.push_back(std::move(collective));
    return start_linked(OpType::GATHER, "neuron:gather", inputs, results, std::move(plan), options);
  }

  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    const Tensor& output = one(outputs, "scatter");
    if (!linked(output)) return GlooGroup::scatter(outputs, inputs, options);
    at::AutoDispatchBelowADInplaceOrView guard;
    check_rank(options.rootRank, "scatter", "src");
    Plan plan;
    Collective collective = exchange(Kind::kPull, static_cast<int>(options.rootRank));
    collective.receives[options.rootRank] = shared(plan, bytes(output, "scatter"), /*written=*/true);
    if (options.rootRank == rank_) {
      check_list(one(inputs, "scatter"), output, "scatter");
      collective.sends = shared(plan, bytes(inputs[0], "scatter"), /*written=*/false);
    } else {
      TORCH_CHECK_VALUE(inputs.empty(), "scatter: only the source rank gives a scatter_list.");
    }
    plan.collectives.push_back(std::move(collective));
    return start_linked(OpType::SCATTER, "neuron:scatter", inputs.empty() ? Tensors{} : inputs[0], outputs, std::move(plan), options);
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_rows, std::vector<int64_t>& input_rows, const c10d::AllToAllOptions& options) override {
    if (!linked(input)) return GlooGroup::alltoall_base(output, input, output_rows, input_rows, options);
    at::AutoDispatchBelowADInplaceOrView guard;
    check_type(input, output, "all_to_all_single");
    const auto output_bytes = split_bytes(output, output_rows, "output"), input_bytes = split_bytes(input, input_rows, "input");
    Plan plan;
    Collective collective = exchange(Kind::kPull, -1);
    collective.sends = shared(plan, bytes(input, "all_to_all_single"), /*written=*/false).split_with_sizes(input_bytes);
    collective.receives = shared(plan, bytes(output, "all_to_all_single"), /*written=*/true).split_with_sizes(output_bytes);
    plan.collectives.push_back(std::move(collective));
    return start_linked(OpType::ALLTOALL_BASE, "neuron:all_to_all_single", {input}, {output}, std::move(plan), options);
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    if (!linked(inputs)) return GlooGroup::alltoall(outputs, inputs, options);
    at::AutoDispatchBelowADInplaceOrView guard;
    check_exchanged(outputs, inputs);
    Plan plan;
    Collective collective = exchange(Kind::kPull, -1);
    collective.sends = shared(plan, bytes(inputs, "all_to_all"), /*written=*/false);
    collective.receives = shared(plan, bytes(outputs, "all_to_all"));
    plan.collectives.push_back(std::move(collective));
    return start_linked(OpType::ALLTOALL, "neuron:all_to_all", inputs, outputs, std::move(plan), options);
  }

  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    const Tensor& tensor = one(tensors, "send");
    if (!linked(tensor)) return GlooGroup::send(tensors, destination, tag);
    check_peer(destination, "send", "dst");
    Plan plan;
    const Tensor data = shared(plan, bytes(tensor, "send"), /*written=*/false);
    auto work = start_transfer(OpType::SEND, "neuron:send", tensors, {}, std::move(plan));
    state_->link->send(data, destination, tag, deadline(c10d::kUnsetTimeout), work.second);
    return work.first;
  }

  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    if (!linked(one(tensors, "recv"))) return GlooGroup::recv(tensors, source, tag);
    check_peer(source, "recv", "src");
    return receive(OpType::RECV, tensors, source, tag);
  }

  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    if (!linked(one(tensors, "recv"))) return GlooGroup::recvAnysource(tensors, tag);
    return receive(OpType::RECVANYSOURCE, tensors, -1, tag);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    if (!state_->link) return GlooGroup::barrier(options);
    Plan plan;
    plan.collectives.push_back(exchange(Kind::kBarrier, -1));
    return start_linked(OpType::BARRIER, "neuron:barrier", {}, {}, std::move(plan), options);
  }

 private:
  bool linked(const Tensor& tensor) const { return state_->link && tensor.device().type() == kNeuron; }
  bool linked(const Tensors& tensors) const { return !tensors.empty() && linked(tensors[0]); }

  // ----------------------------------------------------------------------------------------------------------- starting

  Link::Clock::time_point deadline(Milliseconds timeout) const {
    return Link::Clock::now() + (timeout == c10d::kUnsetTimeout ? gloo_->getBackendOptions()->timeout : timeout);
  }

  template <class Options>
  WorkPtr start_linked(OpType op, const char* name, const Tensors& inputs, const Tensors& outputs, Plan plan, const Options& options) {
    auto work = new_work(op, name, inputs, outputs);
    require_alive(name);
    state_->calls.add(name, inputs.empty() ? Tensor() : inputs[0]);
    state_->count(name, inputs, outputs);
    const Link::Done done = work->follow_link(plan.collectives.size(), all(std::move(plan.steps)));
    for (auto& collective : plan.collectives) state_->link->submit(std::move(collective), deadline(options.timeout), done, options.asyncOp);
    if (coalescing_) coalesced_.push_back(work);
    return work;
  }

  std::pair<WorkPtr, Link::Done> start_transfer(OpType op, const char* name, const Tensors& inputs, const Tensors& outputs, Plan plan) {
    auto work = new_work(op, name, inputs, outputs);
    require_alive(name);
    state_->count(name, inputs, outputs);
    const Link::Done done = work->follow_link(1, all(std::move(plan.steps)));
    if (coalescing_) coalesced_.push_back(work);
    return {work, done};
  }

  WorkPtr receive(OpType op, const Tensors& tensors, int source, int tag) {
    Tensor data = bytes(tensors[0], "recv");
    auto work = start_transfer(op, "neuron:recv", {}, tensors, {});
    state_->link->receive(data, source, tag, deadline(c10d::kUnsetTimeout), work.second);
    return work.first;
  }

  // -------------------------------------------------------------------------------------------------------------- plans

  Collective exchange(Kind kind, int root) const {
    Collective collective;
    collective.kind = kind;
    collective.root = root;
    collective.sends.resize(size_);
    collective.receives.resize(size_);
    return collective;
  }

  // `alias`, or where the peers cannot reach it (another core, memory from outside) a copy in HBM that they can; what is written is
  // copied back at the end.
  Tensor shared(Plan& plan, const Tensor& alias, bool written) const {
    if (state_->link->shares(alias)) return alias;
    Tensor copy = copy_on_core(alias);
    if (written) plan.steps.push_back([to = alias, copy] { to.copy_(copy); });
    return copy;
  }

  Tensors shared(Plan& plan, Tensors aliases, bool written = true) const {
    for (auto& alias : aliases) alias = shared(plan, alias, written);
    return aliases;
  }

  Tensor copy_on_core(const Tensor& alias) const {
    return at_operator_boundary([&] {
      AllocateOnCore on_core(state_->link->device());
      return alias.clone();
    });
  }

  // `keep`: the input must stay as it is where the operation scales it first.
  Collective reduction(Kind kind, Plan& plan, const Tensor& tensor, const ReduceOp& op, const char* name, bool keep, bool written) const {
    Tensor data = flat(tensor, name);
    check_reducible(data.scalar_type(), op.op_, name);
    if (op.op_ == ReduceOp::PREMUL_SUM && keep) data = copy_on_core(data);
    scale_before_sum(data, op, name);
    data = shared(plan, data, written);
    if (data.is_complex()) data = at::view_as_real(data).view(-1);
    Collective collective;
    collective.kind = kind;
    collective.type = data.scalar_type();
    collective.op = op.op_ == ReduceOp::PREMUL_SUM ? ReduceOp::SUM : op.op_;
    if (collective.type == at::kBool) {  // logical, as the hardware does it
      collective.type = at::kByte;
      if (collective.op == ReduceOp::SUM || collective.op == ReduceOp::BOR) collective.op = ReduceOp::MAX;
      if (collective.op == ReduceOp::PRODUCT || collective.op == ReduceOp::BAND) collective.op = ReduceOp::MIN;
    }
    collective.sends = {data};
    return collective;
  }

  WorkPtr all_reduce(OpType op, const char* name, const Tensors& tensors, const c10d::AllreduceOptions& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    Plan plan;
    for (const auto& tensor : tensors) {
      Collective collective = reduction(Kind::kAllReduce, plan, tensor, options.reduceOp, name, /*keep=*/false, /*written=*/true);
      collective.receives = collective.sends;
      plan.collectives.push_back(std::move(collective));
    }
    return start_linked(op, name, tensors, tensors, std::move(plan), options);
  }

  void scatter_sums_of(Plan& plan, const Tensors& parts, const Tensor& output, const ReduceOp& op, const char* name) const {
    Collective collective;
    Tensors sends;
    for (const auto& part : parts) {
      collective = reduction(Kind::kReduceScatter, plan, part, op, name, /*keep=*/true, /*written=*/false);
      sends.push_back(collective.sends[0]);
    }
    collective.sends = std::move(sends);
    collective.receives = {shared(plan, flat(output, name), /*written=*/true)};
    plan.collectives.push_back(std::move(collective));
  }

  WorkPtr reduce_scatter_tensors(OpType op, const char* name, const Tensors& outputs, const Tensors& inputs, const c10d::ReduceScatterOptions& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    check_scattered(outputs, inputs, name);
    Plan plan;
    for (size_t i = 0; i < inputs.size(); ++i) {
      scatter_sums_of(plan, flat(inputs[i], name).split(std::max<int64_t>(outputs[i].numel(), 1)), outputs[i], options.reduceOp, name);
    }
    return start_linked(op, name, inputs, outputs, std::move(plan), options);
  }

  void gather_all(Plan& plan, const Tensors& outputs, const Tensor& input, const char* name) const {
    Collective collective = exchange(Kind::kPush, -1);
    collective.sends.assign(size_, shared(plan, bytes(input, name), /*written=*/false));
    collective.receives = shared(plan, outputs);
    plan.collectives.push_back(std::move(collective));
  }

  WorkPtr all_gather(OpType op, const char* name, const TensorLists& outputs, const Tensors& inputs, const c10d::AllgatherOptions& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    Plan plan;
    Tensors results;
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_gathered(outputs[i], inputs[i], name);
      results.insert(results.end(), outputs[i].begin(), outputs[i].end());
      gather_all(plan, bytes(outputs[i], name), inputs[i], name);
    }
    return start_linked(op, name, inputs, results, std::move(plan), options);
  }

  WorkPtr all_gather_into(OpType op, const char* name, const Tensors& outputs, const Tensors& inputs, const c10d::AllgatherOptions& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    check_gathered_into(outputs, inputs, name);
    Plan plan;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Tensor whole = shared(plan, bytes(outputs[i], name), /*written=*/true);
      gather_all(plan, whole.split_with_sizes(std::vector<int64_t>(size_, static_cast<int64_t>(inputs[i].nbytes()))), inputs[i], name);
    }
    return start_linked(op, name, inputs, outputs, std::move(plan), options);
  }
};

}  // namespace

void bind_process_group(pybind11::module_& module) {
  namespace py = pybind11;
  py::module_::import("torch.distributed");  // declares the base class
  py::class_<Link, std::shared_ptr<Link>>(module, "NeuronLink")
      .def(
          py::init<int, int, int, int, const std::vector<int>&, const std::vector<int>&, const std::vector<int>&>(),
          py::arg("rank"),
          py::arg("size"),
          py::arg("device") = 0,
          py::arg("control") = -1,
          py::arg("hbm") = std::vector<int>(),
          py::arg("bells") = std::vector<int>(),
          py::arg("pidfds") = std::vector<int>())
      .def_static("control_bytes", &Link::control_bytes, py::arg("size"));
  module.def("hbm_fd", [](int device) { return arena(device).fd(); }, py::arg("device"));
  module.def("bell_fd", &own_bell_fd);
  py::class_<GroupState, std::shared_ptr<GroupState>>(module, "GroupState")
      .def_property_readonly("closed", [](GroupState& state) {
        std::lock_guard<std::mutex> lock(state.mutex);
        return state.closed;
      })
      .def_readwrite("ranks", &GroupState::ranks)
      .def_property_readonly("linked", [](GroupState& state) { return state.link != nullptr; })
      .def_property_readonly("traffic", [](GroupState& state) {
        std::lock_guard<std::mutex> lock(state.mutex);
        py::dict result;
        for (const auto& [name, counted] : state.traffic) result[name.c_str()] = py::make_tuple(counted.calls, counted.bytes);
        return result;
      })
      .def("fail", &GroupState::fail, py::arg("reason"), py::call_guard<py::gil_scoped_release>());
  py::class_<ProcessGroupNeuron, c10::intrusive_ptr<ProcessGroupNeuron>, c10d::Backend>(module, "ProcessGroupNeuron")
      .def(
          py::init<c10::intrusive_ptr<c10d::Backend>, c10::intrusive_ptr<c10d::Store>, std::shared_ptr<Link>>(),
          py::arg("gloo"),
          py::arg("store"),
          py::arg("link") = nullptr)
      .def_property_readonly("state", &ProcessGroupNeuron::state);
  // Before the interpreter begins to end, when a thread that wanted it would be torn down in the middle of C++.
  py::module_::import("atexit").attr("register")(py::cpp_function(
      [] {
        Progress::instance().stop();
        leave_interpreter();
      },
      py::call_guard<py::gil_scoped_release>()));
}

}  // namespace neuron
