// The process group as gloo carries it, over zero-copy CPU aliases of device tensors.
//
// gloo alone blocks a rank until its timeout when a rank dies that is not its neighbour, cannot average, writes outputs
// again on a second wait, and knows few types. Here every operation is a NeuronWork with one completion, which gloo's
// completion or the group's failure brings about, whichever comes first; data moves as bytes, so any type will do.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <ATen/ATen.h>

#include <numeric>
#include <optional>

#include "checked_group.h"
#include "collective_tensors.h"
#include "neuron.h"
#include "work.h"

namespace neuron {

// A reduction that gloo can do: the tensor to hand over, gloo's operation, and what makes its result the one asked for.
struct Reduction {
  Tensor buffer;  // 1-D, on the CPU
  ReduceOp op = ReduceOp::SUM;
  Step finish;    // after the reduction, with the result in `buffer`; may be empty
};

// The group as gloo carries it, on CPU aliases of the tensors.
class GlooGroup : public CheckedGroup {
 public:
  GlooGroup(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Link> link)
      : CheckedGroup(gloo->getRank(), gloo->getSize()),
        gloo_(std::move(gloo)),
        state_(std::make_shared<GroupState>(rank_, size_, std::move(store), std::move(link))) {}

  ~GlooGroup() override {
    {
      std::lock_guard<std::mutex> lock(state_->mutex);
      state_->closed = true;
      // After a failure gloo's threads sit in operations that nobody will answer, and its destructor would wait for them.
      if (!state_->failure.empty()) static_cast<void>(gloo_.release());
    }
    {
      // gloo's threads may need the interpreter for callbacks before they can end.
      std::optional<pybind11::gil_scoped_release> without_interpreter;
      if (Py_IsInitialized() && PyGILState_Check()) without_interpreter.emplace();
      // What this rank has started, the others may wait for, whether or not anybody here does.
      if (state_->link) Progress::instance().drive([link = state_->link] { return link->idle(); }, [] {});
      gloo_.reset();
    }
    state_->release_completed();
  }

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setTimeout(Milliseconds timeout) override { gloo_->setTimeout(timeout); }
  c10d::ErrorType getError() override {
    std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->failure.empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::REMOTE_ERROR;
  }
  void abort() override { state_->fail("the group was aborted."); }

  std::shared_ptr<GroupState> state() const { return state_; }

  // -------------------------------------------------------------------------------------------- one tensor, all ranks

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return reduce_all(OpType::ALLREDUCE, "neuron:all_reduce", {one(tensors, "all_reduce")}, options);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return reduce_all(OpType::ALLREDUCE_COALESCED, "neuron:all_reduce_coalesced", tensors, options);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor& tensor = one(tensors, "broadcast");
    check_rank(options.rootRank, "broadcast", "src");
    Tensors data{bytes(tensor, "broadcast")};
    return start(OpType::BROADCAST, "neuron:broadcast", tensors, tensors, skip(data) ? std::vector<WorkPtr>{} : std::vector<WorkPtr>{gloo_->broadcast(data, options)});
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor& tensor = one(tensors, "reduce");
    check_rank(options.rootRank, "reduce", "dst");
    // gloo leaves partial sums on the other ranks, whose tensors are inputs only.
    const bool root = options.rootRank == rank_;
    Tensor alias = flat(tensor, "reduce");
    Reduction reduction = prepare(root ? alias : alias.clone(), options.reduceOp, "reduce");
    Tensors data{reduction.buffer};
    auto gloo_options = options;
    gloo_options.reduceOp = reduction.op;
    return start(OpType::REDUCE, "neuron:reduce", tensors, tensors,
                 skip(data) ? std::vector<WorkPtr>{} : std::vector<WorkPtr>{gloo_->reduce(data, gloo_options)}, root ? reduction.finish : Step());
  }

  // ------------------------------------------------------------------------------------------------------- gathering

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return allgather_coalesced_as(OpType::ALLGATHER, "neuron:all_gather", {one(outputs, "all_gather")}, {one(inputs, "all_gather")}, options);
  }

  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return allgather_coalesced_as(OpType::ALLGATHER_COALESCED, "neuron:all_gather_coalesced", by_input(outputs, inputs), inputs, options);
  }

  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return gather_into(OpType::_ALLGATHER_BASE, "neuron:all_gather_into_tensor", outputs, inputs, options);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return gather_into(OpType::ALLGATHER_COALESCED, "neuron:all_gather_into_tensor_coalesced", outputs, inputs, options);
  }

  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor& input = one(inputs, "gather");
    check_rank(options.rootRank, "gather", "dst");
    TensorLists to;
    Tensors results;
    if (options.rootRank == rank_) {
      results = one(outputs, "gather");
      check_list(results, input, "gather");
      to.push_back(bytes(results, "gather"));
    } else {
      TORCH_CHECK_VALUE(outputs.empty(), "gather: only the destination rank gives a gather_list.");
    }
    Tensors from{bytes(input, "gather")};
    return start(OpType::GATHER, "neuron:gather", inputs, results, skip(from) ? std::vector<WorkPtr>{} : std::vector<WorkPtr>{gloo_->gather(to, from, options)});
  }

  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor& output = one(outputs, "scatter");
    check_rank(options.rootRank, "scatter", "src");
    TensorLists from;
    if (options.rootRank == rank_) {
      check_list(one(inputs, "scatter"), output, "scatter");
      from.push_back(bytes(inputs[0], "scatter"));
    } else {
      TORCH_CHECK_VALUE(inputs.empty(), "scatter: only the source rank gives a scatter_list.");
    }
    Tensors to{bytes(output, "scatter")};
    return start(OpType::SCATTER, "neuron:scatter", inputs.empty() ? Tensors{} : inputs[0], outputs,
                 skip(to) ? std::vector<WorkPtr>{} : std::vector<WorkPtr>{gloo_->scatter(to, from, options)});
  }

  // ---------------------------------------------------------------------------------------------- reduce and scatter

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    at::AutoDispatchBelowADInplaceOrView guard;
    const Tensors& list = one(inputs, "reduce_scatter");
    const Tensor& output = one(outputs, "reduce_scatter");
    check_scattered(list, output);
    Tensors parts;
    int64_t offset = 0;
    for (int r = 0; r < size_; ++r) {
      parts.push_back(flat(list[r], "reduce_scatter"));
      if (r < rank_) offset += list[r].numel();
    }
    return scatter_sums(OpType::REDUCE_SCATTER, "neuron:reduce_scatter", list, outputs, {at::cat(parts)}, {offset}, options);
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return scatter_tensors(OpType::_REDUCE_SCATTER_BASE, "neuron:reduce_scatter_tensor", outputs, inputs, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return scatter_tensors(OpType::REDUCE_SCATTER_TENSOR_COALESCED, "neuron:reduce_scatter_tensor_coalesced", outputs, inputs, options);
  }

  // ------------------------------------------------------------------------------------------------------- all to all

  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_rows, std::vector<int64_t>& input_rows, const c10d::AllToAllOptions& options) override {
    at::AutoDispatchBelowADInplaceOrView guard;
    check_type(input, output, "all_to_all_single");
    Tensor to = bytes(output, "all_to_all_single"), from = bytes(input, "all_to_all_single");
    auto output_bytes = split_bytes(output, output_rows, "output"), input_bytes = split_bytes(input, input_rows, "input");
    return start(OpType::ALLTOALL_BASE, "neuron:all_to_all_single", {input}, {output}, {gloo_->alltoall_base(to, from, output_bytes, input_bytes, options)});
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    at::AutoDispatchBelowADInplaceOrView guard;
    check_exchanged(outputs, inputs);
    std::vector<int64_t> input_bytes, output_bytes;
    for (int r = 0; r < size_; ++r) {
      input_bytes.push_back(int64_t(inputs[r].nbytes()));
      output_bytes.push_back(int64_t(outputs[r].nbytes()));
    }
    Tensor from = at::cat(bytes(inputs, "all_to_all"));
    Tensors targets = bytes(outputs, "all_to_all");
    Tensor to = at::empty({std::accumulate(output_bytes.begin(), output_bytes.end(), int64_t(0))}, from.options());
    auto sizes = output_bytes;  // gloo empties the ones that it is given
    auto work = gloo_->alltoall_base(to, from, sizes, input_bytes, options);
    return start(OpType::ALLTOALL, "neuron:all_to_all", inputs, outputs, {work}, [to, output_bytes, targets] {
      auto received = to.split_with_sizes(output_bytes);
      for (size_t r = 0; r < targets.size(); ++r) targets[r].copy_(received[r]);
    });
  }

  // ---------------------------------------------------------------------------------------------------- point to point

  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    check_peer(destination, "send", "dst");
    Tensors data{bytes(one(tensors, "send"), "send")};
    require_alive("send");
    return transfer(OpType::SEND, "neuron:send", tensors, {}, gloo_->send(data, destination, tag));
  }

  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    check_peer(source, "recv", "src");
    Tensors data{bytes(one(tensors, "recv"), "recv")};
    require_alive("recv");
    return transfer(OpType::RECV, "neuron:recv", tensors, tensors, gloo_->recv(data, source, tag));
  }

  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    Tensors data{bytes(one(tensors, "recv"), "recv")};
    require_alive("recv");
    return transfer(OpType::RECVANYSOURCE, "neuron:recv", tensors, tensors, gloo_->recvAnysource(data, tag));
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto gloo_options = options;
    gloo_options.device_ids.clear();
    gloo_options.device.reset();
    return start(OpType::BARRIER, "neuron:barrier", {}, {}, {gloo_->barrier(gloo_options)});
  }

  // --------------------------------------------------------------------------------------------------------- coalescing

  void startCoalescing() override {
    TORCH_CHECK(!coalescing_, "Operations are being coalesced already; a coalescing manager cannot be nested.");
    coalescing_ = true;
    coalesced_.clear();
  }

  WorkPtr endCoalescing() override {
    TORCH_CHECK(coalescing_, "endCoalescing without startCoalescing.");
    coalescing_ = false;
    Tensors outputs;
    for (const auto& work : coalesced_) {
      for (const auto& tensor : work->result()) outputs.push_back(tensor);
    }
    return start(OpType::COALESCED, "neuron:coalesced", {}, outputs, std::exchange(coalesced_, {}));
  }

 protected:
  // ------------------------------------------------------------------------------------------------ starting operations

  void require_alive(const char* name) {
    std::lock_guard<std::mutex> lock(state_->mutex);
    TORCH_CHECK_WITH(DistBackendError, state_->failure.empty(), name, " on rank ", rank_, " of ", size_, " failed: ", state_->failure);
  }

  c10::intrusive_ptr<NeuronWork> new_work(OpType op, const char* name, const Tensors& inputs, const Tensors& outputs) {
    ++sequence_;
    std::optional<c10::Device> device;
    for (const auto* list : {&outputs, &inputs}) {
      for (const auto& tensor : *list) {
        TORCH_CHECK_VALUE(tensor.device().is_cpu() || tensor.device().type() == kNeuron, name, ": a tensor on ", tensor.device(), "; this group moves neuron and CPU tensors.");
        if (!device && tensor.device().type() == kNeuron) device = tensor.device();
      }
    }
    return c10::make_intrusive<NeuronWork>(state_, op, name, inputs, outputs, device);
  }

  WorkPtr start(OpType op, const char* name, const Tensors& inputs, const Tensors& outputs, const std::vector<WorkPtr>& parts, Step finish = {}) {
    require_alive(name);
    auto work = new_work(op, name, inputs, outputs);
    state_->calls.add(name, inputs.empty() ? Tensor() : inputs[0]);
    state_->count(name, inputs, outputs);
    work->follow(parts, std::move(finish));
    if (coalescing_) coalesced_.push_back(work);
    return work;
  }

  WorkPtr transfer(OpType op, const char* name, const Tensors& inputs, const Tensors& outputs, WorkPtr part) {
    auto work = new_work(op, name, inputs, outputs);
    state_->count(name, inputs, outputs);
    work->follow_transfer(std::move(part));
    if (coalescing_) coalesced_.push_back(work);
    return work;
  }

  // ------------------------------------------------------------------------------------------- several tensors, all ranks

  WorkPtr reduce_all(OpType op, const char* name, const Tensors& tensors, const c10d::AllreduceOptions& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    require_alive(name);
    std::vector<WorkPtr> parts;
    std::vector<Step> steps;
    for (const auto& tensor : tensors) {
      Reduction reduction = prepare(flat(tensor, name), options.reduceOp, name);
      if (tensor.numel() == 0) continue;
      c10d::AllreduceOptions gloo_options;
      gloo_options.reduceOp = reduction.op;
      gloo_options.timeout = options.timeout;
      Tensors data{reduction.buffer};
      parts.push_back(gloo_->allreduce(data, gloo_options));
      if (reduction.finish) steps.push_back(reduction.finish);
    }
    return start(op, name, tensors, tensors, parts, all(std::move(steps)));
  }

  WorkPtr allgather_coalesced_as(OpType op, const char* name, const TensorLists& outputs, const Tensors& inputs, const c10d::AllgatherOptions& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    require_alive(name);
    std::vector<WorkPtr> parts;
    std::vector<Step> steps;
    Tensors results;
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_gathered(outputs[i], inputs[i], name);
      bool even = true;
      for (const auto& tensor : outputs[i]) {
        even = even && tensor.numel() == inputs[i].numel();
        results.push_back(tensor);
      }
      Tensor from = bytes(inputs[i], name);
      Tensors to = bytes(outputs[i], name);
      if (even) {
        if (from.numel() == 0) continue;
        TensorLists lists{to};
        Tensors data{from};
        parts.push_back(gloo_->allgather(lists, data, options));
      } else {  // ranks of different size: one broadcast each
        to[rank_].copy_(from);
        for (int r = 0; r < size_; ++r) {
          if (to[r].numel() == 0) continue;
          c10d::BroadcastOptions broadcast_options;
          broadcast_options.rootRank = r;
          broadcast_options.timeout = options.timeout;
          Tensors data{to[r]};
          parts.push_back(gloo_->broadcast(data, broadcast_options));
        }
      }
    }
    return start(op, name, inputs, results, parts, all(std::move(steps)));
  }

  WorkPtr gather_into(OpType op, const char* name, const Tensors& outputs, const Tensors& inputs, const c10d::AllgatherOptions& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    require_alive(name);
    check_gathered_into(outputs, inputs, name);
    std::vector<WorkPtr> parts;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].numel() == 0) continue;
      TensorLists to{bytes(outputs[i], name).chunk(size_)};
      Tensors from{bytes(inputs[i], name)};
      parts.push_back(gloo_->allgather(to, from, options));
    }
    return start(op, name, inputs, outputs, parts);
  }

  WorkPtr scatter_tensors(OpType op, const char* name, const Tensors& outputs, const Tensors& inputs, const c10d::ReduceScatterOptions& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    check_scattered(outputs, inputs, name);
    Tensors copies;
    std::vector<int64_t> offsets;
    for (size_t i = 0; i < inputs.size(); ++i) {
      copies.push_back(flat(inputs[i], name).clone());
      offsets.push_back(rank_ * outputs[i].numel());
    }
    return scatter_sums(op, name, inputs, outputs, copies, offsets, options);
  }

  // gloo has no reduce-scatter of its own: reduce a copy everywhere, keep this rank's part.
  WorkPtr scatter_sums(OpType op, const char* name, const Tensors& inputs, const Tensors& outputs, const Tensors& copies, const std::vector<int64_t>& offsets, const c10d::ReduceScatterOptions& options) {
    require_alive(name);
    std::vector<WorkPtr> parts;
    std::vector<Step> steps;
    for (size_t i = 0; i < copies.size(); ++i) {
      Reduction reduction = prepare(copies[i], options.reduceOp, name);
      if (copies[i].numel() == 0) continue;
      c10d::AllreduceOptions gloo_options;
      gloo_options.reduceOp = reduction.op;
      gloo_options.timeout = options.timeout;
      Tensors data{reduction.buffer};
      parts.push_back(gloo_->allreduce(data, gloo_options));
      if (reduction.finish) steps.push_back(reduction.finish);
      steps.push_back([to = flat(outputs[i], name), from = copies[i].narrow(0, offsets[i], outputs[i].numel())] { to.copy_(from); });
    }
    return start(op, name, inputs, outputs, parts, all(std::move(steps)));
  }

  // PyTorch's layout is outputs[i] for what rank i sent of every input.
  TensorLists by_input(const TensorLists& outputs, const Tensors& inputs) const {
    TORCH_CHECK_VALUE(int(outputs.size()) == size_, "all_gather_coalesced: ", outputs.size(), " output lists for ", size_, " ranks.");
    TensorLists lists(inputs.size());
    for (const auto& list : outputs) {
      TORCH_CHECK_VALUE(list.size() == inputs.size(), "all_gather_coalesced: an output list of ", list.size(), " tensors for ", inputs.size(), " inputs.");
      for (size_t i = 0; i < list.size(); ++i) lists[i].push_back(list[i]);
    }
    return lists;
  }

  // ---------------------------------------------------------------------------------------------------- tensors for gloo

  static Step all(std::vector<Step> steps) {
    if (steps.empty()) return {};
    return [steps = std::move(steps)] {
      for (const auto& step : steps) step();
    };
  }

  static bool skip(const Tensors& tensors) { return tensors[0].numel() == 0; }

  // What gloo can reduce in place of `buffer` under `op`. Reductions are done in the tensor's own precision, never below.
  Reduction prepare(Tensor buffer, const ReduceOp& op, const char* name) const {
    const auto type = buffer.scalar_type();
    auto kind = static_cast<ReduceOp::RedOpType>(op);
    check_reducible(type, kind, name);
    if (type == at::kBool) {  // logical, as the hardware does it
      if (kind == ReduceOp::SUM || kind == ReduceOp::BOR) kind = ReduceOp::MAX;
      if (kind == ReduceOp::PRODUCT || kind == ReduceOp::BAND) kind = ReduceOp::MIN;
      return {buffer.view(at::kByte), kind, {}};
    }
    if (buffer.is_complex()) return prepare(at::view_as_real(buffer).view(-1), op, name);
    if (type == at::kShort) {  // unknown to gloo
      Reduction wide = prepare(buffer.to(at::kInt), op, name);
      wide.finish = [buffer, sum = wide.buffer] { buffer.copy_(sum); };
      return wide;
    }
    scale_before_sum(buffer, op, name);
    if (kind == ReduceOp::PREMUL_SUM) return {buffer, ReduceOp::SUM, {}};
    if (kind == ReduceOp::AVG) return {buffer, ReduceOp::SUM, [buffer, size = size_]() mutable { buffer.div_(size); }};
    return {buffer, kind, {}};
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::shared_ptr<GroupState> state_;
  std::atomic<uint64_t> sequence_{0};
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
};

}  // namespace neuron
