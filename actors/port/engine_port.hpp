#pragma once

#include <memory>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/messages/messages.hpp"

namespace troupe::actors {

namespace port {
class port_core;
}

/// State of the engine port's actor; everything is in `port::port_core`.
struct port_slot {
  std::unique_ptr<port::port_core> core;

  static inline const char* name = "engine_port";

  port_slot();
  port_slot(const port_slot&) = delete;
  port_slot& operator=(const port_slot&) = delete;
  ~port_slot();
};

[[nodiscard]] engine_port_actor::behavior_type engine_port(
    engine_port_actor::stateful_pointer<port_slot> self, context_ptr context);

}  // namespace troupe::actors
