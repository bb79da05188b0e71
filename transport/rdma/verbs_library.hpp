#pragma once

#include <optional>
#include <string>

namespace troupe::transport::rdma {

/// libibverbs is opened by the first call of it, so that one binary serves hosts with and without RDMA. Why it
/// cannot be opened here; nothing: it is open. Thread-safe.
[[nodiscard]] std::optional<std::string> why_no_verbs();

}  // namespace troupe::transport::rdma
