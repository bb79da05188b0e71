#pragma once

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/config/deployment.hpp"

namespace troupe::actors {

/// The role of a node in messages, from the role of its stage in the file.
[[nodiscard]] constexpr node_role node_role_of(config::role role) noexcept {
  switch (role) {
    case config::role::supervisor: return node_role::supervisor;
    case config::role::prefill: return node_role::prefill;
    case config::role::decode: return node_role::decode;
    case config::role::store: return node_role::store;
    case config::role::both: return node_role::both;
  }
  return node_role::supervisor;
}

}  // namespace troupe::actors
