#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "troupe/io/wire.hpp"

namespace troupe::io {

/// What a peer may send before it has heard how much room there is.
inline constexpr std::size_t least_notices = 64, least_notice_bytes = std::size_t{1} << 20;

/// How much of the room at one peer this agent's notices take. Not thread-safe.
///
/// The peer reports how many notices it has received and taken when it accepts a connection, when
/// its program has taken enough of them, and when asked. After a link broke or a transfer was
/// cancelled, only the peer knows how many have arrived; until it answers, all of them count as
/// unread.
class notice_account {
 public:
  notice_account() = default;
  /// At most `most` may wait here, whatever room the peer claims to have.
  explicit notice_account(const notice_count& most) noexcept : most_{most} {}

  [[nodiscard]] bool has_room_for(std::size_t bytes) const noexcept;
  /// A notice waits for a link.
  void reserve(std::size_t bytes) noexcept;
  /// A notice that waited will not be sent.
  void unreserve(std::size_t bytes) noexcept;
  /// A notice that waited goes to a link.
  void hand_over(std::size_t bytes) noexcept;
  /// A notice that went to a link certainly has not arrived.
  void take_back(std::size_t bytes) noexcept;
  /// Brackets a batch that carries a notice: while a batch is in flight, no count of the peer is
  /// complete.
  void batch_begins() noexcept { ++in_flight_; }
  void batch_ends() noexcept;
  /// Called when this side cannot tell whether a notice arrived.
  void doubt() noexcept { uncertain_ = true; }

  /// The number for a new question about the peer's count. Empty if there is nothing to ask or a
  /// question is open.
  [[nodiscard]] std::optional<std::uint64_t> ask() noexcept;
  /// The question was not sent, or its link is gone.
  void forget_question() noexcept { asked_.reset(); }
  /// Takes the peer's count. Only the answer to the open question is certain to include the notices
  /// handed over before the question; any other count may have been sent earlier.
  void on_count(const taken& said) noexcept;
  /// The peer has accepted a connection. None of our notices is in flight to it.
  void begin(const accepted& said) noexcept;

  [[nodiscard]] const notice_count& handed() const noexcept { return handed_; }

 private:
  notice_count most_{UINT64_MAX, UINT64_MAX};
  notice_count room_{least_notices, least_notice_bytes};  ///< at the peer
  notice_count handed_{};    ///< ever handed to links, less those that certainly did not arrive
  notice_count taken_{};     ///< taken by the peer's program, from the peer's reports
  notice_count reserved_{};  ///< waiting for a link
  std::uint32_t in_flight_{0};
  bool uncertain_{false};
  std::uint64_t changes_{0};  ///< how often a notice was handed over or taken back
  std::uint64_t questions_{0};
  std::optional<std::uint64_t> asked_{};  ///< the number of the open question
  std::uint64_t asked_at_{0};             ///< `changes_` when it was asked
};

}  // namespace troupe::io
