// Functions in the form that torch's dispatcher calls: arguments and results lie on a stack of StableIValues. TORCH_BOX does the same, but
// it copies every argument, it asks for a tensor's sizes and strides anew at each use, and from torch 2.10 to 2.13 it leaks 32 bytes for
// every string.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/schema.h"
#include "core/tensor.h"

namespace minfer::torch_binding {

/// How an argument of type T is read from the stack. take() owns what the value refers to: the dispatcher hands over a reference of our
/// own.
template <class T>
struct Argument {
  static T take(StableIValue value) { return torch::stable::detail::to<T>(value); }
};

template <>
struct Argument<Tensor> {
  static Tensor take(StableIValue value) { return Tensor(torch::stable::detail::to<AtenTensorHandle>(value)); }
};

template <>
struct Argument<ScalarType> {
  static ScalarType take(StableIValue value) { return type_of_code(torch::stable::detail::to<int32_t>(value)); }
};

template <>
struct Argument<std::string> {
  [[gnu::noinline]] static std::string take(StableIValue value) {
    auto const handle = torch::stable::detail::to<StringHandle>(value);
    size_t length = 0;
    char const* data = nullptr;
    std::string text;
    if (torch_string_length(handle, &length) == 0 && torch_string_c_str(handle, &data) == 0) text.assign(data, length);
    torch_delete_string(handle);
    return text;
  }
};

template <class T>
struct Argument<std::optional<T>> {
  [[gnu::noinline]] static std::optional<T> take(StableIValue value) {
    auto const inner = torch::stable::detail::to<StableIValue*>(value);
    if (inner == nullptr) return std::nullopt;
    StableIValue const content = *inner;
    delete inner;  // as torch's own conversion does at this stable ABI's version
    return Argument<T>::take(content);
  }
};

template <>
struct Argument<std::vector<Tensor>> {
  static std::vector<Tensor> take(StableIValue value) {
    std::vector<Tensor> tensors;
    for (auto const handle : torch::stable::detail::to<std::vector<AtenTensorHandle>>(value)) tensors.emplace_back(handle);
    return tensors;
  }
};

/// A result as the stack holds it. Of a tensor the dispatcher gets a reference of its own.
inline StableIValue result_of(Tensor const& x) {
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_new_tensor_handle(x.handle(), &handle) != 0) throw std::runtime_error("minfer: torch could not take a result");
  return torch::stable::detail::from(handle);
}
template <class T>
StableIValue result_of(T const& x) {
  return torch::stable::detail::from(x);
}

/// The next argument of the stack, or for an ArgumentGroup as many as it has members.
template <class T>
T take_next(StableIValue const*& stack) {
  if constexpr (ArgumentGroup<T>) {
    return with_member_types<T>([&]<class... Each>() { return T{Argument<Each>::take(*stack++)...}; });  // as in take_arguments()
  } else {
    return Argument<T>::take(*stack++);
  }
}

/// All arguments of an operator. Operators with the same parameters share this code.
template <class... T>
std::tuple<T...> take_arguments([[maybe_unused]] StableIValue const* stack) {
  return {take_next<T>(stack)...};  // braces evaluate from left to right
}

/// What StableLibrary::impl takes.
using BoxedFunction = void(StableIValue* stack, uint64_t arguments, uint64_t results);

template <auto function, class Signature = decltype(function)>
struct Boxed;

/// Parameters are values or references to const. The number of arguments on the stack needs no check: Operator has compared the function
/// with the schema that it is registered under.
template <auto function, class Result, class... Parameters>
struct Boxed<function, Result (*)(Parameters...)> {
  static void call(StableIValue* stack, uint64_t, uint64_t) {
    auto arguments = take_arguments<std::decay_t<Parameters>...>(stack);
    if constexpr (std::is_void_v<Result>) {
      std::apply(function, std::move(arguments));
    } else if constexpr (requires { std::tuple_size<Result>::value; }) {
      Result const results = std::apply(function, std::move(arguments));
      std::apply([&](auto const&... each) { ((*stack++ = result_of(each)), ...); }, results);
    } else {
      stack[0] = result_of(std::apply(function, std::move(arguments)));
    }
  }
};

template <auto function>
constexpr Boxed<function> boxed;

}  // namespace minfer::torch_binding
