#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "troupe/actors/base/clock.hpp"
#include "troupe/actors/engine_types.hpp"
#include "troupe/actors/messages/movement.hpp"

namespace troupe::actors {

/// One request that a prefill engine offers: how far it is computed, and how many decode ranks have
/// taken it. Clockless; the runner owns it and begins a session per decode rank.
///
/// It is done when as many ranks as it is meant for have released it: all of one replica (the first
/// rank that asks says how many, and so does the first that asks when no other is left), unless
/// `send_spec::consumers` counts those of several. A rank that is lost or fails, before or after it
/// asked and for whatever reason, leaves its place open for `retry_window`: its next life, or
/// another replica, is served from the same blocks, without a second prefill. Without a window it
/// fails the source at once.
///
/// A request does not name its replica; the membership does. As long as nodes are not in it yet,
/// ranks of different numbers are taken for one replica; a rank that another node has taken, or
/// that comes where one was lost and is not its next life, for another replica, until the
/// membership says otherwise (`learn_replicas`).
class source {
 public:
  source(send_spec spec, std::uint32_t layers, time_point deadline)
      : spec_{std::move(spec)},
        ready_(layers, 0),
        wanted_{spec_.consumers},
        deadline_{deadline},
        full_deadline_{deadline} {}

  void add_blocks(std::span<const block_id> blocks, std::uint32_t group) {
    auto& all = spec_.groups.empty() ? spec_.blocks : spec_.groups[group].blocks;
    all.insert(all.end(), blocks.begin(), blocks.end());
  }
  [[nodiscard]] std::size_t block_count() const noexcept;
  void computed(std::uint32_t layer_begin, std::uint32_t layer_end, std::uint32_t token_end);
  void seal(std::uint32_t tokens, std::vector<std::byte> aux);

  /// A decode rank that asks for it. `replica` is empty if unknown.
  struct consumer {
    std::string node, replica;
    std::uint32_t rank{0}, ranks{1};
    std::uint64_t life{0};  ///< incarnation of the node
    bool again{false};      ///< it knows that it had received it before
  };
  /// The membership may now name replicas that were unknown when their ranks came. `name_of` gives
  /// the replica of a node; empty: unknown.
  void learn_replicas(const std::function<std::string(const std::string& node)>& name_of);
  void taken_by(transfer_id sender, const consumer& who);
  /// The sender succeeded. Returns whether the source is now done.
  [[nodiscard]] bool released(transfer_id sender, std::uint64_t bytes);
  /// Whether all ranks that it is for have released it, as far as their replicas are known.
  [[nodiscard]] bool is_delivered() const noexcept {
    return wanted_ != 0 && count(false) >= wanted_;
  }
  /// The rank asked for something that this source, or another source of its receive, does not
  /// have.
  void not_taken_by(transfer_id sender);
  /// The rank was lost, or gave up. Another rank may have come before that was known.
  void lost_one(transfer_id sender);
  /// A node that the source is meant for was lost before it asked.
  void lost_unasked(const std::string& node, const std::string& replica_name);
  /// The sender's last message: its pins are gone.
  void unpinned(transfer_id sender) { senders_.erase(sender); }

  [[nodiscard]] const send_spec& spec() const noexcept { return spec_; }
  [[nodiscard]] const std::vector<std::uint32_t>& ready() const noexcept { return ready_; }
  [[nodiscard]] std::optional<std::uint32_t> sealed_tokens() const noexcept { return sealed_; }
  [[nodiscard]] const std::vector<std::byte>& aux() const noexcept { return aux_; }
  [[nodiscard]] const std::unordered_set<transfer_id>& senders() const noexcept { return senders_; }
  /// Decode ranks that it is meant for; 0: unknown until the first one asks.
  [[nodiscard]] std::uint32_t wanted() const noexcept { return wanted_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] time_point deadline() const noexcept { return deadline_; }
  /// A decode rank was lost: another one may come until `deadline`.
  void shorten(time_point deadline, troupe::error why) {
    deadline_ = deadline;
    lost_ = std::move(why);
  }
  /// All missing ranks came: restores the deadline that the engine gave.
  void lengthen() {
    deadline_ = full_deadline_;
    lost_.reset();
  }
  /// Whether the ranks that move it, have released it, or wait in line to ask for it are fewer than
  /// it is meant for.
  [[nodiscard]] bool has_open_place(std::size_t waiting = 0) const noexcept {
    const std::size_t wanted = wanted_ != 0 ? wanted_ : spec_.held_for.size();
    return count(true) + waiting < wanted;
  }
  /// Why a place is open, while it is.
  [[nodiscard]] const std::optional<troupe::error>& lost() const noexcept { return lost_; }

  bool concluded{false};                    ///< the engine was told the outcome
  time_point began{};                       ///< for the engine's metrics
  seen_movement moved;                      ///< to the ranks that have released it, likewise
  std::unordered_set<transfer_id> holders;  ///< holds of decode nodes that will ask for it
  std::optional<troupe::error> last_loss;   ///< why a place was last lost, filled since or not
  std::set<std::string> told_wanted;        ///< decode nodes told by `event_wanted`

 private:
  /// The last node that took the source as that rank of a replica. It has several senders if it
  /// asked again before its former request had ended here: over two links the first request may
  /// arrive when the second one is released.
  struct taker {
    enum class now : std::uint8_t { lost, moves, released };
    std::string node;
    std::string replica;  ///< empty: unknown so far
    std::uint64_t life{0};
    std::map<transfer_id, now> senders;
    /// The most advanced of the senders.
    [[nodiscard]] now how() const noexcept;
  };
  struct replica {
    std::string name;  ///< empty: unknown so far
    std::map<std::uint32_t, taker> ranks;
    std::set<std::string> missing;  ///< lost before they asked

    [[nodiscard]] bool is_whole() const noexcept;
    [[nodiscard]] bool may_be(const std::string& other) const;
    [[nodiscard]] bool admits(const consumer& who) const;
    /// Merges another part of the same replica. If two nodes took one rank, the one that was not
    /// lost stays.
    void take_in(replica&& other);
  };

  [[nodiscard]] replica& replica_of(const consumer& who);
  [[nodiscard]] taker::now* find(transfer_id sender);
  /// Ranks that have released it and, if `moving`, those that move it.
  [[nodiscard]] std::size_t count(bool moving) const noexcept;

  send_spec spec_;
  std::vector<std::uint32_t> ready_;
  std::optional<std::uint32_t> sealed_;
  std::vector<std::byte> aux_;
  std::unordered_set<transfer_id> senders_;
  std::vector<replica> replicas_;  ///< that have taken it, newest last
  std::uint32_t wanted_;
  std::uint64_t bytes_{0};
  time_point deadline_;
  time_point full_deadline_;
  std::optional<troupe::error> lost_;
};

/// How the latest requests ended, so that a decode rank that asks late is answered at once instead
/// of waiting for its deadline. Bounded; the oldest is forgotten first.
class ended_requests {
 public:
  enum class how : std::uint8_t { delivered, failed };
  struct ending {
    how came{how::failed};
    troupe::error told;  ///< to ranks that ask now
  };
  void remember(const std::string& request, ending end);
  void forget(const std::string& request);
  [[nodiscard]] const ending* find(const std::string& request) const;

 private:
  static constexpr std::size_t bound = 4096;
  std::unordered_map<std::string, ending> endings_;
  std::deque<std::string> order_;
};

}  // namespace troupe::actors
