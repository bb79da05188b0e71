#pragma once

#include <atomic>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/deploy/cli/cluster_address.hpp"
#include "troupe/deploy/cli/status_report.hpp"

namespace troupe::deploy::cli {

/// The nodes as the supervisor reports them. `invalid_config` if it is the supervisor of another
/// cluster than the file describes.
[[nodiscard]] result<actors::membership> members_of(actors::cluster_client& cluster,
                                                    const cluster_address& at);

/// The data of `troupe status`: asks the supervisor and every node. Once `cancelled` is true, no
/// more nodes are asked.
[[nodiscard]] result<cluster_status> look_at(actors::cluster_client& cluster,
                                             const cluster_address& at,
                                             const std::atomic<bool>& cancelled);

/// Whether asking again later cannot help: another cluster or another release listens there, or our
/// credentials are wrong.
[[nodiscard]] bool is_final(const error& why) noexcept;

/// Silences the network layer, whose lines would only repeat the verb's own messages.
void log_errors_only(const std::string& verb);

}  // namespace troupe::deploy::cli
