#pragma once

/// Both sides of one transfer over a network with every kind of fault, under virtual time. A seed
/// determines geometry, mode, latencies, order and faults; the same seed gives the same run.

#include <cstdint>
#include <optional>
#include <string>

#include "troupe/actors/messages/session_messages.hpp"

namespace troupe::actors::simulation {

/// What may go wrong in a run.
enum fault : std::uint32_t {
  decode_abort = 1u << 0,   ///< the decode engine gives up
  prefill_abort = 1u << 1,  ///< the prefill engine gives up
  link_loss = 1u << 2,
  decode_deadline = 1u << 3,  ///< a deadline that may pass
  prefill_deadline = 1u << 4,
  post_refused = 1u << 5,   ///< one post is refused
  never_seals = 1u << 6,    ///< the prefill engine never seals (with a deadline)
  short_seal = 1u << 7,     ///< it seals with fewer tokens than were requested
  unready_seal = 1u << 8,   ///< it seals although a layer is not ready
  link_rebuild = 1u << 9,   ///< the link breaks and is rebuilt, up to three times
  wrong_expect = 1u << 10,  ///< the decode engine expects another seal than it gets
};

struct report {
  std::string violation;  ///< empty if every invariant held after every event
  std::uint32_t faults{0};
  bool decode_done{false};
  bool prefill_done{false};
  std::optional<errc> decode_failure, prefill_failure;
  std::uint64_t events{0};
  /// The mode in which a side that still used a link was refused because the peer's end had broken.
  std::optional<transfer_mode> shut_out;
};

/// Runs one seed. `trace`, if given, receives a line per event and action.
[[nodiscard]] report run(std::uint64_t seed, std::string* trace = nullptr);

/// The names of a set of faults, for humans.
[[nodiscard]] std::string describe_faults(std::uint32_t faults);

}  // namespace troupe::actors::simulation
