#pragma once

#include <string>
#include <vector>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::deploy::cli {

// Backends and their text: of this machine for `troupe info`, of nodes for `troupe status`.

/// The backends that this machine can use. Makes a temporary endpoint without threads.
[[nodiscard]] result<std::vector<actors::backend_report>> backends_here();

/// "usable: memfd and unix sockets work here"; "not usable: " with what it is and what to do.
[[nodiscard]] std::string verdict_text(const actors::backend_report& backend);

/// "shm, tcp"; "none"
[[nodiscard]] std::string usable_text(const std::vector<actors::backend_report>& backends);
/// "xgmi: not built; rdma: no RDMA device found"; only `troupe info` says what to do. Empty if all
/// are usable.
[[nodiscard]] std::string unusable_text(const std::vector<actors::backend_report>& backends);

}  // namespace troupe::deploy::cli
