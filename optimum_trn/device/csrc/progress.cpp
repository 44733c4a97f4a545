// Advances links in turn; waits by spinning, then yielding, then sleeping until a peer rings this process's bell.
#include "progress.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "neuronlink.h"
#include "peer.h"

namespace neuron {

namespace {
constexpr auto kSleep = std::chrono::milliseconds(50);  // deaths and deadlines are looked at this often
// Spinning must outlast a peer's waking up, or two ranks that both fell asleep once would keep waking each other for ever.
constexpr auto kSpin = std::chrono::microseconds(120);
constexpr int kYields = 40;  // turns of the other processes

int cores() {
  static const int count = [] {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(CPU_COUNT(&set), 1) : 1;
  }();
  return count;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}
}  // namespace

// Never destroyed: groups may outlive static destruction.
Progress& Progress::instance() {
  static auto* instance = new Progress;
  return *instance;
}

void Progress::watch(const std::shared_ptr<Link>& link, bool background) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!link->watched.exchange(true)) {
    arrived_.push_back(link);
    any_arrived_ = true;
    ++watched_;
  }
  if (!background || stopped_) return;
  if (!started_) {
    started_ = true;
    process_ = getpid();
    std::thread([this] { run(); }).detach();
  }
  if (waiters_ == 0) {
    changed_.notify_one();
    ring(own_bell());  // the thread may be asleep over another link
  }
}

bool Progress::sweep() {
  Outcomes outcomes;
  bool moved = false, crowded = false;
  {
    std::lock_guard<std::mutex> driving(driving_);
    if (any_arrived_) {
      std::lock_guard<std::mutex> lock(mutex_);
      links_.insert(links_.end(), arrived_.begin(), arrived_.end());
      arrived_.clear();
      any_arrived_ = false;
    }
    const auto now = std::chrono::steady_clock::now();
    for (auto& link : links_) {
      moved = link->advance(outcomes, now) || moved;
      if (!link->idle()) {
        crowded = crowded || link->shares_core();
        continue;
      }
      link->watched = false;
      // Something may have been submitted in between; then it is watched again, here or by who submitted it.
      if (link->idle() || link->watched.exchange(true)) {
        link.reset();
        --watched_;
      }
    }
    std::erase(links_, nullptr);
    crowded_ = crowded;
  }
  for (auto& outcome : outcomes) outcome();
  return moved;
}

void Progress::drive(const std::function<bool()>& done, const std::function<void()>& pause) {
  struct Waiting {
    Progress& progress;
    explicit Waiting(Progress& p) : progress(p) { ++progress.waiters_; }
    ~Waiting() {
      if (--progress.waiters_ == 0 && progress.watched_ > 0) {
        std::lock_guard<std::mutex> lock(progress.mutex_);
        progress.changed_.notify_one();
      }
    }
  } waiting(*this);
  const bool oversubscribed = Link::largest_group() > cores();
  auto moved = Link::Clock::now();
  for (int yields = 0; !done();) {
    const uint32_t seen = own_bell().rings.load(std::memory_order_seq_cst);
    if (sweep()) {
      yields = 0;
      moved = Link::Clock::now();
    } else if (!oversubscribed && !crowded_ && Link::Clock::now() - moved < kSpin) {
      relax();
    } else if (oversubscribed && ++yields <= kYields) {
      sched_yield();
    } else if (!done()) {
      sleep_until_rung(own_bell(), seen, kSleep);
      pause();
    }
  }
}

void Progress::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || (watched_ > 0 && waiters_ == 0); });
    if (stopping_) break;
    lock.unlock();
    // Never spins: the core belongs to who computes.
    const uint32_t seen = own_bell().rings.load(std::memory_order_seq_cst);
    if (!sweep() && waiters_ == 0) sleep_until_rung(own_bell(), seen, kSleep);
    lock.lock();
  }
  stopped_ = true;
  changed_.notify_all();
}

void Progress::stop() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!started_ || stopped_ || process_ != getpid()) {  // a forked child has no such thread
    stopped_ = true;
    return;
  }
  stopping_ = true;
  changed_.notify_all();
  ring(own_bell());
  // Not for ever: a callback of the user's may never return.
  changed_.wait_for(lock, std::chrono::seconds(10), [this] { return stopped_; });
}

}  // namespace neuron
