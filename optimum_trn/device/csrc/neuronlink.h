// NeuronLink: collectives and transfers between processes of one host, which read and write each other's HBM.
//
// A collective has three steps on every rank. It posts where its data lies; when all have posted, it does its share, a slice of a
// reduction or its own copies, straight between the tensors; when all have done theirs, nobody reads or writes this rank's
// tensors any more and it is finished. Every element is computed by one rank, in rank order, and written to all: the results are
// the same bits everywhere, no scratch memory is needed, and one pass over memory suffices at any size.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "peer.h"
#include "progress.h"

namespace neuron {

// What one rank brings to a collective. Tensors are contiguous aliases on the CPU of HBM that the link shares.
struct Collective {
  // kPush and kPull move sends[q] to receives[this rank] of rank q; what is pushed, its sender copies, otherwise its receiver does.
  // The reductions have one send and one receive, except kReduceScatter: sends[q] is the part that rank q keeps.
  enum class Kind : uint32_t { kBarrier, kPush, kPull, kAllReduce, kReduce, kReduceScatter };
  Kind kind = Kind::kBarrier;
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM;  // or AVG, of floats
  c10::ScalarType type = c10::ScalarType::Byte;
  int root = -1;
  std::vector<at::Tensor> sends, receives;  // undefined where there is nothing
};

class Link : public std::enable_shared_from_this<Link> {
 public:
  using Clock = std::chrono::steady_clock;
  // Called once: with what went wrong, or an empty text, and with the rank that a transfer came from.
  using Done = std::function<void(const std::string& problem, int source)>;

  // `control` is the group's shared memory of control_bytes(size) bytes; hbm, bells and pidfds hold a descriptor per rank, -1 for
  // this one. Takes over all of them. A group of one rank has none.
  Link(int rank, int size, int device, int control, const std::vector<int>& hbm, const std::vector<int>& bells, const std::vector<int>& pidfds);
  ~Link();
  static size_t control_bytes(int size);
  static int largest_group();

  int device() const { return device_; }
  bool shares(const at::Tensor& alias) const;  // whether the peers can reach its memory

  void submit(Collective collective, Clock::time_point deadline, Done done, bool background);
  void send(at::Tensor data, int to, int tag, Clock::time_point deadline, Done done);
  void receive(at::Tensor data, int from, int tag, Clock::time_point deadline, Done done);  // from any rank: -1
  // Nothing more will finish, here or on the peers. What is under way is kept, for a peer may be in the middle of writing to it.
  void fail();

  // For Progress: move what can be moved now; whether anything did.
  bool advance(Progress::Outcomes& outcomes, Clock::time_point now);
  bool idle();
  // Whether a peer last ran on the very core of the host that this thread runs on: it cannot go on while this one spins.
  bool shares_core() const;
  std::atomic<bool> watched{false};

 private:
  struct Status;
  struct Piece;
  struct Post;
  struct Message;
  struct Pending {
    Collective collective;
    uint64_t number = 0;  // of the group's collectives, from 1
    Clock::time_point deadline;
    Done done;
    bool performed = false;
  };
  struct Transfer {
    at::Tensor data;
    int peer, tag;
    bool sends;
    Clock::time_point deadline;
    Done done;
    Message* message = nullptr;  // a send that is posted
  };

  Status& status(int rank) const;
  Post& post(int rank, uint64_t number) const;
  Message* messages(int from, int to) const;  // kMessages of them

  char* base(int rank) const { return peers_[rank] ? peers_[rank]->hbm() : base_; }
  char* address(int rank, const Piece& piece) const;
  Piece piece(const at::Tensor& alias) const;

  void post_what_fits();
  void write_post(const Pending& pending);
  std::string disagreement(const Pending& pending) const;
  void perform(const Pending& pending) const;
  void move(const Pending& pending) const;
  void reduce_slices(const Pending& pending) const;
  bool advance_collectives(Progress::Outcomes& outcomes, Clock::time_point now);

  bool advance_transfers(Progress::Outcomes& outcomes, Clock::time_point now);
  bool advance_send(Transfer& transfer, std::string& problem);
  bool advance_receive(Transfer& transfer, std::string& problem, int& source);

  std::string lost(const std::function<bool(int)>& concerns, Clock::time_point deadline, Clock::time_point now) const;
  void give_up();
  void ring_all() const;

  const int rank_, size_, device_;
  char* base_ = nullptr;  // of this rank's HBM
  char* control_ = nullptr;
  size_t control_bytes_ = 0;
  std::vector<std::shared_ptr<Peer>> peers_;
  std::atomic<bool> failed_{false};
  Clock::time_point looked_{};  // when the peers were last seen alive

  std::mutex mutex_;  // for the queues
  std::deque<std::shared_ptr<Pending>> queue_;
  std::list<Transfer> transfers_;
  uint64_t submitted_ = 0, posted_ = 0;
  std::vector<uint64_t> sent_;  // to each rank
  std::vector<at::Tensor> kept_;  // of what was under way when the link failed
};

}  // namespace neuron
