// Every operator runs its CPU kernel over aliases of its arguments, and its outputs become device tensors without a copy.
#include "fallback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/AutogradState.h>
#include <c10/util/SmallVector.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

#include "alias.h"
#include "allocator.h"
#include "bindings.h"
#include "device.h"
#include "generator.h"
#include "recorder.h"
#include "rounding.h"

namespace neuron {

namespace {

// What an operator's schema says, read once.
struct Plan {
  enum class Kind : uint8_t { kPlain, kNumber, kTensor, kTensors, kOptionalTensors, kDevice, kGenerator };
  struct Argument {
    Kind kind = Kind::kPlain;
    bool written = false;
    bool names_type = false;  // of the result
  };
  explicit Plan(const c10::FunctionSchema& schema)
      : name(number_of_operator(c10::toString(schema.operator_name()))),
        returns(schema.returns().size()),
        mixes_devices(takes_host_tensors(schema.name())),
        is_arithmetic(neuron::is_arithmetic(short_name(schema.name()))),
        is_view(returns == 1 && schema.returns()[0].alias_info() && !schema.returns()[0].alias_info()->isWrite()) {
    for (const auto& argument : schema.arguments()) {
      arguments.push_back({kind_of(*argument.type()), argument.alias_info() && argument.alias_info()->isWrite(), argument.name() == "dtype"});
    }
  }

  static std::string_view short_name(const std::string& name) { return std::string_view(name).substr(name.find("::") + 2); }

  static Kind kind_of(const c10::Type& type) {
    if (auto optional = type.cast<c10::OptionalType>()) return kind_of(*optional->getElementType());
    switch (type.kind()) {
      case c10::TypeKind::TensorType:
        return Kind::kTensor;
      case c10::TypeKind::NumberType:
        return Kind::kNumber;
      case c10::TypeKind::DeviceObjType:
        return Kind::kDevice;
      case c10::TypeKind::GeneratorType:
        return Kind::kGenerator;
      case c10::TypeKind::ListType: {
        const auto& element = *type.castRaw<c10::ListType>()->getElementType();
        if (element.kind() == c10::TypeKind::TensorType) return Kind::kTensors;
        if (element.kind() == c10::TypeKind::NumberType) return Kind::kNumber;
        if (element.kind() == c10::TypeKind::OptionalType && kind_of(element) == Kind::kTensor) return Kind::kOptionalTensors;
        return Kind::kPlain;
      }
      default:
        return Kind::kPlain;
    }
  }

  // Operators whose contract has a host tensor beside device tensors: indices, lengths, foreach scalars.
  static bool takes_host_tensors(const std::string& name) {
    const std::string_view op = short_name(name);
    return op.starts_with("index") || op.starts_with("_index") || op.starts_with("_unsafe_index") || op.starts_with("_foreach") ||
        op.starts_with("_fused") || op == "_pack_padded_sequence" || op.starts_with("_amp_");
  }

  std::vector<Argument> arguments;
  uint32_t name;
  size_t returns;
  bool mixes_devices;
  bool is_arithmetic;
  bool is_view;
};

// The device tensors of one call beside their aliases.
struct Aliases {
  struct Pair {
    at::Tensor device, cpu;
    bool written;
  };
  c10::SmallVector<Pair, 6> pairs;
  int device = -1;
  bool host = false;  // a CPU tensor with dimensions is among the arguments; one without is a scalar

  at::Tensor add(const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kNeuron) {
      host |= tensor.dim() > 0;
      return tensor;
    }
    if (device < 0) device = tensor.device().index();
    TORCH_CHECK(
        device == tensor.device().index(),
        "Expected all tensors to be on the same device, but found at least two devices, neuron:",
        device,
        " and ",
        tensor.device(),
        "!");
    pairs.push_back({tensor, to_cpu(tensor), written});
    return pairs.back().cpu;
  }

  at::Tensor back(const at::Tensor& result) const {
    if (!result.defined() || result.device().type() != c10::kCPU) return result;
    for (const Pair& pair : pairs) {
      if (pair.cpu.is_same(result)) return pair.device;
    }
    if (result.has_storage()) {
      for (const Pair& pair : pairs) {
        if (pair.cpu.storage().is_alias_of(result.storage())) return view_of(pair.device, result);
      }
    }
    return from_cpu(result, device);
  }
};

// The autograd engine would run backward on a thread of its own per device, which aborts the process when the script ends right
// after backward(). Each thread that computes on the device keeps its backward passes to itself.
void keep_backward_on_this_thread() {
  thread_local const bool done = [] {
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
    return true;
  }();
  (void)done;
}

// Calls `change` with every tensor among the arguments, and puts what it returns in its place.
template <class Change>
void change_tensors(const Plan& plan, c10::IValue* arguments, const Change& change) {
  for (size_t i = 0; i < plan.arguments.size(); ++i) {
    const bool written = plan.arguments[i].written;
    if (arguments[i].isTensor()) {
      arguments[i] = change(arguments[i].toTensor(), written);
    } else if (arguments[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : arguments[i].toTensorList()) list.push_back(change(tensor, written));
      arguments[i] = std::move(list);
    }
  }
}

// The type that the operator's results are rounded to stochastically, if its kernel is to compute in float32 for that.
std::optional<c10::ScalarType> rounded_type(const Plan& plan, c10::IValue* arguments) {
  for (size_t i = 0; i < plan.arguments.size(); ++i) {
    if (plan.arguments[i].names_type && !arguments[i].isNone()) return std::nullopt;
  }
  std::optional<c10::ScalarType> type;
  int64_t narrow_dims = -1, wide_dims = -1;
  bool mixed = false, writes = false;
  change_tensors(plan, arguments, [&](const at::Tensor& tensor, bool written) {
    if (!tensor.defined() || !at::isFloatingType(tensor.scalar_type())) return tensor;
    if (!is_narrow(tensor.scalar_type())) {
      if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) wide_dims = std::max(wide_dims, tensor.dim());
      return tensor;
    }
    mixed |= type && *type != tensor.scalar_type();
    type = tensor.scalar_type();
    narrow_dims = std::max(narrow_dims, tensor.dim());
    writes |= written;
    return tensor;
  });
  // What is promoted to a wider type is not rounded; a scalar tensor promotes no other.
  const bool promotes = mixed || wide_dims > 0 || (wide_dims == 0 && narrow_dims == 0);
  return promotes && !writes ? std::nullopt : type;
}

// Runs the CPU kernel on float32 copies of narrow arguments, on the host, and rounds what it gives.
void run_rounded(const Plan& plan, const c10::OperatorHandle& op, torch::jit::Stack* stack, c10::ScalarType type, int device) {
  c10::SmallVector<std::tuple<at::Tensor, at::Tensor, bool>, 6> copies;
  change_tensors(plan, stack->data() + (stack->size() - plan.arguments.size()), [&](const at::Tensor& tensor, bool written) {
    if (!tensor.defined() || !is_narrow(tensor.scalar_type())) return tensor;
    copies.emplace_back(tensor, tensor.to(at::kFloat), written);
    return std::get<1>(copies.back());
  });
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  AllocateOnCore on_core(device);
  for (const auto& [narrow, wide, written] : copies) {
    if (!written) continue;
    if (narrow.sizes() != wide.sizes()) narrow.resize_(wide.sizes());
    round_stochastically(wide, narrow);
  }
  const auto narrowed = [&](const at::Tensor& result) {
    for (const auto& [narrow, wide, written] : copies) {
      if (wide.is_same(result)) return narrow;
    }
    if (!result.defined() || result.scalar_type() != at::kFloat) return result;
    at::Tensor rounded = at::empty_like(result, result.options().dtype(type));
    round_stochastically(result, rounded);
    return rounded;
  };
  c10::IValue* results = stack->data() + (stack->size() - plan.returns);
  for (size_t i = 0; i < plan.returns; ++i) {
    if (results[i].isTensor()) {
      results[i] = narrowed(results[i].toTensor());
    } else if (results[i].isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : results[i].toTensorList()) list.push_back(narrowed(tensor));
      results[i] = std::move(list);
    }
  }
}

// Notes the operator in the graph of this thread, from arguments that are not yet replaced by their aliases.
void record_operator(const Plan& plan, const c10::IValue* arguments) {
  static thread_local Entry entry;
  Recorder& recorder = Recorder::current();
  entry.start(plan.name, recorder.in_optimizer());
  int device = -1;
  const auto add = [&](const at::Tensor& tensor) {
    if (device < 0 && tensor.defined() && tensor.device().type() == kNeuron) device = tensor.device().index();
    entry.tensor(tensor);
  };
  for (size_t i = 0; i < plan.arguments.size(); ++i) {
    const c10::IValue& value = arguments[i];
    switch (plan.arguments[i].kind) {
      case Plan::Kind::kPlain:
        entry.value(value);
        break;
      case Plan::Kind::kNumber:
        if (value.isList() && recorder.in_optimizer()) {
          entry.nothing();
        } else {
          entry.number(value);
        }
        break;
      case Plan::Kind::kTensor:
        value.isTensor() ? add(value.toTensor()) : entry.value(c10::IValue());
        break;
      case Plan::Kind::kTensors:
        if (value.isTensorList()) {
          const auto& tensors = value.toTensorList();
          entry.list(tensors.size());
          for (const at::Tensor& tensor : tensors) add(tensor);
        } else {
          entry.value(c10::IValue());
        }
        break;
      case Plan::Kind::kOptionalTensors:
        if (value.isOptionalTensorList()) {
          const auto& tensors = value.toOptionalTensorList();
          entry.list(tensors.size());
          for (const std::optional<at::Tensor>& tensor : tensors) add(tensor.value_or(at::Tensor()));
        } else {
          entry.value(c10::IValue());
        }
        break;
      case Plan::Kind::kDevice:
      case Plan::Kind::kGenerator:
        entry.nothing();
        break;
    }
  }
  recorder.add(entry, device < 0 ? current_device() : device);
}

void record_results(const c10::IValue* results, size_t count, int device) {
  Entry entry;
  entry.start(0, false);
  for (size_t i = 0; i < count; ++i) {
    if (results[i].isTensor()) {
      entry.tensor(results[i].toTensor());
    } else if (results[i].isTensorList()) {
      for (const at::Tensor& tensor : results[i].toTensorList()) entry.tensor(tensor);
    }
  }
  Recorder::current().add_results(entry, device);
}

void run(const Plan& plan, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  require_not_forked();
  keep_backward_on_this_thread();
  Aliases aliases;
  c10::IValue* arguments = stack->data() + (stack->size() - plan.arguments.size());
  const Recording recorded;
  const bool records = recorded && !plan.is_view;
  if (records) record_operator(plan, arguments);
  c10::IValue* generator = nullptr;
  for (size_t i = 0; i < plan.arguments.size(); ++i) {
    c10::IValue& value = arguments[i];
    const bool written = plan.arguments[i].written;
    switch (plan.arguments[i].kind) {
      case Plan::Kind::kPlain:
      case Plan::Kind::kNumber:
        break;
      case Plan::Kind::kTensor:
        if (value.isTensor()) value = aliases.add(value.toTensor(), written);
        break;
      case Plan::Kind::kTensors:
        if (value.isTensorList()) {
          c10::List<at::Tensor> list;
          list.reserve(value.toTensorList().size());
          for (const at::Tensor& tensor : value.toTensorList()) list.push_back(aliases.add(tensor, written));
          value = std::move(list);
        }
        break;
      case Plan::Kind::kOptionalTensors:
        if (value.isOptionalTensorList()) {
          c10::List<std::optional<at::Tensor>> list;
          for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
            list.push_back(tensor ? std::optional<at::Tensor>(aliases.add(*tensor, written)) : std::nullopt);
          }
          value = std::move(list);
        }
        break;
      case Plan::Kind::kDevice:
        if (value.isDevice() && value.toDevice().type() == kNeuron) {
          if (aliases.device < 0) aliases.device = resolve(value.toDevice());
          value = c10::Device(c10::kCPU);
        }
        break;
      case Plan::Kind::kGenerator:
        generator = &value;
        break;
    }
  }
  TORCH_CHECK(
      !aliases.host || aliases.pairs.empty() || plan.mixes_devices,
      "Expected all tensors to be on the same device, but found at least two devices, neuron:",
      aliases.device,
      " and cpu! (when running ",
      op.schema().name(),
      ")");
  if (aliases.device < 0) aliases.device = current_device();
  // A generator takes part in the dispatch: a CPU tensor that is to be filled from a core's generator arrives here too.
  TORCH_CHECK(
      !generator || !aliases.pairs.empty() || !aliases.host,
      "Expected a 'cpu' device type for generator but found 'neuron'");
  if (generator) *generator = draw(generator->isNone() ? default_generator(aliases.device) : generator->toGenerator());
  at_operator_boundary([&] {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto rounded = plan.is_arithmetic && rounds_stochastically() ? rounded_type(plan, arguments) : std::nullopt;
    if (rounded) {
      run_rounded(plan, op, stack, *rounded, aliases.device);
    } else {
      AllocateOnCore on_core(aliases.device);
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
    AllocateOnCore on_core(aliases.device);
    c10::IValue* results = stack->data() + (stack->size() - plan.returns);
    for (const Aliases::Pair& pair : aliases.pairs) {
      if (pair.written) follow(pair.device, pair.cpu);
    }
    for (size_t i = 0; i < plan.returns; ++i) {
      c10::IValue& value = results[i];
      if (value.isTensor()) {
        value = aliases.back(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : value.toTensorList()) list.push_back(aliases.back(tensor));
        value = std::move(list);
      }
    }
  });
  if (C10_UNLIKELY(records && Recorder::current().wants_results())) {
    record_results(stack->data() + (stack->size() - plan.returns), plan.returns, aliases.device);
  }
}

// One operator's kernel: the plan is made on its first call.
struct AliasKernel final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    std::call_once(once_, [&] { plan_ = std::make_unique<Plan>(op.schema()); });
    run(*plan_, op, stack);
  }

 private:
  std::once_flag once_;
  std::unique_ptr<Plan> plan_;
};

}  // namespace

// For operators that were not known when the module was loaded (other libraries'): plans are found by schema.
void run_on_aliases(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static std::mutex mutex;
  static auto* plans = new std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<Plan>>;
  const Plan* plan = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto& slot = (*plans)[&op.schema()];
    if (!slot) slot = std::make_unique<Plan>(op.schema());
    plan = slot.get();
  }
  run(*plan, op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_aliases>()); }

// A backend fallback is the last resort of the dispatcher: an operator that also has a composite kernel would decompose, although
// the CPU has a kernel for it. So every CPU kernel of ATen is registered by name.
void register_kernels() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    if (name.getNamespace() != "aten") continue;
    const auto op = dispatcher.findOp(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    const std::string short_name = c10::toString(name).substr(std::strlen("aten::"));
    library.impl(short_name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<AliasKernel>()));
  }
}

}  // namespace neuron
