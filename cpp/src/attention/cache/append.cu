// append_to_kv_cache: stores new keys and values in a KV cache, in the cache's format, by one launch that writes the tokens' own slots
// only. Kernels: append_rows.cuh for 16 bits, fp8 and int8, append_groups.cuh for int4; both with or without norm_rope.cuh.
#include <algorithm>

#include "attention/cache/append_groups.cuh"
#include "attention/cache/append_rows.cuh"
#include "common/aligned_vector.cuh"
#include "common/kernel_launch.h"
#include "minfer/kv_cache.h"

namespace minfer {

namespace attention {
namespace {

RowsParams describe(KvRows const& rows, int64_t code_bytes) {
  RowsParams params{};
  params.x = static_cast<uint16_t const*>(rows.x);
  params.x_token = rows.x_strides[0];
  params.x_head = rows.x_strides[1];
  params.x_element = rows.x_strides[2];
  params.cache = static_cast<uint8_t*>(rows.cache);
  params.page_bytes = rows.cache_strides[0] * code_bytes;
  params.row_bytes = rows.cache_strides[1] * code_bytes;
  params.head_bytes = rows.cache_strides[2] * code_bytes;
  params.scale = rows.scale;
  params.scale_stride = rows.scale_stride;
  params.residual = static_cast<uint16_t*>(rows.residual);
  params.vectors = int32_t(rows.head_dim / kPerVector);
  return params;
}

/// Whether eight elements are one access, of x and of the residual.
bool is_wide(KvRows const& rows, KvAppend const& append) {
  return begins_vector(rows.x) && begins_vector(rows.residual) && rows.x_strides[2] == 1 &&
         (append.tokens <= 1 || rows.x_strides[0] % kPerVector == 0) && (append.heads_kv <= 1 || rows.x_strides[1] % kPerVector == 0);
}

template <WeightFormat kFormat, class T, int kWidth, class Params>
Status launch_append(Params const& params, DeviceProperties const& device, bool programmatic, Stream stream) {
  LaunchShape shape;
  shape.programmatic = programmatic;
  shape.stream = stream;
  char const* const what = Params::kPrepares ? "launch of qk_norm_rope_append" : "launch of kv_cache_append";
  Params own = params;
  int64_t q_items = 0;
  if constexpr (Params::kPrepares) {
    NormRopeParams& of = own.heads_of;
    // With a head to a warp few tokens are done soonest. Of many, a warp has several in flight, and loads weights and cosines once.
    int64_t const resident = int64_t(device.sm_count) * (kFormat == WeightFormat::kInt4 ? kGroupThreads / kWarp / 2 : 24);
    of.q_together = int64_t(params.tokens) * of.heads_q > resident ? kQueriesTogether : 1;
    of.q_items = (of.heads_q + of.q_together - 1) / of.q_together;
    q_items = of.q_items;
  }
  if constexpr (kFormat == WeightFormat::kInt4) {
    // As few tokens to a CTA as one wave allows, since a CTA completes its groups one after the other.
    constexpr unsigned kWarps = kGroupThreads / kWarp;
    int64_t const pairs = int64_t(params.tokens) * params.heads, q_ctas = (params.tokens * q_items + kWarps - 1) / kWarps;
    int64_t const wave = std::max(device.sm_count, 1) * kGroupCtas, of_groups = q_ctas < wave ? wave - q_ctas : wave;
    own.cta_tokens = int32_t(std::clamp<int64_t>((pairs + of_groups - 1) / of_groups, 1, kWarps));
    unsigned const ctas = (params.tokens + unsigned(own.cta_tokens) - 1) / unsigned(own.cta_tokens) * params.heads;
    if constexpr (Params::kPrepares) own.group_ctas = ctas;
    shape.grid = dim3(ctas + unsigned(q_ctas));
    shape.threads = kGroupThreads;
    return launch(shape, what, &append_groups_kernel<T, kWidth, Params>, own);
  } else {
    constexpr unsigned kWarps = kRowThreads / kWarp;
    shape.grid = dim3(unsigned((params.tokens * (params.heads + q_items) + kWarps - 1) / kWarps));
    shape.threads = kRowThreads;
    return launch(shape, what, &append_rows_kernel<kFormat, T, kWidth, Params>, own);
  }
}

template <WeightFormat kFormat, class Params>
Status launch_format(Params const& params, DataType type, bool wide, DeviceProperties const& device, bool programmatic, Stream stream) {
  if constexpr (Params::kPrepares) {  // always wide
    return type == DataType::kF16 ? launch_append<kFormat, __half, kPerVector>(params, device, programmatic, stream)
                                  : launch_append<kFormat, __nv_bfloat16, kPerVector>(params, device, programmatic, stream);
  } else if (kFormat == WeightFormat::kDense || type == DataType::kF16) {  // a copy is the same for both 16-bit types
    return wide ? launch_append<kFormat, __half, kPerVector>(params, device, programmatic, stream)
                : launch_append<kFormat, __half, 1>(params, device, programmatic, stream);
  } else if constexpr (kFormat != WeightFormat::kDense) {
    return wide ? launch_append<kFormat, __nv_bfloat16, kPerVector>(params, device, programmatic, stream)
                : launch_append<kFormat, __nv_bfloat16, 1>(params, device, programmatic, stream);
  }
  return Status::success();
}

template <class Params>
Status launch_any(Params const& params, WeightFormat format, DataType type, bool wide, DeviceProperties const& device, bool programmatic,
                  Stream stream) {
  switch (format) {
    case WeightFormat::kDense: return launch_format<WeightFormat::kDense>(params, type, wide, device, programmatic, stream);
    case WeightFormat::kFp8E4M3: return launch_format<WeightFormat::kFp8E4M3>(params, type, wide, device, programmatic, stream);
    case WeightFormat::kInt8: return launch_format<WeightFormat::kInt8>(params, type, wide, device, programmatic, stream);
    case WeightFormat::kInt4: return launch_format<WeightFormat::kInt4>(params, type, wide, device, programmatic, stream);
    default: return Status::failure(StatusCode::kInvalidArgument, "a cache of format %s", name_of(format));
  }
}

NormRopeParams describe(NormRope const& of, int64_t head_dim) {
  NormRopeParams params{};
  params.q = static_cast<uint16_t const*>(of.q);
  params.q_token = of.q_strides[0];
  params.q_head = of.q_strides[1];
  params.q_out = static_cast<uint16_t*>(of.q_out);
  params.heads_q = uint32_t(of.heads);
  params.q_weight = static_cast<uint16_t const*>(of.q_weight);
  params.k_weight = static_cast<uint16_t const*>(of.k_weight);
  params.eps = of.eps;
  params.weight_offset = of.weight_offset;
  params.cos_sin = of.cos_sin;
  params.length = of.length;
  params.positions = of.positions;
  params.positions_64bit = of.positions_64bit;
  params.vectors = int32_t(head_dim / kPerVector);
  params.rotary_dim = int32_t(of.rotary_dim);
  params.interleaved = of.interleaved;
  params.table_wide = begins_vector(of.cos_sin) && of.rotary_dim % 8 == 0;
  return params;
}

}  // namespace
}  // namespace attention

Status append_to_kv_cache(KvAppend const& append, NormRope const* norm_rope, DeviceProperties const& device, bool programmatic,
                          Stream stream) {
  using namespace attention;
  int64_t const capacity = append.pages * append.page_size, heads_q = norm_rope != nullptr ? norm_rope->heads : 0;
  bool const stores = append.heads_kv > 0 && capacity > 0;
  if (append.tokens == 0 || (!stores && heads_q == 0)) return Status::success();
  if (append.type == DataType::kF32) return Status::failure(StatusCode::kInvalidArgument, "k of type %d", int(append.type));
  for (int64_t const head_dim : {append.k.head_dim, append.v.head_dim}) {
    int const unit = append.kv_format == WeightFormat::kInt4 ? 32 : kPerVector;
    if (head_dim < unit || head_dim > kMaxCacheHeadDim || head_dim % unit != 0) {
      return Status::failure(StatusCode::kInvalidArgument, "head_dim %lld", (long long)head_dim);
    }
  }
  if (append.tokens > 0x7fffffff / (append.heads_kv + heads_q)) {
    return Status::failure(StatusCode::kNotSupported, "%lld tokens of %lld heads are more than a launch covers", (long long)append.tokens,
                           (long long)(append.heads_kv + heads_q));
  }
  int64_t const code_bytes = append.kv_format == WeightFormat::kDense ? 2 : 1;
  PreparedAppendParams params{};
  params.side[0] = describe(append.k, code_bytes);
  params.side[1] = describe(append.v, code_bytes);
  params.slots = append.slots;
  params.slots_stride = append.slots_stride;
  params.capacity = capacity;
  params.page_size = append.page_size;
  params.tokens = uint32_t(append.tokens);
  params.heads = uint32_t(append.heads_kv);
  bool wide = is_wide(append.k, append) && is_wide(append.v, append);
  if (append.kv_format == WeightFormat::kInt4) {
    if ((append.group_tokens != 32 && append.group_tokens != 64) || append.page_size % append.group_tokens != 0 || append.groups_v < 1 ||
        append.v.head_dim / 32 % append.groups_v != 0) {
      return Status::failure(StatusCode::kInvalidArgument, "groups of %lld tokens, %lld groups of channels", (long long)append.group_tokens,
                             (long long)append.groups_v);
    }
    params.cu_seqlens = append.cu_seqlens;
    params.cu_seqlens_stride = append.cu_seqlens_stride;
    params.batch = append.batch;
    params.group = int32_t(append.group_tokens);
    params.group_log2 = append.group_tokens == 32 ? 5 : 6;
    params.groups_v = int32_t(append.groups_v);
  }
  if (norm_rope == nullptr) {
    PlainAppendParams plain{};
    static_cast<AppendParams&>(plain) = params;
    return launch_any(plain, append.kv_format, append.type, wide, device, programmatic, stream);
  }
  NormRope const& of = *norm_rope;
  if (of.length >= int64_t(1) << 31) return Status::failure(StatusCode::kNotSupported, "a table of %lld rows", (long long)of.length);
  if (of.rotary_dim < 0 || of.rotary_dim % 2 != 0 || of.rotary_dim > append.k.head_dim) {
    return Status::failure(StatusCode::kInvalidArgument, "rotary_dim %lld of %lld", (long long)of.rotary_dim, (long long)append.k.head_dim);
  }
  params.heads_of = describe(of, append.k.head_dim);
  wide = wide && begins_vector(of.q) && begins_vector(of.q_out) && begins_vector(of.q_weight) && begins_vector(of.k_weight) &&
         of.q_strides[2] == 1 && (append.tokens <= 1 || of.q_strides[0] % kPerVector == 0) &&
         (of.heads <= 1 || of.q_strides[1] % kPerVector == 0);
  if (!wide) return Status::failure(StatusCode::kNotSupported, "rows of queries, keys, values or residuals at no multiples of 16 bytes");
  return launch_any(params, append.kv_format, append.type, wide, device, programmatic, stream);
}

}  // namespace minfer
