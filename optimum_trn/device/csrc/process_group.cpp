// The c10d backend "neuron": PyTorch's collectives on device tensors, moved by gloo over zero-copy CPU aliases.
//
// gloo alone blocks a rank until its timeout when a rank dies that is not its neighbour, cannot average, writes outputs
// again on a second wait, and knows few types. Here every operation is a NeuronWork with one completion, which gloo's
// completion or the group's failure brings about, whichever comes first; data moves as bytes, so any type will do.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <ATen/ATen.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <thread>
#include <unordered_map>

#include "call_log.h"
#include "neuron.h"

namespace neuron {
namespace {

using at::Tensor;
using c10d::Backend;
using c10d::OpType;
using c10d::ReduceOp;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<Work>;
using Milliseconds = std::chrono::milliseconds;
using Step = std::function<void()>;

class NeuronWork;

// What the works of a group share with it: who is pending, and why the group failed if it did. It may outlive the group.
//
// A work owns tensors, and those may own Python objects. A thread that gives one up needs the interpreter, and one that asks
// for it while the process ends is killed on the spot, which aborts the process. So gloo's threads own no work: the state does,
// and threads that call the group let go of what is finished.
struct GroupState {
  const int rank;
  const int size;
  std::mutex mutex;
  std::condition_variable failed;
  std::string failure;
  bool closed = false;  // the group is gone
  CallLog calls;
  std::unordered_map<NeuronWork*, c10::intrusive_ptr<NeuronWork>> pending;
  std::vector<c10::intrusive_ptr<NeuronWork>> finished;

  GroupState(int rank_, int size_, c10::intrusive_ptr<c10d::Store> store) : rank(rank_), size(size_), calls(rank_, size_, std::move(store)) {}

  // Every pending and every later operation raises DistBackendError with this reason.
  void fail(const std::string& reason);

  void let_go_of_finished();
};

std::exception_ptr backend_error(const std::string& message) {
  try {
    TORCH_CHECK_WITH(DistBackendError, false, message);
  } catch (...) {
    return std::current_exception();
  }
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown error";
  }
}

// Ctrl-C must end a wait: let the main thread run Python's signal handlers.
void run_signal_handlers() {
  if (!Py_IsInitialized()) return;
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

class NeuronWork final : public Work {
 public:
  NeuronWork(std::shared_ptr<GroupState> group, OpType op, const char* name, const Tensors& inputs, Tensors outputs, std::optional<c10::Device> device)
      : Work(group->rank, op, name, inputs.empty() ? std::nullopt : std::make_optional(inputs)),
        group_(std::move(group)),
        name_(name),
        inputs_(inputs),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()), device ? std::vector<c10::Device>{*device} : std::vector<c10::Device>{})) {}

  // Complete when all of gloo's works have, then run `finish` on the thread that saw the last of them.
  void follow(const std::vector<WorkPtr>& parts, Step finish) {
    finish_ = std::move(finish);
    enlist(std::max<size_t>(parts.size(), 1));
    if (parts.empty()) return report(nullptr);
    for (const auto& part : parts) {
      part->getFuture()->addCallback(
          [this](c10::ivalue::Future& done) { report(done.hasError() ? done.exception_ptr() : nullptr); }, /*uses_future=*/false);
    }
  }

  // gloo's point-to-point works have no future: a thread waits for this one.
  void follow_transfer(WorkPtr transfer) {
    transfer_ = std::move(transfer);
    enlist(1);
    std::thread([this] {
      std::exception_ptr error;
      try {
        transfer_->wait();
        if (opType_ == OpType::RECVANYSOURCE) source_ = transfer_->sourceRank();
      } catch (...) {
        error = std::current_exception();
      }
      report(error);
    }).detach();
  }

  // The first call counts: success, an error of gloo, or the group's failure.
  void complete(std::exception_ptr error) {
    if (decided_.exchange(true)) return;
    if (!error && finish_) {
      try {
        at::AutoDispatchBelowADInplaceOrView guard;
        finish_();
      } catch (...) {
        error = std::current_exception();
      }
    }
    finish_ = nullptr;
    Work::finish(error);
    if (error) {
      future_->setErrorIfNeeded(error);
    } else {
      future_->markCompleted(outputs_);
    }
  }

  void fail(const std::string& reason) {
    complete(backend_error(c10::str(name_, " on rank ", group_->rank, " of ", group_->size, " failed: ", reason)));
    if (transfer_) transfer_->abort();  // last, for it wakes the thread that waits, to which an aborted transfer looks finished
  }

  bool wait(Milliseconds timeout) override {
    const auto start = std::chrono::steady_clock::now();
    std::unique_lock<std::mutex> lock(mutex_);
    while (!completed_) {
      if (cv_.wait_for(lock, Milliseconds(100)) == std::cv_status::timeout && !completed_) {
        lock.unlock();
        run_signal_handlers();
        if (timeout > kNoTimeout && std::chrono::steady_clock::now() - start > timeout) {
          std::rethrow_exception(backend_error(c10::str(
              name_, " on rank ", group_->rank, " of ", group_->size, " did not finish in ", timeout.count(), " ms. ", group_->calls.difference())));
        }
        lock.lock();
      }
    }
    lock.unlock();
    group_->let_go_of_finished();
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }

  void synchronize() override {}
  void blockCurrentStream() override { wait(kNoTimeout); }
  void abort() override { fail("it was aborted."); }
  int sourceRank() const override { return source_; }
  std::vector<Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  // The state owns this work from here until gloo has reported all of its parts.
  void enlist(size_t parts) {
    group_->let_go_of_finished();
    unfinished_ = unreported_ = parts;
    std::lock_guard<std::mutex> lock(group_->mutex);
    group_->pending.emplace(this, c10::intrusive_ptr<NeuronWork>::reclaim_copy(this));
  }

  // One of gloo's works is done. After the last of them another thread may delete this one.
  void report(const std::exception_ptr& error) {
    const auto group = group_;
    if (error) {
      complete(explain(error));
    } else if (--unfinished_ == 0) {
      complete(nullptr);
    }
    std::lock_guard<std::mutex> lock(group->mutex);
    if (--unreported_ > 0) return;
    auto entry = group->pending.find(this);
    group->finished.push_back(std::move(entry->second));
    group->pending.erase(entry);
  }

  // gloo says "connection closed"; who died is known a moment later from the group's failure.
  std::exception_ptr explain(const std::exception_ptr& error) {
    std::unique_lock<std::mutex> lock(group_->mutex);
    group_->failed.wait_for(lock, Milliseconds(500), [this] { return !group_->failure.empty() || decided_; });
    std::string reason = group_->failure;
    lock.unlock();
    // Nobody died: gloo could not make sense of what came, or nothing came in time.
    if (reason.empty() && !decided_) reason = c10::str(group_->calls.difference(), " (gloo: ", text_of(error), ")");
    return backend_error(c10::str(name_, " on rank ", group_->rank, " of ", group_->size, " failed: ", reason));
  }

  const std::shared_ptr<GroupState> group_;
  const char* const name_;
  const Tensors inputs_;
  const Tensors outputs_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  WorkPtr transfer_;
  Step finish_;
  std::atomic<bool> decided_{false};
  std::atomic<size_t> unfinished_{0};
  size_t unreported_ = 0;  // under the group's mutex
  int source_ = -1;
};

void GroupState::fail(const std::string& reason) {
  decltype(pending) works;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (closed || !failure.empty()) return;
    failure = reason;
    works = pending;
  }
  failed.notify_all();
  for (auto& entry : works) entry.second->fail(reason);
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& entry : works) finished.push_back(std::move(entry.second));
}

void GroupState::let_go_of_finished() {
  decltype(finished) works;
  std::lock_guard<std::mutex> lock(mutex);
  works.swap(finished);
}

// A reduction that gloo can do: the tensor to hand over, gloo's operation, and what makes its result the one asked for.
struct Reduction {
  Tensor buffer;  // 1-D, on the CPU
  ReduceOp op = ReduceOp::SUM;
  Step finish;    // after the reduction, with the result in `buffer`; may be empty
};

class ProcessGroupNeuron final : public Backend {
 public:
  ProcessGroupNeuron(c10::intrusive_ptr<Backend> gloo, c10::intrusive_ptr<c10d::Store> store)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), state_(std::make_shared<GroupState>(rank_, size_, std::move(store))) {}

  ~ProcessGroupNeuron() override {
    bool failed;
    {
      std::lock_guard<std::mutex> lock(state_->mutex);
      state_->closed = true;
      failed = !state_->failure.empty();
    }
    if (failed) {  // gloo's threads sit in operations that nobody will answer, and its destructor would wait for them
      static_cast<void>(gloo_.release());
    } else {
      gloo_.reset();
      state_->let_go_of_finished();
    }
  }

  const std::string getBackendName() const override { return "neuron"; }
  bool supportsCoalescing() const override { return true; }
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

  // PyTorch's layout here: outputs[i] holds what rank i sent of every input.
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK_VALUE(int(outputs.size()) == size_, "all_gather_coalesced: ", outputs.size(), " output lists for ", size_, " ranks.");
    TensorLists by_input(inputs.size());
    for (const auto& list : outputs) {
      TORCH_CHECK_VALUE(list.size() == inputs.size(), "all_gather_coalesced: an output list of ", list.size(), " tensors for ", inputs.size(), " inputs.");
      for (size_t i = 0; i < list.size(); ++i) by_input[i].push_back(list[i]);
    }
    return allgather_coalesced_as(OpType::ALLGATHER_COALESCED, "neuron:all_gather_coalesced", by_input, inputs, options);
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
    TORCH_CHECK_VALUE(int(list.size()) == size_, "reduce_scatter: ", list.size(), " input tensors for ", size_, " ranks.");
    TORCH_CHECK_VALUE(list[rank_].sizes() == output.sizes(), "reduce_scatter: the output has sizes ", output.sizes(), ", but input ", rank_, " has ", list[rank_].sizes(), ".");
    Tensors parts;
    int64_t offset = 0;
    for (int r = 0; r < size_; ++r) {
      check_type(list[r], output, "reduce_scatter");
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
    TORCH_CHECK_VALUE(int(inputs.size()) == size_ && int(outputs.size()) == size_, "all_to_all: ", inputs.size(), " input and ", outputs.size(), " output tensors for ", size_, " ranks.");
    std::vector<int64_t> input_bytes, output_bytes;
    for (int r = 0; r < size_; ++r) {
      check_type(inputs[r], outputs[r], "all_to_all");
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

 private:
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
    work->follow(parts, std::move(finish));
    if (coalescing_) coalesced_.push_back(work);
    return work;
  }

  WorkPtr transfer(OpType op, const char* name, const Tensors& inputs, const Tensors& outputs, WorkPtr part) {
    auto work = new_work(op, name, inputs, outputs);
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
      TORCH_CHECK_VALUE(int(outputs[i].size()) == size_, name, ": ", outputs[i].size(), " output tensors for ", size_, " ranks.");
      bool even = true;
      for (const auto& tensor : outputs[i]) {
        check_type(inputs[i], tensor, name);
        even = even && tensor.numel() == inputs[i].numel();
        results.push_back(tensor);
      }
      TORCH_CHECK_VALUE(outputs[i][rank_].numel() == inputs[i].numel(), name, ": rank ", rank_, " sends ", inputs[i].numel(), " elements, but its place in the outputs has ", outputs[i][rank_].numel(), ".");
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
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), name, ": ", outputs.size(), " outputs for ", inputs.size(), " inputs.");
    std::vector<WorkPtr> parts;
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_type(inputs[i], outputs[i], name);
      TORCH_CHECK_VALUE(outputs[i].numel() == inputs[i].numel() * size_, name, ": the output has ", outputs[i].numel(), " elements, but ", size_, " ranks send ", inputs[i].numel(), " each.");
      if (inputs[i].numel() == 0) continue;
      TensorLists to{bytes(outputs[i], name).chunk(size_)};
      Tensors from{bytes(inputs[i], name)};
      parts.push_back(gloo_->allgather(to, from, options));
    }
    return start(op, name, inputs, outputs, parts);
  }

  WorkPtr scatter_tensors(OpType op, const char* name, const Tensors& outputs, const Tensors& inputs, const c10d::ReduceScatterOptions& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), name, ": ", outputs.size(), " outputs for ", inputs.size(), " inputs.");
    Tensors copies;
    std::vector<int64_t> offsets;
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_type(inputs[i], outputs[i], name);
      TORCH_CHECK_VALUE(inputs[i].numel() == outputs[i].numel() * size_, name, ": the input has ", inputs[i].numel(), " elements, but ", size_, " ranks receive ", outputs[i].numel(), " each.");
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

  // ---------------------------------------------------------------------------------------------------- tensors for gloo

  static Step all(std::vector<Step> steps) {
    if (steps.empty()) return {};
    return [steps = std::move(steps)] {
      for (const auto& step : steps) step();
    };
  }

  static bool skip(const Tensors& tensors) { return tensors[0].numel() == 0; }

  // All elements in memory order, as a 1-D CPU tensor over the same memory.
  static Tensor flat(const Tensor& tensor, const char* name) {
    TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, name, ": a ", tensor.layout(), " tensor; collectives move dense tensors, see Tensor.to_dense().");
    TORCH_CHECK_VALUE(!tensor.is_conj() && !tensor.is_neg(), name, ": a tensor with a lazy conjugate or negation; pass tensor.resolve_conj().resolve_neg().");
    TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(), name, ": a tensor of sizes ", tensor.sizes(), " and strides ", tensor.strides(), " is not contiguous; pass tensor.contiguous().");
    return to_cpu(tensor.detach()).as_strided({tensor.numel()}, {1}, tensor.storage_offset());
  }

  static Tensor bytes(const Tensor& tensor, const char* name) {
    Tensor alias = flat(tensor, name);
    return at::from_blob(alias.data_ptr(), {int64_t(alias.nbytes())}, [alias](void*) {}, at::TensorOptions(at::kByte));
  }

  static Tensors bytes(const Tensors& tensors, const char* name) {
    Tensors result;
    for (const auto& tensor : tensors) {
      TORCH_CHECK_VALUE(tensor.is_contiguous(), name, ": a tensor of sizes ", tensor.sizes(), " and strides ", tensor.strides(), " in a list is not contiguous; pass tensor.contiguous().");
      result.push_back(bytes(tensor, name));
    }
    return result;
  }

  // What gloo can reduce in place of `buffer` under `op`. Reductions are done in the tensor's own precision, never below.
  Reduction prepare(Tensor buffer, const ReduceOp& op, const char* name) const {
    const auto type = buffer.scalar_type();
    auto kind = static_cast<ReduceOp::RedOpType>(op);
    TORCH_CHECK_TYPE(
        !at::isFloat8Type(type) && !at::isBarebonesUnsignedType(type), name, ": ", type, " cannot be reduced; convert it to bfloat16 or float32 (unsigned: int64) first.");
    if (type == at::kBool) {  // logical, as the hardware does it
      TORCH_CHECK_TYPE(kind != ReduceOp::AVG && kind != ReduceOp::PREMUL_SUM, name, ": a bool has no average; convert it to float32 first.");
      if (kind == ReduceOp::SUM || kind == ReduceOp::BOR) kind = ReduceOp::MAX;
      if (kind == ReduceOp::PRODUCT || kind == ReduceOp::BAND) kind = ReduceOp::MIN;
      return {buffer.view(at::kByte), kind, {}};
    }
    if (buffer.is_complex()) {
      TORCH_CHECK_TYPE(kind == ReduceOp::SUM || kind == ReduceOp::AVG || kind == ReduceOp::PREMUL_SUM, name, ": complex numbers can be summed and averaged only.");
      return prepare(at::view_as_real(buffer).view(-1), op, name);
    }
    if (type == at::kShort) {  // unknown to gloo
      Reduction wide = prepare(buffer.to(at::kInt), op, name);
      wide.finish = [buffer, sum = wide.buffer] { buffer.copy_(sum); };
      return wide;
    }
    if (kind == ReduceOp::PREMUL_SUM) {
      const auto* factor = dynamic_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
      TORCH_CHECK_VALUE(factor, name, ": PREMUL_SUM without a factor; make it with torch.distributed._make_nccl_premul_sum(factor).");
      if (factor->tensor_factor.defined()) {
        buffer.mul_(to_cpu(factor->tensor_factor));
      } else {
        buffer.mul_(factor->double_factor);
      }
      return {buffer, ReduceOp::SUM, {}};
    }
    if (kind == ReduceOp::AVG) {
      TORCH_CHECK_TYPE(buffer.is_floating_point(), name, ": ReduceOp.AVG of ", type, " would round; use ReduceOp.SUM and divide.");
      return {buffer, ReduceOp::SUM, [buffer, size = size_]() mutable { buffer.div_(size); }};
    }
    if (kind == ReduceOp::BAND || kind == ReduceOp::BOR || kind == ReduceOp::BXOR) {
      TORCH_CHECK_TYPE(at::isIntegralType(type, false), name, ": a bitwise reduction of ", type, "; it needs integers or bool.");
    }
    return {buffer, kind, {}};
  }

  std::vector<int64_t> split_bytes(const Tensor& tensor, const std::vector<int64_t>& rows, const char* which) const {
    TORCH_CHECK_VALUE(tensor.dim() > 0, "all_to_all_single: the ", which, " must have a dimension to split.");
    const int64_t length = tensor.size(0);
    const int64_t row_bytes = length ? int64_t(tensor.nbytes()) / length : 0;
    std::vector<int64_t> result;
    if (rows.empty()) {
      TORCH_CHECK_VALUE(length % size_ == 0, "all_to_all_single: dimension 0 of the ", which, " is ", length, ", which ", size_, " ranks do not divide; give split sizes.");
      result.assign(size_, length / size_ * row_bytes);
    } else {
      TORCH_CHECK_VALUE(int(rows.size()) == size_, "all_to_all_single: ", rows.size(), " ", which, " split sizes for ", size_, " ranks.");
      const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t(0));
      TORCH_CHECK_VALUE(total == length, "all_to_all_single: the ", which, " split sizes add up to ", total, ", but dimension 0 is ", length, ".");
      for (int64_t row : rows) result.push_back(row * row_bytes);
    }
    return result;
  }

  // ------------------------------------------------------------------------------------------------------------- checks

  template <typename T>
  static const T& one(const std::vector<T>& values, const char* name) {
    TORCH_CHECK_VALUE(values.size() == 1, name, ": one tensor per rank, not ", values.size(), ".");
    return values[0];
  }

  static void check_type(const Tensor& a, const Tensor& b, const char* name) {
    TORCH_CHECK_TYPE(a.scalar_type() == b.scalar_type(), name, ": input and output differ in type, ", a.scalar_type(), " and ", b.scalar_type(), ".");
  }

  void check_list(const Tensors& list, const Tensor& tensor, const char* name) const {
    TORCH_CHECK_VALUE(int(list.size()) == size_, name, ": a list of ", list.size(), " tensors for ", size_, " ranks.");
    for (const auto& entry : list) {
      check_type(entry, tensor, name);
      TORCH_CHECK_VALUE(entry.numel() == tensor.numel(), name, ": the list holds a tensor of ", entry.numel(), " elements where the other side has ", tensor.numel(), ".");
    }
  }

  void check_rank(int64_t rank, const char* name, const char* argument) const {
    TORCH_CHECK_VALUE(0 <= rank && rank < size_, name, ": ", argument, " is group rank ", rank, ", but the group has ", size_, " ranks.");
  }

  void check_peer(int rank, const char* name, const char* argument) const {
    check_rank(rank, name, argument);
    TORCH_CHECK_VALUE(rank != rank_, name, ": ", argument, " is this rank itself.");
  }

  c10::intrusive_ptr<Backend> gloo_;
  const std::shared_ptr<GroupState> state_;
  std::atomic<uint64_t> sequence_{0};
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
};

}  // namespace

void bind_process_group(pybind11::module_& module) {
  namespace py = pybind11;
  py::module_::import("torch.distributed");  // declares the base class
  py::class_<GroupState, std::shared_ptr<GroupState>>(module, "GroupState")
      .def_property_readonly("closed", [](GroupState& state) {
        std::lock_guard<std::mutex> lock(state.mutex);
        return state.closed;
      })
      .def("fail", &GroupState::fail, py::arg("reason"), py::call_guard<py::gil_scoped_release>());
  py::class_<ProcessGroupNeuron, c10::intrusive_ptr<ProcessGroupNeuron>, Backend>(module, "ProcessGroupNeuron")
      .def(py::init<c10::intrusive_ptr<Backend>, c10::intrusive_ptr<c10d::Store>>(), py::arg("gloo"), py::arg("store"))
      .def_property_readonly("state", &ProcessGroupNeuron::state);
}

}  // namespace neuron
