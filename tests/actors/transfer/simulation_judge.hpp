#pragma once

/// The invariants of a transfer, checked after every event of a simulated run.

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "troupe/actors/transfer/session_actions.hpp"

#include "simulation_scenario.hpp"

namespace troupe::actors::simulation {

/// State that the judge tracks for one side.
struct watched {
  bool exists{false};
  bool fence_called{false};
  bool fence_effective{false};
  bool quiescent_given{false};
  bool unpinned{false};
  bool knows_link_is_lost{false};
  bool refused{false};    ///< by the peer, over the link that this side uses
  bool link_gone{false};  ///< its end of the link is broken and the next link is not up
  bool engine_aborted{false};
  bool got_abort{false};
  bool must_fail{false};  ///< the peer's abort arrived before the outcome
  std::uint32_t concluded{0};
  std::uint32_t answers{0};  ///< `transfer_quiescent` messages sent
  std::uint32_t in_flight{0};
  std::uint32_t knows_link{0};  ///< number of the link that it uses
  std::uint32_t posts{0};
  std::optional<error> failure;
};

/// The true course of events, independent of what the two sides believe.
struct course {
  std::uint32_t now{0};
  std::array<watched, 2> sides;
  std::array<std::uint32_t, most_layers> ready{};  ///< by layer: computed up to this token
  std::array<std::uint32_t, most_layers> told{};   ///< by layer: reported to the decode engine
  std::array<std::array<std::uint32_t, most_tokens>, most_layers> landed{};  ///< times per token
  std::uint32_t state_landed{0};
  std::uint32_t link{0};       ///< number of the current link
  std::uint32_t old_until{0};  ///< bytes of a former link may move until then
  bool sealed{false}, broken{false}, released{false}, offered{false}, refused{false};
};

class judge {
 public:
  judge(const scenario& s, course& c) : scenario_{s}, course_{c} {}

  /// The first invariant that did not hold. Empty if all have.
  [[nodiscard]] const std::string& violation() const noexcept { return violation_; }
  void violate(const std::string& what);

  // -- what a side does
  void posts(side by, const post_slice& what);
  void sends(side from, const session_message& message, transfer_id expected);
  void fences(side by);
  void offers(side by, const send_offer& what);
  void tells(side by, const cache_slice& what);
  void concludes(side by, const conclude& what);
  void unpins(side by);

  // -- what happens to memory
  /// Bytes move now: they are read at the source and written at the destination.
  void touches_memory();
  void lands(const cache_slice& what, bool with_state);

  /// A side learns that one of its batches has failed.
  void fails(side by, const error& why);
  /// A side learns that its link was replaced.
  void link_is_back(side at);

  // -- the end
  /// `finished`: whether each machine is in its last state.
  void comes_to_its_end(std::array<bool, 2> finished);
  /// Both sides ended well by themselves: checks that their accounts agree.
  void agreement(report& into);

 private:
  void check_slice(const post_slice& what);
  void check_all_is_here(const conclude& what);
  void check_answer(const watched& w);
  void check_reason(const watched& w);
  /// Whether something came exactly once, or more often where a link broke.
  [[nodiscard]] bool came(std::uint32_t times) const;

  const scenario& scenario_;
  course& course_;
  std::string violation_;
};

}  // namespace troupe::actors::simulation
