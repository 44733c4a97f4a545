// The handle of one operation of a group, and what the operations of a group share.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "call_log.h"
#include "neuronlink.h"

namespace neuron {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Milliseconds = std::chrono::milliseconds;
using Step = std::function<void()>;

class NeuronWork;

// It may outlive the group. A work owns tensors, and those may own Python objects. A thread that gives one up needs the interpreter, and
// one that asks for it while the process ends is killed on the spot, which aborts the process. So the threads that complete works
// only borrow them: the state owns them, and threads that call the group let go of what is completed.
struct GroupState {
  ~GroupState();
  const int rank;
  const int size;
  const std::shared_ptr<Link> link;  // null where gloo carries everything
  std::mutex mutex;
  std::condition_variable failed;
  std::string failure;
  bool closed = false;  // the group is gone
  CallLog calls;
  std::unordered_map<NeuronWork*, c10::intrusive_ptr<NeuronWork>> works;  // until completed, and then until the next call
  std::vector<NeuronWork*> completed;
  struct Traffic {
    uint64_t calls = 0, bytes = 0;
  };
  std::vector<int64_t> ranks;              // of the members in the world; what the recorder shows
  std::map<std::string, Traffic> traffic;  // by operator; the bytes that this rank gave, or received where it gave none

  GroupState(int rank_, int size_, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Link> link_)
      : rank(rank_), size(size_), link(std::move(link_)), calls(rank_, size_, std::move(store)) {}

  // Every pending and every later operation raises DistBackendError with this reason.
  void fail(const std::string& reason);
  void count(const char* name, const Tensors& inputs, const Tensors& outputs);
  // Let go of works that have completed. For threads of the user only.
  void release_completed();
};

class NeuronWork final : public c10d::Work {
 public:
  NeuronWork(
      std::shared_ptr<GroupState> group, c10d::OpType op, const char* name, const Tensors& inputs, Tensors outputs, std::optional<c10::Device> device);

  // Complete when all of `parts` have, then run `finish` on the thread that saw the last of them.
  void follow(const std::vector<WorkPtr>& parts, Step finish);
  // gloo's point-to-point works have no future: a thread waits for this one.
  void follow_transfer(WorkPtr transfer);
  // Complete when as many parts as that, which the link carries, have called the function that this returns.
  Link::Done follow_link(size_t parts, Step finish);

  void fail(const std::string& reason);

  bool wait(Milliseconds timeout) override;
  bool isCompleted() override { return finished_; }
  bool can_be_released();
  void synchronize() override {}
  void blockCurrentStream() override { wait(kNoTimeout); }
  void abort() override { fail("it was aborted."); }
  int sourceRank() const override { return source_; }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  void enter();
  // The first call counts: success, an error, or the group's failure.
  void complete(std::exception_ptr error);
  std::exception_ptr explain(const std::string& said);

  const std::shared_ptr<GroupState> group_;
  const char* const name_;
  const Tensors inputs_, outputs_;  // held, or a thread of the carrier could be the last to let go of them
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  WorkPtr transfer_;
  Step finish_;
  std::atomic<size_t> remaining_{0};
  std::atomic<size_t> borrowers_{0};  // callbacks and threads that will still look at this
  std::atomic<bool> decided_{false}, finished_{false};
  bool moved_by_waiters_ = false;
  int source_ = -1;
};

std::exception_ptr backend_error(const std::string& message);
// The interpreter is about to end: from now on no thread of ours enters it. Waits for those that are in it.
void leave_interpreter();

}  // namespace neuron
