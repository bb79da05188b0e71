#pragma once

/// What stands between the network and CAF's parser at a cluster port, on both ends: no byte of a
/// stranger's reaches CAF, and none of ours reaches a stranger. Knows no CAF.
///
/// Who dials and who is dialled prove to each other that they hold the cluster's key
/// (`door_handshake.hpp`); in mode `tls` they also exchange certificates of the cluster's authority
/// and encrypt all that follows (`door_tls.hpp`). What comes out is a connected stream socket that
/// carries the plain bytes: the network's own, or in mode `tls` one end of a socket pair whose other
/// end the door's thread pumps.
///
/// One thread serves all connections of a door; none of them can hold it up. A stranger costs one
/// descriptor and a bounded record for at most `patience`, at most `max_strangers` at once (then one
/// of the address that sent most goes, `door_eviction.hpp`). What stays after that is bounded: which
/// networks failed lately. Who has shown the key counts apart.

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
  /// Told why a stranger was sent away, at most one sentence a second with the number of those left
  /// out, and daily when our certificate ends within a week. On the door's thread; must not block.
  std::function<void(const std::string& sentence)> notice;
  /// Told what became of files of credentials that changed: once per change, on the door's thread;
  /// must not block. `failed`: they cannot be read or do not fit, the old ones stay in force.
  struct credential_calls {
    std::function<void(const std::string&sentence)> renewed, failed;
  } credentials;
};

/// A connected stream socket, non-blocking and close-on-exec; the one that is given it owns it.
using door_socket = int;

class door {
 public:
  /// Reads the credentials and starts the thread. `invalid_config` naming the file and what is wrong
  /// with it (missing, readable by others, expired, key and certificate that do not belong together, a
  /// certificate of another authority or cluster).
  [[nodiscard]] static result<std::unique_ptr<door>> create(door_options options);
  /// Ends the thread, every handshake (as `aborted`, on that thread, before this returns) and every
  /// connection that it pumps; in modes open and secret connections that were handed out stay. Waits
  /// for callbacks, so not to be called by one.
  virtual ~door() = default;

  /// Listens on host:port (an empty host: on all interfaces; port 0: the OS chooses). `admitted` is
  /// called on the door's thread with each connection that proved itself; must not block. Returns the
  /// port. `already_exists` (taken), `invalid_config` (not of this host, or open to others without
  /// tls), `overloaded`. Thread-safe, as all calls; waits for the resolver where `host` is a name.
  [[nodiscard]] virtual result<std::uint16_t> listen(const std::string& host, std::uint16_t port,
                                                     std::function<void(door_socket)> admitted) = 0;
  /// Listens there no more: `admitted` is not called any more when this returns, and the port is free.
  /// Handshakes under way are given up, admitted connections stay. Must not hold a lock that a callback
  /// takes.
  virtual void close(std::uint16_t port) = 0;
  /// Connects to host:port, trying each address of the host in turn, and proves itself. Returns at
  /// once; a name is looked up on another thread. `then` is called once, on the door's thread; must not
  /// block. Errors, all with what to do: `peer_unreachable` (nothing listens, no such host, no route),
  /// `link_broken` (it hung up), `deadline` (it is silent), `unauthorized` (it, or we, have another key or
  /// certificate: the sentence says which), `version_mismatch` (what answers is no node of Troupe of
  /// this release), `overloaded` (no descriptors, or too many names), `invalid_config` (as `listen`).
  virtual void connect(const std::string& host, std::uint16_t port,
                       std::chrono::steady_clock::time_point deadline,
                       std::function<void(result<door_socket>)> then) = 0;

  struct counters {
    std::uint64_t admitted{0}, refused{0};
    std::uint32_t strangers{0};  ///< now
    std::uint32_t pumped{0};     ///< connections that are encrypted, now
  };
  [[nodiscard]] virtual counters count() const = 0;
};

}  // namespace troupe::actors
