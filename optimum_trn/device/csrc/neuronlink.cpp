// Collectives over NeuronLink.
#include "neuronlink.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include <c10/util/Exception.h>

#include "allocator.h"
#include "copies.h"
#include "neuronlink_layout.h"
#include "reductions.h"

namespace neuron {

namespace {
using Kind = Collective::Kind;
constexpr int64_t kCopyBlock = 128 << 10;  // read from memory once, then written to every peer out of the cache
constexpr auto kLookAfter = std::chrono::milliseconds(20);

std::atomic<int> largest{1};

size_t post_bytes(int size) { return 64 + (sizeof(uint64_t) * 4 * size + 63) / 64 * 64; }
}  // namespace

// ------------------------------------------------------------------------------------------------------- shared memory

size_t Link::control_bytes(int size) {
  return size * (sizeof(Status) + kPosts * post_bytes(size)) + size_t(size) * size * kMessages * sizeof(Message);
}

int Link::largest_group() { return largest; }

Link::Link(int rank, int size, int device, int control, const std::vector<int>& hbm, const std::vector<int>& bells, const std::vector<int>& pidfds)
    : rank_(rank), size_(size), device_(device), peers_(size), sent_(size) {
  if (size > 1) {
    base_ = arena(device).base();
    control_ = map_shared(control, control_bytes_);
    close(control);
    TORCH_CHECK(control_bytes_ == control_bytes(size), "The control memory of a group of ", size, " ranks has ", control_bytes_, " bytes.");
    for (int r = 0; r < size; ++r) {
      if (r != rank) peers_[r] = Peer::map(hbm[r], bells[r], pidfds[r]);
    }
  } else {
    control_bytes_ = control_bytes(size);
    void* memory = mmap(nullptr, control_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "Out of memory.");
    control_ = static_cast<char*>(memory);
  }
  for (int known = largest; known < size && !largest.compare_exchange_weak(known, size);) {
  }
}

Link::~Link() { munmap(control_, control_bytes_); }

Link::Status& Link::status(int rank) const { return reinterpret_cast<Status*>(control_)[rank]; }

Link::Post& Link::post(int rank, uint64_t number) const {
  char* first = control_ + size_ * sizeof(Status);
  return *reinterpret_cast<Post*>(first + (rank * kPosts + number % kPosts) * post_bytes(size_));
}

Link::Message* Link::messages(int from, int to) const {
  char* first = control_ + size_ * (sizeof(Status) + kPosts * post_bytes(size_));
  return reinterpret_cast<Message*>(first) + (size_t(from) * size_ + to) * kMessages;
}

bool Link::shares(const at::Tensor& alias) const {
  return size_ == 1 || alias.numel() == 0 || arena_of(alias.const_data_ptr()) == existing_arena(device_);
}

Link::Piece Link::piece(const at::Tensor& alias) const {
  if (!alias.defined() || alias.numel() == 0) return {0, 0};
  return {static_cast<uint64_t>(reinterpret_cast<uintptr_t>(alias.const_data_ptr()) - reinterpret_cast<uintptr_t>(base_)), alias.nbytes()};
}

char* Link::address(int rank, const Piece& piece) const {
  return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(base(rank)) + piece.offset);
}

void Link::ring_all() const {
  for (const auto& peer : peers_) {
    if (peer) ring(peer->bell());
  }
}

// ------------------------------------------------------------------------------------------------------------- starting

void Link::submit(Collective collective, Clock::time_point deadline, Done done, bool background) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::make_shared<Pending>(Pending{std::move(collective), ++submitted_, deadline, std::move(done)}));
    post_what_fits();
  }
  Progress::instance().watch(shared_from_this(), background);
}

void Link::post_what_fits() {
  const uint64_t before = posted_;
  for (; posted_ < submitted_; ++posted_) {
    const uint64_t number = posted_ + 1;
    // The place in the ring is free once everybody has done with what it held.
    bool free = true;
    for (int r = 0; r < size_ && number > kPosts; ++r) free = free && status(r).done.load(std::memory_order_acquire) >= number - kPosts;
    if (!free) break;
    write_post(*queue_[queue_.size() - (submitted_ - posted_)]);
    status(rank_).posted.store(number, std::memory_order_release);
  }
  if (posted_ != before) ring_all();
}

void Link::write_post(const Pending& pending) {
  const Collective& c = pending.collective;
  status(rank_).core.store(sched_getcpu(), std::memory_order_relaxed);
  Post& mine = post(rank_, pending.number);
  mine.kind = static_cast<uint32_t>(c.kind);
  mine.op = static_cast<uint32_t>(c.op);
  mine.type = static_cast<uint32_t>(c.type);
  mine.root = c.root;
  for (int q = 0; q < size_; ++q) {
    mine.sends()[q] = piece(q < static_cast<int>(c.sends.size()) ? c.sends[q] : at::Tensor());
    mine.sends()[size_ + q] = piece(q < static_cast<int>(c.receives.size()) ? c.receives[q] : at::Tensor());
  }
}

void Link::fail() {
  if (failed_.exchange(true)) return;
  status(rank_).failed.store(1, std::memory_order_release);
  ring_all();
  if (size_ > 1) ring(own_bell());
}

bool Link::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && transfers_.empty();
}

bool Link::shares_core() const {
  const int core = sched_getcpu();
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && status(r).core.load(std::memory_order_relaxed) == core) return true;
  }
  return false;
}

// ------------------------------------------------------------------------------------------------------------ advancing

bool Link::advance(Progress::Outcomes& outcomes, Clock::time_point now) {
  if (failed_) {
    give_up();
    return true;
  }
  bool moved = advance_collectives(outcomes, now);
  moved = advance_transfers(outcomes, now) || moved;
  if (now - looked_ > kLookAfter) looked_ = now;
  return moved;
}

bool Link::advance_collectives(Progress::Outcomes& outcomes, Clock::time_point now) {
  const auto all = [this](std::atomic<uint64_t> Status::*counter, uint64_t number) {
    for (int r = 0; r < size_; ++r) {
      if ((status(r).*counter).load(std::memory_order_acquire) < number) return false;
    }
    return true;
  };
  bool moved = false;
  while (true) {
    std::shared_ptr<Pending> head;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (queue_.empty()) return moved;
      if (posted_ < submitted_) post_what_fits();
      head = queue_.front();
    }
    std::string problem;
    if (!head->performed && all(&Status::posted, head->number)) {
      problem = disagreement(*head);
      if (problem.empty()) {
        perform(*head);
        head->performed = moved = true;
        status(rank_).core.store(sched_getcpu(), std::memory_order_relaxed);
        status(rank_).done.store(head->number, std::memory_order_release);
        ring_all();
      }
    }
    const bool finished = head->performed && all(&Status::done, head->number);
    if (!finished && problem.empty()) {
      const auto counter = head->performed ? &Status::done : &Status::posted;
      problem = lost([&](int r) { return (status(r).*counter).load(std::memory_order_acquire) < head->number; }, head->deadline, now);
      if (problem.empty()) return moved;
    }
    outcomes.push_back([done = std::move(head->done), problem] { done(problem, -1); });
    if (!problem.empty()) {
      fail();
      give_up();
      return true;
    }
    moved = true;
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.pop_front();
  }
}

// Why something cannot finish that waits for the ranks which `concerns` says: one has died, given up, or is too late.
std::string Link::lost(const std::function<bool(int)>& concerns, Clock::time_point deadline, Clock::time_point now) const {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || !concerns(r)) continue;
    // What a rank did before it failed or ended still counts, hence the second look.
    if (status(r).failed.load(std::memory_order_acquire) && concerns(r)) return c10::str("rank ", r, " gave up");
    if (now - looked_ > kLookAfter && !peers_[r]->alive() && concerns(r)) return c10::str("the process of rank ", r, " has ended");
  }
  return now > deadline ? "it took longer than the group's timeout" : "";
}

void Link::give_up() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& pending : queue_) {
    for (auto* list : {&pending->collective.sends, &pending->collective.receives}) kept_.insert(kept_.end(), list->begin(), list->end());
  }
  for (auto& transfer : transfers_) kept_.push_back(transfer.data);
  queue_.clear();
  transfers_.clear();
}

// Where another rank's post does not fit this one's.
std::string Link::disagreement(const Pending& pending) const {
  Post& mine = post(rank_, pending.number);
  const Piece* sends = mine.sends();
  const Piece* receives = sends + size_;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    if (status(r).failed.load(std::memory_order_acquire)) return c10::str("rank ", r, " gave up");
    Post& other = post(r, pending.number);
    if (other.kind != mine.kind || other.op != mine.op || other.type != mine.type || other.root != mine.root) {
      return c10::str("rank ", r, " called something else");
    }
    const Piece* theirs = other.sends();
    switch (pending.collective.kind) {
      case Kind::kBarrier:
        break;
      case Kind::kPush:
      case Kind::kPull:
        for (const auto& [from, sent, to, expected] : {std::tuple(rank_, sends[r].bytes, r, theirs[size_ + rank_].bytes), std::tuple(r, theirs[rank_].bytes, rank_, receives[r].bytes)}) {
          if (sent != expected) return c10::str("rank ", from, " sends ", sent, " bytes to rank ", to, ", which expects ", expected);
        }
        break;
      case Kind::kAllReduce:
      case Kind::kReduce:
        if (theirs[0].bytes != sends[0].bytes) return c10::str("rank ", r, " reduces ", theirs[0].bytes, " bytes, rank ", rank_, " ", sends[0].bytes);
        break;
      case Kind::kReduceScatter:
        for (int q = 0; q < size_; ++q) {
          if (theirs[q].bytes != sends[q].bytes) {
            return c10::str("for rank ", q, " rank ", r, " brings ", theirs[q].bytes, " bytes, rank ", rank_, " ", sends[q].bytes);
          }
        }
        break;
    }
  }
  return "";
}

void Link::perform(const Pending& pending) const {
  switch (pending.collective.kind) {
    case Kind::kBarrier:
      return;
    case Kind::kPush:
    case Kind::kPull:
      return move(pending);
    default:
      return reduce_slices(pending);
  }
}

void Link::move(const Pending& pending) const {
  Post& mine = post(rank_, pending.number);
  const Piece* sends = mine.sends();
  const Piece* receives = sends + size_;
  const bool pulls = pending.collective.kind == Kind::kPull;
  size_t total = 0, longest = 0;
  for (int r = 0; r < size_; ++r) {
    const size_t bytes = (pulls ? receives : sends)[r].bytes;
    total += bytes;
    longest = std::max(longest, bytes);
  }
  const bool streaming = total >= kStreamFrom;
  if (pulls) {
    for (int step = 0; step < size_; ++step) {
      const int from = (rank_ + step) % size_;  // not all from the same rank at once
      copy(address(rank_, receives[from]), address(from, post(from, pending.number).sends()[rank_]), receives[from].bytes, streaming);
    }
    finish_streaming();
    return;
  }
  const auto target = [&](int to) { return address(to, to == rank_ ? receives[rank_] : post(to, pending.number).sends()[size_ + rank_]); };
  for (size_t start = 0; start < longest; start += kCopyBlock) {
    for (int step = 0; step < size_; ++step) {
      const int to = (rank_ + step) % size_;
      if (start >= sends[to].bytes) continue;
      copy(target(to) + start, address(rank_, sends[to]) + start, std::min<size_t>(kCopyBlock, sends[to].bytes - start), streaming);
    }
  }
  finish_streaming();
}

void Link::reduce_slices(const Pending& pending) const {
  const Collective& c = pending.collective;
  const bool scatters = c.kind == Kind::kReduceScatter;
  const size_t item = c10::elementSize(c.type);
  Post& mine = post(rank_, pending.number);
  size_t start = 0, bytes = mine.sends()[scatters ? rank_ : 0].bytes;
  const bool streaming = bytes * (scatters ? size_ : 1) >= kStreamFrom;
  if (!scatters) {  // this rank's share of the whole: full cache lines, so that no two ranks write to the same one
    const size_t share = (bytes / size_ + 63) / 64 * 64;
    start = std::min(bytes, share * rank_);
    bytes = rank_ + 1 == size_ ? bytes - start : std::min(share, bytes - start);
  }
  if (bytes == 0) return;
  std::vector<const char*> inputs;
  std::vector<char*> outputs;
  for (int r = 0; r < size_; ++r) {
    const Piece* sends = post(r, pending.number).sends();
    inputs.push_back(address(r, sends[scatters ? rank_ : 0]) + start);
    const bool receives = c.kind == Kind::kAllReduce || (c.kind == Kind::kReduce ? r == c.root : r == rank_);
    if (receives) outputs.push_back(address(r, sends[size_]) + start);
  }
  const bool average = c.op == c10d::ReduceOp::AVG;
  reduce(c.type, average ? c10d::ReduceOp::SUM : c.op, inputs, outputs, static_cast<int64_t>(bytes / item), average ? size_ : 1, streaming);
}

}  // namespace neuron
