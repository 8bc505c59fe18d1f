// Whether kernels are launched with programmatic stream serialization (dependent_launch.cuh).
#pragma once

namespace minfer {

/// The environment variable MINFER_PDL, read once: yes unless it is 0.
bool programmatic_launch_enabled();

}  // namespace minfer
