#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace troupe {

/// Why an operation failed. One enum for the whole of Troupe: it is sent in messages, printed in
/// logs by these names, and engines switch on it. The numbers are part of the wire protocol:
/// append, never renumber.
enum class errc : std::uint8_t {
  invalid_config = 1,   ///< a configuration or an argument that cannot be accepted
  no_device,            ///< this machine does not have the requested hardware
  layout_mismatch,      ///< two caches that cannot be mapped onto each other
  version_mismatch,     ///< the peer speaks another protocol version
  unknown_region,       ///< a region id that is not, or no longer, registered
  out_of_range,         ///< an offset, length or index outside what it refers to
  grant_revoked,        ///< the permission was withdrawn, usually since the transfer ended
  pool_exhausted,       ///< no free blocks, and the caller did not want to wait
  overloaded,           ///< a bound (queue, credits, connections) was reached
  not_found,            ///< no such key, request, node or block
  already_exists,       ///< the id or key is in use
  peer_unreachable,     ///< no connection to the peer could be made
  peer_lost,            ///< the peer was there and is gone
  link_broken,          ///< the connection failed while both peers may still live
  deadline,             ///< the caller's deadline has passed
  aborted,              ///< one of the two engines gave the transfer up
  lease_expired,        ///< the holder of the blocks was silent for too long
  stale_incarnation,    ///< the message or id belongs to a former life of a node
  unauthorized,         ///< wrong or missing token, or a right that the grant does not give
  backend_unavailable,  ///< the requested transport cannot be used here
  internal,             ///< a defect of Troupe itself; please report it with the log
};

/// The name as it is written in logs and on the wire of `--json` output, e.g. `peer_lost`.
[[nodiscard]] std::string_view to_string(errc code) noexcept;

/// Whether a number from outside names an `errc`.
[[nodiscard]] bool is_errc(std::uint8_t number) noexcept;

/// Returned by every fallible call instead of a value: the code to switch on, and one sentence that
/// says what was wrong and what to do about it.
struct error {
  errc code{errc::internal};
  std::string message;

  friend bool operator==(const error&, const error&) = default;
};

/// "peer_lost: the sentence"
[[nodiscard]] std::string to_string(const error& e);

}  // namespace troupe
