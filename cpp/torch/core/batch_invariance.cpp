#include "core/batch_invariance.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "core/failure.h"
#include "core/operators.h"

namespace minfer::torch_binding {

namespace {

/// The process's mode.
std::atomic<bool>& of_process() {
  static std::atomic<bool> mode = [] {
    char const* value = std::getenv("MINFER_BATCH_INVARIANT");
    return value != nullptr && std::strcmp(value, "1") == 0;
  }();
  return mode;
}

/// The thread's own mode: 0 or 1, or -1 for that of the process.
thread_local int64_t of_thread = -1;

/// Operators that compute in the mode. An operator that nobody has thought about is refused.
constexpr std::string_view kInvariant[] = {
    // sums over GPUs, in the order of the ranks
    "_all_reduce",
    "_all_reduce_rms_norm",
    "_allocate_peer_memory",
    "_open_peer_memory",
    "_release_peer_memory",
    "_return_sums",
    "_send_tokens",
    // attention
    "_attention_paged_into",
    "attention",
    "attention_paged",
    "attention_varlen",
    // products
    "gemm",
    "gemm_fp8",
    "gemm_fp8_gated",
    "gemm_gated",
    "gemm_int8",
    "gemm_int8_gated",
    "rms_norm_gemm",
    "rms_norm_gemm_gated",
    "rms_norm_w4a16_gemm",
    "rms_norm_w4a16_gemm_gated",
    "rms_norm_w8a16_gemm",
    "rms_norm_w8a16_gemm_gated",
    "decoder_block",
    "fp8_decoder_block",
    "w4a16_decoder_block",
    "w4a16_dequantize",
    "w4a16_gemm",
    "w4a16_gemm_gated",
    "w4a16_pack",
    "w4a8_gemm",
    "w4a8_gemm_gated",
    "w8a16_dequantize",
    "w8a16_gemm",
    "w8a16_gemm_gated",
    "w8a16_pack",
    // experts
    "grouped_gemm",
    "grouped_gemm_fp8",
    "grouped_gemm_int8",
    "grouped_gemm_masked",
    "grouped_gemm_fp8_masked",
    "grouped_gemm_int8_masked",
    "grouped_w4a16_gemm",
    "moe_combine",
    "moe_ffn",
    "moe_ffn_fp8",
    "moe_ffn_int8",
    "moe_ffn_w4a16",
    "moe_router",
    "moe_router_gemm",
    "moe_sort",
    // rows
    "activation",
    "add_rms_norm",
    "add_rms_norm_quantized",
    "dequantize",
    "embedding",
    "gated_activation",
    "gated_activation_quantized",
    "hadamard",
    "layer_norm",
    "log_softmax",
    "quantize",
    "rms_norm",
    "rms_norm_quantized",
    "rope",
    "sample",
    "softmax",
    // caches: a warp for each head of a token
    "kv_cache_append",
    "merge_attention_states",
    "qk_norm_rope_append",
};

/// Whether an operator is one of them; its own may have a namespace in front.
bool computes_in_the_mode(std::string_view name) {
  size_t const colons = name.rfind("::");
  if (colons != std::string_view::npos) name.remove_prefix(colons + 2);
  return std::find(std::begin(kInvariant), std::end(kInvariant), name) != std::end(kInvariant);
}

bool computes_batch_invariant(std::string const& op) { return computes_in_the_mode(op); }

void set_batch_invariant(bool enabled) { of_process() = enabled; }

/// -1: the thread follows the process.
void set_batch_invariant_of_thread(int64_t enabled) { of_thread = enabled; }

constexpr Operator kOperators[] = {
    {"_batch_invariant() -> bool", boxed<&batch_invariant>},
    {"_computes_batch_invariant(str op) -> bool", boxed<&computes_batch_invariant>},
    {"_set_batch_invariant(bool enabled) -> ()", boxed<&set_batch_invariant>},
    {"_set_batch_invariant_of_thread(int enabled) -> ()", boxed<&set_batch_invariant_of_thread>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CompositeExplicitAutograd, m) { implement(m, kOperators); }

}  // namespace

bool batch_invariant() { return of_thread < 0 ? of_process().load(std::memory_order_relaxed) : of_thread != 0; }

void check_batch_invariance(char const* op) {
  if (batch_invariant() && !computes_in_the_mode(op)) {
    fail(op, ": cannot compute in the batch-invariant mode; leave it with minfer.batch_invariant(False)");
  }
}

}  // namespace minfer::torch_binding
