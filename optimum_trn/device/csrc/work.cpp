// Works complete once, on whatever thread finds out, and are let go of by threads that may destroy Python objects.
#include "work.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <shared_mutex>
#include <thread>

#include <torch/csrc/utils/pybind.h>

#include "progress.h"
#include "recorder.h"

namespace neuron {

namespace {
// Held by threads that complete works, for callbacks of futures may be Python functions; taken for good when the interpreter ends.
struct Interpreter {
  std::shared_timed_mutex entered;
  std::atomic<bool> ending{false};
};
Interpreter& interpreter() {
  static auto* instance = new Interpreter;  // never destroyed: gloo's threads end with the process
  return *instance;
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

// Ctrl-C must end a wait: let Python's signal handlers run, which they do on the main thread only.
void run_signal_handlers() {
  if (syscall(SYS_gettid) != getpid() || !Py_IsInitialized()) return;
  pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}
}  // namespace

std::exception_ptr backend_error(const std::string& message) {
  try {
    TORCH_CHECK_WITH(DistBackendError, false, message);
  } catch (...) {
    return std::current_exception();
  }
}

void leave_interpreter() {
  interpreter().ending = true;
  // Not for ever: a callback of the user's may never return.
  if (interpreter().entered.try_lock_for(std::chrono::seconds(10))) interpreter().entered.unlock();
}

// ------------------------------------------------------------------------------------------------------------ the group

GroupState::~GroupState() {
  std::shared_lock<std::shared_timed_mutex> entered(interpreter().entered);
  for (auto& entry : works) {
    if (interpreter().ending) static_cast<void>(entry.second.release());  // the process ends; its memory goes with it
  }
}

void GroupState::fail(const std::string& reason) {
  std::vector<NeuronWork*> pending;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (closed || !failure.empty()) return;
    failure = reason;
    for (auto& entry : works) pending.push_back(entry.first);
  }
  failed.notify_all();
  if (link) link->fail();
  for (NeuronWork* work : pending) {
    c10::intrusive_ptr<NeuronWork> held;
    {
      std::lock_guard<std::mutex> lock(mutex);
      auto it = works.find(work);
      if (it != works.end()) held = it->second;
    }
    if (held) held->fail(reason);
  }
}

void GroupState::count(const char* name, const Tensors& inputs, const Tensors& outputs) {
  uint64_t bytes = 0;
  for (const auto& tensor : inputs.empty() ? outputs : inputs) bytes += tensor.nbytes();
  record_collective(name, inputs, outputs, ranks);
  std::lock_guard<std::mutex> lock(mutex);
  Traffic& counted = traffic[std::string_view(name).substr(std::string_view("neuron:").size()).data()];
  ++counted.calls;
  counted.bytes += bytes;
}

void GroupState::release_completed() {
  std::vector<c10::intrusive_ptr<NeuronWork>> released;  // destroyed without the lock: that may need the interpreter
  std::lock_guard<std::mutex> lock(mutex);
  std::erase_if(completed, [&](NeuronWork* work) {
    if (!work->can_be_released()) return false;
    auto it = works.find(work);
    released.push_back(std::move(it->second));
    works.erase(it);
    return true;
  });
}

// ------------------------------------------------------------------------------------------------------------- the work

NeuronWork::NeuronWork(
    std::shared_ptr<GroupState> group, c10d::OpType op, const char* name, const Tensors& inputs, Tensors outputs, std::optional<c10::Device> device)
    : Work(group->rank, op, name, inputs.empty() ? std::nullopt : std::make_optional(inputs)),
      group_(std::move(group)),
      name_(name),
      inputs_(inputs),
      outputs_(std::move(outputs)),
      future_(c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), device ? std::vector<c10::Device>{*device} : std::vector<c10::Device>{})) {}

void NeuronWork::enter() {
  group_->release_completed();
  std::lock_guard<std::mutex> lock(group_->mutex);
  group_->works.emplace(this, c10::intrusive_ptr<NeuronWork>::reclaim_copy(this));
}

void NeuronWork::follow(const std::vector<WorkPtr>& parts, Step finish) {
  finish_ = std::move(finish);
  enter();
  if (parts.empty()) return complete(nullptr);
  remaining_ = borrowers_ = parts.size();
  for (const auto& part : parts) {
    if (dynamic_cast<NeuronWork*>(part.get())) moved_by_waiters_ = group_->link != nullptr;
    part->getFuture()->addCallback([this, group = group_](c10::ivalue::Future& done) {
      if (done.hasError()) {
        if (!decided_) complete(explain(text_of(done.exception_ptr())));
      } else if (--remaining_ == 0) {
        complete(nullptr);
      }
      --borrowers_;
    }, /*uses_future=*/false);
  }
}

void NeuronWork::follow_transfer(WorkPtr transfer) {
  transfer_ = std::move(transfer);
  borrowers_ = 1;
  enter();
  std::thread([this, group = group_, transfer = transfer_] {
    std::exception_ptr error;
    try {
      transfer->wait();
      if (opType_ == c10d::OpType::RECVANYSOURCE) source_ = transfer->sourceRank();
    } catch (...) {
      error = explain(text_of(std::current_exception()));
    }
    complete(error);
    --borrowers_;
  }).detach();
}

Link::Done NeuronWork::follow_link(size_t parts, Step finish) {
  finish_ = std::move(finish);
  moved_by_waiters_ = true;
  remaining_ = borrowers_ = parts;
  enter();
  if (parts == 0) complete(nullptr);
  return [this, group = group_](const std::string& problem, int source) {
    if (!problem.empty()) {
      if (!decided_) complete(explain(problem));
      // The ranks no longer agree on what comes next.
      group->fail(group->calls.difference());
    } else if (--remaining_ == 0) {
      source_ = source;
      complete(nullptr);
    }
    --borrowers_;
  };
}

void NeuronWork::complete(std::exception_ptr error) {
  if (decided_.exchange(true)) return;
  if (!error && finish_) {
    try {
      at::AutoDispatchBelowADInplaceOrView guard;
      finish_();
    } catch (...) {
      error = std::current_exception();
    }
  }
  {
    std::shared_lock<std::shared_timed_mutex> entered(interpreter().entered);
    if (!interpreter().ending) {
      if (recordFunctionEndCallback_) std::exchange(recordFunctionEndCallback_, nullptr)();
      if (error) {
        future_->setErrorIfNeeded(error);
      } else {
        future_->markCompleted(outputs_);
      }
    }
  }
  const auto group = group_;  // this work may be gone before the bell rings
  {
    std::lock_guard<std::mutex> lock(group->mutex);
    group->completed.push_back(this);
  }
  {
    // A borrower keeps the work for itself; for others it may be gone as soon as it is completed and unlocked.
    std::lock_guard<std::mutex> lock(mutex_);
    exception_ = error;
    completed_ = true;
    cv_.notify_all();
    finished_ = true;
  }
  if (group->link) ring(own_bell());
}

bool NeuronWork::can_be_released() {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ && borrowers_ == 0;
}

void NeuronWork::fail(const std::string& reason) {
  complete(backend_error(c10::str(name_, " on rank ", group_->rank, " of ", group_->size, " failed: ", reason)));
  if (transfer_) transfer_->abort();  // last, for it wakes the thread that waits, to which an aborted transfer looks finished
}

bool NeuronWork::wait(Milliseconds timeout) {
  const auto start = std::chrono::steady_clock::now();
  const auto pause = [&] {
    run_signal_handlers();
    if (timeout > kNoTimeout && std::chrono::steady_clock::now() - start > timeout) {
      std::rethrow_exception(backend_error(c10::str(
          name_, " on rank ", group_->rank, " of ", group_->size, " did not finish in ", timeout.count(), " ms. ", group_->calls.difference())));
    }
  };
  if (moved_by_waiters_) Progress::instance().drive([this] { return finished_.load(std::memory_order_acquire); }, pause);
  std::unique_lock<std::mutex> lock(mutex_);
  while (!completed_) {
    if (cv_.wait_for(lock, Milliseconds(100)) == std::cv_status::timeout && !completed_) {
      lock.unlock();
      pause();
      lock.lock();
    }
  }
  const auto error = exception_;
  lock.unlock();
  group_->release_completed();
  if (error) std::rethrow_exception(error);
  return true;
}

// gloo says "connection closed", NeuronLink that a process has ended; who died is known a moment later from the group's failure.
std::exception_ptr NeuronWork::explain(const std::string& said) {
  std::unique_lock<std::mutex> lock(group_->mutex);
  group_->failed.wait_for(lock, Milliseconds(500), [this] { return !group_->failure.empty() || decided_; });
  std::string reason = group_->failure;
  lock.unlock();
  // Nobody died: the carrier could not make sense of what came, or nothing came in time.
  if (reason.empty() && !decided_) reason = c10::str(group_->calls.difference(), " (", moved_by_waiters_ ? "NeuronLink: " : "gloo: ", said, ")");
  return backend_error(c10::str(name_, " on rank ", group_->rank, " of ", group_->size, " failed: ", reason));
}

}  // namespace neuron
