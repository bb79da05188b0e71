#pragma once

/// A node's own state while it is drained. The supervisor orders the drain and decides when the
/// node leaves; a restarted supervisor has forgotten the drain, and does not know what it placed
/// here before. The node then tells it that it leaves, and decides by itself: it is drained once
/// two heartbeats in a row reported no request and no transfer.
///
///   standing   event                                       next
///   ---------  ------------------------------------------  --------
///   serving    order of its incarnation to end what it has  draining
///   draining   the order to leave                           drained
///   draining   the order to serve on                        serving
///   draining   registers, and no order came again           draining, says so, judges itself
///   draining   judges itself, two quiet heartbeats          drained
///   drained    anything                                     drained
///
/// Once it is drained, only the node's next life serves again. The same holds once it has told a
/// restarted supervisor that it leaves: the supervisor takes that for its own decision.

#include <atomic>
#include <cstdint>
#include <memory>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/actors/engine_types.hpp"

namespace troupe::actors {

/// Written by the node's actor, read by any thread of the engine.
class node_drain {
 public:
  [[nodiscard]] drain_standing standing() const noexcept { return standing_.load(); }

  // -- for the node's actor only

  /// Returns false if the order changes nothing, or is meant for another life.
  [[nodiscard]] bool ordered(const drain_order& order, std::uint64_t incarnation);
  /// The node asks to be registered. A supervisor that remembers the drain orders it again before
  /// it answers.
  void asks() noexcept { reminded_ = false; }
  /// The supervisor has answered. Returns whether it has to be told that the node leaves.
  [[nodiscard]] bool registered();
  /// A heartbeat goes out with this load. Returns whether that made the node drained.
  [[nodiscard]] bool beats(const load_report& load);

 private:
  std::atomic<drain_standing> standing_{drain_standing::serving};
  bool reminded_{false};  ///< the order came again since the node asked to be registered
  bool judges_itself_{false};
  std::uint32_t quiet_beats_{0};
};

using node_drain_ptr = std::shared_ptr<node_drain>;

}  // namespace troupe::actors
