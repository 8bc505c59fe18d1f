// Compares an operator's schema, "name(Tensor a, *, int b=1) -> Tensor", with the C++ function that implements it, at compile time: the
// number and the types of arguments and results. Names are not part of a function's type; tests/contracts/test_bindings.py compares them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "core/tensor.h"

namespace minfer::torch_binding {

/// A parameter that takes several arguments of the schema, one for each of its members: an aggregate that lists all of these, in order, as
/// pointers in a tuple kMembers.
template <class T>
concept ArgumentGroup = requires { T::kMembers; };

template <class Group, class Member>
Member member_type(Member Group::*);
/// Calls function.template operator()<type of the member>...() for the members of a group.
template <ArgumentGroup Group, class Function>
constexpr auto with_member_types(Function&& function) {
  return std::apply([&](auto... members) { return function.template operator()<decltype(member_type(members))...>(); }, Group::kMembers);
}

template <class T>
constexpr bool kIsOptional = false;
template <class T>
constexpr bool kIsOptional<std::optional<T>> = true;
template <class T>
constexpr bool kIsList = false;
template <class T>
constexpr bool kIsList<std::vector<T>> = true;

/// Whether a type of the schema language, "Tensor(a!)?", is what a parameter of type T takes.
template <class T>
constexpr bool is_schema_of(std::string_view type) {
  if constexpr (kIsOptional<T>) {
    return type.ends_with("?") && is_schema_of<typename T::value_type>(type.substr(0, type.size() - 1));
  } else if constexpr (kIsList<T>) {
    return type.ends_with("[]") && is_schema_of<typename T::value_type>(type.substr(0, type.size() - 2));
  } else if constexpr (std::is_same_v<T, Tensor>) {
    return type == "Tensor" || (type.starts_with("Tensor(") && type.ends_with("!)"));  // "!": the operator writes it
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return type == "int";
  } else if constexpr (std::is_same_v<T, double>) {
    return type == "float";
  } else if constexpr (std::is_same_v<T, bool>) {
    return type == "bool";
  } else if constexpr (std::is_same_v<T, std::string>) {
    return type == "str";
  } else {
    static_assert(std::is_same_v<T, ScalarType>, "no type of the schema language is known for this parameter");
    return type == "ScalarType";
  }
}

/// Compares the first entry of a list of arguments or results, "Tensor a, int b", with a type, and removes it from the list.
template <class T>
constexpr void match_first(std::string_view* list) {
  auto const take = [&] {
    size_t const end = std::min(list->find(", "), list->size());
    std::string_view const entry = list->substr(0, end);
    list->remove_prefix(std::min(end + 2, list->size()));
    return entry;
  };
  std::string_view entry = take();
  if (entry == "*") entry = take();  // keyword arguments follow
  if (!is_schema_of<std::decay_t<T>>(entry.substr(0, entry.find(' ')))) throw "the schema and the function differ in a type";
}

/// The same for a parameter of a function, which takes one argument or a group.
template <class Parameter>
constexpr void match_parameter(std::string_view* list) {
  if constexpr (ArgumentGroup<std::decay_t<Parameter>>) {
    with_member_types<std::decay_t<Parameter>>([&]<class... Each>() { (match_first<Each>(list), ...); });
  } else {
    match_first<Parameter>(list);
  }
}

/// The results of a function: one value, a tuple of several, or none.
template <class Result>
struct Results {
  static constexpr void match(std::string_view* list) { match_first<Result>(list); }
};
template <class... Each>
struct Results<std::tuple<Each...>> {
  static constexpr void match(std::string_view* list) {
    list->remove_prefix(1);  // "(Tensor, Tensor)"
    list->remove_suffix(1);
    (match_first<Each>(list), ...);
  }
};
template <>
struct Results<void> {
  static constexpr void match(std::string_view* list) {
    if (*list == "()") *list = "";
  }
};

/// Separates the arguments from the results.
constexpr std::string_view kResult = ") -> ";
/// The position of kResult.
constexpr size_t end_of_arguments(std::string_view schema) {
  size_t const end = schema.find(kResult);
  if (end == std::string_view::npos) throw "the schema has no result";
  return end;
}

/// In a constant expression this does not compile for a schema whose arguments or results differ from the function's in number, order or
/// type.
template <class Result, class... Parameters>
constexpr void match(std::string_view schema, Result (*)(Parameters...)) {
  size_t const end = end_of_arguments(schema), begin = schema.find('(') + 1;
  std::string_view arguments = schema.substr(begin, end - begin), results = schema.substr(end + kResult.size());
  (match_parameter<Parameters>(&arguments), ...);
  if (!arguments.empty()) throw "the schema has more arguments than the function";
  Results<Result>::match(&results);
  if (!results.empty()) throw "the schema has more results than the function";
}

}  // namespace minfer::torch_binding
