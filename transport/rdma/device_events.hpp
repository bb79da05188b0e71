#pragma once

#include <cstdint>
#include <string_view>

#include <infiniband/verbs.h>

namespace troupe::transport::rdma {

/// What an asynchronous event of a device is about (ibv_get_async_event(3)).
enum class event_subject : std::uint8_t {
  queue_pair,
  completion_queue,
  port,
  device,
  other,  ///< not used here: shared receive queues, the subnet manager
};

/// How an event is handled.
enum class event_effect : std::uint8_t {
  ends,  ///< its subject has failed
  told,  ///< logged only; everything keeps working
  none,  ///< routine; ignored
};

struct event_meaning {
  event_subject about{event_subject::other};
  event_effect effect{event_effect::told};
  std::string_view name;  ///< "IBV_EVENT_QP_FATAL"
  /// For `ends`: what the device did, "gave a queue pair up after an error of its own".
  std::string_view what_happened{};
};

/// An event unknown to this build is `other` and `told`.
[[nodiscard]] event_meaning meaning_of(ibv_event_type what);

}  // namespace troupe::transport::rdma
