#pragma once

/// The replicas that are being drained, and when each of them may leave. A plain class without
/// threads, I/O or a clock; the `supervisor` actor feeds it and carries out its decisions.
///
/// An operator drains a node; its whole replica drains with it, since a replica takes requests only
/// while all of its ranks are up. Its ranks leave together:
///
///   draining -> leaving   no request placed on the replica is unfinished, and two heartbeats in a
///                         row of every present rank, sent since it knew of the drain, reported no
///                         request and no transfer; or the deadline has passed
///
/// A lost rank is not waited for while another rank is present. Decisions stand: a rank that comes
/// back in the same life is told again. That includes the cancelling of a drain, since a rank that
/// was lost meanwhile would go on draining.

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/actors/membership/membership.hpp"

namespace troupe::actors {

/// The reason of a node that is down after a drain left it nothing to do. A node that left
/// otherwise has a sentence of its own.
inline constexpr std::string_view drained_reason = "drained";

class drain_list {
 public:
  using rank = node_life;
  /// The news of a replica's ranks: that they leave, or that they still drain, and why.
  struct verdict {
    std::vector<rank> ranks;
    bool leave{false};
    std::string reason;
  };
  /// Returns the number of requests that were placed on a replica and have not ended.
  using unfinished_fn = std::function<std::size_t(std::string_view stage, std::uint32_t replica)>;

  /// These ranks of a replica drain from now on, together with its ranks that drain already.
  /// `deadline` is bounded by `max_drain_deadline`. `epoch` is that of the first membership that
  /// shows the drain: a heartbeat of a rank that has not seen it may have waited here since before
  /// the drain.
  void begin(std::string_view stage, std::uint32_t replica, const std::vector<rank>& ranks,
             std::chrono::milliseconds deadline, std::uint64_t epoch, steady_time now);
  /// The ranks serve on. Has no effect if they have been told to leave.
  void cancel(std::string_view stage, std::uint32_t replica);
  /// A heartbeat of a node.
  void heard(const heartbeat& beat);
  /// That life of a node is down.
  void lost(std::string_view name, std::uint64_t incarnation);
  /// That name no longer belongs to a node.
  void forgotten(std::string_view name);
  /// A life of a node registered. A life other than the draining one ends the drain of that rank.
  /// Returns the order for a life that drains or did: to leave, to go on draining, or to serve on.
  [[nodiscard]] std::optional<drain_order> registered(std::string_view name,
                                                      std::uint64_t incarnation);
  /// Why the ranks of that node's drain leave; empty if they do not.
  [[nodiscard]] std::string why_it_leaves(std::string_view name) const;
  /// The changes since the last call: replicas that leave now, and news of those that still drain.
  [[nodiscard]] std::vector<verdict> judge(const unfinished_fn& unfinished, steady_time now);

 private:
  struct draining_rank {
    rank who;
    bool lost{false};
    std::uint32_t quiet_beats{0};  ///< in a row
    load_report load;              ///< of the last beat
  };
  struct entry {
    std::string stage;
    std::uint32_t replica{0};
    std::vector<draining_rank> ranks;
    std::chrono::milliseconds patience{0};
    steady_time deadline{};
    std::uint64_t epoch{0};
    bool leaves{false};
    std::string why_leaves;
    bool cancelled{false};
    bool news{false};  ///< something was heard since it was last judged
  };

  [[nodiscard]] static verdict judged(entry& e, std::size_t unfinished, bool late);
  [[nodiscard]] draining_rank* find(std::string_view name, std::uint64_t incarnation, entry** of);

  std::vector<entry> entries_;  ///< at most one per replica
};

/// The longest deadline of a drain.
inline constexpr std::chrono::milliseconds max_drain_deadline = std::chrono::hours{24};

}  // namespace troupe::actors
