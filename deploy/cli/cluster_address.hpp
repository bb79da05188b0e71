#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/actors/supervisor_begin.hpp"
#include "troupe/config/resolve.hpp"

namespace troupe::deploy::cli {

/// Where the supervisor of a running cluster listens, and what the file says of the cluster.
struct cluster_address {
  std::string host;
  std::uint16_t port{0};
  std::vector<config::resolved_node> expected;  ///< of the file, when there is one
  std::string cluster;                          ///< of the file; empty: an address was given

  /// As the file says. When an address was given: the secret of this user's that is taken there, else
  /// open.
  actors::door_security security{};
  /// When an address was given: the clusters whose secrets were refused there.
  std::vector<std::string> tried{};
  /// Stages of the file whose nodes it does not name.
  std::vector<std::string> open_stages{};
  /// Of a file with `supervisor.begin`: looks where it is now, and begins none. `host` and `port` are
  /// those of the first look; of the file where that found none.
  actors::supervisor_look find{};

  /// HOST:PORT, a host with colons in brackets. The host alone where nobody knows the port.
  [[nodiscard]] std::string text() const;
  /// To connect with: `timeout` of every step, 0: the client's own.
  [[nodiscard]] actors::cluster_client_options client(std::chrono::milliseconds timeout) const;
  /// An error of the cluster's, with what to do about it when only the address was given.
  [[nodiscard]] error explained(error why) const;
};

/// `where` is a deployment file or HOST:PORT ([HOST]:PORT); a file of that name goes first. Empty:
/// what is wrong has been said on standard error in the name of `troupe VERB`.
[[nodiscard]] std::optional<cluster_address> cluster_at(std::string_view verb,
                                                        const std::string& where);

}  // namespace troupe::deploy::cli
