// Stochastic rounding, seeded: the noise of an element follows from the seed, the rounding's number in the process and the
// element's place, so that ranks that compute the same round the same.
#include "rounding.h"

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <unordered_set>

#include <ATen/ops/empty_like.h>

namespace neuron {

namespace {
struct Rounding {
  std::atomic<bool> enabled;
  std::atomic<uint64_t> seed;
  std::atomic<uint64_t> count{0};
  Rounding() {
    const char* on = std::getenv("NEURON_RT_STOCHASTIC_ROUNDING_EN");
    const char* value = std::getenv("NEURON_RT_STOCHASTIC_ROUNDING_SEED");
    enabled = on && std::string_view(on) == "1";
    seed = value ? std::strtoull(value, nullptr, 10) : 0;
  }
};

Rounding& state() {
  static auto* rounding = new Rounding;
  return *rounding;
}

// SplitMix64's output function (Steele, Lea, Flood, OOPSLA 2014) of a counter.
uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

c10::BFloat16 to_bfloat16(float value, uint32_t noise) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return c10::BFloat16(value);  // infinite, or not a number
  return c10::BFloat16(static_cast<uint16_t>((bits + (noise & 0xffffu)) >> 16), c10::BFloat16::from_bits());
}

c10::Half to_half(float value, uint32_t noise) {
  const float size = std::fabs(value);
  if (!(size < 65504.f)) return c10::Half(value);
  if (size < 0x1p-14f) {  // below the normal numbers of float16 the neighbours are 2^-24 apart
    const float steps = size * 0x1p24f, floor = std::floor(steps);
    const float rounded = (floor + (static_cast<float>(noise & 0xffffu) < (steps - floor) * 0x1p16f ? 1.f : 0.f)) * 0x1p-24f;
    return c10::Half(std::copysign(rounded, value));
  }
  const uint32_t bits = std::bit_cast<uint32_t>(value) + (noise & 0x1fffu);
  return c10::Half(std::bit_cast<float>(bits & ~0x1fffu));
}

template <class Narrow, class Round>
void round_all(const float* from, Narrow* to, int64_t count, Round round) {
  Rounding& rounding = state();
  const uint64_t stream = mix(rounding.seed + 0x9e3779b97f4a7c15 * ++rounding.count);
  for (int64_t i = 0; i < count; i += 4) {  // 16 bits of noise an element
    uint64_t noise = mix(stream + 0x9e3779b97f4a7c15 * static_cast<uint64_t>(i));
    for (int64_t j = i; j < std::min(i + 4, count); ++j, noise >>= 16) to[j] = round(from[j], static_cast<uint32_t>(noise));
  }
}
}  // namespace

bool rounds_stochastically() { return state().enabled.load(std::memory_order_relaxed); }

void set_stochastic_rounding(bool enabled, uint64_t seed) {
  state().seed = seed;
  state().count = 0;
  state().enabled = enabled;
}

bool is_arithmetic(std::string_view name) {
  static const auto* names = new std::unordered_set<std::string_view>{
      "add",  "sub",   "rsub",    "mul",        "div",  "addmm", "mm",   "bmm",     "baddbmm", "addbmm",        "addmv",
      "mv",   "dot",   "linear",  "addcmul",    "addcdiv", "lerp", "sqrt", "rsqrt",   "reciprocal", "pow",        "exp",
      "log",  "tanh",  "sigmoid", "silu",       "gelu", "sum",   "mean", "cumsum",  "_softmax", "_log_softmax", "silu_backward",
      "gelu_backward", "tanh_backward", "sigmoid_backward", "_softmax_backward_data", "_log_softmax_backward_data"};
  if (name.starts_with("_foreach_") || name.starts_with("_fused_")) return true;
  if (name.ends_with('_')) name.remove_suffix(1);
  return names->contains(name);
}

void round_stochastically(const at::Tensor& wide, const at::Tensor& narrow) {
  const bool same_order = narrow.is_non_overlapping_and_dense() && wide.strides() == narrow.strides();
  const at::Tensor from = same_order ? wide : wide.contiguous();
  const at::Tensor to = same_order ? narrow : at::empty_like(narrow, at::MemoryFormat::Contiguous);
  const auto* elements = static_cast<const float*>(from.const_data_ptr());
  if (narrow.scalar_type() == at::kBFloat16) {
    round_all(elements, static_cast<c10::BFloat16*>(to.mutable_data_ptr()), from.numel(), to_bfloat16);
  } else {
    round_all(elements, static_cast<c10::Half*>(to.mutable_data_ptr()), from.numel(), to_half);
  }
  if (!same_order) narrow.copy_(to);
}

}  // namespace neuron
