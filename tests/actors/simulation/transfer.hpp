#pragma once

/// One attempt to move the cache of one request: both engines, the shells around both state
/// machines, and the bytes. The frontend decides what a failed attempt means for the request.

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "troupe/actors/transfer/receive_session.hpp"
#include "troupe/actors/transfer/send_session.hpp"

#include "link.hpp"

namespace troupe::actors::cluster_simulation {

/// Called once with the outcome of an attempt as one engine sees it.
using outcome_told = std::function<void(side, const std::optional<error>&)>;

class transfer : public std::enable_shared_from_this<transfer> {
 public:
  transfer(world& in, std::uint64_t number, placement where, stage_of_things placed,
           outcome_told told);

  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
  [[nodiscard]] const life& at(side s) const { return ends_[s].at; }

  // -- the engines
  /// The frontend's call reaches a node, which may be in another life than the one that was placed.
  void begin(side s);
  void abort_session(side s);

  [[nodiscard]] stage_of_things placed_when() const noexcept { return placed_; }

  // -- leases (leases.cpp)
  /// A hold of this side has lapsed.
  void lapses(side s, const error& why);
  [[nodiscard]] const node_info& placed_on(side s) const {
    return s == decode ? where_.decode.front() : where_.prefill.front();
  }

  // -- the links
  void link_lost(side s, const error& why);
  /// The link was rebuilt.
  void link_back(side s, std::uint32_t generation);
  void resend_final_messages(side s);
  [[nodiscard]] bool speaks_of_a_former_link(side s) const;

  /// Whether this side has ended, as far as its process still lives.
  [[nodiscard]] bool settled(side s) const;
  [[nodiscard]] std::string standing() const;

 private:
  static constexpr std::uint32_t layers = 3;
  static constexpr std::uint32_t block_tokens = 4;
  static constexpr std::uint32_t most_tokens = 24;

  struct end {
    life at;
    bool begun{false};
    std::optional<kvcache::allocation> blocks;
    bool freed{false};
    bool pinned{false};
    moment deadline{};
    std::uint32_t outcomes{0};
    std::optional<error> failure;
    bool fenced{false}, shut{false}, quiescent{false}, unpinned{false};
    bool reclaimed{false};  ///< its hold lapsed before the peer asked
  };
  struct moved_batch {
    post_slice what;
    side by;
    std::uint32_t over;     ///< the link's generation over which it was posted
    std::uint32_t granted;  ///< the generation in which the decode side asked for it
    bool landed{false};
    std::optional<error> failure;
  };

  // -- blocks
  void want_blocks(side s);
  void have_blocks(side s, result<kvcache::allocation> given);
  void free_blocks(side s);
  void unpin(side s);
  void touch(const cache_slice& what);
  // -- decode
  void want_link();
  void link_is_up(const std::shared_ptr<link>& wire);
  // -- prefill
  void compute();
  void request_came(const transfer_request& request, const std::shared_ptr<link>& wire);
  void serve_request();
  // -- both
  void came(side to, const session_message& message);
  void carry_out(side s, const session_actions& actions);
  void post(side by, const post_slice& what);
  void land(std::size_t index);
  [[nodiscard]] bool may_move(moved_batch& b);
  void complete(std::size_t index);
  [[nodiscard]] operation_id operation(side s) const { return operation_id{2 * number_ + s}; }
  void hold(side s);
  void meet(side s);
  void let_go(side s);
  void ask_again(const transfer_request& request);
  void fence(side s);
  void conclude_side(side s, const std::optional<error>& why);
  void expire_after(side s, microseconds time);
  void expire(side s);
  [[nodiscard]] bool gone(side s) const { return !ends_[s].at->alive; }

  world& world_;
  const std::uint64_t number_;
  const placement where_;
  const stage_of_things placed_;
  const outcome_told told_;
  std::array<end, 2> ends_;
  std::shared_ptr<link> link_;
  transfer_mode mode_{transfer_mode::write};
  std::uint32_t tokens_{1};
  std::optional<receive_session> receiver_;
  std::optional<send_session> sender_;
  // the prefill engine
  std::vector<std::uint32_t> ready_ = std::vector<std::uint32_t>(layers, 0);
  bool sealed_{false};
  std::optional<moment> computes_until_;
  std::optional<transfer_request> parked_;
  std::array<std::vector<session_message>, 2> last_words_;
  std::uint32_t asked_over_{0};  ///< the link's generation over which the decode side last asked
  std::uint32_t held_since_{0};  ///< the link's generation that the sender was last told of
  // bytes
  std::vector<moved_batch> batches_;
  std::array<std::array<bool, most_tokens>, layers> landed_{};
  std::array<std::uint32_t, layers> told_layers_{};
};

}  // namespace troupe::actors::cluster_simulation
