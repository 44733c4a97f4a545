// Point-to-point transfers over NeuronLink: the sender posts where the data lies, the receiver copies it out.
#include <algorithm>
#include <cstring>

#include "neuronlink.h"
#include "neuronlink_layout.h"

namespace neuron {

void Link::send(at::Tensor data, int to, int tag, Clock::time_point deadline, Done done) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    transfers_.push_back({std::move(data), to, tag, true, deadline, std::move(done)});
  }
  Progress::instance().watch(shared_from_this(), true);
}

void Link::receive(at::Tensor data, int from, int tag, Clock::time_point deadline, Done done) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    transfers_.push_back({std::move(data), from, tag, false, deadline, std::move(done)});
  }
  Progress::instance().watch(shared_from_this(), true);
}

bool Link::advance_transfers(Progress::Outcomes& outcomes, Clock::time_point now) {
  bool moved = false;
  std::vector<const Transfer*> unmatched;  // receives of this pass
  std::unique_lock<std::mutex> lock(mutex_);
  // Only the thread that advances takes transfers out, so the iterators stay good while it is unlocked.
  for (auto it = transfers_.begin(); it != transfers_.end();) {
    Transfer& transfer = *it;
    lock.unlock();
    std::string problem;
    int source = transfer.peer;
    const bool posted = transfer.message != nullptr;
    // A message that arrives during this pass belongs to the first receive that it fits, which may just have looked in vain.
    const bool preceded = std::any_of(unmatched.begin(), unmatched.end(), [&](const Transfer* earlier) {
      return earlier->tag == transfer.tag && (earlier->peer == transfer.peer || earlier->peer < 0 || transfer.peer < 0);
    });
    bool finished = false;
    if (transfer.sends) {
      finished = advance_send(transfer, problem);
    } else if (!preceded) {
      finished = advance_receive(transfer, problem, source);
    }
    if (!transfer.sends && !finished) unmatched.push_back(&transfer);
    moved = moved || finished || posted != (transfer.message != nullptr);
    if (!finished) {
      problem = lost([&](int r) { return transfer.peer < 0 || r == transfer.peer; }, transfer.deadline, now);
      finished = !problem.empty();
    }
    if (finished) outcomes.push_back([done = std::move(transfer.done), problem, source] { done(problem, source); });
    lock.lock();
    if (!problem.empty()) {
      lock.unlock();
      fail();
      give_up();
      return true;
    }
    it = finished ? transfers_.erase(it) : std::next(it);
  }
  return moved;
}

bool Link::advance_send(Transfer& transfer, std::string& problem) {
  if (!transfer.message) {
    const uint64_t number = sent_[transfer.peer] + 1;
    Message& place = messages(rank_, transfer.peer)[number % kMessages];
    if (place.state.load(std::memory_order_acquire) != Message::kFree) return false;
    place.tag = transfer.tag;
    place.number = sent_[transfer.peer] = number;
    place.piece = piece(transfer.data);
    place.state.store(Message::kPosted, std::memory_order_release);
    transfer.message = &place;
    ring(peers_[transfer.peer]->bell());
  }
  const uint32_t state = transfer.message->state.load(std::memory_order_acquire);
  if (state == Message::kPosted) return false;
  if (state == Message::kRefused) problem = c10::str("rank ", transfer.peer, " expects another number of bytes than ", transfer.data.nbytes());
  transfer.message->state.store(Message::kFree, std::memory_order_release);
  return true;
}

bool Link::advance_receive(Transfer& transfer, std::string& problem, int& source) {
  Message* earliest = nullptr;
  // A message may be posted to a place that was looked at already, before one that is found further on. Messages are posted in
  // order: once one has been seen, a second look finds all that came before it.
  for (int look = 0; look == 0 || (look == 1 && earliest); ++look) {
    for (int from = 0; from < size_; ++from) {
      if (from == rank_ || (transfer.peer >= 0 && from != transfer.peer) || (earliest && from != source)) continue;
      for (Message* message = messages(from, rank_); message != messages(from, rank_) + kMessages; ++message) {
        if (message->state.load(std::memory_order_acquire) != Message::kPosted || message->tag != transfer.tag) continue;
        if (!earliest || message->number < earliest->number) earliest = message;
        source = from;
      }
    }
  }
  if (!earliest) return false;
  const Piece piece = earliest->piece;
  const bool fits = piece.bytes == transfer.data.nbytes();
  if (fits && piece.bytes != 0) std::memcpy(transfer.data.mutable_data_ptr(), address(source, piece), piece.bytes);
  if (!fits) problem = c10::str("rank ", source, " sends ", piece.bytes, " bytes, not ", transfer.data.nbytes());
  earliest->state.store(fits ? Message::kTaken : Message::kRefused, std::memory_order_release);
  ring(peers_[source]->bell());
  return true;
}

}  // namespace neuron
