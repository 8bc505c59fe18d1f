// The calling thread's CUDA context.
#pragma once

#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

/// Binds the device's primary context if the thread has no context. The runtime's functions bind it by themselves, but the driver's
/// functions that encode tensor maps need one, and a thread that uses CUDA through this library alone has none. Otherwise this only queries
/// the thread's context.
Status bind_context(DeviceProperties const& device);

}  // namespace minfer
