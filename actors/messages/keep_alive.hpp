#pragma once

/// The frames by which the two ends of a link ask each other whether they still live. They go over
/// the link like the frames of session messages. The thread that makes the progress answers them
/// where they arrive, without an actor. No CAF here.
///
/// A frame is little-endian: `u16 version` (`session_version`), `u16 type` (`keep_alive_type`,
/// which no session message has), `u8 word` (1 a question, 2 an answer), `u8 polls` (0 or 1).
/// Left-over bytes are an error.

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
  /// The sender reads and answers only while its engine polls: its silence does not mean that the
  /// link is broken.
  bool polls{false};
  friend bool operator==(const keep_alive&, const keep_alive&) = default;
};

/// Whether a frame is a keep-alive frame, not a session message.
[[nodiscard]] bool is_keep_alive(std::span<const std::byte> frame) noexcept;
[[nodiscard]] std::array<std::byte, keep_alive_bytes> encode(const keep_alive& what) noexcept;
/// Decodes a frame that `is_keep_alive`. `version_mismatch`, or `out_of_range` naming the field.
[[nodiscard]] result<keep_alive> decode_keep_alive(std::span<const std::byte> frame);

}  // namespace troupe::actors
