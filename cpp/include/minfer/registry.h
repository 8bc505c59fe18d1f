// The kernel registry: every configuration of cpp/configs/*.toml, whether or not this build compiled it.
#pragma once

#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

enum class Schedule : int32_t {
  kCooperative = 0,  // sm90: both consumer warpgroups share one tile, split along M
  kPingpong = 1,     // sm90: each consumer warpgroup owns a tile; one's epilogue hides under the other's mainloop
  kMultistage = 2,   // sm80: cp.async ring, mma.sync
  kSplitKv = 3,      // attention of few queries: the keys are shared out over the CTAs
  kRows = 4,         // fused: a row in the registers of a group of threads
  kRegisters = 5,    // norm_gemm: weights go from memory into the registers of the warp that multiplies them
};
inline char const* name_of(Schedule s) {
  switch (s) {
    case Schedule::kCooperative: return "cooperative";
    case Schedule::kPingpong: return "pingpong";
    case Schedule::kMultistage: return "multistage";
    case Schedule::kSplitKv: return "split_kv";
    case Schedule::kRows: return "rows";
    case Schedule::kRegisters: return "registers";
  }
  return "?";
}

/// Compile-time facts of one kernel. `launch` is opaque: the family's run function casts it; null when not compiled.
struct KernelInfo {
  char const* name;       // gemm_sm90_f16_tn_128x192x64_2x1x1_cooperative
  char const* family;     // "gemm"
  char const* operation;  // fused: what it computes, "rms_norm"; else the family
  int32_t arch;           // 80 or 90: the lowest compute capability it runs on
  bool arch_exact;        // sm_90a code runs on 9.0 alone
  DataType ab_type;
  Major a_major, b_major;          // of the caller's A and B
  WeightFormat b_format;           // of B; attention: of the KV cache
  int32_t group_multiple;          // quantised B: k per scale must be a multiple of this, or all of k; moe_scaled: k per scale of a row
  bool swap;                       // computes D^T = B^T.A^T: the caller's n is on the tile's M side, his m on its N side
  int32_t column_step;             // > 0: a launch chooses the tiles' columns, multiples of this up to tile_n; 0: they are tile_n
  int32_t tile_m, tile_n, tile_k;  // attention: queries, keys, head_dim; fused: 1, elements of a thread, 1;
                                   // norm_gemm: tokens, columns, k of a warp's turn
  int32_t head_dim_v;              // attention: of the values; else 0
  int32_t cluster_m, cluster_n;
  Schedule schedule;
  int32_t stages;
  int32_t threads;
  int32_t smem_bytes;
  int32_t ctas_per_sm;
  int32_t alignment;     // bytes that A's and B's pointers and strides must be multiples of
  char const* sums;      // how an output is added up over k: kernels of one text give it the same bits, for the same ranges of k; else ""
  bool invariant_only;   // only batch-invariant plans take it
  bool in_place_ranges;  // has Decomposition::kRanges
  char const* note;
  void const* launch;  // null: not in this build
};

/// All kernels of all families, in table order.
KernelInfo const* registry(int64_t* count);

/// By exact name; null if there is none.
KernelInfo const* find_kernel(char const* name);

/// Architectures this build holds code for, for example "90a;80"; empty without CUDA.
char const* build_archs();
/// CUTLASS version the kernels were built with, "4.2.0"; empty without CUDA.
char const* build_cutlass_version();

/// Fills `properties` for a device of this machine. kNotSupported in a build without CUDA.
Status query_device(int32_t device_index, DeviceProperties* properties);

/// Bytes of a device's memory: those that no process has, and all. It becomes the calling thread's device. kNotSupported without CUDA.
Status query_memory(int32_t device_index, int64_t* free, int64_t* total);

/// Whether the work in front of an event (cudaEvent_t) has finished; also while any thread captures a graph. kNotSupported without CUDA.
Status query_event(void* event, bool* done);

}  // namespace minfer
