// Problems and devices that the planning tests share.
#pragma once

#include <cstring>
#include <string>

#include "minfer/gemm.h"

namespace minfer::testing {

/// Alignment in bytes of a dense operand's leading dimension, at most 16.
inline int32_t alignment_of(int64_t leading_dimension, DataType type) {
  int64_t const bytes = leading_dimension * size_of(type);
  int32_t alignment = 16;
  while (bytes % alignment != 0) alignment /= 2;
  return alignment;
}

/// A dense problem with the alignments its sizes give it.
inline GemmProblem problem_of(int64_t m, int64_t n, int64_t k, DataType type = DataType::kF16, Major a_major = Major::kK,
                              Major b_major = Major::kK, bool has_c = false, bool gated = false) {
  GemmProblem p;
  p.m = m, p.n = n, p.k = k;
  p.ab_type = type;
  p.d_type = has_8_bits(p) ? DataType::kBF16 : type;
  p.a_major = a_major, p.b_major = b_major;
  p.has_c = has_c, p.gated = gated;
  p.a_alignment = alignment_of(a_major == Major::kK ? k : m, type);
  p.b_alignment = alignment_of(b_major == Major::kK ? k : n, type);
  p.d_alignment = alignment_of(gated ? n / 2 : n, p.d_type);
  p.c_alignment = has_c && p.d_alignment == 16 ? 16 : 0;
  return p;
}

inline std::string text_of(GemmProblem const& p) {
  char text[200];
  std::snprintf(text, sizeof(text), "%lldx%lldx%lld batch %lld %s->%s %c%c align %d %d %d c %d gated %d", (long long)p.m, (long long)p.n,
                (long long)p.k, (long long)p.batch, name_of(p.ab_type), name_of(p.d_type), p.a_major == Major::kK ? 't' : 'n',
                p.b_major == Major::kK ? 'n' : 't', p.a_alignment, p.b_alignment, p.d_alignment, p.has_c, p.gated);
  return text;
}

/// Options under which a plan does not depend on what this build compiled or on what was tuned.
inline GemmPlanOptions analytic_options() {
  GemmPlanOptions options;
  options.only_runnable = false;
  options.use_tuned = false;
  return options;
}

inline DeviceProperties device_of(char const* name, int major, int minor, int sms, int smem, int64_t l2, double bandwidth, double rate) {
  DeviceProperties d;
  std::strncpy(d.name, name, sizeof(d.name) - 1);
  d.compute_major = major, d.compute_minor = minor;
  d.sm_count = sms, d.smem_per_block = smem, d.l2_bytes = l2;
  d.read_bandwidth = bandwidth, d.matrix_rate = rate;
  return d;
}

/// GPUs that only the portable kernels run on.
inline DeviceProperties const* portable_devices(int* count) {
  static DeviceProperties const devices[] = {
      device_of("NVIDIA A100-SXM4-80GB", 8, 0, 108, 166912, 40 << 20, 1.9e6, 270e6),
      device_of("NVIDIA GeForce RTX 3090", 8, 6, 82, 101376, 6 << 20, 0.9e6, 70e6),
      device_of("NVIDIA L40S", 8, 9, 142, 101376, 96 << 20, 0.8e6, 330e6),
      device_of("NVIDIA GeForce RTX 5090", 12, 0, 170, 101376, 96 << 20, 1.7e6, 210e6),
  };
  *count = int(sizeof(devices) / sizeof(devices[0]));
  return devices;
}

}  // namespace minfer::testing
