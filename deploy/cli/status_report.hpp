#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::deploy::cli {

/// What a node did since the last look.
struct node_rates {
  double transfers{0};  ///< done, per second
  double bytes{0};      ///< moved, per second
};

/// The data of `troupe status` before it is printed.
struct cluster_status {
  struct node {
    actors::member member;               ///< only `member.node.name` and so on when not registered
    bool registered{true};               ///< false: the file names it, the supervisor does not
    result<actors::node_report> report;  ///< or why there is none
    std::optional<node_rates> rates{};   ///< when watched, of a node that was seen before
  };
  std::string supervisor;  ///< HOST:PORT
  actors::membership members;
  std::vector<node> nodes;
  bool watched{false};  ///< rates are shown

  /// Every node is up and answered.
  [[nodiscard]] bool complete() const noexcept;
};

void print_tables(const cluster_status& status, std::ostream& out);
/// One object: cluster, epoch, supervisor, complete, and nodes with backends, links, pool and
/// transfers.
[[nodiscard]] std::string to_json(const cluster_status& status);
/// The same in one line, with `unix_ms`, the time of the look.
[[nodiscard]] std::string to_json_line(const cluster_status& status, std::uint64_t unix_ms);

}  // namespace troupe::deploy::cli
