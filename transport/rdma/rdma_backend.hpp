#pragma once

#include <memory>
#include <string>
#include <vector>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/backend_context.hpp"

namespace troupe::transport {

/// Reliable connections over libibverbs; transport/rdma/wire.hpp describes the protocol. Creating
/// the backend never fails: without a device `probe` says why.
[[nodiscard]] std::unique_ptr<backend> make_rdma_backend(backend_context& context);

namespace rdma {
/// One line for people about each device of this host, used or not.
[[nodiscard]] std::vector<std::string> describe_devices();
}  // namespace rdma

}  // namespace troupe::transport
