#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "troupe/actors/messages.hpp"
#include "troupe/actors/node_context.hpp"
#include "troupe/kvcache/plan.hpp"

namespace troupe::actors {

/// What both kinds of transfer actor carry around their state machine.
struct session_basis {
  context_ptr context;
  engine_port_actor port;
  link_handle link;
  std::shared_ptr<const kvcache::transfer_geometry> geometry;
  transfer_id transfer;
  std::string request;
  std::vector<block_id> local_blocks;
  std::vector<block_id> remote_blocks;
  std::uint32_t local_state_slot{0};
  std::optional<std::uint32_t> remote_state_slot;
  std::unordered_map<std::uint32_t, std::shared_ptr<const transport::remote_grant>>
      grants;  ///< by remote region
  // for the one log line
  time_point started{std::chrono::steady_clock::now()};
  time_point first_byte{};
  time_point last_byte{};
  std::uint64_t bytes{0};
  std::uint64_t segments_before{0};
  std::uint64_t segments_after{0};
};

/// Takes over the grants of a request or an offer. The remote side names its regions by its own
/// ids; its layout counts them from 0 in the order of the grants.
void adopt_grants(session_basis& basis, std::vector<transport::remote_grant> grants);

/// Plans one slice and posts it, with `frame` behind its bytes. An error becomes the batch's
/// completion, so that the state machine hears of every post exactly once. `self_event` takes that
/// completion.
struct planned_batch {
  transport::batch work;
  std::optional<troupe::error> failure;
};
[[nodiscard]] planned_batch plan_batch(session_basis& basis, const post_slice& post,
                                       transport::direction dir, std::vector<std::byte> frame);

/// The grants that cover the local blocks (and the state slot), one wish per region.
[[nodiscard]] result<std::vector<grant_wish>> wish_grants(const session_basis& basis,
                                                          transport::access rights);

/// "transfer 0123456789abcdef request r1 from prefill-0: done, 12 MB in 48 segments (96 before
/// merging), waited 1.2 ms, wire 4.5 ms, total 5.9 ms"
void log_outcome(const session_basis& basis, std::string_view side,
                 const std::optional<troupe::error>& failure);

/// How many layers go into one batch so that it stays near `bytes_per_batch`: small enough to
/// overlap, large enough that a batch costs nothing.
[[nodiscard]] std::uint32_t layers_per_batch(const kvcache::transfer_geometry& geometry,
                                             std::uint32_t tokens);

}  // namespace troupe::actors
