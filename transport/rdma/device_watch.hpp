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

/// Listens to what the devices of an endpoint say unasked (`device_events.hpp`), and acts on it: what
/// ends a queue pair or a completion queue breaks the link that has it; a device that fails is marked
/// (`device::failure`) and breaks all its links; of a port see `port_record`. Thread-safe.
class device_watch final : public pollable {
 public:
  /// `notice` is told what is worth logging; may be empty.
  device_watch(std::vector<std::shared_ptr<device>> rails, progress_engine& engine,
               std::function<void(const std::string&)> notice);

  void start(const std::shared_ptr<device_watch>& self);
  void stop();

  /// A link of these devices. What they say from now on reaches it; whether one has failed before is
  /// for the caller to ask, afterwards.
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
    port_record::clock::time_point at{};     ///< when that was
    port_record::clock::time_point since{};  ///< when the count began
    std::uint32_t count{0};
    bool told_down{false};  ///< of the port's state, as it was told last
  };
  std::mutex mutex_;
  std::vector<std::optional<watch_id>> watches_;  ///< one per rail
  std::map<const device*, last_notice> said_;
  std::vector<std::weak_ptr<rdma_link>> links_;
};

}  // namespace troupe::transport::rdma
