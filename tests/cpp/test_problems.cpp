// Plans are cached by the comparison of problems: no member may be left out, whoever adds one.
#include <utility>
#include <vector>

#include "minfer/attention.h"
#include "minfer/gemm.h"
#include "minfer/moe.h"
#include "testing.h"

using namespace minfer;

namespace {

/// Becomes a member of any type, with this value.
struct Member {
  int value = 0;
  template <class T>
  operator T() const {
    return static_cast<T>(value);
  }
};

/// The number of members of a problem: of values that braces take.
template <class Problem, class... Members>
constexpr size_t members_of() {
  if constexpr (requires { Problem{Members{}..., Member{}}; }) {
    return members_of<Problem, Members..., Member>();
  } else {
    return sizeof...(Members);
  }
}

/// A problem of zeros but for member `one`, which is 1.
template <class Problem, size_t... at>
Problem with_member(size_t one, std::index_sequence<at...>) {
  return {Member{at == one}...};
}

template <class Problem, size_t kAtLeast>
void check_members() {
  constexpr size_t kMembers = members_of<Problem>();
  static_assert(kMembers >= kAtLeast);
  std::vector<Problem> problems;
  for (size_t one = 0; one <= kMembers; ++one) problems.push_back(with_member<Problem>(one, std::make_index_sequence<kMembers>()));
  for (size_t i = 0; i < problems.size(); ++i) {
    for (size_t j = 0; j < problems.size(); ++j) CHECK_EQUAL(problems[i] == problems[j], i == j);
  }
}

}  // namespace

TEST_CASE(problems_differ_by_every_member) {
  check_members<GemmProblem, 18>();
  check_members<GroupedProblem, 15>();
  check_members<AttentionProblem, 22>();
}
