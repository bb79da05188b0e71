#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/backend.hpp"

/// The checks that every backend makes before it creates a link or connects it to its peer.
namespace troupe::transport {

/// Most lanes that a link may have.
inline constexpr std::size_t max_link_lanes = 64;

/// Checks the arguments of `backend::open`: a sink, the peer's incarnation, 1 to `max_link_lanes`
/// lanes, a meaningful post batch size. `invalid_config`, naming the option.
[[nodiscard]] result<void> check_options(const link_options& options, const link_sink* sink);

/// Whether `offer` is for backend `kind` and from the incarnation of the peer that the link is for.
/// `invalid_config`, `stale_incarnation`.
[[nodiscard]] result<void> check_offer(backend_kind kind, incarnation peer,
                                       const link_offer& offer);

/// The state of a link.
enum class link_phase : std::uint8_t { opened, connecting, up, broken, closed };

/// The `link_broken` error with which a link that is not `up` refuses a call. `why` is what broke
/// it.
[[nodiscard]] unexpected not_up(backend_kind kind, link_phase now,
                                const std::optional<troupe::error>& why);

}  // namespace troupe::transport
