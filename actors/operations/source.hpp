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

/// What a prefill engine offers of one request: how far it is computed, and how many decode ranks
/// have taken it. Clockless; the engine port owns it and spawns a sender per decode rank.
///
/// It is done when as many ranks as it is for have released it: all of one replica, unless
/// `send_spec::consumers` counts those of several. A rank that is lost or fails, before or after it
/// asked and whatever the reason, leaves its place open for `retry_window` (its next life, or another
/// replica, is served from the same blocks, without a second prefill); without one it fails the source
/// at once.
///
/// A request does not name its replica; the membership does. Of nodes that are not in it yet, ranks of
/// different numbers are of one; a rank that somebody else has taken, or that comes where one was lost
/// and is not its next life, is of another one, until the membership says otherwise (`learn_replicas`).
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

  /// Who asks for it. `replica` is empty where it is not known.
  struct consumer {
    std::string node, replica;
    std::uint32_t rank{0}, ranks{1};
    std::uint64_t life{0};  ///< incarnation of the node
    bool again{false};      ///< it knows that it had it before
  };
  /// The membership may name replicas by now that it did not when their ranks came. `name_of` gives the
  /// replica that a node is of; empty: not known.
  void learn_replicas(const std::function<std::string(const std::string& node)>& name_of);
  /// A decode rank takes it.
  void taken_by(transfer_id sender, const consumer& who);
  /// Its sender's outcome. True: with it the source is done.
  [[nodiscard]] bool released(transfer_id sender, std::uint64_t bytes);
  /// Whether all that it is for have released it, as far as it knows of which replica they are.
  [[nodiscard]] bool is_delivered() const noexcept {
    return wanted_ != 0 && count(false) >= wanted_;
  }
  /// It asked for what this source, or another one of its receive, does not have.
  void not_taken_by(transfer_id sender);
  /// Or it was lost, or gave up. Another rank may have come before that was known.
  void lost_one(transfer_id sender);
  /// A node that it is for was lost before it asked.
  void lost_unasked(const std::string& node, const std::string& replica_name);
  /// The sender's last word: its pins are gone.
  void unpinned(transfer_id sender) { senders_.erase(sender); }

  [[nodiscard]] const send_spec& spec() const noexcept { return spec_; }
  [[nodiscard]] const std::vector<std::uint32_t>& ready() const noexcept { return ready_; }
  [[nodiscard]] std::optional<std::uint32_t> sealed_tokens() const noexcept { return sealed_; }
  [[nodiscard]] const std::vector<std::byte>& aux() const noexcept { return aux_; }
  [[nodiscard]] const std::unordered_set<transfer_id>& senders() const noexcept { return senders_; }
  /// Decode ranks that it is for; 0: not known before the first one asks.
  [[nodiscard]] std::uint32_t wanted() const noexcept { return wanted_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] time_point deadline() const noexcept { return deadline_; }
  /// A decode rank was lost: until then another one may come.
  void shorten(time_point deadline, troupe::error why) {
    deadline_ = deadline;
    lost_ = std::move(why);
  }
  /// All that were missing came: they have the time that the engine gave.
  void lengthen() {
    deadline_ = full_deadline_;
    lost_.reset();
  }
  /// Whether fewer ranks move it, have released it, or wait in line to ask for it, than it is for.
  [[nodiscard]] bool has_open_place(std::size_t waiting = 0) const noexcept {
    const std::size_t wanted = wanted_ != 0 ? wanted_ : spec_.held_for.size();
    return count(true) + waiting < wanted;
  }
  /// Why a place is open, while it is.
  [[nodiscard]] const std::optional<troupe::error>& lost() const noexcept { return lost_; }

  bool concluded{false};                    ///< the engine was told the outcome
  time_point began{};                       ///< for the engine's metrics, as what moved is
  seen_movement moved;                      ///< to those that have released it
  std::unordered_set<transfer_id> holders;  ///< of decode nodes that will ask for it
  std::set<std::string> told_wanted;        ///< decode nodes that the engine knows want it

 private:
  /// Who took it as that rank of a replica, last. Several senders serve one that asked again before its
  /// former asking had ended here: over two links the first asking may come when the second one is
  /// released.
  struct taker {
    enum class now : std::uint8_t { lost, moves, released };
    std::string node;
    std::string replica;  ///< empty: not known yet
    std::uint64_t life{0};
    std::map<transfer_id, now> senders;
    /// The best of them.
    [[nodiscard]] now how() const noexcept;
  };
  struct replica {
    std::string name;  ///< empty: not known yet
    std::map<std::uint32_t, taker> ranks;
    std::set<std::string> missing;  ///< lost before they asked

    [[nodiscard]] bool is_whole() const noexcept;
    [[nodiscard]] bool may_be(const std::string& other) const;
    [[nodiscard]] bool admits(const consumer& who) const;
    /// Another part of the same replica. Of two that took one rank, who did not lose it stays.
    void take_in(replica&& other);
  };

  [[nodiscard]] replica& replica_of(const consumer& who);
  [[nodiscard]] taker::now* find(transfer_id sender);
  /// Ranks that have released it; with those that move it, if `moving`.
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

/// How the latest requests ended, so that a decode rank that asks late hears it at once instead of
/// waiting for its deadline. Bounded; the oldest is forgotten first.
class ended_requests {
 public:
  enum class how : std::uint8_t { delivered, failed };
  struct ending {
    how came{how::failed};
    troupe::error told;  ///< to whoever asks now
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
