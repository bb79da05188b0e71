#pragma once

/// Which replicas are being drained, and when each of them may leave. A plain class without
/// threads, I/O or a clock; the `supervisor` actor feeds it and carries out what it decides.
///
/// An operator drains a node; its whole replica drains with it, since a replica takes requests only
/// while all of its ranks are up. Its ranks leave together:
///
///   draining -> leaving   nothing placed on the replica is unfinished, and two heartbeats in a row
///                         of every rank that is there, sent since it knew of the drain, told of no
///                         request and no transfer; or the deadline has passed
///
/// A rank that is lost is waited for no longer while another is there. What has been decided stays
/// decided: a rank that comes back in the same life is told again. That a drain was cancelled, too: a
/// rank that was lost meanwhile would go on with it.

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

/// Why a node is down that was drained with nothing left to do. Whoever left otherwise has a
/// sentence of its own.
inline constexpr std::string_view drained_reason = "drained";

class drain_list {
 public:
  struct rank {
    std::string name;
    std::uint64_t incarnation{0};
  };
  /// What is to be said of ranks: as long as they drain, or that they leave and why.
  struct verdict {
    std::vector<rank> ranks;
    bool leave{false};
    std::string reason;
  };
  /// Requests that were placed on a replica and have not ended.
  using unfinished_fn = std::function<std::size_t(std::string_view stage, std::uint32_t replica)>;

  /// These ranks of a replica drain from now on, together with those of it that do already.
  /// `deadline` is bounded by `max_drain_deadline`. `epoch`: of the membership that says so first; a
  /// heartbeat of a rank that has not seen that may have waited here since before the drain.
  void begin(std::string_view stage, std::uint32_t replica, const std::vector<rank>& ranks,
             std::chrono::milliseconds deadline, std::uint64_t epoch, steady_time now);
  /// They serve on. Nothing where they have been told to leave.
  void cancel(std::string_view stage, std::uint32_t replica);
  /// A heartbeat of a node.
  void heard(const heartbeat& beat);
  /// That life of a node is down.
  void lost(std::string_view name, std::uint64_t incarnation);
  /// That name is no node any more.
  void forgotten(std::string_view name);
  /// A life of a node registered: another one than that which drains ends the drain. What the life
  /// is to be told, if it drains or did: whether to leave, or to serve on.
  [[nodiscard]] std::optional<drain_order> registered(std::string_view name,
                                                      std::uint64_t incarnation);
  /// Why the ranks that drain with that one leave; empty where they do not.
  [[nodiscard]] std::string why_it_leaves(std::string_view name) const;
  /// What has changed: who leaves now, and what is said of those that go on.
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
    bool news{false};  ///< something was heard since it was judged
  };

  [[nodiscard]] static verdict judged(entry& e, std::size_t unfinished, bool late);
  [[nodiscard]] draining_rank* find(std::string_view name, std::uint64_t incarnation, entry** of);

  std::vector<entry> entries_;  ///< at most one per replica
};

/// No drain waits for longer.
inline constexpr std::chrono::milliseconds max_drain_deadline = std::chrono::hours{24};

}  // namespace troupe::actors
