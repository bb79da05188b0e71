#pragma once

#include <memory>
#include <string>
#include <vector>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/backend_context.hpp"

namespace troupe::transport {

/// Reliable connections over libibverbs; what the ends say to each other is described in
/// transport/rdma/wire.hpp. Never fails to be made: without a device `probe` says why.
[[nodiscard]] std::unique_ptr<backend> make_rdma_backend(backend_context& context);

namespace rdma {
/// One line for each device that is here, used or not; for people.
[[nodiscard]] std::vector<std::string> describe_devices();
}  // namespace rdma

}  // namespace troupe::transport
