#pragma once

#include <cstdint>
#include <string_view>

#include <infiniband/verbs.h>

namespace troupe::transport::rdma {

/// What something that a device says unasked is about (ibv_get_async_event(3)).
enum class event_subject : std::uint8_t {
  queue_pair,
  completion_queue,
  port,
  device,
  other,  ///< nothing that is made here: shared receive queues, the subnet manager
};

/// What is made of it.
enum class event_effect : std::uint8_t {
  ends,  ///< what it is about is of no use any more
  told,  ///< it is logged: worth knowing, and all goes on
  none,  ///< part of how things go
};

struct event_meaning {
  event_subject about{event_subject::other};
  event_effect effect{event_effect::told};
  std::string_view name;  ///< "IBV_EVENT_QP_FATAL"
  /// Of one that ends something: "gave a queue pair up after an error of its own". The device did.
  std::string_view what_happened{};
};

/// Of what this was not built with: `other`, which is told.
[[nodiscard]] event_meaning meaning_of(ibv_event_type what);

}  // namespace troupe::transport::rdma
