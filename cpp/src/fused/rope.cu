// Rotary position embedding of queries and keys, in place (minfer/fused.h). Source: RoFormer (Su et al., 2021).
//
// A CTA has some heads of one token. A thread has a column: one place of the rotated part of a head, for which it loads cosines and sines
// once, and rotates that place of every kHeadGroups-th head; kHeadsTogether heads' elements are in flight at a time. A place is
//   halves        kWidth elements, and as many rotary_dim / 2 behind them
//   interleaved   2 kWidth consecutive elements
// kWidth is 8, accesses of 16 bytes (interleaved: two of them), or 1 where bases, strides or rotary_dim / 2 do not allow that.
// A position outside of the table has cosines and sines of zero.
#include "common/aligned_vector.cuh"
#include "common/dependent_launch.cuh"
#include "common/float16.cuh"
#include "common/kernel_launch.h"
#include "fused/row_vector.cuh"

namespace minfer {

namespace fused {
namespace {

constexpr unsigned kRopeThreads = 256;
constexpr int kHeadsTogether = 2;

struct RopeParams {
  Rope rope;
  uint32_t places;       // of a head
  uint32_t head_groups;  // of a CTA: threads / places
  uint32_t blocks;       // CTAs of a token
};

template <class T, int kWidth, bool kInterleaved>
__global__ void __launch_bounds__(kRopeThreads, 3) rope_kernel(__grid_constant__ RopeParams const params) {
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
#endif
  Rope const& r = params.rope;
  uint32_t const token = params.blocks == 1 ? blockIdx.x : blockIdx.x / params.blocks;
  uint32_t const block = blockIdx.x - token * params.blocks;
  uint32_t const group = threadIdx.x / params.places, place = threadIdx.x - group * params.places;
  using Vector = AlignedVector<T, kWidth>;
  uint32_t const half = uint32_t(r.rotary_dim) / 2, heads = uint32_t(r.q.heads + r.k.heads), step = params.head_groups * params.blocks;
  uint32_t const first_at = kInterleaved ? place * 2 * kWidth : place * kWidth,
                 second_at = kInterleaved ? first_at + kWidth : first_at + half;
  auto const address = [&](uint32_t head) {
    bool const of_q = head < r.q.heads;
    Rope::Heads const& of = of_q ? r.q : r.k;
    return static_cast<T*>(of.data) + token * of.token_stride + (of_q ? head : head - uint32_t(r.q.heads)) * of.head_stride;
  };
  uint32_t head = block * params.head_groups + group;
  if (group >= params.head_groups) return;  // before the wait, so that the divisions are, too
  T const* first_head[kHeadsTogether];
#pragma unroll
  for (int h = 0; h < kHeadsTogether; ++h) {
    first_head[h] = address(head + h * step);
    make_opaque(first_head[h]);  // likewise
  }
#if __CUDA_ARCH__ >= 900
  wait_for_predecessor();
#endif
  Vector x[kHeadsTogether][2];
  auto const load = [&](uint32_t head, auto&& address_of) {
#pragma unroll
    for (int h = 0; h < kHeadsTogether; ++h) {
      if (head + h * step >= heads) continue;
      T const* const from = address_of(h);
      x[h][0] = *reinterpret_cast<Vector const*>(from + first_at);
      x[h][1] = *reinterpret_cast<Vector const*>(from + second_at);
    }
  };
  int64_t const position = r.positions_64bit ? load_operand(static_cast<int64_t const*>(r.positions) + token)
                                             : load_operand(static_cast<int32_t const*>(r.positions) + token);
  load(head, [&](int h) { return first_head[h]; });
  bool const known = position >= 0 && position < r.length;
  float cosine[kWidth], sine[kWidth];
  float const* const row = r.cos_sin + (known ? position : 0) * r.rotary_dim + place * kWidth;
  constexpr int kAtOnce = kWidth < 4 ? kWidth : 4;
  using Factors = AlignedVector<float, kAtOnce>;
#pragma unroll
  for (int i = 0; i < kWidth; i += kAtOnce) {
    Factors c = {}, s = {};
    if (known) {
      c = load_operand(reinterpret_cast<Factors const*>(row + i));
      s = load_operand(reinterpret_cast<Factors const*>(row + half + i));
    }
#pragma unroll
    for (int e = 0; e < kAtOnce; ++e) cosine[i + e] = c.value[e], sine[i + e] = s.value[e];
  }
#pragma unroll 1
  for (; head < heads; head += kHeadsTogether * step) {
#pragma unroll
    for (int h = 0; h < kHeadsTogether; ++h) {
      if (head + h * step >= heads) continue;
      Vector y[2];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        // The pair's members: number i of both vectors, or 2 i and 2 i + 1 of the two taken together.
        int const at = kInterleaved ? 2 * i / kWidth : 0, other = kInterleaved ? (2 * i + 1) / kWidth : 1;
        int const of = kInterleaved ? 2 * i % kWidth : i, of_other = kInterleaved ? (2 * i + 1) % kWidth : i;
        float const a = to_float(x[h][at].value[of]), b = to_float(x[h][other].value[of_other]);
        y[at].value[of] = from_float<T>(fmaf(a, cosine[i], -(b * sine[i])));
        y[other].value[of_other] = from_float<T>(fmaf(b, cosine[i], a * sine[i]));
      }
      T* const to = address(head + h * step);
      *reinterpret_cast<Vector*>(to + first_at) = y[0];
      *reinterpret_cast<Vector*>(to + second_at) = y[1];
    }
    uint32_t const next = head + kHeadsTogether * step;
    if (next < heads) load(next, [&](int h) { return address(next + h * step); });
  }
}

template <class T>
Status launch_rope(Rope const& rope, DeviceProperties const& device, bool programmatic, Stream stream) {
  constexpr int kWide = 16 / int(sizeof(T));
  int64_t const half = rope.rotary_dim / 2;
  auto const fits = [&](Rope::Heads const& of) {
    return of.heads == 0 || begin_vectors(of.data, sizeof(T), {of.token_stride, of.head_stride});
  };
  bool const wide = half % kWide == 0 && fits(rope.q) && fits(rope.k) && begins_vector(rope.cos_sin);
  int64_t const places = wide ? half / kWide : half, heads = rope.q.heads + rope.k.heads;
  if (places > kRopeThreads || heads > 0x7fffffff) {
    return Status::failure(StatusCode::kNotSupported, "%lld heads of which %lld elements are rotated", (long long)heads,
                           (long long)rope.rotary_dim);
  }
  RopeParams params{rope, uint32_t(places), 0, 1};
  // Few heads are spread over CTAs, of many a thread has kHeadsTogether: the turning point is where an H100 takes as long with either.
  int64_t const together = rope.tokens * heads > 128 * int64_t(std::max(device.sm_count, 1)) ? kHeadsTogether : 1;
  int64_t const groups_of_token = (heads + together - 1) / together;
  int64_t const most = kRopeThreads / places;
  params.blocks = uint32_t((groups_of_token + most - 1) / most);
  params.head_groups = uint32_t((groups_of_token + params.blocks - 1) / params.blocks);
  LaunchShape shape;
  shape.threads = unsigned((params.head_groups * places + 31) / 32 * 32);
  if (rope.tokens > 0x7fffffff / params.blocks) {
    return Status::failure(StatusCode::kNotSupported, "%lld tokens are more than a launch covers", (long long)rope.tokens);
  }
  shape.grid = dim3(unsigned(rope.tokens * params.blocks));
  shape.programmatic = programmatic;
  shape.stream = stream;
  char const* const what = "launch of rope";
  if (rope.interleaved) {
    return wide ? launch(shape, what, &rope_kernel<T, kWide, true>, params) : launch(shape, what, &rope_kernel<T, 1, true>, params);
  }
  return wide ? launch(shape, what, &rope_kernel<T, kWide, false>, params) : launch(shape, what, &rope_kernel<T, 1, false>, params);
}

}  // namespace
}  // namespace fused

Status rotate(Rope const& rope, DeviceProperties const& device, bool programmatic, Stream stream) {
  if (rope.tokens == 0 || rope.q.heads + rope.k.heads == 0 || rope.rotary_dim == 0) return Status::success();
  switch (rope.type) {
    case DataType::kF16: return fused::launch_rope<__half>(rope, device, programmatic, stream);
    case DataType::kBF16: return fused::launch_rope<__nv_bfloat16>(rope, device, programmatic, stream);
    default: return Status::failure(StatusCode::kInvalidArgument, "queries of type %s", name_of(rope.type));
  }
}

}  // namespace minfer
