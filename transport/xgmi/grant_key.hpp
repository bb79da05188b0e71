#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/shm/control_memory.hpp"
#include "troupe/transport/types.hpp"

namespace troupe::transport::xgmi {

/// The content of `remote_grant::key` for this backend: the number of the grant's slot, behind four
/// letters with which no other backend's key begins.
struct packed_grant_key {
  std::uint32_t letters{0x696d6778};  // "xgmi"
  std::uint32_t slot{0};
};

[[nodiscard]] inline std::vector<std::byte> encode_grant_key(std::uint32_t slot) {
  packed_grant_key packed;
  packed.slot = slot;
  std::vector<std::byte> bytes(sizeof packed);
  std::memcpy(bytes.data(), &packed, sizeof packed);
  return bytes;
}

/// Returns the slot. `unauthorized`: not a key of this backend.
[[nodiscard]] inline result<std::uint32_t> decode_grant_key(std::span<const std::byte> key) {
  packed_grant_key packed;
  const auto letters = packed.letters;
  if (key.size() == sizeof packed) std::memcpy(&packed, key.data(), sizeof packed);
  if (key.size() != sizeof packed || packed.letters != letters ||
      packed.slot >= shm::slots_per_direction) {
    return fail(errc::unauthorized, "the grant's key of " + std::to_string(key.size()) +
                                        " bytes is not that of an xgmi link");
  }
  return packed.slot;
}

}  // namespace troupe::transport::xgmi
