#pragma once

/// Leases on the blocks of this node's transfers: on sources (held for decode nodes) and on
/// destinations (held for prefill nodes), each with whether its node still lives. A plain class
/// with no clock in it, not thread-safe; the runner feeds it and carries out what it returns.
///
/// A hold is on one operation, for one node. Its lease belongs to the life of that node which the
/// newest membership shows, and every beat of this node renews the leases of all lives that live:
/// waiting in line, however long, ends no lease. Without a supervisor the last membership stands.
///
///   hold     event                                             next
///   -------  ------------------------------------------------  ------------------------------------
///   none     hold                                              waiting, or unseen if nobody lives
///                                                              under that name
///   unseen   a membership shows a life of it that lives        waiting
///   unseen   shown down, by news that count                    none, lapse (down)
///   waiting  shown down or replaced, by older news             unseen: the engine that named it
///                                                              knew newer news
///   waiting  news that count show another life, which was      waiting, for that life: it is the one
///            taken in when the peer was named                  that was meant
///   waiting  shown down or replaced, by news that count        none, lapse (down, replaced)
///   waiting  its lease ends: no membership shows it, or it     none, lapse (unheard)
///            was lost while no supervisor watches
///   any      meet (it asked, or was asked)                     met
///   met      shown down or replaced                            met: its session hears of it from
///                                                              its link
///   met      its lease ends                                    met, lapse (unheard)
///   met      leave                                             none
///   none     keep (its word came that it will ask)             as met, but it counts as waiting
///   any      end of the operation                              none
///
/// News count for a hold once they are at least as new as all that the caller who named the peer
/// can have known: the placement, if it is known and of the same life of the supervisor; otherwise
/// the supervisor's answer to a heartbeat that was sent after the hold began, since no earlier
/// placement can rest on later news. A list may be late by any time, so waiting for some time would
/// not do. A list that shows the peer `joining` does not say which life was meant: a restarted
/// supervisor shows the nodes that it remembers that way, and may have forgotten the latest ones.
///
/// A sealed source without a known living taker is held for any node, for one length; then it
/// lapses (unread).
///
/// A life lives when the membership shows it (`joining`, `up`, `suspect`, `leaving`, or `down` by
/// its own report), or when a link with it is up and no membership says otherwise. Time in which
/// this process was frozen ends no lease: between two beats at most half a length passes.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "troupe/actors/base/clock.hpp"
#include "troupe/actors/cluster_messages.hpp"
#include "troupe/actors/engine_types.hpp"
#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/lease.hpp"

namespace troupe::actors {

class cache_leases {
 public:
  using duration = kvcache::lease_table::duration;

  struct options {
    incarnation self{1};                       ///< holder of the leases that are for any node
    duration length{std::chrono::minutes{1}};  ///< of every lease; positive
  };
  /// A membership: of that life of the supervisor; 0: none in particular.
  struct mark {
    std::uint64_t supervisor_incarnation{0};
    std::uint64_t epoch{0};
  };
  /// Whether this node is registered with a supervisor now, so that the membership is up to date.
  enum class news : std::uint8_t { current, old };
  enum class cause : std::uint8_t { down, replaced, unheard, unread };

  /// A hold that is over because its holder is dead, or because nobody asked for it.
  struct lapse {
    operation_id operation;
    cause why{cause::down};
    std::string peer;    ///< empty when unread
    std::string reason;  ///< why it is down, from the membership
    transfer_id met;     ///< its session; 0: it had not asked
    duration waited{};   ///< unread: how long no living taker was known
  };

  cache_leases() : cache_leases{options{}} {}
  explicit cache_leases(options opts) : options_{opts} {}

  // -- holds

  /// Holds the operation's blocks for node `peer`, which a placement of that membership named.
  void hold(operation_id operation, const std::string& peer, time_point now, mark placed);
  void hold(operation_id operation, const std::string& peer, time_point now) {
    hold(operation, peer, now, {});
  }
  /// That life of the peer has asked, or was asked: a session is open with it.
  void meet(operation_id operation, transfer_id session, const std::string& peer, incarnation life,
            time_point now);
  /// That life of the peer announced with message `word` that it will ask: the source is kept for
  /// it, in addition to its other holds.
  void keep(operation_id operation, transfer_id word, const std::string& peer, incarnation life,
            time_point now);
  /// The session has its outcome, or the hold by a message is over.
  void leave(operation_id operation, transfer_id session, time_point now);
  /// The source is sealed: from now on, holding it for any node has an end.
  void sealed(operation_id operation, time_point now);
  void end(operation_id operation);

  // -- which nodes live

  /// The newest membership.
  [[nodiscard]] std::vector<lapse> see(std::shared_ptr<const membership> members, time_point now);
  /// A supervisor answered, at that epoch, a heartbeat that was sent at `asked`.
  [[nodiscard]] std::vector<lapse> answered(mark supervisor, time_point asked, time_point now);
  void linked(incarnation life);
  /// The link is gone. Without a supervisor it is unknown whether that life still lives, until news
  /// or the next link tell.
  void unlinked(incarnation life);
  /// Renews the leases of lives that live, and collects those that are over. Once per
  /// `beat_period`.
  [[nodiscard]] std::vector<lapse> beat(time_point now, news of);

  // -- properties

  /// The number of living nodes that have not asked for it yet, and will.
  [[nodiscard]] std::size_t waiting(operation_id operation) const;
  /// Nothing is held, so no beat is needed.
  [[nodiscard]] bool empty() const noexcept { return operations_.empty(); }
  /// The longest time allowed between two beats.
  [[nodiscard]] duration beat_period(duration heartbeat) const;

 private:
  enum class standing : std::uint8_t { lives, unknown, down, replaced };
  struct living {
    std::string peer;
    std::size_t holds{0};
    mark shown;  ///< newest: later news of the same supervisor can say that it was replaced
    std::uint64_t taken_in_by{0};  ///< the last supervisor that showed it beyond `joining`
  };
  struct claim {
    std::string peer;
    incarnation of{};           ///< 0: unseen
    kvcache::lease_id lease{};  ///< 0: none
    transfer_id session{};      ///< 0: not met
    time_point since;           ///< of the hold
    mark placed{};              ///< newest news of the caller who named the peer; none: unknown
    bool kept{false};           ///< by a message instead of a session
    bool certain{false};        ///< news that count have confirmed that this life was meant
  };
  struct held {
    std::vector<claim> claims;
    bool sealed{false};
    kvcache::lease_id for_anyone{};  ///< 0: none
    time_point alone_since;          ///< while there is a lease for anyone
  };

  [[nodiscard]] time_point clock(time_point now) const;
  [[nodiscard]] const member* member_of(const std::string& peer) const;
  [[nodiscard]] standing judge(incarnation id, const living& one, news of) const;
  [[nodiscard]] std::string reason_of(const std::string& peer) const;
  [[nodiscard]] kvcache::lease_id lease_for(operation_id id, incarnation holder, time_point now);
  [[nodiscard]] bool news_count(const claim& one) const;
  [[nodiscard]] bool proves(const member& shown, const claim& one) const;
  void note_shown(living& one, incarnation id) const;
  [[nodiscard]] bool makes_certain(claim& one);
  void give_back(claim& from);
  void forget_life(incarnation id);
  void bind(operation_id id, claim& to, incarnation to_life, time_point now);
  void bind_if_shown(operation_id id, claim& to, time_point now);
  void update_lease_for_anyone(operation_id id, held& of, time_point now);
  void bury(incarnation id, standing how, time_point now, std::vector<lapse>& lapses);
  void review(time_point now, std::vector<lapse>& lapses);
  void collect(time_point now, std::vector<lapse>& lapses);

  options options_;
  kvcache::lease_table table_;
  std::map<operation_id, held> operations_;
  std::unordered_map<kvcache::lease_id, operation_id> operation_of_;
  std::map<incarnation, living> lives_;  ///< that hold something
  std::unordered_set<incarnation> linked_;
  /// Lives in `members_` whose link was lost since that epoch came.
  std::unordered_set<incarnation> doubted_;
  std::shared_ptr<const membership> members_{std::make_shared<membership>()};
  std::unordered_map<std::string_view, const member*> by_name_;  ///< into `members_`
  std::uint64_t last_lease_{0};
  time_point last_beat_{};   ///< by the caller's clock
  time_point lease_time_{};  ///< the lease clock then: without time that the process was frozen
};

}  // namespace troupe::actors
