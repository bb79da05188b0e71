#pragma once

/// Values of one engine's that are put at a node, got, asked for, removed and missed again, in this order. A put may
/// be given up: then the value is never there.

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "troupe/actors/engine.hpp"

#include "scenario.hpp"
#include "tally.hpp"

namespace troupe::engine_fuzz {

class lent_value;

class value_stories {
 public:
  value_stories(engine& node, finder found, tally& counts, dice& d);
  ~value_stories();

  /// `give_up`: 0 not, 1 at once, 2 soon.
  void put(const std::string& peer, const std::string& key, std::uint64_t seed, std::uint32_t bytes,
           std::uint32_t give_up);
  /// Whether it is an event of one of these.
  [[nodiscard]] bool take(event& e);
  /// Gives up what is due.
  void pump();
  [[nodiscard]] bool empty() const { return live_.empty(); }
  [[nodiscard]] std::string open() const;

 private:
  enum class step : std::uint8_t { put, get, query, remove, get_nothing };
  struct story {
    std::string peer, key;
    std::unique_ptr<lent_value> value;
    step at{step::put};
    bool given_up{false};
    bool not_known{false};
    std::optional<std::chrono::steady_clock::time_point> give_up_at;
  };

  void ask(story one, step what);
  void go_on(story one, event& e);
  void end_put(story one, const event_failed* failed);
  void wrong(const story& one, const std::string& what);

  engine& node_;
  finder found_;
  tally& counts_;
  dice& dice_;
  std::map<std::uint64_t, story> live_;
};

}  // namespace troupe::engine_fuzz
