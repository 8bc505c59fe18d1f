// The calling thread's CUDA context.
#pragma once

#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

/// Binds the device's primary context where the thread has no context: a thread that nothing but this library asks for CUDA has none, and the
/// driver's own functions, which encode tensor maps, want one. The runtime's would bind it. Nothing but a look at the thread otherwise.
Status bind_context(DeviceProperties const& device);

}  // namespace minfer
