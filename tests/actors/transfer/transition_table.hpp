#pragma once

/// What the transition tables of both sessions share: one request of two layers with eight tokens
/// each, the errors that end it, and the check of a table.

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "session_table.hpp"

namespace troupe::actors {

inline constexpr std::uint32_t layers = 2;
inline constexpr std::uint32_t tokens = 8;
inline const time_point deadline = time_point{} + std::chrono::seconds{10};
inline const error broken{errc::link_broken, "the link broke"};
inline const error given_up{errc::aborted, "the engine gave up"};
inline const error refused{errc::overloaded, "too much"};
inline const error revoked{errc::grant_revoked, "fenced"};

inline transfer_request request_for(transfer_mode mode, std::uint32_t begin = 0,
                                    std::uint32_t end = tokens) {
  transfer_request r;
  r.transfer = transfer_id{5};
  r.request = std::string{"r"};
  r.mode = mode;
  r.token_begin = begin;
  r.token_end = end;
  return r;
}

inline session_actions join(session_actions first, session_actions second) {
  for (auto& action : second) first.emplace_back(std::move(action));
  return first;
}
template <class Session>
session_actions then_quiescent(Session& s, session_actions first) {
  return join(std::move(first), s.quiescent());
}
template <class Session>
session_actions aborted_and_lost(Session& s) {
  auto did = s.peer_aborted(given_up);
  did = join(std::move(did), s.link_lost(broken));
  return then_quiescent(s, std::move(did));
}

/// A state in which events arrive, or a variant of one that behaves differently.
template <class Session>
struct situation {
  const char* name;
  std::function<Session()> in;
};

template <class Session, std::size_t Situations>
struct transition_row {
  const char* event;
  std::function<session_actions(Session&)> happens;
  /// "next state: actions" per situation, in their order; "=" if nothing happens.
  std::array<const char*, Situations> expected;
};

inline constexpr const char* stays = "=";
inline constexpr const char* is_refused =
    "fencing: send(transfer_abort out_of_range) conclude(out_of_range) fence";

template <class Session, std::size_t Situations>
void expect_transitions(const std::array<situation<Session>, Situations>& situations,
                        const std::vector<transition_row<Session, Situations>>& table) {
  for (const auto& row : table) {
    for (std::size_t i = 0; i < Situations; ++i) {
      auto s = situations[i].in();
      const auto before = s.current();
      const auto did = row.happens(s);
      const auto found = describe(before, s.current(), did);
      EXPECT_EQ(found, row.expected[i]) << row.event << " in " << situations[i].name;
    }
  }
}

}  // namespace troupe::actors
