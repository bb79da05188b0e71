#pragma once

#include <cstdint>
#include <string>

namespace troupe::actors {

/// How the ends of a connection authenticate each other.
struct door_security {
  enum class mode : std::uint8_t {
    open,    ///< the key is a constant of the protocol: keeps out only those that do not speak it
    secret,  ///< a secret that every node has
    tls,     ///< the secret and certificates; encrypted
  };
  mode how{mode::open};
  std::string cluster;  ///< in mode tls, a certificate must name it: URI `troupe:CLUSTER`
  /// Paths. Read at the start, and again within two seconds when a file has changed; a file that
  /// cannot be read or does not fit leaves the former one in force and is tried again. `secret`:
  /// one a line, ours first (`door_credentials.hpp`). `ca`: one or more certificates of
  /// authorities. How to change each of them while nodes run: `door_credentials.hpp`,
  /// `door_tls.hpp`.
  std::string secret, certificate, key, ca;
};

}  // namespace troupe::actors
