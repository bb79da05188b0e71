#pragma once

/// The frames by which two ends of a link ask each other whether they still live. They go over the
/// link like the frames of session messages and are answered where they arrive, by the thread that
/// makes the progress: no actor is in the way. No CAF here.
///
/// A frame is little-endian: `u16 version` (`session_version`), `u16 type` (`keep_alive_type`, which is
/// no session message's), `u8 word` (1 a question, 2 an answer), `u8 polls` (0 or 1). Left-over bytes
/// are an error.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

inline constexpr std::uint16_t keep_alive_type = 0xFFFF;
inline constexpr std::size_t keep_alive_bytes = 2 + 2 + 1 + 1;

struct keep_alive {
  enum class word : std::uint8_t { question = 1, answer = 2 };
  word said{word::question};
  /// Who says it reads and answers while its engine polls, and not otherwise: its silence is no sign
  /// of a broken link.
  bool polls{false};
  friend bool operator==(const keep_alive&, const keep_alive&) = default;
};

/// Whether a frame is one of these, and not a session message's.
[[nodiscard]] bool is_keep_alive(std::span<const std::byte> frame) noexcept;
[[nodiscard]] std::array<std::byte, keep_alive_bytes> encode(const keep_alive& what) noexcept;
/// Of a frame that `is_keep_alive`. `version_mismatch`, or `out_of_range` naming the field.
[[nodiscard]] result<keep_alive> decode_keep_alive(std::span<const std::byte> frame);

}  // namespace troupe::actors
