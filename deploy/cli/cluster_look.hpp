#pragma once

#include <atomic>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/deploy/cli/cluster_address.hpp"
#include "troupe/deploy/cli/status_report.hpp"

namespace troupe::deploy::cli {

/// What the supervisor says of its nodes. `invalid_config` when it is that of another cluster than
/// the file describes.
[[nodiscard]] result<actors::membership> members_of(actors::cluster_client& cluster,
                                                    const cluster_address& at);

/// What `troupe status` shows: asks the supervisor and every node. Once `cancelled` is true no more
/// nodes are asked.
[[nodiscard]] result<cluster_status> look_at(actors::cluster_client& cluster,
                                             const cluster_address& at,
                                             const std::atomic<bool>& cancelled);

/// Whether asking again later cannot help: another cluster listens there, or another release, or our
/// credentials are not its own.
[[nodiscard]] bool is_final(const error& why) noexcept;

/// Lines of the network layer would only repeat what a verb says itself.
void log_errors_only(const std::string& verb);

}  // namespace troupe::deploy::cli
