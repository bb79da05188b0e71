#pragma once

/// Values of one engine's that are put at a node, got, asked for, removed and missed again, in this order. A put may
/// be given up, or not be done in time: then the value is never there, and the engine has its memory back with the
/// outcome. A value may have an end.

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
  /// `may_be_late`: operations on values have a short deadline.
  value_stories(engine& node, finder found, tally& counts, block_lender blocks, bool may_be_late);
  ~value_stories();

  void put(const std::string& peer, const std::string& key, const put_plan& plan);
  /// Whether it is an event of one of these.
  [[nodiscard]] bool take(event& e);
  /// Gives up and asks what is due.
  void pump();
  [[nodiscard]] bool empty() const { return live_.empty() && later_.empty(); }
  [[nodiscard]] std::string open() const;

 private:
  using time_point = std::chrono::steady_clock::time_point;
  enum class step : std::uint8_t { put, put_again, get, query, remove, get_nothing };
  struct story {
    put_plan plan;
    std::string peer, key;
    std::unique_ptr<lent_memory> value;
    step at{step::put};
    bool not_known{false};  ///< whether it is stored: the put failed with that
    bool looked{false};     ///< once, for what must not be there
    bool put_again{false};
    std::uint32_t tries{0};  ///< of this step
    time_point put_asked, put_ended, asked;
    std::optional<time_point> give_up_at;
    std::optional<time_point> taken_since;  ///< its key, by the put before
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
  /// Asks again where the answer was late; false: it was no lateness.
  [[nodiscard]] bool was_late(story& one, const event_failed* failed);
  /// Whether its time to live may have passed.
  [[nodiscard]] static bool may_be_over(const story& one);
  void wrong(const story& one, const std::string& what);

  engine& node_;
  finder found_;
  tally& counts_;
  memory_lender lender_;
  bool may_be_late_;
  std::map<std::uint64_t, story> live_;
  std::list<due> later_;
};

}  // namespace troupe::engine_fuzz
