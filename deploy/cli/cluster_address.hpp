#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/config/resolve.hpp"

namespace troupe::deploy::cli {

/// Where the supervisor of a running cluster listens, and what the file says of the cluster.
struct cluster_address {
  std::string host;
  std::uint16_t port{0};
  std::vector<config::resolved_node> expected;  ///< of the file, when there is one
  std::string cluster;                          ///< of the file; empty: an address was given

  /// HOST:PORT, a host with colons in brackets.
  [[nodiscard]] std::string text() const;
};

/// `where` is a deployment file or HOST:PORT ([HOST]:PORT); a file of that name goes first. Empty:
/// what is wrong has been said on standard error in the name of `troupe VERB`.
[[nodiscard]] std::optional<cluster_address> cluster_at(std::string_view verb,
                                                        const std::string& where);

}  // namespace troupe::deploy::cli
