// The ring of stages whose factors warps write by turns (gemm/mainloop_columns_sm90.cuh), in pingpong: whether each k tile is multiplied by
// its own factors, whatever warp is late, and whether no barrier is signalled more often than it expects.
//
// Simulated are the producer, the three warps, the two consumer warpgroups, which take tiles in turns, and the stages' mbarriers: a phase
// ends with its last arrival, and a wait for a parity passes where the phase before the present one had it. So a parity says nothing about
// the phase before that one: this is what `awaits_full` is for, and without it the simulation must find the fault that was seen on a GPU.
#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "testing.h"

using namespace minfer::testing;

namespace {

constexpr int kWarps = 3, kInFlight = 4;  // k tiles of a consumer whose MMAs are under way or whose sums are being added

struct Mbarrier {
  int expected, pending, phases = 0;
  bool overrun = false;

  explicit Mbarrier(int arrivals) : expected(arrivals), pending(arrivals) {}
  void arrive() {
    if (--pending > 0) return;
    pending = expected;
    ++phases;
  }
  bool passes(int parity) const { return (phases & 1) != parity; }
};

/// Arrivals at a full barrier are the producer's and a warp's: a second one of a warp's in a phase is an illegal instruction.
struct Stage {
  Mbarrier full{2}, empty{1};
  bool filled = false;  // by a warp, in this phase
  int factors = -1;     // of which k tile
};

class Ring {
 public:
  /// tiles: the k tiles of each output tile of the CTA.
  Ring(int stages, std::vector<int> const& tiles, bool awaits_full, uint32_t seed)
      : stages_(size_t(stages)), awaits_full_(awaits_full), random_(seed) {
    int first = 0;
    for (size_t i = 0; i < tiles.size(); ++i, first += tiles[i - 1]) consumers_[i % 2].items.push_back({first, tiles[i]});
    total_ = first;
    for (int warp = 0; warp < kWarps; ++warp) next_[warp] = warp;
  }

  /// What went wrong, or nothing.
  std::string run() {
    std::array<int, 1 + kWarps + 2> asleep{};  // steps until an agent goes on
    for (int idle = 0; idle < 100000;) {
      int const agent = int(random_() % asleep.size());
      if (asleep[size_t(agent)] > 0 && --asleep[size_t(agent)] > 0) continue;
      if (random_() % 16 == 0) asleep[size_t(agent)] = int(random_() % 300);  // a late warp
      bool const moved = agent == 0 ? produce() : agent <= kWarps ? write(agent - 1) : consume(agent - 1 - kWarps);
      if (!fault_.empty()) return fault_;
      if (consumers_[0].done() && consumers_[1].done()) return "";
      idle = moved ? 0 : idle + 1;
    }
    return "nobody goes on";
  }

 private:
  struct Item {
    int first, count;
  };
  struct Consumer {
    std::vector<Item> items;
    size_t item = 0;
    int sent = 0, retired = 0;  // of the item's k tiles
    bool done() const { return item == items.size(); }
  };

  Stage& stage(int k) { return stages_[size_t(k) % stages_.size()]; }
  int round(int k) const { return k / int(stages_.size()); }

  bool produce() {
    if (produced_ == total_ || !stage(produced_).empty.passes((round(produced_) & 1) ^ 1)) return false;
    arrive_full(produced_++);
    return true;
  }
  bool write(int warp) {
    int const k = next_[warp];
    if (k >= total_) return false;
    Stage& own = stage(k);
    int const parity = (round(k) & 1) ^ 1;  // that of the round before, for either barrier
    if (awaits_full_ && !own.full.passes(parity)) return false;
    if (!own.empty.passes(parity)) return false;
    if (own.filled) fault_ = "factors of k tile " + std::to_string(k) + " arrive twice in a phase";
    own.filled = true;
    own.factors = k;
    arrive_full(k);
    next_[warp] += kWarps;
    return true;
  }
  void arrive_full(int k) {
    Stage& own = stage(k);
    int const before = own.full.phases;
    own.full.arrive();
    if (own.full.phases != before) own.filled = false;
  }
  /// Sends the MMAs of a k tile, or adds the oldest one's sums and gives its stage back. The turn passes with the last one that is sent.
  bool consume(int self) {
    Consumer& own = consumers_[size_t(self)];
    if (own.done()) return false;
    Item const item = own.items[own.item];
    bool const may_send = own.sent < item.count && own.sent - own.retired < kInFlight && (own.sent > 0 || turn_ == self);
    if (may_send && random_() % 2 == 0) {
      int const k = item.first + own.sent;
      if (!stage(k).full.passes(round(k) & 1)) return false;
      if (++own.sent == item.count) turn_ = 1 - self;
      return true;
    }
    if (own.retired == own.sent) return false;
    int const k = item.first + own.retired;
    if (stage(k).factors != k) fault_ = "k tile " + std::to_string(k) + " has the factors of " + std::to_string(stage(k).factors);
    stage(k).empty.arrive();
    if (++own.retired == item.count) {
      own.sent = own.retired = 0;
      ++own.item;
    }
    return true;
  }

  std::vector<Stage> stages_;
  bool awaits_full_;
  std::mt19937 random_;
  int total_ = 0, produced_ = 0, turn_ = 0;
  int next_[kWarps];
  std::array<Consumer, 2> consumers_;
  std::string fault_;
};

/// The faults of many runs with rings and tiles of many sizes.
std::vector<std::string> faults(bool awaits_full) {
  std::vector<std::string> found;
  std::mt19937 random(7);
  for (uint32_t seed = 0; seed < 3000; ++seed) {
    int const stages = 3 + int(random() % 10);
    std::vector<int> tiles(2 + random() % 5);
    for (int& count : tiles) count = 1 + int(random() % 40);
    std::string const fault = Ring(stages, tiles, awaits_full, seed).run();
    if (!fault.empty()) found.push_back(std::to_string(stages) + " stages, seed " + std::to_string(seed) + ": " + fault);
  }
  return found;
}

}  // namespace

TEST_CASE(a_k_tile_has_its_own_factors) {
  auto const found = faults(true);
  Context const first(found.empty() ? "" : found[0]);
  CHECK(found.empty());
}

TEST_CASE(without_the_first_wait_the_simulation_finds_the_fault) { CHECK(!faults(false).empty()); }
