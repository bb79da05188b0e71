#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <infiniband/verbs.h>

#include "troupe/transport/progress_engine.hpp"
#include "troupe/transport/rdma/device.hpp"
#include "troupe/transport/rdma/port_record.hpp"
#include "troupe/transport/rdma/rdma_link.hpp"

namespace troupe::transport::rdma {

/// Handles the asynchronous events of an endpoint's devices (`device_events.hpp`). An error of a
/// queue pair or completion queue breaks the link that owns it. A device that fails is marked
/// (`device::failure`), and all its links break. For port events see `port_record`. Thread-safe.
class device_watch final : public pollable {
 public:
  /// `notice` is called with each sentence worth logging; may be empty.
  device_watch(std::vector<std::shared_ptr<device>> rails, progress_engine& engine,
               std::function<void(const std::string&)> notice);

  void start(const std::shared_ptr<device_watch>& self);
  void stop();

  /// Registers a link over these devices: it receives their events from now on. A device may have
  /// failed before, so the caller must check `device::failure` after this call.
  void add(const std::shared_ptr<rdma_link>& link);

  bool on_ready(std::uint64_t key, std::uint32_t events) override;

 private:
  void take(device& rail, ibv_async_event event);
  void take_port_event(device& rail, ibv_event_type what);
  void fail_device(device& rail, const std::string& what);
  void unwatch(std::size_t rail);
  void notice(const device& rail, ibv_event_type what, const std::string& sentence);
  [[nodiscard]] std::vector<std::shared_ptr<rdma_link>> links();

  const std::vector<std::shared_ptr<device>> rails_;
  progress_engine& engine_;
  const std::function<void(const std::string&)> notice_;
  struct last_notice {
    std::string sentence{};
    port_record::clock::time_point at{};     ///< when it was logged last, or suppressed
    port_record::clock::time_point since{};  ///< start of the period of `count`
    std::uint32_t count{0};
    bool told_down{false};  ///< the port state logged last was down
  };
  std::mutex mutex_;
  std::vector<std::optional<watch_id>> watches_;  ///< one per rail
  std::map<const device*, last_notice> said_;
  std::vector<std::weak_ptr<rdma_link>> links_;
};

}  // namespace troupe::transport::rdma
