#pragma once

/// Values that one engine puts at another node, gets, asks for, removes, and then misses, in this
/// order. A put may be given up or miss its deadline: then the value never appears, and the engine
/// has its memory back with the outcome. A value may expire.

#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "troupe/actors/engine.hpp"

#include "lent_memory.hpp"
#include "scenario.hpp"
#include "tally.hpp"

namespace troupe::engine_fuzz {

class value_stories {
 public:
  value_stories(const scenario& s, std::uint32_t node, engine& e, finder found, tally& counts,
                block_lender blocks);
  ~value_stories();

  void begin_round(const round& now);

  void put(const std::string& peer, const std::string& key, const put_plan& plan);
  /// Returns whether the event belongs to one of these values.
  [[nodiscard]] bool take(event& e);
  /// Makes the calls and aborts that are due.
  void pump();
  void hear_of_wake();
  [[nodiscard]] bool empty() const { return settled() && parked_.empty(); }
  /// Whether nothing is live, apart from what waits for a stopped node.
  [[nodiscard]] bool settled() const { return live_.empty() && later_.empty(); }
  [[nodiscard]] std::string open() const;

 private:
  using time_point = std::chrono::steady_clock::time_point;
  enum class step : std::uint8_t { put, put_again, get, query, remove, get_nothing };
  struct story {
    put_plan plan;
    std::string peer, key;
    std::unique_ptr<lent_memory> value;
    step at{step::put};
    bool not_known{false};  ///< whether it is stored; the put failed with that outcome
    bool looked{false};     ///< has looked once for a value that must not be there
    bool put_again{false};
    std::uint32_t tries{0};  ///< of this step
    time_point put_asked, put_ended, asked;
    std::optional<time_point> give_up_at;
    std::optional<time_point> taken_since;   ///< since when the earlier put has held its key
    std::optional<time_point> missed_since;  ///< since when its woken node has not been reached
  };
  struct due {
    time_point when;
    story what;
    step next;
  };

  void begin_put(story one, step what, std::uint64_t seed);
  void ask(story one, step what);
  void ask_later(story one, step what, std::chrono::microseconds pause);
  void go_on(story one, event& e);
  void end_put(story one, const event_failed* failed);
  void end_get(story one, const event& e);
  void end_query(story one, const event& e);
  void end_remove(story one, const event_failed* failed);
  void end_get_nothing(story one, const event_failed* failed);
  void end(const story& one);
  /// Whether the node of one side is killed or stopped in this round.
  [[nodiscard]] bool is_disturbed(const story& one) const;
  /// Whether the failure can come from a killed or stopped node on one side.
  [[nodiscard]] bool is_loss(const story& one, const troupe::error& why) const;
  /// Handles a loss: asks again once the other side goes on, or ends the story if it never will.
  /// Returns false if it was no loss.
  [[nodiscard]] bool was_lost(story& one, step what, const troupe::error& why);
  /// Asks again if the answer was late. Returns false if it was not.
  [[nodiscard]] bool was_late(story& one, const event_failed* failed);
  /// Whether its time to live may have ended.
  [[nodiscard]] static bool may_be_over(const story& one);
  void wrong(const story& one, const std::string& what);

  const scenario& s_;
  std::uint32_t self_;
  engine& node_;
  finder found_;
  tally& counts_;
  memory_lender lender_;
  bool may_be_late_;
  std::optional<std::uint32_t> victim_;  ///< of the round
  bool stands_{false};                   ///< it goes on later; else it is killed
  bool woken_{false};
  std::map<std::uint64_t, story> live_;
  std::list<due> later_;
  std::list<due> parked_;
};

}  // namespace troupe::engine_fuzz
