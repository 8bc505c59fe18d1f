// Private operators of minfer.distributed: sums over the GPUs of a host, tokens and experts' sums among them, and the memory that these go
// through.
#include <cstring>

#include "core/batch_invariance.h"
#include "core/checks.h"
#include "core/device.h"
#include "core/json.h"
#include "core/operators.h"
#include "core/torch_calls.h"
#include "minfer/all_reduce.h"
#include "minfer/expert_exchange.h"

namespace minfer::torch_binding {

namespace {

/// The ranks' exchange buffers, into a description of a sum through them.
template <class Sum>
void set_buffers(char const* op, std::vector<int64_t> const& buffers, int64_t rank, int64_t most, Sum* sum) {
  int64_t const ranks = int64_t(buffers.size());
  if (ranks < 2 || ranks > kMostReduceRanks) fail(op, ": buffers must be of 2 to ", kMostReduceRanks, " ranks, got ", ranks);
  if (rank < 0 || rank >= ranks) fail(op, ": rank must be that of a buffer, got ", rank);
  sum->ranks = int32_t(ranks);
  sum->rank = int32_t(rank);
  sum->most = most;
  for (int64_t i = 0; i < ranks; ++i) sum->buffers[i] = reinterpret_cast<void*>(buffers[size_t(i)]);
}

/// x becomes the sum of all ranks'.
void all_reduce_in_place(Tensor const& x, std::vector<int64_t> const& buffers, int64_t rank, int64_t most) {
  char const* op = "minfer::_all_reduce";
  check_16bit(op, "x", x);
  int64_t const count = x.numel();
  if (!x.is_contiguous() || !x.is_aligned(16) || count % 8 != 0 || count > most) {
    fail(op, ": x must be contiguous, aligned to 16 bytes, of a multiple of 8 and at most ", most, " elements, got ", x);
  }
  AllReduce sum{};
  set_buffers(op, buffers, rank, most, &sum);
  OnDevice const on(op, x);
  sum.type = data_type(x.scalar_type());
  sum.x = sum.out = x.data_ptr();
  sum.count = count;
  Status const status = all_reduce(sum, on.properties(), on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": x ", x, ": ", status.message);
}

/// residual, or x where there is none, becomes the sum; returns its norm.
Tensor all_reduce_rms_norm_in_place(Tensor const& x, std::optional<Tensor> const& residual, Tensor const& weight, double eps,
                                    double weight_offset, std::vector<int64_t> const& buffers, int64_t rank, int64_t most) {
  char const* op = "minfer::_all_reduce_rms_norm";
  check_16bit(op, "x", x);
  auto const check_rows = [&](char const* name, Tensor const& rows) {
    if (!rows.is_contiguous() || !rows.is_aligned(16)) fail(op, ": ", name, " must be contiguous and aligned to 16 bytes, got ", rows);
  };
  int64_t const count = x.numel(), width = x.dim() > 0 ? x.size(x.dim() - 1) : 0;
  if (width == 0 || width % 8 != 0 || width > kMostReduceNormWidth || count > most) {
    fail(op, ": x must have rows of a multiple of 8 and at most ", kMostReduceNormWidth, " elements, and at most ", most, " in all, got ",
         x);
  }
  check_rows("x", x);
  if (residual) {
    check_operand(op, "residual", *residual, x.scalar_type(), x.sizes(), {"x", x});
    check_rows("residual", *residual);
    check_no_overlap(op, *residual, "x", x, "residual");
    check_no_overlap(op, *residual, "weight", weight, "residual");
  } else {
    check_no_overlap(op, x, "weight", weight, "x");
  }
  check_operand(op, "weight", weight, x.scalar_type(), {width}, {"x", x});
  check_rows("weight", weight);
  AllReduceRmsNorm sum{};
  sum.eps = eps_in_float32(op, eps);
  sum.weight_offset = in_float32(op, "weight_offset", weight_offset);
  set_buffers(op, buffers, rank, most, &sum);
  OnDevice const on(op, x);
  Tensor const out = allocate(op, x, x.sizes(), x.scalar_type(), "the norm of x ", x);
  sum.type = data_type(x.scalar_type());
  sum.x = x.data_ptr();
  sum.sum = residual ? residual->data_ptr() : x.data_ptr();
  sum.adds = residual.has_value();
  sum.weight = weight.data_ptr();
  sum.out = out.data_ptr();
  sum.rows = count / width;
  sum.width = width;
  sum.batch_invariant = batch_invariant();
  Status const status = all_reduce_rms_norm(sum, on.properties(), on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": x ", x, ": ", status.message);
  return out;
}

int64_t exchange_bytes(int64_t most, int64_t ranks) { return int64_t(all_reduce_bytes(most, int32_t(ranks))); }

std::string exchange_layout(int64_t ranks, int64_t most, int64_t hidden, int64_t top_k) {
  ExpertExchangeLayout const layout = expert_exchange_layout(int32_t(ranks), most, hidden, top_k);
  Json json;
  json.open('{').key("ids").value(int64_t(layout.ids)).key("weights").value(int64_t(layout.weights));
  json.key("rows").value(int64_t(layout.rows)).key("sums").value(int64_t(layout.sums)).key("bytes").value(int64_t(layout.bytes));
  json.close('}');
  return json.text();
}

/// A call as the launches take it. ids: of this rank's tokens; numbers: of 16 bits, their rows are as long as those of tokens.
ExpertExchange exchange_of(char const* op, Tensor const& numbers, Tensor const& ids, std::vector<int64_t> const& buffers, int64_t rank,
                           int64_t most, int64_t capacity, int64_t experts) {
  check_16bit(op, "numbers", numbers);
  bool const right = numbers.dim() == 2 && ids.dim() == 2 && ids.scalar_type() == ScalarType::Int && ids.is_contiguous();
  if (!right) fail(op, ": tokens must be [rows, hidden] and ids int32 [tokens, top_k], contiguous, got ", numbers, " and ", ids);
  if (!numbers.is_aligned(16)) fail(op, ": numbers must begin at a multiple of 16 bytes, got ", numbers);
  ExpertExchange exchange{};
  int64_t const ranks = int64_t(buffers.size());
  if (ranks > kMostExchangeRanks) fail(op, ": buffers must be of at most ", kMostExchangeRanks, " ranks, got ", ranks);
  exchange.type = data_type(numbers.scalar_type());
  exchange.ranks = int32_t(ranks);
  exchange.rank = int32_t(rank);
  for (int64_t i = 0; i < ranks; ++i) exchange.buffers[i] = reinterpret_cast<void*>(buffers[size_t(i)]);
  exchange.most = most;
  exchange.hidden = numbers.size(1);
  exchange.top_k = ids.size(1);
  exchange.capacity = capacity;
  exchange.experts = experts;
  exchange.tokens = ids.size(0);
  exchange.ids = static_cast<int32_t const*>(ids.data_ptr());
  return exchange;
}

/// x [tokens, hidden] with their weights and ids to the ranks that have their experts.
void send_tokens_to_ranks(Tensor const& x, Tensor const& weights, Tensor const& ids, std::vector<int64_t> const& buffers, int64_t rank,
                          int64_t most, int64_t capacity, int64_t experts) {
  char const* op = "minfer::_send_tokens";
  ExpertExchange const exchange = exchange_of(op, x, ids, buffers, rank, most, capacity, experts);
  bool const has_rows = x.size(0) > 1;
  if (x.size(0) != ids.size(0) || x.stride(1) != 1 || (has_rows && x.stride(0) % 8 != 0)) {
    fail(op, ": x must have a row of 16-byte vectors for each token, got ", x, " beside ids ", ids);
  }
  if (weights.scalar_type() != ScalarType::Float || !weights.is_contiguous() || weights.numel() != ids.numel()) {
    fail(op, ": weights must be float32, contiguous, as many as ids ", ids, ", got ", weights);
  }
  OnDevice const on(op, x);
  int64_t const ldx = has_rows ? x.stride(0) : x.size(1);
  Status const status =
      send_tokens(exchange, x.data_ptr(), ldx, static_cast<float const*>(weights.data_ptr()), on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": x ", x, ": ", status.message);
}

/// What the experts of all ranks have made of this rank's tokens.
Tensor return_sums_to_ranks(Tensor const& y, Tensor const& inverse, Tensor const& ids, std::vector<int64_t> const& buffers, int64_t rank,
                            int64_t most, int64_t capacity, int64_t experts) {
  char const* op = "minfer::_return_sums";
  ExpertExchange const exchange = exchange_of(op, y, ids, buffers, rank, most, capacity, experts);
  if (!y.is_contiguous()) fail(op, ": y must be contiguous, got ", y);
  int64_t const places = int64_t(buffers.size()) * capacity;
  if (inverse.scalar_type() != ScalarType::Int || !inverse.is_contiguous() || inverse.dim() != 2 || inverse.size(0) != places) {
    fail(op, ": inverse must be int32 [", places, ", pairs], contiguous, got ", inverse);
  }
  OnDevice const on(op, y);
  Tensor const out = allocate(op, y, {ids.size(0), y.size(1)}, y.scalar_type(), "the sums of ids ", ids);
  Status const status = return_sums(exchange, y.data_ptr(), y.size(0), static_cast<int32_t const*>(inverse.data_ptr()), inverse.size(1),
                                    out.data_ptr(), on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": y ", y, ": ", status.message);
  return out;
}

/// like: a tensor of the device. Address and handle.
std::string allocate_for_peers(Tensor const& like, int64_t bytes) {
  char const* op = "minfer::_allocate_peer_memory";
  OnDevice const on(op, like);
  void* memory = nullptr;
  PeerHandle handle;
  Status const status = allocate_peer_memory(size_t(bytes), &memory, &handle);
  if (!status.ok()) fail(op, ": ", bytes, " bytes: ", status.message);
  std::string text;
  for (unsigned char const byte : handle.bytes) {
    for (int const digit : {byte >> 4, byte & 15}) text += "0123456789abcdef"[digit];
  }
  Json json;
  json.open('{').key("address").value(int64_t(address_of(memory))).key("handle").value(text.c_str()).close('}');
  return json.text();
}

int64_t map_peer_memory(Tensor const& like, std::string const& handle) {
  char const* op = "minfer::_open_peer_memory";
  PeerHandle peer;
  auto const digit = [](char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; };
  if (handle.size() != 2 * sizeof(peer.bytes)) fail(op, ": handle must have ", 2 * sizeof(peer.bytes), " digits, got ", handle.size());
  for (size_t i = 0; i < sizeof(peer.bytes); ++i) {
    int const high = digit(handle[2 * i]), low = digit(handle[2 * i + 1]);
    if (high < 0 || low < 0) fail(op, ": handle must be of hexadecimal digits");
    peer.bytes[i] = static_cast<unsigned char>(16 * high + low);
  }
  OnDevice const on(op, like);
  void* memory = nullptr;
  Status const status = open_peer_memory(peer, &memory);
  if (!status.ok()) fail(op, ": ", status.message);
  return int64_t(address_of(memory));
}

void release_peer_memory(Tensor const& like, int64_t address, bool mapped) {
  char const* op = "minfer::_release_peer_memory";
  OnDevice const on(op, like);
  void* const memory = reinterpret_cast<void*>(address);
  Status const status = mapped ? close_peer_memory(memory) : free_peer_memory(memory);
  if (!status.ok()) fail(op, ": ", status.message);
}

constexpr Operator kOperators[] = {
    // x becomes the sum of all ranks' x; buffers: where this process has all ranks' exchange buffers, each for `most` numbers.
    {"_all_reduce(Tensor(a!) x, int[] buffers, int rank, int most) -> ()", boxed<&all_reduce_in_place>},
    // The same, and what is behind it: residual, or x where there is none, becomes the sum of all ranks' x and the residual. Returns the
    // norm of its rows.
    {"_all_reduce_rms_norm(Tensor(a!) x, Tensor(b!)? residual, Tensor weight, float eps, float weight_offset, int[] buffers, int rank, "
     "int most) -> Tensor",
     boxed<&all_reduce_rms_norm_in_place>},
    // x's rows, weights [tokens, top_k] and ids to the ranks that have experts of them; most: what buffers are for. Then this rank's buffer
    // has all ranks' tokens, [ranks * capacity] places.
    {"_send_tokens(Tensor x, Tensor weights, Tensor ids, int[] buffers, int rank, int most, int capacity, int experts) -> ()",
     boxed<&send_tokens_to_ranks>},
    // The sums of this rank's tokens, [tokens, hidden]; y: rows of the pairs that this rank's experts have, inverse [places,
    // pairs]: where they are.
    {"_return_sums(Tensor y, Tensor inverse, Tensor ids, int[] buffers, int rank, int most, int capacity, int experts) -> Tensor",
     boxed<&return_sums_to_ranks>},
    // Memory of like's device that other processes of the host can map: {"address": .., "handle": ".."}.
    {"_allocate_peer_memory(Tensor like, int bytes) -> str", boxed<&allocate_for_peers>},
    // Where this process has another's memory.
    {"_open_peer_memory(Tensor like, str handle) -> int", boxed<&map_peer_memory>},
    // Memory that was allocated, or mapped.
    {"_release_peer_memory(Tensor like, int address, bool mapped) -> ()", boxed<&release_peer_memory>},
};
constexpr Operator kSizes[] = {
    // Bytes of an exchange buffer.
    {"_all_reduce_bytes(int most, int ranks) -> int", boxed<&exchange_bytes>},
    // Where the parts of an expert exchange's buffer begin: {"ids": .., "weights": .., "rows": .., "sums": .., "bytes": ..}.
    {"_expert_exchange_layout(int ranks, int most, int hidden, int top_k) -> str", boxed<&exchange_layout>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) {
  define(m, kOperators);
  define(m, kSizes);
}
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CompositeExplicitAutograd, m) { implement(m, kSizes); }

}  // namespace

}  // namespace minfer::torch_binding
