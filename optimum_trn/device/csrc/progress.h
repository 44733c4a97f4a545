// Who moves collectives forward: a thread that waits for one, and otherwise one thread of the process.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace neuron {

class Link;

class Progress {
 public:
  using Outcomes = std::vector<std::function<void()>>;  // to be told once no lock is held

  static Progress& instance();

  // `link` has something under way. With `background` the process's thread sees to it; otherwise whoever waits does.
  void watch(const std::shared_ptr<Link>& link, bool background);
  // Moves everything forward on this thread until `done`. Calls `pause` every 50 ms that nothing moves; it may throw.
  void drive(const std::function<bool()>& done, const std::function<void()>& pause);
  // Ends the thread, which then never enters the interpreter again; what is under way moves only while somebody waits.
  void stop();

 private:
  Progress() = default;
  bool sweep();  // whether anything moved; sets crowded_
  void run();

  std::mutex driving_;  // held while links advance
  std::vector<std::shared_ptr<Link>> links_;
  std::mutex mutex_;    // for what follows
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Link>> arrived_;
  std::atomic<size_t> watched_{0};
  std::atomic<int> waiters_{0};
  std::atomic<bool> any_arrived_{false};
  std::atomic<bool> crowded_{false};  // a peer waits for this thread's core of the host
  bool started_ = false, stopping_ = false, stopped_ = false;
  int process_ = 0;
};

}  // namespace neuron
