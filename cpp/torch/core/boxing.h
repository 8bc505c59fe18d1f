// Functions as the dispatcher calls them, with arguments and results on a stack. TORCH_BOX does this too, but copies every argument, asks for
// tensors' facts anew at each use, and (torch 2.10 to 2.13) loses 32 bytes of memory for every text.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/tensor.h"

namespace minfer::torch_binding {

/// An argument on the stack, which is taken off it.
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
  static std::string take(StableIValue value) {
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
  static std::optional<T> take(StableIValue value) {
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

/// Results go on the stack as references of the caller's own.
inline StableIValue result_of(Tensor const& x) {
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_new_tensor_handle(x.handle(), &handle) != 0) throw std::runtime_error("minfer: torch could not take a result");
  return torch::stable::detail::from(handle);
}
template <class T>
StableIValue result_of(T const& x) {
  return torch::stable::detail::from(x);
}

template <class Function>
struct Boxed;

template <class Result, class... Arguments>
struct Boxed<Result (*)(Arguments...)> {
  template <size_t... I>
  static std::tuple<std::decay_t<Arguments>...> take(StableIValue const* stack, std::index_sequence<I...>) {
    return {Argument<std::decay_t<Arguments>>::take(stack[I])...};  // in order
  }

  template <Result (*function)(Arguments...)>
  static void call(StableIValue* stack) {
    auto arguments = take(stack, std::index_sequence_for<Arguments...>());
    if constexpr (std::is_void_v<Result>) {
      std::apply(function, std::move(arguments));
    } else if constexpr (requires { std::tuple_size<Result>::value; }) {
      Result const results = std::apply(function, std::move(arguments));
      std::apply([&](auto const&... each) { ((*stack++ = result_of(each)), ...); }, results);
    } else {
      stack[0] = result_of(std::apply(function, std::move(arguments)));
    }
  }

  static constexpr uint64_t kArguments = sizeof...(Arguments);
};

/// For StableLibrary::impl. The function's arguments are values or references to const.
template <auto function>
void boxed(StableIValue* stack, uint64_t arguments, uint64_t) {
  using Form = Boxed<decltype(function)>;
  if (arguments != Form::kArguments) throw std::runtime_error("minfer: an operator's schema and its implementation have other arguments");
  Form::template call<function>(stack);
}

}  // namespace minfer::torch_binding
