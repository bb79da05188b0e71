#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "troupe/transport/tcp/wire.hpp"

namespace troupe::transport::tcp {

/// Turns the bytes of a lane into events. It stores no more than one header and allocates nothing
/// by a length that the peer gave. The caller keeps the bytes that were not consumed and calls
/// again with more behind them; a buffer of `max_head` bytes always suffices for progress.
///
/// | state | bytes | event | next state |
/// | --- | --- | --- | --- |
/// | head | fewer than header + table | need_more | head |
/// | head | header + table | begin | session, data, trailer or head by what the header announces |
/// | head | a header against the protocol | malformed | failed |
/// | session | some | session (part of it) | session until all is there |
/// | data | some | data (part of it) | data until all is there |
/// | trailer | fewer than 8 | need_more | trailer |
/// | trailer | 8 | end | head |
/// | done (no trailer) | - | end | head |
/// | failed | any | malformed | failed |
class frame_decoder {
 public:
  enum class kind : std::uint8_t { need_more, begin, session, data, end, malformed };

  struct event {
    kind what{kind::need_more};
    /// session, data: the bytes, a view into the input. begin: the table.
    std::span<const std::byte> bytes;
  };

  /// Returns the next event and consumes its bytes from the front of `in`.
  [[nodiscard]] event next(std::span<const std::byte>& in);

  /// The header of the current frame.
  [[nodiscard]] const frame_header& header() const noexcept { return header_; }
  /// Data bytes still to come. Instead of passing them to `next`, the caller may receive them
  /// straight into their place and call `took_data`.
  [[nodiscard]] std::size_t data_left() const noexcept { return state_ == state::data ? left_ : 0; }
  void took_data(std::size_t bytes) noexcept;
  /// Session bytes still to come.
  [[nodiscard]] std::size_t session_left() const noexcept {
    return state_ == state::session ? left_ : 0;
  }
  /// After the `end` of a frame with a trailer: 0, or why the sender could not send intact data.
  [[nodiscard]] std::uint32_t trailer_status() const noexcept { return trailer_status_; }
  /// Why the stream is malformed; valid after `malformed`.
  [[nodiscard]] const std::string& reason() const noexcept { return reason_; }
  /// Whether the next byte begins a frame.
  [[nodiscard]] bool between_frames() const noexcept { return state_ == state::head; }

 private:
  enum class state : std::uint8_t { head, session, data, trailer, done, failed };

  event on_head(std::span<const std::byte>& in);
  event on_trailer(std::span<const std::byte>& in);
  event take(std::span<const std::byte>& in, kind what);
  event malformed(std::string reason);
  void enter_session();
  void enter_data();
  void enter_tail();

  state state_{state::head};
  frame_header header_;
  std::size_t left_{0};
  std::uint32_t trailer_status_{0};
  std::string reason_;
};

}  // namespace troupe::transport::tcp
