#pragma once

/// The door stands between the network and CAF's parser at a cluster port, at both ends of a
/// connection: no byte from a stranger reaches CAF, and none of CAF's bytes reaches a stranger. The
/// door does not depend on CAF.
///
/// The dialling end and the listening end prove to each other that they hold the cluster's key
/// (`door_handshake.hpp`); in mode `tls` they also exchange certificates of the cluster's authority
/// and encrypt everything that follows (`door_tls.hpp`). The result is a connected stream socket
/// that carries plain bytes: the network socket itself, or in mode `tls` one end of a socket pair
/// whose other end the door's thread pumps.
///
/// One thread serves all connections of a door; none of them can hold it up. A stranger costs one
/// descriptor and a bounded record for at most `patience`. At most `max_strangers` are kept at
/// once; beyond that the door drops one from the address that sent most (`door_eviction.hpp`). Only
/// a bounded record of the networks that failed lately remains. Connections that have shown the key
/// are counted separately.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "troupe/actors/door_security.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

struct door_options {
  door_security security;
  std::chrono::milliseconds patience{2000};  ///< for the whole handshake of a stranger
  std::uint32_t max_strangers{256};          ///< accepted connections that have not shown the key
  /// Called with the reason when a stranger is refused, at most one sentence a second with the
  /// number of sentences left out, and daily when our certificate expires within a week. On the
  /// door's thread; must not block.
  std::function<void(const std::string& sentence)> notice;
  /// Called once per change of the credential files, on the door's thread; must not block.
  /// `failed`: the files cannot be read or do not fit together, the old credentials stay in force.
  struct credential_calls {
    std::function<void(const std::string&sentence)> renewed, failed;
  } credentials;
};

/// A connected stream socket, non-blocking and close-on-exec; the receiver owns it.
using door_socket = int;

class door {
 public:
  /// Reads the credentials and starts the thread. `invalid_config` naming the file and what is wrong
  /// with it (missing, readable by others, expired, key and certificate that do not belong together, a
  /// certificate of another authority or cluster).
  [[nodiscard]] static result<std::unique_ptr<door>> create(door_options options);
  /// Ends the thread, every handshake (as `aborted`, on that thread, before this returns) and every
  /// pumped connection; in modes open and secret, connections already handed out stay. Waits for
  /// callbacks, so a callback must not call it.
  virtual ~door() = default;

  /// Listens on host:port (an empty host: on all interfaces; port 0: the OS chooses). `admitted` is
  /// called on the door's thread with each connection that proved itself; must not block. Returns
  /// the port. `already_exists` (taken), `invalid_config` (not an address of this host, or
  /// reachable from other hosts without tls), `overloaded`. Thread-safe, as all calls; waits for
  /// the resolver if `host` is a name.
  [[nodiscard]] virtual result<std::uint16_t> listen(const std::string& host, std::uint16_t port,
                                                     std::function<void(door_socket)> admitted) = 0;
  /// Stops listening at the port: when this returns, `admitted` is not called any more and the port
  /// is free. Handshakes in progress are dropped, admitted connections stay. The caller must not
  /// hold a lock that a callback takes.
  virtual void close(std::uint16_t port) = 0;
  /// Connects to host:port, trying each address of the host in turn, and proves itself. Returns at
  /// once; a name is looked up on another thread. `then` is called once, on the door's thread; must
  /// not block. Errors, each with advice: `peer_unreachable` (nothing listens, no such host, no
  /// route), `link_broken` (the peer hung up), `deadline` (the peer is silent), `unauthorized` (key
  /// or certificate differ: the sentence says at which end), `version_mismatch` (the peer is not a
  /// Troupe node of this release), `overloaded` (no descriptors, or too many lookups),
  /// `invalid_config` (as `listen`).
  virtual void connect(const std::string& host, std::uint16_t port,
                       std::chrono::steady_clock::time_point deadline,
                       std::function<void(result<door_socket>)> then) = 0;

  struct counters {
    std::uint64_t admitted{0}, refused{0};
    std::uint32_t strangers{0};  ///< current
    std::uint32_t pumped{0};     ///< current encrypted connections
  };
  [[nodiscard]] virtual counters count() const = 0;
};

}  // namespace troupe::actors
