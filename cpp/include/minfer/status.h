// Status: how every entry point of the kernel library reports. Nothing throws, prints or exits.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>

namespace minfer {

enum class StatusCode : int32_t {
  kSuccess = 0,
  kInvalidArgument,    // the caller's values are wrong; nothing was launched
  kNotSupported,       // legal, but no kernel of this build can run it on this device
  kUnknownKernel,      // an override names no kernel
  kNotCompiled,        // the kernel exists in the table but not in this build
  kWorkspaceTooSmall,  // the caller's workspace is smaller than the plan asked for
  kCudaError,          // a CUDA call failed; cuda_error holds its code
  kInternal,           // a bug of ours
};

/// Result of a call: a code and, on failure, a message that carries the values. Trivially copyable, never allocates.
struct Status {
  StatusCode code = StatusCode::kSuccess;
  int32_t cuda_error = 0;
  char message[380] = {0};

  bool ok() const { return code == StatusCode::kSuccess; }

  static Status success() { return Status{}; }

  /// printf-style failure; the message is truncated to the buffer, never dropped.
  static Status failure(StatusCode code, char const* format, ...)
#if defined(__GNUC__)
      __attribute__((format(printf, 2, 3)))
#endif
  {
    Status status;
    status.code = code;
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(status.message, sizeof(status.message), format, arguments);
    va_end(arguments);
    return status;
  }
};

}  // namespace minfer
