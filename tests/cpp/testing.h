// A test case is a function that CHECKs; the runner takes its name. ctest lists every TEST_CASE of these files as a test of its own.
#pragma once

#include <cstdio>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace minfer::testing {

struct Case {
  char const* name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registration {
  Registration(char const* name, void (*run)()) { cases().push_back({name, run}); }
};

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// What the case is looking at, for the message of a CHECK that fails in a loop.
class Context {
 public:
  explicit Context(std::string text) { stack().push_back(std::move(text)); }
  ~Context() { stack().pop_back(); }
  Context(Context const&) = delete;
  Context& operator=(Context const&) = delete;

  static std::vector<std::string>& stack() {
    thread_local std::vector<std::string> texts;
    return texts;
  }
};

[[noreturn]] inline void fail(char const* file, int line, std::string const& what) {
  std::ostringstream message;
  message << file << ":" << line << ": " << what;
  for (std::string const& text : Context::stack()) message << "\n  at " << text;
  throw Failure(message.str());
}

template <typename A, typename B>
void check_equal(A const& a, B const& b, char const* a_text, char const* b_text, char const* file, int line) {
  if (a == b) return;
  std::ostringstream what;
  what << a_text << " == " << b_text << " does not hold: " << a << " and " << b;
  fail(file, line, what.str());
}

}  // namespace minfer::testing

#define TEST_CASE(name)                                                           \
  static void name();                                                             \
  static ::minfer::testing::Registration const name##_registration(#name, &name); \
  static void name()

#define CHECK(condition)                                                                        \
  do {                                                                                          \
    if (!(condition)) ::minfer::testing::fail(__FILE__, __LINE__, #condition " does not hold"); \
  } while (0)

#define CHECK_EQUAL(a, b) ::minfer::testing::check_equal((a), (b), #a, #b, __FILE__, __LINE__)
