#pragma once

#include <optional>
#include <string>

namespace troupe::transport::rdma {

/// Why libibverbs cannot be opened on this host. Empty if it is open. The first call into the
/// library opens it, so one binary serves hosts with and without RDMA. Thread-safe.
[[nodiscard]] std::optional<std::string> why_no_verbs();

}  // namespace troupe::transport::rdma
