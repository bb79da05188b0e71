#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "troupe/transport/xgmi/gpu_runtime.hpp"

namespace troupe::transport::xgmi {

/// An event of another process that is open here. Closed when its last user ends.
class opened_event {
 public:
  opened_event(gpu_runtime& runtime, gpu_event event) noexcept
      : runtime_{&runtime}, event_{event} {}
  opened_event(const opened_event&) = delete;
  opened_event& operator=(const opened_event&) = delete;
  ~opened_event() { runtime_->release_event(event_); }

  [[nodiscard]] void* handle() const noexcept { return event_.handle; }

 private:
  gpu_runtime* runtime_;
  gpu_event event_;
};

/// Keeps the most recently used events of other processes open: engines record the same events
/// again and again, and opening one is a driver call. Thread-safe.
class opened_events {
 public:
  /// The most open events per GPU; the least recently used is evicted. More than an engine has
  /// layers.
  static constexpr std::size_t per_gpu = 256;

  explicit opened_events(gpu_runtime& runtime) : runtime_{&runtime} {}

  /// Opens the event, or finds it open. A caller that makes a stream wait for the event must keep
  /// it until the stream has reached the wait: it is not documented what drivers do if an event of
  /// another process is closed earlier. The errors of `gpu_runtime::open_event`.
  [[nodiscard]] result<std::shared_ptr<const opened_event>> open(std::uint32_t gpu,
                                                                 const event_handle& handle);
  /// Keeps the event open until destruction, for a stream that is no longer watched. Null is
  /// ignored.
  void leave(std::shared_ptr<const opened_event> event);

 private:
  struct entry {
    event_handle handle;
    std::shared_ptr<const opened_event> event;
  };
  /// The open events of one GPU.
  struct line {
    std::list<entry> by_use;  ///< most recently used first
    std::map<event_handle, std::list<entry>::iterator> by_handle;
  };

  gpu_runtime* runtime_;
  std::mutex mutex_;
  std::map<std::uint32_t, line> lines_;
  std::vector<std::shared_ptr<const opened_event>> left_;
};

}  // namespace troupe::transport::xgmi
