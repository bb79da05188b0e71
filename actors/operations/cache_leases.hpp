#pragma once

/// For whom the blocks of this node's transfers are held, and whether those still live: leases on
/// sources (held for decode nodes) and on destinations (held for prefill nodes). A plain class with no
/// clock in it, not thread-safe; the engine port feeds it and carries out what it returns.
///
/// A hold is on one operation, for one node. Its lease belongs to the life of that node which the
/// newest membership shows, and every beat of this node renews the leases of all lives that live: how
/// long they wait in line ends nothing. Without a supervisor the last membership stands.
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
/// News count for a hold once they are as new as what whoever named the peer can have known: the
/// placement, where it is known and by the same life of the supervisor. Else what the supervisor has
/// answered to a heartbeat that was sent after the hold began: it cannot have placed anything before by
/// news that it had not yet. A list may be late by any time, so no time is waited for instead. Which
/// life was meant, no list says that shows the peer `joining`: a supervisor that was restarted shows so
/// what it remembers, and may have forgotten the last ones.
///
/// A sealed source for which nobody that lives is known holds its blocks for whoever asks, for one
/// length: then it lapses (unread).
///
/// A life lives when the membership shows it (`joining`, `up`, `suspect`, `leaving`, or `down` by its
/// own report), or when a link with it is up and no membership says otherwise. Time in which this
/// process stood still ends no lease: between two beats at most half a length passes.

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
    incarnation self{1};                       ///< holds what is held for nobody in particular
    duration length{std::chrono::minutes{1}};  ///< of every lease; positive
  };
  /// Which membership: of that life of the supervisor, 0: none in particular.
  struct mark {
    std::uint64_t supervisor_incarnation{0};
    std::uint64_t epoch{0};
  };
  /// Whether a supervisor has this node at the moment, so that the membership is of now.
  enum class news : std::uint8_t { current, old };
  enum class cause : std::uint8_t { down, replaced, unheard, unread };

  /// A hold that is over since its holder does not live, or that nobody asked for.
  struct lapse {
    operation_id operation;
    cause why{cause::down};
    std::string peer;    ///< empty when unread
    std::string reason;  ///< why it is down, as the membership says
    transfer_id met;     ///< of its session, 0: it had not asked
    duration waited{};   ///< unread: since when nobody was known who lives
  };

  cache_leases() : cache_leases{options{}} {}
  explicit cache_leases(options opts) : options_{opts} {}

  // -- what is held, for whom

  /// The operation's blocks are held for node `peer`, as a placement of that membership says.
  void hold(operation_id operation, const std::string& peer, time_point now, mark placed);
  void hold(operation_id operation, const std::string& peer, time_point now) {
    hold(operation, peer, now, {});
  }
  /// That life of the peer has asked, or was asked: a session speaks with it.
  void meet(operation_id operation, transfer_id session, const std::string& peer, incarnation life,
            time_point now);
  /// That life of the peer will ask, and says so by that word of its own: the source is kept for it, beside
  /// what it is held for anyway.
  void keep(operation_id operation, transfer_id word, const std::string& peer, incarnation life,
            time_point now);
  /// The session has its outcome, or the word is over.
  void leave(operation_id operation, transfer_id session, time_point now);
  /// The source is sealed: from now on it is not held for nobody without an end.
  void sealed(operation_id operation, time_point now);
  void end(operation_id operation);

  // -- who lives

  /// The newest membership.
  [[nodiscard]] std::vector<lapse> see(std::shared_ptr<const membership> members, time_point now);
  /// A supervisor has answered a heartbeat, which was sent at `asked`: it was at that epoch then.
  [[nodiscard]] std::vector<lapse> answered(mark supervisor, time_point asked, time_point now);
  void linked(incarnation life);
  /// The link is gone. Without a supervisor nobody knows whether that life still lives, until news or
  /// the next link say so.
  void unlinked(incarnation life);
  /// Renews what living lives hold, and collects what is over. Once per `beat_period`.
  [[nodiscard]] std::vector<lapse> beat(time_point now, news of);

  // -- properties

  /// Nodes that live, have not asked for it yet, and will.
  [[nodiscard]] std::size_t waiting(operation_id operation) const;
  /// Nothing is held: no beat is needed.
  [[nodiscard]] bool empty() const noexcept { return operations_.empty(); }
  /// At most so long from one beat to the next.
  [[nodiscard]] duration beat_period(duration heartbeat) const;

 private:
  enum class standing : std::uint8_t { lives, unknown, down, replaced };
  struct living {
    std::string peer;
    std::size_t holds{0};
    mark shown;  ///< last: later news of the same supervisor can say that it was replaced
    std::uint64_t taken_in_by{0};  ///< the last supervisor that has shown it as more than `joining`
  };
  struct claim {
    std::string peer;
    incarnation of{};           ///< 0: unseen
    kvcache::lease_id lease{};  ///< 0: none
    transfer_id session{};      ///< 0: not met
    time_point since;           ///< of the hold
    mark placed{};              ///< what whoever named the peer knew at most; none: not known yet
    bool kept{false};           ///< by a word instead of a session
    bool certain{false};        ///< news that count have shown that this life was meant
  };
  struct held {
    std::vector<claim> claims;
    bool sealed{false};
    kvcache::lease_id for_anyone{};  ///< 0: none
    time_point alone_since;          ///< while there is one
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
  void settle(operation_id id, held& of, time_point now);
  void bury(incarnation id, standing how, time_point now, std::vector<lapse>& lapses);
  void review(time_point now, std::vector<lapse>& lapses);
  void collect(time_point now, std::vector<lapse>& lapses);

  options options_;
  kvcache::lease_table table_;
  std::map<operation_id, held> operations_;
  std::unordered_map<kvcache::lease_id, operation_id> operation_of_;
  std::map<incarnation, living> lives_;  ///< that hold something
  std::unordered_set<incarnation> linked_;
  /// Of `members_`, whose link was lost since that epoch came.
  std::unordered_set<incarnation> doubted_;
  std::shared_ptr<const membership> members_{std::make_shared<membership>()};
  std::unordered_map<std::string_view, const member*> by_name_;  ///< into `members_`
  std::uint64_t last_lease_{0};
  time_point last_beat_{};   ///< as the caller's clock said
  time_point lease_time_{};  ///< at that beat, without the time in which this process stood still
};

}  // namespace troupe::actors
