#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/grant_table.hpp"
#include "troupe/transport/staging/memory_run.hpp"
#include "troupe/transport/tcp/frame_decoder.hpp"
#include "troupe/transport/tcp/landing_stage.hpp"

namespace troupe::transport::tcp {

/// The destination of the current frame's data. Without a guard the data are read and dropped.
struct landing {
  std::shared_ptr<revocable> guard;
  std::span<const staging::memory_run> runs;  ///< valid until the frame has ended
  staging::run_cursor cursor;
  // Set only for data that go into GPU memory, through the lane's stage.
  landing_stage* stage{nullptr};
  std::shared_ptr<staging::copy_group> group{};  ///< the copies; some may outlive the frame
  std::span<const region_use> memory{};          ///< of the runs; read only under a pin
  transfer_id transfer{};
};

/// Handles frames; implemented by the link. Called by one thread at a time, with no lock held.
class frame_handler {
 public:
  virtual ~frame_handler() = default;
  /// A frame begins. Checks it before any of its data are received. An error ends the link.
  [[nodiscard]] virtual result<landing> on_begin(const frame_header& header,
                                                 std::span<const std::byte> table) = 0;
  /// The frame is complete. `landed`: all data are in their place, or being copied there by the
  /// landing's group. `where` is the landing with its cursor advanced.
  [[nodiscard]] virtual result<void> on_end(const frame_header& header,
                                            std::span<const std::byte> session, bool landed,
                                            const landing& where, std::uint32_t trailer_status) = 0;
};

/// The receiving half of a lane. Small frames are received by one system call into a small buffer;
/// larger data go from the socket straight to their place, and the next frame's head is received in
/// the same call. Used by one thread at a time.
class lane_receiver {
 public:
  lane_receiver(int fd, frame_handler& handler);

  enum class outcome : std::uint8_t { nothing, worked, ended, failed };
  /// Receives what the socket holds, about `budget` bytes at most. `ended`: the peer closed its
  /// side. `failed`: `error` says why (an error of the socket, or a violation of the protocol).
  outcome run(std::size_t budget);
  [[nodiscard]] const troupe::error& error() const noexcept { return error_; }
  [[nodiscard]] bool between_frames() const noexcept {
    return decoder_.between_frames() && begin_ == end_;
  }
  /// Whether the last `run` emptied the socket.
  [[nodiscard]] bool emptied() const noexcept { return emptied_; }
  /// Releases the chunk being filled. For a link that has ended.
  void drop_chunk() noexcept;
  [[nodiscard]] std::uint64_t payload_received() const noexcept { return payload_; }

 private:
  enum class step : std::uint8_t { go_on, need_bytes, need_room, failed };

  step consume();
  step handle(const frame_decoder::event& event);
  step end_frame();
  void keep_session(std::span<const std::byte> part);
  void land(std::span<const std::byte> bytes);
  void stage(std::span<const std::byte> bytes);
  [[nodiscard]] std::span<std::byte> room();
  [[nodiscard]] bool to_chunk() const noexcept {
    return landing_.stage != nullptr && landed_ && decoder_.data_left() > 0;
  }
  long receive();
  long receive_head();
  long receive_data();
  long receive_staged();
  long receive_to_drop();
  void save_session();
  step refuse(troupe::error why);

  static constexpr std::size_t buffer_size = 64 * 1024;
  static constexpr std::size_t read_ahead = 8 * 1024;

  const int fd_;
  frame_handler& handler_;
  frame_decoder decoder_;
  std::vector<std::byte> buffer_;
  std::size_t begin_{0};
  std::size_t end_{0};
  std::size_t asked_{0};
  landing landing_;
  bool landed_{true};
  bool emptied_{true};
  std::span<const std::byte>
      session_;  ///< into `buffer_` until `save_session`, then into `stored_`
  std::vector<std::byte> stored_;
  bool session_in_buffer_{false};
  std::uint64_t payload_{0};
  troupe::error error_;
};

}  // namespace troupe::transport::tcp
