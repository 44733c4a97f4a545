// Ranks publish their latest calls in the group's store once one of them fails; each compares what the others have published.
#include "call_log.h"

#include <chrono>
#include <map>
#include <sstream>
#include <thread>
#include <vector>

namespace neuron {

namespace {
constexpr size_t kKept = 64;
constexpr auto kPatience = std::chrono::seconds(3);  // for ranks whose own call fails a moment later

// Operators in which every rank gives as many elements as the others.
bool is_even(std::string_view name) {
  return name != "neuron:gather" && name != "neuron:scatter" && name != "neuron:all_gather" && name != "neuron:all_to_all" && name != "neuron:all_to_all_single" &&
      name != "neuron:all_gather_coalesced";
}

using Calls = std::map<uint64_t, std::string>;  // by number, from 1

Calls parse(const std::string& text) {
  Calls calls;
  std::istringstream lines(text);
  uint64_t number;
  for (std::string line; lines >> number && std::getline(lines.ignore(), line);) calls[number] = line;
  return calls;
}

std::string join(const std::vector<int>& ranks) {
  std::ostringstream text;
  text << (ranks.size() > 1 ? "ranks " : "rank ");
  for (size_t i = 0; i < ranks.size(); ++i) text << (i ? (i + 1 == ranks.size() ? " and " : ", ") : "") << ranks[i];
  return text.str();
}
}  // namespace

void CallLog::add(const char* name, const at::Tensor& tensor) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++count_;
  const bool sized = tensor.defined() && is_even(name);
  latest_.push_back({name, sized ? tensor.numel() : -1, sized ? tensor.scalar_type() : c10::ScalarType::Undefined, tensor.defined() && tensor.is_cpu()});
  if (latest_.size() > kKept) latest_.pop_front();
}

std::string CallLog::difference() {
  std::lock_guard<std::mutex> once(comparing_);
  if (!found_.empty()) return found_;
  std::ostringstream own;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t number = count_ - latest_.size();
    for (const Call& call : latest_) {
      own << ++number << ' ' << std::string_view(call.name).substr(std::string_view("neuron:").size());
      if (call.elements >= 0) own << " of " << call.elements << ' ' << c10::toString(call.type);
      if (call.on_host) own << " on the CPU";
      own << '\n';
    }
  }
  const auto key = [](int rank) { return "neuron/calls/" + std::to_string(rank); };
  std::map<int, Calls> calls;
  std::vector<int> silent;
  try {
    store_->set(key(rank_), own.str());
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    for (int rank = 0; rank < size_; ++rank) {
      while (!store_->check({key(rank)}) && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      if (store_->check({key(rank)})) {
        calls[rank] = parse(store_->get_to_str(key(rank)));
      } else {
        silent.push_back(rank);
      }
    }
  } catch (const std::exception&) {  // who kept the store has gone
    return found_ = "Not every rank called it.";
  }
  uint64_t first = 1, last = 0;
  for (const auto& [rank, log] : calls) {
    if (log.empty()) continue;
    first = std::max(first, log.begin()->first);
    last = std::max(last, log.rbegin()->first);
  }
  for (uint64_t number = first; number <= last; ++number) {
    std::map<std::string, std::vector<int>> by_call;
    for (const auto& [rank, log] : calls) by_call[log.contains(number) ? log.at(number) : "nothing more"].push_back(rank);
    if (by_call.size() < 2) continue;
    // The fewest first: most likely it is they who went astray.
    std::multimap<size_t, std::string> sides;
    for (const auto& [call, ranks] : by_call) sides.emplace(ranks.size(), join(ranks) + " called " + call);
    std::ostringstream text;
    text << "The ranks differ in call " << number << " of this group: ";
    for (auto side = sides.begin(); side != sides.end(); ++side) text << (side == sides.begin() ? "" : ", but ") << side->second;
    return found_ = text.str() + ". Every rank must make the same collectives in the same order.";
  }
  if (silent.empty()) return found_ = "All ranks called it.";
  return found_ = "It was not called by " + join(silent) + ", still at something else, in call " + std::to_string(last) + " of this group.";
}

}  // namespace neuron
