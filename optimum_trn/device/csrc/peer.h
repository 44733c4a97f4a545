// Another process of this host as NeuronLink sees it: its HBM mapped here, the bell that wakes it, and whether it lives.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

namespace neuron {

// One word in shared memory per process; whoever changes what the process may be waiting for rings it.
struct Bell {
  std::atomic<uint32_t> rings{0};
  std::atomic<uint32_t> sleepers{0};
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

Bell& own_bell();
int own_bell_fd();
void ring(Bell& bell);
// Returns when the bell has rung since it stood at `seen`, or after `longest`.
void sleep_until_rung(Bell& bell, uint32_t seen, std::chrono::milliseconds longest);

// A shared mapping of a whole file; the descriptor may be closed afterwards.
char* map_shared(int fd, size_t& bytes);

class Peer {
 public:
  // Takes over the three descriptors. Groups that share a peer share its mappings.
  static std::shared_ptr<Peer> map(int hbm_fd, int bell_fd, int pidfd);
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  char* hbm() const { return hbm_; }
  Bell& bell() const { return *bell_; }
  bool alive() const;

 private:
  Peer() = default;
  char* hbm_ = nullptr;
  size_t hbm_bytes_ = 0, bell_bytes_ = 0;
  Bell* bell_ = nullptr;
  int pidfd_ = -1;
};

}  // namespace neuron
