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

/// An event of another process that is open here. Closed with its last user.
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

/// The events of other processes that were used last, open: engines record the same ones again and
/// again, and to open one is a call to the driver. Thread-safe.
class opened_events {
 public:
  /// Of each GPU; the one that was used longest ago makes room. More than an engine has layers.
  static constexpr std::size_t per_gpu = 256;

  explicit opened_events(gpu_runtime& runtime) : runtime_{&runtime} {}

  /// Opens the event, or finds it open. Who tells a stream to wait for it keeps it until the stream
  /// has come there: what drivers do with the wait when an event of another process is closed
  /// first is written nowhere. The errors of `gpu_runtime::open_event`.
  [[nodiscard]] result<std::shared_ptr<const opened_event>> open(std::uint32_t gpu,
                                                                 const event_handle& handle);
  /// Keeps it open to the end, for a stream that nobody looks at any more. Null is nothing.
  void leave(std::shared_ptr<const opened_event> event);

 private:
  struct entry {
    event_handle handle;
    std::shared_ptr<const opened_event> event;
  };
  /// Of one GPU.
  struct line {
    std::list<entry> by_use;  ///< last used first
    std::map<event_handle, std::list<entry>::iterator> by_handle;
  };

  gpu_runtime* runtime_;
  std::mutex mutex_;
  std::map<std::uint32_t, line> lines_;
  std::vector<std::shared_ptr<const opened_event>> left_;
};

}  // namespace troupe::transport::xgmi
