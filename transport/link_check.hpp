#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/backend.hpp"

/// What every backend checks before a link of it exists or joins its peer, whatever moves the bytes.
namespace troupe::transport {

/// Lanes that a link may have.
inline constexpr std::size_t max_link_lanes = 64;

/// What `backend::open` was given: a sink, the peer's incarnation, 1 to `max_link_lanes` lanes, a post
/// batch size that means something. `invalid_config`, naming the option.
[[nodiscard]] result<void> check_options(const link_options& options, const link_sink* sink);

/// Whether `offer` is one of backend `kind` and of the life of the peer that the link is for.
/// `invalid_config`, `stale_incarnation`.
[[nodiscard]] result<void> check_offer(backend_kind kind, incarnation peer,
                                       const link_offer& offer);

/// How far a link is.
enum class link_phase : std::uint8_t { opened, connecting, up, broken, closed };

/// Why a link that is not `up` does not do what it is told: `link_broken`. `why` is what broke it.
[[nodiscard]] unexpected not_up(backend_kind kind, link_phase now,
                                const std::optional<troupe::error>& why);

}  // namespace troupe::transport
