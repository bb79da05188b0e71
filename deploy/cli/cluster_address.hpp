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

/// The address of a running cluster's supervisor, and the cluster's description from the file.
struct cluster_address {
  std::string host;
  std::uint16_t port{0};
  std::vector<config::resolved_node> expected;  ///< from the file, if there is one
  std::string cluster;                          ///< from the file; empty if an address was given

  /// From the file. If an address was given: this user's secret that is accepted there, else open.
  actors::door_security security{};
  /// If an address was given: the clusters whose secrets were refused there.
  std::vector<std::string> tried{};
  /// Stages whose nodes the file does not name.
  std::vector<std::string> open_stages{};
  /// For a file with `supervisor.begin`: finds the supervisor now, and begins none. `host` and
  /// `port` are from the first look, or from the file if it found none.
  actors::supervisor_look find{};

  /// HOST:PORT, a host with colons in brackets. Only the host if the port is unknown.
  [[nodiscard]] std::string text() const;
  /// Options to connect with: `timeout` of every step, 0: the client's own.
  [[nodiscard]] actors::cluster_client_options client(std::chrono::milliseconds timeout) const;
  /// An error of the cluster, with advice if only the address was given.
  [[nodiscard]] error explained(error why) const;
};

/// `where` is a deployment file or HOST:PORT ([HOST]:PORT); a file of that name takes precedence.
/// Empty if it is invalid, which has been reported on standard error in the name of `troupe VERB`.
[[nodiscard]] std::optional<cluster_address> cluster_at(std::string_view verb,
                                                        const std::string& where);

}  // namespace troupe::deploy::cli
