// Operations as bytes: written on every call, read when a graph is new.
#include "entry.h"

#include <mutex>
#include <unordered_map>

#include <ATen/core/List.h>
#include <c10/core/ScalarType.h>

namespace neuron {

namespace {
struct Names {
  std::mutex mutex;
  std::unordered_map<std::string, uint32_t> numbers;
  std::vector<const std::string*> names;  // the keys above, which stay where they are
};

Names& names() {
  static auto* all = new Names;
  return *all;
}

constexpr size_t kHeader = sizeof(uint32_t) + 1;
constexpr size_t kTag = 1 + sizeof(uint32_t);  // of what has a length
}  // namespace

uint32_t number_of_operator(const std::string& name) {
  Names& all = names();
  std::lock_guard<std::mutex> lock(all.mutex);
  const auto [found, added] = all.numbers.emplace(name, static_cast<uint32_t>(all.names.size()));
  if (added) all.names.push_back(&found->first);
  return found->second;
}

const std::string& operator_of_number(uint32_t number) {
  Names& all = names();
  std::lock_guard<std::mutex> lock(all.mutex);
  return *all.names.at(number);
}

void Entry::start(uint32_t name, bool run_time_numbers) {
  run_time_numbers_ = run_time_numbers;
  bytes_.resize(kHeader);
  std::memcpy(bytes_.data(), &name, sizeof(name));
  bytes_[sizeof(name)] = run_time_numbers;
}

void Entry::tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return put('U');
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (impl.is_wrapped_number()) {
    if (run_time_numbers_) return put('n');
    const void* data = tensor.const_data_ptr();
    switch (tensor.scalar_type()) {
      case c10::ScalarType::Double: return put('d', *static_cast<const double*>(data));
      case c10::ScalarType::Long: return put('i', *static_cast<const int64_t*>(data));
      case c10::ScalarType::Bool: return put('b', *static_cast<const bool*>(data));
      default: break;
    }
  }
  const c10::IntArrayRef sizes = impl.sizes();
  const size_t end = bytes_.size();
  bytes_.resize(end + 3 + sizes.size() * sizeof(int64_t));
  char* to = bytes_.data() + end;
  to[0] = 'T';
  to[1] = static_cast<char>(c10::typeMetaToScalarType(impl.dtype()));
  to[2] = static_cast<char>(sizes.size());
  std::memcpy(to + 3, sizes.data(), sizes.size() * sizeof(int64_t));
}

void Entry::ranks(const std::vector<int64_t>& ranks) {
  put('R', static_cast<uint32_t>(ranks.size()));
  const auto* first = reinterpret_cast<const char*>(ranks.data());
  bytes_.insert(bytes_.end(), first, first + ranks.size() * sizeof(int64_t));
}

void Entry::list(size_t length) { put('L', static_cast<uint32_t>(length)); }

void Entry::number(const c10::IValue& value) {
  if (run_time_numbers_ && !value.isNone()) return put('n');
  this->value(value);
}

void Entry::value(const c10::IValue& value) {
  if (value.isNone()) return put('N');
  if (value.isInt()) return put('i', value.toInt());
  if (value.isBool()) return put('b', value.toBool());
  if (value.isDouble()) {
    // An optimizer's own kernel takes its learning rate as an attribute.
    return run_time_numbers_ ? put('n') : put('d', value.toDouble());
  }
  if (value.isString()) {
    const std::string& text = value.toStringRef();
    put('s', static_cast<uint32_t>(text.size()));
    bytes_.insert(bytes_.end(), text.begin(), text.end());
    return;
  }
  if (value.isIntList()) {
    const auto items = value.toIntList();
    list(items.size());
    for (const int64_t item : items) put('i', item);
    return;
  }
  if (value.isList()) {
    const auto items = value.toList();
    list(items.size());
    for (const auto& item : items) this->value(item);
    return;
  }
  if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    put('d', number.real());
    return put('d', number.imag());
  }
  put('?');
}

std::string content_of(std::string_view entry) {
  uint32_t number;
  std::memcpy(&number, entry.data(), sizeof(number));
  std::string content = operator_of_number(number);
  content += '\0';
  std::string_view rest = entry.substr(sizeof(number));
  if (rest.size() > kTag && rest[1] == 'R') {  // a collective, which begins with the ranks of its group
    uint32_t count;
    std::memcpy(&count, rest.data() + 2, sizeof(count));
    content += rest.substr(0, 1 + kTag);
    rest.remove_prefix(1 + kTag + count * sizeof(int64_t));
  }
  content += rest;
  content += '\n';
  return content;
}

namespace {
namespace py = pybind11;

template <class T>
T take(std::string_view& bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  bytes.remove_prefix(sizeof(T));
  return value;
}

py::object read(std::string_view& bytes) {
  const char tag = take<char>(bytes);
  switch (tag) {
    case 'T': {
      const auto type = static_cast<c10::ScalarType>(take<uint8_t>(bytes));
      py::tuple shape(take<uint8_t>(bytes));
      for (size_t i = 0; i < shape.size(); ++i) shape[i] = take<int64_t>(bytes);
      return py::make_tuple(py::cast(type), shape);
    }
    case 'L': {
      py::list items;
      for (uint32_t left = take<uint32_t>(bytes); left != 0; --left) items.append(read(bytes));
      return items;
    }
    case 'R': {
      py::list ranks;
      for (uint32_t left = take<uint32_t>(bytes); left != 0; --left) ranks.append(take<int64_t>(bytes));
      return ranks;
    }
    case 'i': return py::int_(take<int64_t>(bytes));
    case 'd': return py::float_(take<double>(bytes));
    case 'b': return py::bool_(take<bool>(bytes));
    case 's': {
      const uint32_t length = take<uint32_t>(bytes);
      py::str text(bytes.data(), length);
      bytes.remove_prefix(length);
      return text;
    }
    case 'U':
    case 'N': return py::none();
    default: return py::ellipsis();
  }
}
}  // namespace

py::tuple decode(std::string_view entry) {
  const uint32_t number = take<uint32_t>(entry);
  const bool in_optimizer = take<bool>(entry);
  py::list arguments;
  while (!entry.empty()) arguments.append(read(entry));
  return py::make_tuple(operator_of_number(number), in_optimizer, arguments);
}

}  // namespace neuron
