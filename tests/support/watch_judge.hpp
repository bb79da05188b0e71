#pragma once

/// Checks the membership events of one engine for impossible sequences.

#include <cstdint>
#include <map>
#include <string>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/engine.hpp"

namespace troupe::testing {

class watch_judge {
 public:
  struct life {
    std::uint64_t incarnation{0};
    member_state state{member_state::joining};
    friend bool operator==(const life&, const life&) = default;
  };

  /// Returns what is wrong with the event; empty if nothing is.
  [[nodiscard]] std::string hear(const event_member& e) {
    const auto wrong = [&e](const std::string& what) {
      return e.node + " (" + actors::life_text(e.incarnation) + ", " +
             std::string{to_string(e.state)} + "): " + what;
    };
    if (e.node.empty() || e.incarnation == 0) return wrong("told of nobody");
    const auto known = there_.find(e.node);
    if (e.state == member_state::gone) {
      if (known == there_.end() || known->second.incarnation != e.incarnation) {
        return wrong("gone, and nobody was told that it is there");
      }
      if (e.reason.empty()) return wrong("gone for no reason");
      there_.erase(known);
      ++ended;
      return {};
    }
    if (known == there_.end()) {
      there_.emplace(e.node, life{e.incarnation, e.state});
      ++begun;
      return {};
    }
    if (known->second.incarnation != e.incarnation)
      return wrong("the life before it was not ended");
    if (known->second.state == e.state) return wrong("told twice");
    known->second.state = e.state;
    return {};
  }
  /// The members that the engine believes to be present, by name.
  [[nodiscard]] const std::map<std::string, life>& there() const noexcept { return there_; }

  int begun{0}, ended{0};  ///< lives

 private:
  std::map<std::string, life> there_;
};

}  // namespace troupe::testing
