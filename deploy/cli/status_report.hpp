#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::deploy::cli {

/// What `troupe status` found out, before it is shown.
struct cluster_status {
  struct node {
    actors::member member;               ///< only `member.node.name` and so on when not registered
    bool registered{true};               ///< false: the file names it, the supervisor does not
    result<actors::node_report> report;  ///< or why there is none
  };
  std::string supervisor;  ///< HOST:PORT
  actors::membership members;
  std::vector<node> nodes;

  /// Every node is up and answered.
  [[nodiscard]] bool complete() const noexcept;
};

void print_tables(const cluster_status& status, std::ostream& out);
/// One object: cluster, epoch, supervisor, complete, and nodes with backends, links, pool and
/// transfers.
[[nodiscard]] std::string to_json(const cluster_status& status);

}  // namespace troupe::deploy::cli
