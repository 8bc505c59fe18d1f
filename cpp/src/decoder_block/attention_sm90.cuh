// The attention of one token at the head of a decoder block's launch: the token's q and k are normalised and rotated, k and v stored in a
// paged cache of 16 bits, and the output goes to the block's converters as packets.
//
// A launch of its own would wait for the one in front of it, and so would the one behind it; here the block's weights fill their ring
// meanwhile, and the first keys and values are in registers before the predecessor has finished.
//
// Division. The CTAs of a head of keys divide its sequence (`splits`). The 16 consumer warps of a CTA are divided twice: `pairs` of the
// head's group of queries, and sets, which take 8 keys at a time in turns. A lane has 8 of a key's 128 elements: a load of the warp is two
// keys. Sums are in float32 (FlashAttention's online softmax), merged in shared memory by a CTA, and by packets among the CTAs of a head,
// each of which merges some columns of all of them.
// Keys are requested before the weights, which would keep memory busy for longer. With `early` that is before the wait for the predecessor
// (common/dependent_launch.cuh): another exception from its rule, of which the caller promises what is promised of constant weights.
// Queries are made by the converters' warps, which have nothing else to do then, and go to the consumers through shared memory. So does the
// new key, in the CTA of the last split: it is not read from the cache, where they store it.
#pragma once

#include <cstdint>

#include "common/dependent_launch.cuh"
#include "common/float16.cuh"
#include "common/opaque.cuh"
#include "common/packet.cuh"
#include "decoder_block/layout.h"
#include "fused/row_operation.cuh"

namespace minfer::decoder_block {

/// Of one layer of a launch.
struct LayerAttention {
  void *k_cache, *v_cache;
  void const *q_weight, *k_weight;  // [128], or null: no normalisation
  int32_t window;                   // keys before the token's own that it sees, or -1: all
};

/// Of all of them.
struct AttentionParams {
  void const* qkv;                  // [heads + 2 heads_kv, 128], of the first layer
  int64_t strides[3];               // of both caches, in elements: of pages, rows and heads
  int32_t const *table, *seq_lens;  // of the one sequence; its length counts the token
  int64_t const* slots;
  void const* positions;
  float const* cos_sin;  // [length, 128]: cosines, then sines
  int64_t length, pages;
  float eps, weight_offset, scale_log2;
  int32_t heads, heads_kv, group;          // group: queries' heads of a head of keys
  int32_t pair_shift, splits, page_shift;  // log2 of pairs and of a page's rows
  int32_t capacity;                        // rows of the table's pages
  bool positions_64bit;
  Packet *out, *partials, *ends;  // of the output; of each CTA and head of queries 64 of its sums, and what they are relative to
};

/// What a CTA has to know of the sequence: read once, for a line of memory that all warps of all CTAs want is slow to serve them.
struct Sequence {
  alignas(8) int64_t position;
  int32_t length;                   // with the token
  int32_t head, split;              // of the CTA
  int32_t pages[kPagesOfSequence];  // the first ones
};

/// Keys of a CTA's split, begin to end - 1, all of them in the cache.
struct Split {
  int begin, end;

  __device__ __forceinline__ Split(AttentionParams const& p, int split, int window, int length) {
    int const cached = max(length - 1, 0), first = window >= 0 ? max(cached - window, 0) : 0;
    int const share = (cached - first + p.splits - 1) / p.splits;
    begin = first + split * share;
    end = min(begin + share, cached);
  }
};

/// Before the wait: from L2, for the first-level cache may still have what other launches left there.
template <class U>
__device__ __forceinline__ U load_early(U const* from) {
  return __ldcg(from);
}

/// By a warp. All loads are under way at a time: pages are not looked up where the length says, but from the first one on.
__device__ __forceinline__ void read_sequence(AttentionParams const& p, Sequence* sequence, int lane) {
  int const columns = p.capacity >> p.page_shift;
  int const length = load_early(p.seq_lens);
  int64_t const position = p.positions_64bit ? int64_t(load_early(static_cast<long long const*>(p.positions)))
                                             : int64_t(load_early(static_cast<int32_t const*>(p.positions)));
  int pages[kPagesOfSequence / 32];
#pragma unroll
  for (int i = 0; i < kPagesOfSequence / 32; ++i) pages[i] = lane + 32 * i < columns ? load_early(p.table + lane + 32 * i) : 0;
#pragma unroll
  for (int i = 0; i < kPagesOfSequence / 32; ++i) sequence->pages[lane + 32 * i] = pages[i];
  if (lane == 0) {
    sequence->length = min(length, p.capacity);
    sequence->position = position;
    sequence->head = int(blockIdx.x) / p.splits;
    sequence->split = int(blockIdx.x) % p.splits;
  }
}

/// The same number, of which the compiler does not know that: what follows from it is computed where it is used, and takes no registers
/// until then.
__device__ __forceinline__ int opaque(int x) {
  make_opaque(x);
  return x;
}

/// Layers: of a launch, with a member `attention` each.
template <DataType kType, class Layers>
class TokenAttention {
 public:
  static constexpr int kKeys = 8, kHeads = 2;  // of a warp at a time
  static constexpr int kLoads = kKeys / 2;
  using T = fused::RowType<kType>;
  static_assert(kWarps * kHeads * kHeadDim * 4 + kWarps * kHeads * 8 == kAttentionBytes);

  __device__ __forceinline__ TokenAttention(AttentionParams const& params, Layers const& layers, int layer, Sequence const& sequence,
                                            char* area, char* rows, int warp, int lane)
      : p_(params), layers_(layers), layer_(layer), sequence_(sequence), area_(area), rows_(rows), warp_(warp), lane_(lane) {}

  /// By the converters' warps: the CTA's heads of queries, and in the CTA of the last split the new key and value, which it also stores.
  /// packets: of q, k and v, with what tag; null: they are in memory.
  __device__ __forceinline__ void prepare(Packet const* packets, uint64_t tag) const {
    bool const has_new = sequence_.length > 0 && sequence_.split == p_.splits - 1;
    int const rows = p_.group + (has_new ? 2 : 0);  // a row for each half of a warp
    if (sequence_.head >= p_.heads_kv || 2 * warp_ >= rows) return;
    int const row = min(2 * warp_ + lane_ / 16, rows - 1);
    bool const is_query = row<p_.group, is_value = row> p_.group;
    uint4 const raw =
        row_of(packets, tag, is_query ? sequence_.head * p_.group + row : p_.heads + sequence_.head + (is_value ? p_.heads_kv : 0));
    uint4 const rotated = prepared(raw, is_query ? own().q_weight : own().k_weight, rotation_of_token());
    uint4 const x = is_value ? raw : rotated;
    place_of(row) = x;
    if (!is_query) store(is_value ? own().v_cache : own().k_cache, x);
  }

  /// By the consumers. at_start: called first; issued: when the first keys have been requested; ready: waits for what `prepare` makes;
  /// join: waits for all warps, and returns the tag of attention's own packets.
  template <class AtStart, class Issued, class Ready, class Join>
  __device__ __forceinline__ void run(AtStart const& at_start, Issued const& issued, Ready const& ready, Join const& join) const {
    at_start();
    if (sequence_.head >= p_.heads_kv) {
      issued();
      ready();
      join();
      return;
    }
    int const sets = kWarps >> p_.pair_shift, set = warp_ >> p_.pair_shift;
    int const length = sequence_.length;
    auto const [begin, end] = Split(p_, sequence_.split, own().window, length);
    int at = begin + set * kKeys;
    bool has_new = length > 0 && sequence_.split == p_.splits - 1 && set == sets - 1;
    uint4 k[kLoads] = {}, v[kLoads] = {};  // not what the layer in front left there, which would have to be kept
    if (at < end) load(at, end, k, v);
    issued();
    ready();
    State state;
    int count = end - at;
#pragma unroll 1
    while (true) {
      if (count <= 0) {
        if (!has_new) break;
        has_new = false;
        count = 1;
        k[0] = place_of(p_.group);
        v[0] = lane_ < 16 ? place_of(p_.group + 1) : uint4{};
#pragma unroll
        for (int j = 1; j < kLoads; ++j) k[j] = v[j] = uint4{};
      }
      asm volatile("" ::: "memory");  // queries are read anew: there are no registers for them
      attend(k, v, count, state);
      at += sets * kKeys;
      count = end - at;
      if (count > 0) load(at, end, k, v);
    }
    leave(state);
    uint64_t const tag = join();
    merge_warps(tag);
    merge_splits(tag);
  }

 private:
  static constexpr float kLowest = -3.0e38f;  // below all scores, and finite: differences to it are no NaN

  /// Of the lane's head of the warp's two: the largest score and the sum of weights relative to it. Of both heads: the weighted values.
  struct State {
    float most = kLowest, total = 0.0f, sums[kHeads][8] = {};
  };

  static __device__ __forceinline__ void unpack(uint4 const& from, float (&x)[8]) {
    uint32_t const words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kType == DataType::kBF16) {  // a shift and a mask: shorter than Float16's
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      } else {
        float2 const two = Float16<kType>::unpack(words[i]);
        x[2 * i] = two.x;
        x[2 * i + 1] = two.y;
      }
    }
  }

  /// The lane's elements of a head of the token's q, k and v.
  __device__ __forceinline__ uint4 row_of(Packet const* packets, uint64_t tag, int head) const {
    int const at = head * kHeadDim + lane_ % 16 * 8;
    if (packets == nullptr) return load_operand(reinterpret_cast<uint4 const*>(static_cast<T const*>(p_.qkv) + at));
    Packet two[2] = {{0, ~tag}, {0, ~tag}};
    while (true) {
#pragma unroll
      for (int i = 0; i < 2; ++i) poll_packet(two[i].tag != tag, two[i], packets + at / 4 + i);
      if (two[0].tag == tag && two[1].tag == tag) break;
    }
    __syncwarp();
    return {uint32_t(two[0].numbers), uint32_t(two[0].numbers >> 32), uint32_t(two[1].numbers), uint32_t(two[1].numbers >> 32)};
  }
  /// Of the lane's elements of a key in both caches, in bytes.
  __device__ __forceinline__ int64_t place(int64_t page, int row) const {
    return (page * p_.strides[0] + row * p_.strides[1] + sequence_.head * p_.strides[2] + lane_ % 16 * 8) * int64_t(sizeof(T));
  }
  /// Keys at + 2 j + lane / 16 and their values, from `end` on those of the last one.
  __device__ __forceinline__ void load(int at, int end, uint4 (&k)[kLoads], uint4 (&v)[kLoads]) const {
    int page[kLoads], key[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      key[j] = min(at + 2 * j + lane_ / 16, end - 1);
      int const i = key[j] >> p_.page_shift;
      page[j] = i < kPagesOfSequence ? sequence_.pages[i] : load_early(p_.table + i);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      int const row = key[j] & ((1 << p_.page_shift) - 1);
      int64_t const at_key = place(page[j], row);
      k[j] = load_early(reinterpret_cast<uint4 const*>(static_cast<char const*>(own().k_cache) + at_key));
      v[j] = load_early(reinterpret_cast<uint4 const*>(static_cast<char const*>(own().v_cache) + at_key));
    }
  }
  /// The cosines of the lane's elements, the sines are kHeadDim / 2 further on; null for a position outside of the table, which has zeros.
  __device__ __forceinline__ float const* rotation_of_token() const {
    int64_t const position = sequence_.position;
    return position >= 0 && position < p_.length ? p_.cos_sin + position * kHeadDim + lane_ % 8 * 8 : nullptr;
  }
  /// A head, normalised if there is a weight, rotated, and rounded.
  __device__ __forceinline__ uint4 prepared(uint4 const& raw, void const* weight, float const* rotation) const {
    float x[8];
    unpack(raw, x);
    if (weight != nullptr) {
      float squares = 0.0f, factors[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) squares = fmaf(x[e], x[e], squares);
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
      float const factor = rsqrtf(squares * (1.0f / kHeadDim) + p_.eps);
      unpack(load_operand(reinterpret_cast<uint4 const*>(static_cast<T const*>(weight) + lane_ % 16 * 8)), factors);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = x[e] * factor * (factors[e] + p_.weight_offset);
    }
    bool const low = lane_ % 16 < 8;  // of the pairs, which are 64 elements apart
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      auto const* const from = reinterpret_cast<float4 const*>(rotation) + i;
      float4 const cosines = rotation != nullptr ? load_operand(from) : float4{};
      float4 const sines = rotation != nullptr ? load_operand(from + kHeadDim / 8) : float4{};
      float const cosine[4] = {cosines.x, cosines.y, cosines.z, cosines.w}, sine[4] = {sines.x, sines.y, sines.z, sines.w};
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        float y[2];
#pragma unroll
        for (int f = 0; f < 2; ++f) {
          float const other = __shfl_xor_sync(0xffffffffu, x[4 * i + e + f], 8);
          y[f] = x[4 * i + e + f] * cosine[e + f] + (low ? -other : other) * sine[e + f];
        }
        words[2 * i + e / 2] = Float16<kType>::pack(y[0], y[1]);
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }
  /// The lane's elements of the new key, or of its value.
  __device__ __forceinline__ void store(void* cache, uint4 const& x) const {
    int64_t const slot = load_operand(p_.slots), page = slot >> p_.page_shift;
    if (slot < 0 || page >= p_.pages) return;
    int const row = int(slot) & ((1 << p_.page_shift) - 1);
    *reinterpret_cast<uint4*>(static_cast<char*>(cache) + place(page, row)) = x;
  }

  /// The first `count` of 8 keys. Scores are summed over 16 lanes while they are dealt out among them: bit 3 of a lane is the head, bits 2
  /// and 1 are the load, bit 4 is the key of the load's two.
  __device__ __forceinline__ void attend(uint4 const (&k)[kLoads], uint4 const (&v)[kLoads], int count, State& state) const {
    float scores[kHeads][kLoads];
    {
      float of_q[kHeads][8];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) unpack(place_of(min(pair() * kHeads + h, p_.group - 1)), of_q[h]);
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        float of_k[8];
        unpack(k[j], of_k);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          scores[h][j] = 0.0f;
#pragma unroll
          for (int e = 0; e < 8; ++e) scores[h][j] = fmaf(of_q[h][e], of_k[e], scores[h][j]);
        }
      }
    }
    constexpr unsigned kAll = 0xffffffffu;
    bool const high = lane_ & 8, late = lane_ & 4, odd = lane_ & 2;
    float of_head[kLoads], of_half[2];
#pragma unroll
    for (int j = 0; j < kLoads; ++j)
      of_head[j] = (high ? scores[1][j] : scores[0][j]) + __shfl_xor_sync(kAll, high ? scores[0][j] : scores[1][j], 8);
#pragma unroll
    for (int j = 0; j < 2; ++j)
      of_half[j] = (late ? of_head[2 + j] : of_head[j]) + __shfl_xor_sync(kAll, late ? of_head[j] : of_head[2 + j], 4);
    float score = (odd ? of_half[1] : of_half[0]) + __shfl_xor_sync(kAll, odd ? of_half[0] : of_half[1], 2);
    score = (score + __shfl_xor_sync(kAll, score, 1)) * p_.scale_log2;
    bool const inside = (lane_ / 2 % 4) * 2 + lane_ / 16 < count;
    float most = inside ? score : kLowest;
    most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
    most = fmaxf(most, __shfl_xor_sync(kAll, most, 4));
    most = fmaxf(most, __shfl_xor_sync(kAll, most, 16));
    most = fmaxf(most, state.most);
    float const kept = exp2f(state.most - most), weight = inside ? exp2f(score - most) : 0.0f;
    state.most = most;
    state.total = fmaf(state.total, kept, weight);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float const kept_of_head = __shfl_sync(kAll, kept, h * 8);
#pragma unroll
      for (int e = 0; e < 8; ++e) state.sums[h][e] *= kept_of_head;
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      float of_v[8];
      unpack(v[j], of_v);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float const own = __shfl_sync(kAll, weight, (lane_ & 16) + h * 8 + j * 2);
#pragma unroll
        for (int e = 0; e < 8; ++e) state.sums[h][e] = fmaf(own, of_v[e], state.sums[h][e]);
      }
    }
  }

  /// The lane's elements of what `prepare` makes: heads of queries, then the new key and its value.
  __device__ __forceinline__ uint4& place_of(int row) const { return reinterpret_cast<uint4*>(rows_)[row * (kHeadDim / 8) + lane_ % 16]; }
  __device__ __forceinline__ float* sums_of(int warp, int h) const {
    return reinterpret_cast<float*>(area_) + (warp * kHeads + h) * kHeadDim;
  }
  __device__ __forceinline__ float2& end_of(int warp, int h) const {
    return reinterpret_cast<float2*>(area_ + kWarps * kHeads * kHeadDim * 4)[warp * kHeads + h];
  }
  /// What a warp has, in shared memory: lanes 0 to 15 store head 0, the others head 1.
  __device__ __forceinline__ void leave(State& state) const {
    constexpr unsigned kAll = 0xffffffffu;
#pragma unroll
    for (int offset = 2; offset <= 16; offset = offset == 4 ? 16 : 2 * offset) state.total += __shfl_xor_sync(kAll, state.total, offset);
    if (lane_ % 16 == 8 * (lane_ / 16)) end_of(warp_, lane_ / 16) = make_float2(state.most, state.total);
    float own[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) state.sums[h][e] += __shfl_xor_sync(kAll, state.sums[h][e], 16);
      own[e] = lane_ < 16 ? state.sums[0][e] : state.sums[1][e];
    }
    auto* const to = reinterpret_cast<float4*>(sums_of(warp_, lane_ / 16) + lane_ % 16 * 8);
    to[0] = make_float4(own[0], own[1], own[2], own[3]);
    to[1] = make_float4(own[4], own[5], own[6], own[7]);
  }
  /// The sums of the CTA's sets, to the CTAs of the same head: two columns a thread.
  __device__ __forceinline__ void merge_warps(uint64_t tag) const {
    if (p_.pair_shift == 0) {
      merge_sets<kWarps>(tag);
    } else if (p_.pair_shift == 1) {
      merge_sets<kWarps / 2>(tag);
    } else {
      merge_sets<kWarps / 4>(tag);
    }
  }
  template <int kSets>
  __device__ __forceinline__ void merge_sets(uint64_t tag) const {
    int const thread = warp_ * 32 + lane_, head = thread / 64, column = thread % 64;
    if (head >= p_.group) return;
    int const first = head / kHeads, h = head % kHeads;
    float2 ends[kSets];
    float most = kLowest, total = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
    for (int set = 0; set < kSets; ++set) ends[set] = end_of(set * (kWarps / kSets) + first, h);
#pragma unroll
    for (int set = 0; set < kSets; ++set) most = fmaxf(most, ends[set].x);
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      float2 const sums = *reinterpret_cast<float2 const*>(sums_of(set * (kWarps / kSets) + first, h) + 2 * column);
      float const kept = exp2f(ends[set].x - most);
      total = fmaf(kept, ends[set].y, total);
      x = fmaf(kept, sums.x, x);
      y = fmaf(kept, sums.y, y);
    }
    int const row = int(blockIdx.x) * p_.group + head;
    store_packet(p_.partials + row * 64 + column, numbers_of(x, y), tag);
    if (column == 0) store_packet(p_.ends + row, numbers_of(most, total), tag);
  }
  /// Four columns of all splits a warp, every splits-th four a CTA: half a warp has two of the columns, a lane every 16th split.
  __device__ __forceinline__ void merge_splits(uint64_t tag) const {
    constexpr int kEach = kMostSplits / 16, kNear = 8;  // lanes
    constexpr unsigned kAll = 0xffffffffu;
#pragma unroll 1
    for (int four = sequence_.split + p_.splits * warp_; four < p_.group * 32; four += p_.splits * kWarps) {
      int const head = four / 32, column = four % 32 * 2 + lane_ / 16;
      Packet sums[kEach], ends[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) sums[i] = ends[i] = {0, lane_ % 16 + 16 * i < p_.splits ? ~tag : tag};
      // What the sums are relative to comes with them, and is 16 packets for all of a warp's columns: so it alone is polled for until most
      // of it has come.
      Packet const* const first_end = p_.ends + (sequence_.head * p_.splits + lane_ % 16) * p_.group + head;
      Packet const* const first_sums = p_.partials + ((sequence_.head * p_.splits + lane_ % 16) * p_.group + head) * 64 + column;
      bool near = false;
      while (true) {
        bool all = true;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          poll_packet(ends[i].tag != tag, ends[i], first_end + 16 * i * p_.group);
          poll_packet(near && sums[i].tag != tag, sums[i], first_sums + 16 * i * p_.group * 64);
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i) all = all && ends[i].tag == tag;
        near = __popc(__ballot_sync(kAll, all)) >= kNear;
#pragma unroll
        for (int i = 0; i < kEach; ++i) all = all && sums[i].tag == tag;
        if (__all_sync(kAll, all)) break;
        if (!near) __nanosleep(32);
      }
      float most = kLowest, total = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (lane_ % 16 + 16 * i < p_.splits) most = fmaxf(most, ends[i].get().x);
      }
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, offset));
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (lane_ % 16 + 16 * i >= p_.splits) continue;
        float2 const end = ends[i].get(), sum = sums[i].get();
        float const kept = exp2f(end.x - most);
        total = fmaf(kept, end.y, total);
        x = fmaf(kept, sum.x, x);
        y = fmaf(kept, sum.y, y);
      }
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) {
        total += __shfl_xor_sync(kAll, total, offset);
        x += __shfl_xor_sync(kAll, x, offset);
        y += __shfl_xor_sync(kAll, y, offset);
      }
      float const factor = total == 0.0f ? 0.0f : __fdividef(1.0f, total);  // a sequence without keys: zeros
      uint32_t const two = Float16<kType>::pack(x * factor, y * factor), next = __shfl_down_sync(kAll, two, 16);
      if (lane_ == 0) store_packet(p_.out + (sequence_.head * p_.group + head) * 32 + four % 32, two | uint64_t(next) << 32, tag);
    }
  }

  __device__ __forceinline__ int pair() const { return warp_ & ((1 << p_.pair_shift) - 1); }
  __device__ __forceinline__ LayerAttention const& own() const { return layers_[opaque(layer_)].attention; }

  AttentionParams const& p_;
  Layers const& layers_;
  int layer_;
  Sequence const& sequence_;
  char *area_, *rows_;
  int warp_, lane_;
};

}  // namespace minfer::decoder_block
