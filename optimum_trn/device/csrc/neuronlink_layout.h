// A group's control memory, as all of its ranks see it: zeros at first, then written by one rank each and read by the others.
#pragma once

#include <atomic>
#include <cstdint>

#include "neuronlink.h"

namespace neuron {

constexpr uint64_t kPosts = 8;      // collectives that a rank may post ahead of the slowest
constexpr uint64_t kMessages = 32;  // transfers under way from one rank to another

struct alignas(64) Link::Status {
  std::atomic<uint64_t> posted;  // this rank's posts up to this number can be read
  std::atomic<uint64_t> done;    // this rank has done its share of the collectives up to this number
  std::atomic<uint32_t> failed;  // it will do nothing more
  std::atomic<int32_t> core;     // of the host, that it last ran on
};

// Bytes from the start of the HBM of the rank that posts them.
struct Link::Piece {
  uint64_t offset, bytes;
};

// Followed by a piece to send to, and one to receive from, each rank.
struct alignas(64) Link::Post {
  uint32_t kind, op, type;
  int32_t root;
  Piece* sends() { return reinterpret_cast<Piece*>(this + 1); }
};

struct alignas(64) Link::Message {
  enum State : uint32_t { kFree, kPosted, kTaken, kRefused };
  std::atomic<uint32_t> state;
  int32_t tag;
  uint64_t number;
  Piece piece;
};

}  // namespace neuron
