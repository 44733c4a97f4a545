// What a core is asked to do between graph cuts: the operations of a thread, followed through the graphs that it has run before.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "entry.h"

namespace neuron {

// The graphs of a thread share their beginnings: each is a path from the root of a tree, and a step that repeats an earlier one walks
// the same path again. Only where it leaves all known paths is anything stored, and is Python asked which line of code that was.
class Recorder {
 public:
  // Of the calling thread.
  static Recorder& current();

  // The operation comes next.
  void add(const Entry& entry, int device);
  // What the operation that came last has made; kept the first time only.
  bool wants_results() const { return results_wanted_; }
  void add_results(const Entry& results, int device);

  // The graph ends here, if it has begun: its number, from 0, or -1.
  int64_t cut();
  // A value leaves the core for the host, which ends the graph.
  void read(const char* kind);

  // A tensor that came from the host. Operators may see it in another form: its shape is what explains them.
  void note_input(const at::Tensor& tensor);
  const std::vector<int64_t>* input_of(int64_t elements) const;  // the latest one of so many elements

  void begin_optimizer(bool begins) { in_optimizer_ = begins; }
  bool in_optimizer() const { return in_optimizer_; }
  uint64_t step = 0;  // optimizer steps finished

  struct Graph {
    uint32_t end;       // its last node
    uint32_t length;    // operations
    uint64_t runs = 0;
    uint64_t step;      // optimizer steps finished before it ran first
    std::string cause;  // what Python said where it left the known graphs; empty where that was its first operation ever
    bool ended_early;   // it is the beginning of a known graph
  };
  const std::vector<Graph>& graphs() const { return graphs_; }
  // The operations of a graph, first to last, as (entry, results, bytes live before, bytes live after).
  struct Operation {
    std::string_view entry, results;
    int64_t live_before, live_after;
  };
  std::vector<Operation> operations(const Graph& graph) const;
  uint32_t generation() const { return generation_; }  // how often all graphs were forgotten
  void forget();

 private:
  struct Node {
    uint32_t entry = 0, results = 0;  // into entries_
    uint32_t parent = 0, child = 0, sibling = 0;
    uint32_t graph = 0;  // number of the graph that ends here, from 1
    int64_t live_before = 0, live_after = 0;
  };
  uint32_t intern(std::string_view bytes);
  void leave(uint32_t expected, const Entry& entry);
  bool begins_a_graph(std::string_view entry) const;

  std::vector<Node> nodes_{1};  // the first is the root
  std::vector<std::string_view> entries_{std::string_view()};
  std::unordered_map<std::string, uint32_t> numbers_;
  std::vector<Graph> graphs_;
  std::unordered_map<int64_t, std::vector<int64_t>> inputs_;
  uint32_t at_ = 0, length_ = 0, generation_ = 0;
  bool left_known_ = false, results_wanted_ = false, in_optimizer_ = false;
  std::string cause_;
};

// Whether operations are recorded; they are unless OPTIMUM_TRN_RECORD=0, which benchmarks/recorder.py compares with.
bool recording();

// While one lives, the operators that its operator calls are part of it.
class Recording {
 public:
  Recording() : outermost_(depth_++ == 0 && recording()) {}
  ~Recording() { --depth_; }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  explicit operator bool() const { return outermost_; }

 private:
  static thread_local int depth_;
  const bool outermost_;
};

// An operation of some tensors and values.
void record(uint32_t name, std::initializer_list<std::reference_wrapper<const at::Tensor>> tensors, std::initializer_list<c10::IValue> values, int device);
void record_collective(const char* name, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs, const std::vector<int64_t>& ranks);

}  // namespace neuron
