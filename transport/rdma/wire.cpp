#include "troupe/transport/rdma/wire.hpp"

#include <cstring>
#include <limits>
#include <string>
#include <type_traits>

namespace troupe::transport::rdma {

namespace {

constexpr std::uint32_t magic = 0x4d445254;  // "TRDM"
constexpr std::uint16_t version = 3;
constexpr std::uint32_t max_24_bits = 0xffffff;

struct offer_payload {
  std::uint32_t magic_word{magic};
  std::uint16_t version_word{version};
  std::uint16_t unused{0};
  offer_body body;
};
static_assert(std::is_trivially_copyable_v<offer_payload>);
static_assert(sizeof(offer_payload) <= link_offer::max_payload);
static_assert(std::is_trivially_copyable_v<grant_key>);
static_assert(sizeof(grant_key) <= remote_grant::max_key_size);

/// The header of `grant_keys` on the wire; the keys follow.
struct keys_header {
  std::uint64_t grant{0}, transfer{0}, address{0}, begin{0}, end{0}, piece_bytes{0};
  std::uint16_t lanes{0};
  std::uint8_t rights{0};
  std::array<std::uint8_t, 5> unused{};
};
static_assert(std::is_trivially_copyable_v<keys_header>);

unexpected wrong_keys(const std::string& what) {
  return fail(errc::unauthorized, "the rdma peer's keys to a grant: " + what);
}

template <class T>
std::vector<std::byte> bytes_of(const T& value) {
  std::vector<std::byte> bytes(sizeof value);
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

unexpected wrong_offer(const std::string& what) {
  return fail(errc::invalid_config, "rdma offer: " + what);
}

result<void> check(const queue_pair_offer& pair, std::uint8_t rails) {
  if (pair.number == 0 || pair.number > max_24_bits || pair.first_packet > max_24_bits) {
    return wrong_offer("queue pair " + std::to_string(pair.number) + " is invalid");
  }
  if (pair.rail >= rails) {
    return wrong_offer("a queue pair is on rail " + std::to_string(pair.rail) + " of " +
                       std::to_string(rails));
  }
  return {};
}

}  // namespace

std::vector<std::byte> offer_body::encode() const {
  offer_payload payload;
  payload.body = *this;
  return bytes_of(payload);
}

result<offer_body> offer_body::decode(std::span<const std::byte> bytes) {
  offer_payload payload;
  if (bytes.size() != sizeof payload) {
    return wrong_offer("found " + std::to_string(bytes.size()) + " bytes, expected " +
                       std::to_string(sizeof payload));
  }
  std::memcpy(&payload, bytes.data(), sizeof payload);
  if (payload.magic_word != magic || payload.version_word != version) {
    return wrong_offer("found version " + std::to_string(payload.version_word) + ", expected " +
                       std::to_string(version) + "; run the same Troupe on both sides");
  }
  const auto& body = payload.body;
  if (body.rails < 1 || body.rails > max_rails || body.lanes < 1 || body.lanes > max_lanes) {
    return wrong_offer(std::to_string(body.rails) + " rails and " + std::to_string(body.lanes) +
                       " lanes, expected 1 to " + std::to_string(max_rails) + " and 1 to " +
                       std::to_string(max_lanes));
  }
  if (body.message_buffers < 4 || body.message_buffers > 65'535 ||
      body.buffer_bytes <= sizeof(message_header) || body.buffer_bytes > 65'535 ||
      body.notices < 1 || body.notices > 65'535) {
    return wrong_offer("invalid buffers for messages");
  }
  for (std::size_t i = 0; i < body.rails; ++i) {
    if (body.rail[i].mtu < 1 || body.rail[i].mtu > 5) return wrong_offer("an invalid path MTU");
  }
  if (auto ok = check(body.messages, body.rails); !ok) return fail(ok.error());
  for (std::size_t i = 0; i < body.lanes; ++i) {
    if (auto ok = check(body.lane[i], body.rails); !ok) return fail(ok.error());
  }
  return body;
}

std::vector<std::byte> grant_key::encode() const {
  return bytes_of(*this);
}

result<grant_key> grant_key::decode(std::span<const std::byte> bytes) {
  grant_key key;
  if (bytes.size() != sizeof key) {
    return fail(errc::unauthorized, "its grant has a key of " + std::to_string(bytes.size()) +
                                        " bytes, an rdma grant's has " +
                                        std::to_string(sizeof key));
  }
  std::memcpy(&key, bytes.data(), sizeof key);
  return key;
}

std::vector<std::byte> grant_keys::encode() const {
  const keys_header header{.grant = grant,
                           .transfer = transfer.value,
                           .address = address,
                           .begin = begin,
                           .end = end,
                           .piece_bytes = piece_bytes,
                           .lanes = lanes,
                           .rights = static_cast<std::uint8_t>(rights),
                           .unused = {}};
  const auto all = std::as_bytes(std::span{keys});
  std::vector<std::byte> bytes(sizeof header + all.size());
  std::memcpy(bytes.data(), &header, sizeof header);
  if (!all.empty()) std::memcpy(bytes.data() + sizeof header, all.data(), all.size());
  return bytes;
}

result<grant_keys> grant_keys::decode(std::span<const std::byte> bytes) {
  keys_header header;
  if (bytes.size() < sizeof header) {
    return wrong_keys("found " + std::to_string(bytes.size()) + " bytes, expected at least " +
                      std::to_string(sizeof header));
  }
  std::memcpy(&header, bytes.data(), sizeof header);
  constexpr auto most = std::numeric_limits<std::uint64_t>::max();
  if (header.begin > header.end || header.end > most - header.address || header.piece_bytes == 0) {
    return wrong_keys("bytes " + std::to_string(header.begin) + " to " +
                      std::to_string(header.end) + " of a region in pieces of " +
                      std::to_string(header.piece_bytes) + " are invalid");
  }
  if (header.lanes < 1 || header.lanes > max_lanes || header.rights < 1 || header.rights > 3) {
    return wrong_keys(std::to_string(header.lanes) + " lanes and rights " +
                      std::to_string(header.rights) + " are invalid");
  }
  grant_keys made{.grant = header.grant,
                  .transfer = transfer_id{header.transfer},
                  .address = header.address,
                  .begin = header.begin,
                  .end = header.end,
                  .piece_bytes = header.piece_bytes,
                  .rights = static_cast<access>(header.rights),
                  .lanes = header.lanes,
                  .keys = {}};
  const auto pieces = made.pieces();
  const auto found = bytes.size() - sizeof header;
  if (pieces > max_keys / made.lanes || found != pieces * made.lanes * sizeof(std::uint32_t)) {
    return wrong_keys(std::to_string(found) + " bytes of keys for " + std::to_string(pieces) +
                      " pieces and " + std::to_string(made.lanes) + " lanes");
  }
  made.keys.resize(pieces * made.lanes);
  if (found != 0) std::memcpy(made.keys.data(), bytes.data() + sizeof header, found);
  return made;
}

}  // namespace troupe::transport::rdma
