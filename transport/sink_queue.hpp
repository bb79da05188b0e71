#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <variant>
#include <vector>

#include "troupe/transport/backend.hpp"

namespace troupe::transport {

/// Calls a link's sink so that calls never overlap, whatever threads they come from, and no lock is
/// held. The thread that finds nobody delivering delivers; the others (and a callback that causes
/// more) leave their event to it. Thread-safe.
class sink_queue {
 public:
  explicit sink_queue(std::shared_ptr<link_sink> sink) : sink_{std::move(sink)} {}

  void up() { push(up_event{}); }
  void completed(completion done) { push(std::move(done)); }
  void quiescent(transfer_id transfer) { push(quiescent_event{transfer}); }
  void broken(troupe::error why) { push(broken_event{std::move(why)}); }
  /// Without a copy where nobody else is delivering.
  void frame(std::span<const std::byte> bytes);
  /// From now on `broken` is swallowed: the owner closed the link.
  void mute_broken() noexcept { muted_.store(true, std::memory_order_release); }
  /// Bytes of frames that wait because another thread is inside a callback.
  [[nodiscard]] std::size_t waiting_bytes() const noexcept {
    return waiting_bytes_.load(std::memory_order_relaxed);
  }

 private:
  struct up_event {};
  struct quiescent_event {
    transfer_id transfer;
  };
  struct broken_event {
    troupe::error why;
  };
  using frame_event = std::vector<std::byte>;
  using event = std::variant<up_event, completion, quiescent_event, broken_event, frame_event>;

  void push(event e);
  void call(event& e);
  void deliver_rest();

  const std::shared_ptr<link_sink> sink_;
  std::mutex mutex_;
  std::deque<event> waiting_;
  bool delivering_{false};
  std::atomic<std::size_t> waiting_bytes_{0};
  std::atomic<bool> muted_{false};
};

}  // namespace troupe::transport
