#pragma once

#include <cstdint>
#include <memory>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/backend.hpp"
#include "troupe/transport/backend_context.hpp"

namespace troupe::transport {

namespace staging {
class staging_pool;
}

/// One-sided frames over TCP sockets; transport/tcp/PROTOCOL.md describes the protocol.
class tcp_backend : public backend {
 public:
  /// The port that the listener is bound to.
  [[nodiscard]] virtual std::uint16_t port() const noexcept = 0;
};

/// Binds the listener. `invalid_config`: the host is not an address of this machine, or the port is
/// taken; the sentence names both. `staging` moves GPU memory.
[[nodiscard]] result<std::unique_ptr<tcp_backend>> make_tcp_backend(
    backend_context& context, std::shared_ptr<staging::staging_pool> staging);

}  // namespace troupe::transport
