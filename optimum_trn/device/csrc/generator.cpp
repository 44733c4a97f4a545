// Random numbers of a core: every operator draws from a temporary CPU generator keyed by (seed, offset).
#include "generator.h"

#include <cstring>
#include <mutex>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <ATen/EmptyTensor.h>

#include "device.h"

namespace neuron {

namespace {
constexpr size_t kStateBytes = 16;
// One operator moves the offset by one Philox counter of four numbers, the unit PyTorch's device generators keep offsets in
// (torch/distributed/tensor/_random.py rounds to it as well).
constexpr uint64_t kOffsetStep = 4;

// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
uint64_t split_mix(uint64_t& state) {
  uint64_t z = (state += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

struct NeuronGenerator final : c10::GeneratorImpl {
  explicit NeuronGenerator(int device)
      : GeneratorImpl({kNeuron, static_cast<c10::DeviceIndex>(device)}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  static c10::DeviceType device_type() { return kNeuron; }

  void set_current_seed(uint64_t value) override {
    seed_ = value;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t value) override { offset_ = value; }
  uint64_t get_offset() const override { return offset_; }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({kStateBytes}, at::kByte);
    auto* bytes = state.mutable_data_ptr<uint8_t>();
    std::memcpy(bytes, &seed_, 8);
    std::memcpy(bytes + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(
        state.numel() == int64_t(kStateBytes), "The state of a neuron generator is ", kStateBytes, " bytes (seed and offset), but got ", state.numel());
    const auto* bytes = static_cast<const uint8_t*>(state.data());
    std::memcpy(&seed_, bytes, 8);
    std::memcpy(&offset_, bytes + 8, 8);
  }

  at::mt19937 next_engine() {
    uint64_t key = seed_, counter = offset_;
    offset_ += kOffsetStep;
    // The seed is mixed before the offset is added, so that streams of neighbouring seeds and offsets do not meet.
    uint64_t state = split_mix(key) ^ counter;
    state = split_mix(state);
    at::mt19937_data_pod data{};
    data.seed_ = state;
    for (auto& word : data.state_) word = static_cast<uint32_t>(split_mix(state) >> 32);
    data.seeded_ = true;
    data.next_ = 0;
    data.left_ = 1;
    at::mt19937 engine;
    engine.set_data(data);
    return engine;
  }

 private:
  NeuronGenerator* clone_impl() const override {
    auto* copy = new NeuronGenerator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};
}  // namespace

at::Generator new_generator(int device) { return at::make_generator<NeuronGenerator>(device); }

const at::Generator& default_generator(int device) {
  static std::mutex mutex;
  static auto* generators = new std::vector<at::Generator>;
  std::lock_guard<std::mutex> lock(mutex);
  // All at once, so that the references handed out stay valid.
  if (generators->empty()) {
    const uint64_t seed = c10::detail::getNonDeterministicRandom();
    for (int i = 0; i < device_count(); ++i) {
      generators->push_back(new_generator(i));
      generators->back().set_current_seed(seed);
    }
  }
  return generators->at(device < 0 ? current_device() : device);
}

at::Generator draw(const at::Generator& generator) {
  auto* device = at::check_generator<NeuronGenerator>(generator);
  auto cpu = at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);
  std::lock_guard<std::mutex> lock(device->mutex_);
  at::check_generator<at::CPUGeneratorImpl>(cpu)->set_engine(device->next_engine());
  return cpu;
}

}  // namespace neuron
