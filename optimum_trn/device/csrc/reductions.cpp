// Reductions in blocks that stay in the first-level cache, compiled for several instruction sets and chosen when loaded.
#include "reductions.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include "copies.h"

// A resolver in the library picks the best clone once; elsewhere the compiler's baseline has to do (aarch64: NEON).
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
#define INLINE inline __attribute__((always_inline))

namespace neuron {

namespace {
using Op = c10d::ReduceOp::RedOpType;
constexpr int64_t kBlockBytes = 8192;

// bfloat16 by its bits: conversions without branches, which compilers turn into vector code.
struct Brain {
  uint16_t bits;
};

template <class T>
struct Accumulator {
  using Type = T;
};
template <>
struct Accumulator<Brain> {
  using Type = float;
};
template <>
struct Accumulator<c10::Half> {
  using Type = float;
};

template <class A, class T>
INLINE A widen(T value) {
  if constexpr (std::is_same_v<T, Brain>) {
    return std::bit_cast<float>(uint32_t(value.bits) << 16);
  } else {
    return static_cast<A>(value);
  }
}

template <class T, class A>
INLINE T narrow(A value) {
  if constexpr (std::is_same_v<T, Brain>) {  // to nearest, ties to even; a NaN stays one
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
  } else {
    return static_cast<T>(value);
  }
}

// MIN and MAX of a NaN are NaN, as torch.amin and torch.amax have it.
template <Op op, class A>
INLINE A combine(A a, A b) {
  if constexpr (op == Op::SUM) {
    return static_cast<A>(a + b);
  } else if constexpr (op == Op::PRODUCT) {
    return static_cast<A>(a * b);
  } else if constexpr (op == Op::MIN) {
    return (a < b) | (a != a) ? a : b;
  } else if constexpr (op == Op::MAX) {
    return (a > b) | (a != a) ? a : b;
  } else if constexpr (op == Op::BAND) {
    return static_cast<A>(a & b);
  } else if constexpr (op == Op::BOR) {
    return static_cast<A>(a | b);
  } else {
    return static_cast<A>(a ^ b);
  }
}

struct Slices {
  const std::vector<const char*>& inputs;
  const std::vector<char*>& outputs;
  int64_t count;
  int divisor;
  std::vector<bool> streamed;  // by output
};

template <class T, Op op>
INLINE void run(const Slices& slices) {
  using A = typename Accumulator<T>::Type;
  constexpr int64_t kBlock = kBlockBytes / sizeof(A);
  alignas(64) A sum[kBlock];
  for (int64_t start = 0; start < slices.count; start += kBlock) {
    const int64_t n = std::min(kBlock, slices.count - start);
    const T* first = reinterpret_cast<const T*>(slices.inputs[0]) + start;
    if (slices.inputs.size() == 1) {
      for (int64_t i = 0; i < n; ++i) sum[i] = widen<A>(first[i]);
    } else {
      const T* second = reinterpret_cast<const T*>(slices.inputs[1]) + start;
      for (int64_t i = 0; i < n; ++i) sum[i] = combine<op>(widen<A>(first[i]), widen<A>(second[i]));
    }
    for (size_t r = 2; r < slices.inputs.size(); ++r) {
      const T* next = reinterpret_cast<const T*>(slices.inputs[r]) + start;
      for (int64_t i = 0; i < n; ++i) sum[i] = combine<op>(sum[i], widen<A>(next[i]));
    }
    if constexpr (std::is_floating_point_v<A>) {
      if (slices.divisor != 1) {
        const A divisor = static_cast<A>(slices.divisor);
        for (int64_t i = 0; i < n; ++i) sum[i] /= divisor;
      }
    }
    for (size_t r = 0; r < slices.outputs.size(); ++r) {
      T* to = reinterpret_cast<T*>(slices.outputs[r]) + start;
      if (slices.streamed[r]) {
        alignas(64) T rounded[kBlock];
        for (int64_t i = 0; i < n; ++i) rounded[i] = narrow<T>(sum[i]);
        copy(reinterpret_cast<char*>(to), reinterpret_cast<const char*>(rounded), n * sizeof(T), true);
      } else {
        for (int64_t i = 0; i < n; ++i) to[i] = narrow<T>(sum[i]);
      }
    }
  }
}

template <class T>
INLINE void run_op(Op op, const Slices& slices) {
  switch (op) {
    case Op::SUM:
      return run<T, Op::SUM>(slices);
    case Op::PRODUCT:
      return run<T, Op::PRODUCT>(slices);
    case Op::MIN:
      return run<T, Op::MIN>(slices);
    case Op::MAX:
      return run<T, Op::MAX>(slices);
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (op) {
      case Op::BAND:
        return run<T, Op::BAND>(slices);
      case Op::BOR:
        return run<T, Op::BOR>(slices);
      case Op::BXOR:
        return run<T, Op::BXOR>(slices);
      default:
        break;
    }
  }
  TORCH_INTERNAL_ASSERT(false, "no such reduction");
}

CLONES void reduce_float(Op op, const Slices& slices) { run_op<float>(op, slices); }
CLONES void reduce_double(Op op, const Slices& slices) { run_op<double>(op, slices); }
CLONES void reduce_bfloat16(Op op, const Slices& slices) { run_op<Brain>(op, slices); }
void reduce_float16(Op op, const Slices& slices) { run_op<c10::Half>(op, slices); }
CLONES void reduce_int64(Op op, const Slices& slices) { run_op<int64_t>(op, slices); }
CLONES void reduce_int32(Op op, const Slices& slices) { run_op<int32_t>(op, slices); }
CLONES void reduce_int16(Op op, const Slices& slices) { run_op<int16_t>(op, slices); }
CLONES void reduce_int8(Op op, const Slices& slices) { run_op<int8_t>(op, slices); }
CLONES void reduce_uint8(Op op, const Slices& slices) { run_op<uint8_t>(op, slices); }

void run_type(c10::ScalarType type, Op op, const Slices& slices) {
  switch (type) {
    case c10::ScalarType::Float:
      return reduce_float(op, slices);
    case c10::ScalarType::Double:
      return reduce_double(op, slices);
    case c10::ScalarType::BFloat16:
      return reduce_bfloat16(op, slices);
    case c10::ScalarType::Half:
      return reduce_float16(op, slices);
    case c10::ScalarType::Long:
      return reduce_int64(op, slices);
    case c10::ScalarType::Int:
      return reduce_int32(op, slices);
    case c10::ScalarType::Short:
      return reduce_int16(op, slices);
    case c10::ScalarType::Char:
      return reduce_int8(op, slices);
    case c10::ScalarType::Byte:
      return reduce_uint8(op, slices);
    default:
      TORCH_INTERNAL_ASSERT(false, "no reduction of ", type);
  }
}
}  // namespace

void reduce(
    c10::ScalarType type,
    Op op,
    const std::vector<const char*>& inputs,
    const std::vector<char*>& outputs,
    int64_t count,
    int divisor,
    bool streaming) {
  Slices slices{inputs, outputs, count, divisor, {}};
  for (char* output : outputs) slices.streamed.push_back(streaming && std::find(inputs.begin(), inputs.end(), output) == inputs.end());
  run_type(type, op, slices);
  finish_streaming();
}

}  // namespace neuron
