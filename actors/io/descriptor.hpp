#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/transport/types.hpp"

/// An agent's description of itself and its memory, as bytes that its program carries to peers.
///
///     magic       8   0x89 "TRPIO\n" 0
///     version     2   1
///     size        4   of the whole
///     life        8   the agent's incarnation
///     token      16   random for this life; proves a greeting
///     port        2
///     host, name      texts of at most 255 and 256 bytes
///     memories    4   how many follow
///       number    8
///       rights    1
///       parts     2   at least 1
///         region  4
///         offset  8   of the part in the region
///         address 8   in the agent's process
///         length  8
///     check       8   FNV-1a of everything before: detects damaged or cut bytes, not forgery
///
/// Memories may share regions: regions do not overlap, a memory is one registration.
namespace troupe::io {

using agent_token = std::array<std::byte, 16>;

/// A part of a memory that lies in one region.
struct memory_part {
  region_id region;
  std::uint64_t offset{0};   ///< in the region
  std::uint64_t address{0};  ///< in its owner's process
  std::uint64_t length{0};
  friend bool operator==(const memory_part&, const memory_part&) = default;
};

struct described_memory {
  std::uint64_t number{0};
  transport::access rights{transport::access::read};
  std::vector<memory_part> parts;  ///< by address, without gaps

  [[nodiscard]] std::uint64_t address() const noexcept { return parts.front().address; }
  [[nodiscard]] std::uint64_t length() const noexcept {
    return parts.back().address + parts.back().length - address();
  }
  friend bool operator==(const described_memory&, const described_memory&) = default;
};

struct descriptor {
  incarnation life;
  agent_token token{};
  std::uint16_t port{0};
  std::string host, name;
  std::vector<described_memory> memories;

  static constexpr std::uint16_t version = 1;
  static constexpr std::size_t max_host = 255, max_name = 256, max_parts = 1024;

  [[nodiscard]] std::vector<std::byte> encode() const;
  /// `invalid_config`: not a descriptor; `version_mismatch`.
  [[nodiscard]] static result<descriptor> decode(std::span<const std::byte> bytes);
};

/// Decodes the number on the wire; empty if it is unknown.
[[nodiscard]] std::optional<transport::access> access_from(std::uint8_t number) noexcept;

}  // namespace troupe::io
