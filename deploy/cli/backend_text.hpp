#pragma once

#include <string>
#include <vector>

#include "troupe/actors/cluster_messages.hpp"

namespace troupe::deploy::cli {

// Text for backends: of this machine for `troupe info`, of nodes for `troupe status`.

/// "usable: memfd and unix sockets work here"; "not usable: " with what it is and what to do.
[[nodiscard]] std::string verdict_text(const actors::backend_report& backend);

/// "shm, tcp"; "none"
[[nodiscard]] std::string usable_text(const std::vector<actors::backend_report>& backends);
/// "xgmi: not built; rdma: no RDMA device found"; only `troupe info` says what to do. Empty if all
/// are usable.
[[nodiscard]] std::string unusable_text(const std::vector<actors::backend_report>& backends);

}  // namespace troupe::deploy::cli
