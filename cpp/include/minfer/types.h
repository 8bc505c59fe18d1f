// Types that every operator family shares: number types and formats (formats.h), operand majors, activations, device facts, stream.
#pragma once

#include <cstddef>
#include <cstdint>

#include "minfer/formats.h"

struct CUstream_st;  // cudaStream_t without CUDA's headers

namespace minfer {

using Stream = CUstream_st*;

/// Which mode of an operand is contiguous: k, or the mode it shares with the output (m for A, n for B).
enum class Major : int32_t { kK = 0, kMN = 1 };

enum class Activation : int32_t { kNone = 0, kRelu = 1, kGelu = 2, kGeluTanh = 3, kSilu = 4, kRelu2 = 5 };
constexpr Activation kActivations[] = {Activation::kNone,     Activation::kRelu, Activation::kGelu,
                                       Activation::kGeluTanh, Activation::kSilu, Activation::kRelu2};

/// Where gates and ups are among the n rows of a gated weight, or among the n elements of its product: n / 2 are of gates, n / 2 of ups.
enum class GateLayout : int32_t {
  kHalves = 0,       // all gates, then all ups: the order of checkpoints
  kAlternating = 1,  // gate, up, gate, up, ..: gpt-oss
  kBlocks = 2,       // 8 gates, then their 8 ups: minfer.pack_gate_up
};

enum class RasterOrder : int32_t { kAlongM = 0, kAlongN = 1 };

inline char const* name_of(Activation a) {
  switch (a) {
    case Activation::kNone: return "none";
    case Activation::kRelu: return "relu";
    case Activation::kGelu: return "gelu";
    case Activation::kGeluTanh: return "gelu_tanh";
    case Activation::kSilu: return "silu";
    case Activation::kRelu2: return "relu2";
  }
  return "?";
}
inline char const* name_of(RasterOrder order) { return order == RasterOrder::kAlongM ? "along_m" : "along_n"; }

/// What planning needs to know of a GPU. Filled by query_device() on a machine that has one, by hand in tests.
struct DeviceProperties {
  char name[256] = {0};  // whole, as CUDA has it: the tuned table is found by it
  int32_t index = -1;    // of this machine's devices; none of them: -1
  int32_t compute_major = 0;
  int32_t compute_minor = 0;
  int32_t sm_count = 0;
  int32_t max_clusters[4] = {0, 0, 0, 0};  // clusters of 1, 2, 4, 8 CTAs, each CTA filling an SM, that are resident at once: SMs of one
                                           // cluster share a GPC, so 132 SMs hold fewer than 33 clusters of 4
  int32_t smem_per_block = 0;              // bytes, with opt-in
  int64_t l2_bytes = 0;
  int64_t memory_bytes = 0;   // all of it; 0: unknown
  double read_bandwidth = 0;  // bytes / us, sustained
  double matrix_rate = 0;     // 16-bit multiply-adds x 2 / us, dense, sustained

  int32_t compute_capability() const { return compute_major * 10 + compute_minor; }
};

/// The H200 as measured (4.45 TB/s read, 750 TFLOP/s dense 16-bit): plans can be read and tested without a GPU.
DeviceProperties h200_properties();

/// Without its ending, the name of the file that a device's tuned table is in.
struct DeviceFileName {
  char text[256] = {0};
};

/// A device's name in lower case, each run of bytes that are neither ASCII letters nor digits being one '-', but none at the ends; "device"
/// where nothing is left: "NVIDIA A100-SXM4-40GB (MIG 1g.5gb)" is nvidia-a100-sxm4-40gb-mig-1g-5gb. The rule stands only here.
DeviceFileName device_file_name(char const* device_name);

}  // namespace minfer
