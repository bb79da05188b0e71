#pragma once

/// How errors and times are encoded in message fields.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>

#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// The error of a reply that says `failed`. A number that is no `errc` is from another release.
template <class Reply>
[[nodiscard]] troupe::error refusal(const Reply& reply) {
  const auto code = is_errc(reply.failed) ? static_cast<errc>(reply.failed) : errc::internal;
  return {code, reply.sentence};
}

/// A remaining time in milliseconds, at least 1, for fields in which 0 has another meaning.
[[nodiscard]] inline std::uint32_t whole_ms(std::chrono::milliseconds time) {
  return static_cast<std::uint32_t>(
      std::clamp<std::int64_t>(time.count(), 1, std::numeric_limits<std::uint32_t>::max()));
}

}  // namespace troupe::actors
