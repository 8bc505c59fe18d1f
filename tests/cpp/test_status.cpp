#include <cstring>
#include <type_traits>

#include "minfer/status.h"
#include "minfer/types.h"
#include "testing.h"

using namespace minfer;

static_assert(std::is_trivially_copyable_v<Status>, "a Status is returned by value through C interfaces");

TEST_CASE(status_default_is_success) {
  CHECK(Status{}.ok());
  CHECK(Status::success().ok());
  CHECK_EQUAL(std::strlen(Status::success().message), size_t(0));
}

TEST_CASE(status_failure_carries_code_and_values) {
  Status const status = Status::failure(StatusCode::kWorkspaceTooSmall, "workspace has %d bytes, the plan needs %d", 16, 4096);
  CHECK(!status.ok());
  CHECK(status.code == StatusCode::kWorkspaceTooSmall);
  CHECK_EQUAL(std::string(status.message), "workspace has 16 bytes, the plan needs 4096");
}

TEST_CASE(status_truncates_a_long_message) {
  std::string const text(2000, 'x');
  Status const status = Status::failure(StatusCode::kInternal, "%s", text.c_str());
  CHECK_EQUAL(std::strlen(status.message), sizeof(status.message) - 1);
  CHECK(status.code == StatusCode::kInternal);
}

TEST_CASE(types_have_sizes_and_names) {
  CHECK_EQUAL(size_of(DataType::kF16), 2);
  CHECK_EQUAL(size_of(DataType::kBF16), 2);
  CHECK_EQUAL(size_of(DataType::kF32), 4);
  CHECK_EQUAL(std::string(name_of(DataType::kBF16)), "bf16");
  char const* const activations[] = {"none", "relu", "gelu", "gelu_tanh", "silu", "relu2"};
  for (int i = 0; i < 5; ++i) CHECK_EQUAL(std::string(name_of(Activation(i))), activations[i]);
}
