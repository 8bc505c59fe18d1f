// The router's protocol (moe/routing/router_gemm.cu): that a launch ends, sums rightly and leaves its workspace clean, however few CTAs are
// resident together and in whatever order their accesses to memory are done.
//
// A CTA is a coroutine that stops before every access. CTAs start in order, as many as there are places, and keep theirs to the end; some
// are up to a thousand times slower than others. Memory promises as little as the kernel asks of it: a store or an exchange is done at some
// later time, in any order with the same CTA's accesses to other words, even when the CTA has ended, but before the next launch. A CTA
// itself sees its own stores. A launch is replayed with the same nonce, from memory that held anything at first; sums depend on the order
// of their terms and on the run, so what was left by the run before would show.
#include <algorithm>
#include <bit>
#include <cmath>
#include <coroutine>
#include <cstdint>
#include <optional>
#include <queue>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "moe/routing/router_gemm_plan.h"
#include "moe/routing/router_owners.h"
#include "testing.h"

using namespace minfer;
using namespace minfer::moe;
using namespace minfer::testing;

namespace {

constexpr int kPackets = 2;  // of a token and item: enough for one to be there and the other not
constexpr int kBatch = 8;    // tokens that are gathered together, by as many warps

/// What the protocol would be without one of its rules.
enum class Without {
  kNothing,
  kPatience,        // nobody leaves
  kExchange,        // the flag is read, and then written
  kWaitForFlag,     // a flag is cleared as soon as the sums are complete
  kClearingAtLast,  // packets are cleared one by one as they are summed
  kTakingOver,      // the last CTA looks for flags, but leaves them
};

struct Word {
  uint64_t value = 0, tag = 0;  // a flag has a tag only
};

/// What takes 1 to 1000 units of time, a few units as often as hundreds.
double duration(std::mt19937_64& random) { return std::pow(10.0, std::uniform_real_distribution<double>(0.0, 3.0)(random)); }

class Memory {
 public:
  /// Holds anything, but no nonce: those are even.
  Memory(size_t words, int ctas, std::mt19937_64& random) : random_(random), words_(words), own_(words * size_t(ctas)) {
    for (Word& word : words_) word = {random_(), random_() | 1};
  }
  Word const& at(size_t place) const { return words_[place]; }

  Word load(int cta, size_t place) const {
    Own const& own = own_[size_t(cta) * words_.size() + place];
    return own.under_way > 0 ? own.last : words_[place];
  }
  void store(int cta, size_t place, Word word) { exchange(cta, place, word, nullptr); }
  /// `before` has a value as soon as the exchange is done.
  void exchange(int cta, size_t place, Word word, std::optional<Word>* before) {
    Own& own = own_[size_t(cta) * words_.size() + place];
    double const when = now + duration(random_);
    own.done = own.under_way > 0 ? std::max(own.done, when) : when;
    own.last = word;
    ++own.under_way;
    accesses_.push({own.done, ++number_, cta, place, word, before});
  }

  /// When the next access is done.
  double next() const { return accesses_.empty() ? kNever : accesses_.top().done; }
  void proceed() {
    Access const access = accesses_.top();
    accesses_.pop();
    --own_[size_t(access.cta) * words_.size() + access.place].under_way;
    if (access.before != nullptr) *access.before = words_[access.place];
    words_[access.place] = access.word;
  }

  double now = 0.0;
  static constexpr double kNever = 1e300;

 private:
  struct Access {
    double done;
    int64_t number;
    int cta;
    size_t place;
    Word word;
    std::optional<Word>* before;

    bool operator<(Access const& other) const { return std::pair(done, number) > std::pair(other.done, other.number); }
  };
  struct Own {  // of a CTA to a word: done one after the other
    Word last;
    double done = 0.0;
    int under_way = 0;
  };
  std::mt19937_64& random_;
  std::vector<Word> words_;
  std::vector<Own> own_;
  std::priority_queue<Access> accesses_;
  int64_t number_ = 0;
};

class Coroutine {
 public:
  struct promise_type {
    Coroutine get_return_object() { return Coroutine(std::coroutine_handle<promise_type>::from_promise(*this)); }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { throw; }
  };
  explicit Coroutine(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  Coroutine(Coroutine&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Coroutine& operator=(Coroutine&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Coroutine() {
    if (handle_) handle_.destroy();
  }
  void resume() { handle_.resume(); }
  bool done() const { return handle_.done(); }

 private:
  std::coroutine_handle<promise_type> handle_;
};

struct Launch {
  RouterOwners owners;
  int items;
  uint64_t nonce;
  Without without = Without::kNothing;
  int run = 0;
  std::vector<std::vector<uint64_t>> sums;  // of each token, of every time that it was chosen for
  int left = 0;                             // CTAs

  Launch(int tokens, int ctas, int items, uint64_t nonce) : owners(tokens, ctas), items(items), nonce(nonce) {}

  size_t packet_at(int token, int item, int packet) const {
    return (size_t(token) * size_t(items) + size_t(item)) * kPackets + size_t(packet);
  }
  size_t flag_at(int rank) const { return packet_at(owners.tokens, 0, 0) + size_t(rank); }
  size_t words() const { return flag_at(owners.count()); }
  uint64_t value(int token, int item, int packet) const {
    return ((uint64_t(run) * 1009 + uint64_t(token)) * 1013 + uint64_t(item)) * 3 + uint64_t(packet);
  }
  static uint64_t add(uint64_t sum, uint64_t term) { return sum * 0x9e3779b97f4a7c15u + term; }
};

/// As router_gemm_kernel goes, line by line.
Coroutine run_cta(Launch& launch, Memory& memory, int cta) {
  std::suspend_always const access;
  RouterOwners const& owners = launch.owners;
  Without const without = launch.without;
  Word const set{0, launch.nonce}, cleared{};
  int const rank = owners.rank_of(cta);
  std::vector<std::optional<Word>> found(size_t(owners.count()));
  for (int other = 1; rank == 0 && other < owners.count(); ++other) {
    co_await access;
    if (without == Without::kExchange) {
      found[size_t(other)] = memory.load(cta, launch.flag_at(other));
      co_await access;
      memory.store(cta, launch.flag_at(other), set);
    } else {
      memory.exchange(cta, launch.flag_at(other), set, &found[size_t(other)]);
    }
  }
  for (int item = cta; item < launch.items; item += owners.ctas) {
    for (int token = 0; token < owners.tokens; ++token) {
      for (int packet = 0; packet < kPackets; ++packet) {
        co_await access;
        memory.store(cta, launch.packet_at(token, item, packet), {launch.value(token, item, packet), launch.nonce});
      }
    }
  }
  if (rank >= owners.count()) co_return;

  uint64_t next = 0;
  for (bool begins = true; begins || next != 0; begins = false) {
    uint64_t const todo = begins ? owners.tokens_of(uint64_t(1) << rank) : next;
    int patience = begins && without != Without::kPatience ? owners.patience(rank) : RouterOwners::kForever;
    std::vector<uint64_t> sums;
    for (;;) {
      bool all = true;
      sums.clear();
      next = todo;
      for (; next != 0 && sums.size() < kBatch && all; next &= next - 1) {
        int const token = std::countr_zero(next);
        uint64_t sum = 0;  // of all packets
        for (int packet = 0; packet < kPackets && all; ++packet) {
          int polls = patience;
          for (int item = 0; item < launch.items && all; ++item) {
            co_await access;
            Word word = memory.load(cta, launch.packet_at(token, item, packet));
            while (word.tag != launch.nonce && polls != 0) {
              polls -= polls > 0 ? 1 : 0;
              co_await access;
              word = memory.load(cta, launch.packet_at(token, item, packet));
            }
            all = word.tag == launch.nonce;
            sum = Launch::add(sum, word.value);
            if (all && without == Without::kClearingAtLast) memory.store(cta, launch.packet_at(token, item, packet), cleared);
          }
        }
        sums.push_back(sum);
      }
      if (all) break;
      std::optional<Word> before;
      if (without == Without::kExchange) {
        co_await access;
        before = memory.load(cta, launch.flag_at(rank));
        co_await access;
        memory.store(cta, launch.flag_at(rank), set);
      } else {
        memory.exchange(cta, launch.flag_at(rank), set, &before);
        while (!before) co_await access;
      }
      if (before->tag != launch.nonce) {
        ++launch.left;
        co_return;
      }
      patience = RouterOwners::kForever;
    }
    if (begins && rank == 0) {
      uint64_t ranks = 0;
      for (int other = 1; other < owners.count(); ++other) {
        while (!found[size_t(other)]) co_await access;
        if (found[size_t(other)]->tag != launch.nonce) continue;
        ranks |= uint64_t(1) << other;
        memory.store(cta, launch.flag_at(other), cleared);
      }
      if (without != Without::kTakingOver) next |= owners.tokens_of(ranks);
    }
    uint64_t batch = todo;
    for (size_t i = 0; i < sums.size(); ++i, batch &= batch - 1) {
      int const token = std::countr_zero(batch);
      for (int item = 0; item < launch.items; ++item) {
        for (int packet = 0; packet < kPackets; ++packet) {
          co_await access;
          memory.store(cta, launch.packet_at(token, item, packet), cleared);
        }
      }
      launch.sums[size_t(token)].push_back(sums[i]);
    }
    if (begins && rank > 0) {
      do {
        co_await access;
      } while (without != Without::kWaitForFlag && memory.load(cta, launch.flag_at(rank)).tag != launch.nonce);
      memory.store(cta, launch.flag_at(rank), cleared);
    }
  }
}

/// What is wrong with a run of the launch; empty if nothing is.
std::string fault_of(Launch& launch, Memory& memory, int resident, std::mt19937_64& random) {
  int const ctas = launch.owners.ctas;
  launch.sums.assign(size_t(launch.owners.tokens), {});
  struct Running {
    Coroutine cta;
    double step, next;
  };
  std::vector<Running> running;
  int started = 0;
  for (int64_t events = 0;; ++events) {
    while (int(running.size()) < resident && started < ctas) {
      double const step = duration(random);
      running.push_back({run_cta(launch, memory, started), step, memory.now + step});
      ++started;
    }
    auto const first = std::min_element(running.begin(), running.end(), [](auto const& a, auto const& b) { return a.next < b.next; });
    if (first == running.end() && memory.next() == Memory::kNever) break;
    memory.now = std::min(memory.next(), first == running.end() ? Memory::kNever : first->next);
    if (events == 3000000) return "does not end";
    if (memory.now == memory.next()) {
      memory.proceed();
      continue;
    }
    first->next += first->step * std::uniform_real_distribution<double>(0.5, 1.5)(random);
    first->cta.resume();
    if (first->cta.done()) running.erase(first);
  }
  for (int token = 0; token < launch.owners.tokens; ++token) {
    uint64_t sum = 0;
    for (int packet = 0; packet < kPackets; ++packet) {
      for (int item = 0; item < launch.items; ++item) sum = Launch::add(sum, launch.value(token, item, packet));
    }
    std::vector<uint64_t> const& sums = launch.sums[size_t(token)];
    if (sums.size() != 1) return "token " + std::to_string(token) + " was chosen for " + std::to_string(sums.size()) + " times";
    if (sums[0] != sum) return "token " + std::to_string(token) + " has another sum";
  }
  for (size_t place = 0; place < launch.words(); ++place) {
    if (memory.at(place).tag == launch.nonce) return "word " + std::to_string(place) + " of " + std::to_string(launch.words()) + " is left";
  }
  return "";
}

/// The same after each of some replays, on memory of any content; `left`: how many CTAs left their tokens to the last one.
std::string fault_of(Launch launch, int resident, int replays, uint64_t seed, int* left = nullptr) {
  std::mt19937_64 random(seed);
  Memory memory(launch.words(), launch.owners.ctas, random);
  for (launch.run = 0; launch.run < replays; ++launch.run) {
    if (std::string const fault = fault_of(launch, memory, resident, random); !fault.empty()) {
      return "run " + std::to_string(launch.run) + ", seed " + std::to_string(seed) + ": " + fault;
    }
  }
  if (left != nullptr) *left += launch.left;
  return "";
}

std::string text_of(Launch const& launch) {
  return std::to_string(launch.owners.tokens) + " tokens, " + std::to_string(launch.items) + " items, " +
         std::to_string(launch.owners.ctas) + " CTAs";
}

/// Whether the protocol fails without a rule in one of many orders of events.
bool fails(Launch launch, Without without, int resident) {
  launch.without = without;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    if (!fault_of(launch, resident, 3, seed).empty()) return true;
  }
  return false;
}

}  // namespace

TEST_CASE(router_tokens_have_one_owner) {
  for (int ctas : {1, 2, 3, 7, 8, 31, 63, 64, 65, 132}) {
    for (int tokens = 1; tokens <= 64; ++tokens) {
      Context const at(std::to_string(tokens) + " tokens, " + std::to_string(ctas) + " CTAs");
      RouterOwners const owners(tokens, ctas);
      uint64_t all = 0;
      for (int rank = 0; rank < owners.count(); ++rank) {
        uint64_t const own = owners.tokens_of(uint64_t(1) << rank);
        CHECK(own != 0 && (own & all) == 0);
        for (int token = 0; token < 64; ++token) CHECK_EQUAL(int(own >> token & 1), int(token < tokens && token % ctas == rank));
        all |= own;
        CHECK_EQUAL(owners.tokens_of((uint64_t(2) << rank) - 1), all);
        CHECK_EQUAL(owners.patience(rank) < 0, rank == 0);
      }
      CHECK_EQUAL(all, ~uint64_t(0) >> (64 - tokens));
      CHECK_EQUAL(owners.rank_of(ctas - 1), 0);
    }
  }
}

TEST_CASE(router_workspace_holds_the_flags) {
  for (int64_t tokens : {1, 8, 33, 64}) {
    for (int64_t experts : {5, 128, 1024}) {
      for (int32_t sms : {1, 16, 132}) {
        RouterGemmPlan const plan = plan_router_gemm(tokens, 2048, experts, sms);
        size_t const flags = plan.workspace_bytes(tokens, experts) - plan.partials_bytes(tokens, experts);
        CHECK_EQUAL(flags, size_t(RouterOwners(int32_t(tokens), plan.ctas).count()) * 8);
        CHECK_EQUAL(plan.partials_bytes(tokens, experts), size_t(tokens * plan.splits * plan.packets(experts)) * 16);
      }
    }
  }
}

TEST_CASE(router_progress) {
  int left = 0;
  for (auto const& [ctas, items] : {std::pair{1, 1}, {2, 2}, {3, 7}, {8, 8}, {13, 13}, {24, 24}}) {
    for (int tokens : {1, 2, 3, 9, 24, 64}) {
      Launch const launch(tokens, ctas, items, 0x5eed5eed5eed5eeeu);
      Context const at(text_of(launch));
      for (int resident : {1, 2, 3, ctas / 2, ctas - 1, ctas}) {
        if (resident < 1 || resident > ctas) continue;
        Context const places(std::to_string(resident) + " resident");
        for (uint64_t seed = 0; seed < 10; ++seed) CHECK_EQUAL(fault_of(launch, resident, 3, seed, &left), "");
      }
    }
  }
  CHECK(left > 3000);
}

/// As operators plan it, on devices of any size.
TEST_CASE(router_progress_of_plans) {
  struct {
    int64_t tokens, hidden, experts;
    int32_t sms;
  } const cases[] = {{1, 4096, 8, 132}, {8, 512, 64, 20}, {64, 256, 128, 8}, {64, 64, 1024, 16}, {17, 1024, 32, 132}};
  for (auto const& c : cases) {
    RouterGemmPlan const plan = plan_router_gemm(c.tokens, c.hidden, c.experts, c.sms);
    Launch const launch(int(c.tokens), plan.ctas, plan.tiles * plan.splits, 0x5eed5eed5eed5eeeu);
    Context const at(text_of(launch));
    for (int resident : {1, plan.ctas / 2, plan.ctas}) {
      if (resident > 0) CHECK_EQUAL(fault_of(launch, resident, 2, uint64_t(resident)), "");
    }
  }
}

/// A single token is the last CTA's, which waits for lower ones only: nobody is ever impatient.
TEST_CASE(router_of_one_token_waits_for_lower_ctas) {
  int left = 0;
  for (int resident = 1; resident <= 16; ++resident) CHECK_EQUAL(fault_of(Launch(1, 16, 16, 2), resident, 2, 7, &left), "");
  CHECK_EQUAL(left, 0);
}

/// What the simulation is for: without any of its rules the protocol fails, and that is seen.
TEST_CASE(router_progress_needs_its_rules) {
  Launch const small(2, 3, 3, 2), large(6, 9, 9, 2);
  for (Without without : {Without::kExchange, Without::kWaitForFlag, Without::kClearingAtLast, Without::kTakingOver}) {
    Context const at("without rule " + std::to_string(int(without)));
    CHECK(fails(small, without, 3) || fails(large, without, 5));
  }
  Launch waits = large;
  waits.without = Without::kPatience;
  CHECK(fault_of(waits, large.owners.count() - 1, 1, 0).find("does not end") != std::string::npos);
  CHECK_EQUAL(fault_of(waits, large.owners.count(), 1, 0), "");
}
