#include "troupe/transport/tcp/wire.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace troupe::transport::tcp {

namespace {

constexpr std::uint64_t hello_magic = 0x314b4e4c50525454;  // "TTRPLNK1"
constexpr std::uint64_t reply_magic = 0x31594c5250525454;  // "TTRPRLY1"

template <class T>
T swapped_on_big_endian(T value) noexcept {
  if constexpr (std::endian::native == std::endian::little || sizeof(T) == 1) {
    return value;
  } else {
    auto bytes = std::bit_cast<std::array<std::byte, sizeof(T)>>(value);
    std::reverse(bytes.begin(), bytes.end());
    return std::bit_cast<T>(bytes);
  }
}

template <class T>
void put(std::byte* at, T value) noexcept {
  value = swapped_on_big_endian(value);
  std::memcpy(at, &value, sizeof value);
}

template <class T>
T get(const std::byte* at) noexcept {
  T value;
  std::memcpy(&value, at, sizeof value);
  return swapped_on_big_endian(value);
}

result<void> check_version(const std::string& who, std::uint16_t version) {
  if (version == protocol_version) return {};
  return fail(errc::version_mismatch, who + " speaks version " + std::to_string(version) +
                                          " of the tcp protocol, we speak " +
                                          std::to_string(protocol_version) +
                                          "; run the same release of Troupe on every node");
}

unexpected broken(const char* field, std::uint64_t found, const std::string& expected) {
  return fail(errc::invalid_config, std::string{"frame "} + field + " is " + std::to_string(found) +
                                        ", expected " + expected);
}

// Which sections a type of frame may have.
struct shape {
  std::size_t entries;
  std::size_t data;
  std::size_t session;
};

constexpr shape shape_of(frame_type type) noexcept {
  switch (type) {
    case frame_type::write: return {max_entries, max_data, max_session};
    case frame_type::read_request: return {max_entries, 0, 0};
    case frame_type::read_data: return {0, max_data, 0};
    case frame_type::completion: return {0, 0, max_completion_body};
    case frame_type::session: return {0, 0, max_session};
    case frame_type::cancel:
    case frame_type::goodbye: return {0, 0, 0};
  }
  return {0, 0, 0};
}

}  // namespace

void encode(const frame_header& h, std::byte* out) noexcept {
  put<std::uint16_t>(out, frame_magic);
  put<std::uint8_t>(out + 2, static_cast<std::uint8_t>(h.type));
  put<std::uint8_t>(out + 3, h.flags);
  put<std::uint16_t>(out + 4, h.entries);
  put<std::uint8_t>(out + 6, h.parts);
  put<std::uint8_t>(out + 7, h.status);
  put<std::uint32_t>(out + 8, h.data_size);
  put<std::uint32_t>(out + 12, h.session_size);
  put<std::uint64_t>(out + 16, h.batch);
  put<std::uint64_t>(out + 24, h.grant);
  put<std::uint64_t>(out + 32, h.transfer);
  put<std::uint64_t>(out + 40, 0);
}

result<frame_header> decode_header(std::span<const std::byte, header_size> in) {
  const auto* at = in.data();
  if (get<std::uint16_t>(at) != frame_magic) {
    return broken("magic", get<std::uint16_t>(at), std::to_string(frame_magic));
  }
  const auto type = get<std::uint8_t>(at + 2);
  if (type < 1 || (type > static_cast<std::uint8_t>(frame_type::cancel) &&
                   type != static_cast<std::uint8_t>(frame_type::goodbye))) {
    return broken("type", type, "1 to 6, or 9");
  }
  frame_header h{.type = static_cast<frame_type>(type),
                 .flags = get<std::uint8_t>(at + 3),
                 .entries = get<std::uint16_t>(at + 4),
                 .parts = get<std::uint8_t>(at + 6),
                 .status = get<std::uint8_t>(at + 7),
                 .data_size = get<std::uint32_t>(at + 8),
                 .session_size = get<std::uint32_t>(at + 12),
                 .batch = get<std::uint64_t>(at + 16),
                 .grant = get<std::uint64_t>(at + 24),
                 .transfer = get<std::uint64_t>(at + 32)};
  const auto bounds = shape_of(h.type);
  if (h.flags > 7) return broken("flags", h.flags, "0 to 7");
  if (h.entries > bounds.entries) {
    return broken("entry count", h.entries, "at most " + std::to_string(bounds.entries));
  }
  if (h.data_size > bounds.data) {
    return broken("data size", h.data_size, "at most " + std::to_string(bounds.data));
  }
  if (h.session_size > bounds.session) {
    return broken("session size", h.session_size, "at most " + std::to_string(bounds.session));
  }
  if (h.status != 0 && (h.type != frame_type::completion || !is_errc(h.status))) {
    return broken("status", h.status, "0, or an error code in a completion");
  }
  if (h.type == frame_type::write && (h.parts < 1 || h.parts > max_lanes)) {
    return broken("part count", h.parts, "1 to 64");
  }
  if (h.type == frame_type::read_request && h.entries == 0) {
    return broken("entry count", 0, "at least 1 in a read request");
  }
  if (get<std::uint64_t>(at + 40) != 0)
    return broken("reserved field", get<std::uint64_t>(at + 40), "0");
  return h;
}

void encode(const wire_entry& e, std::byte* out) noexcept {
  put<std::uint64_t>(out, e.offset);
  put<std::uint64_t>(out + 8, e.stride);
  put<std::uint32_t>(out + 16, e.length);
  put<std::uint32_t>(out + 20, e.count);
  put<std::uint32_t>(out + 24, e.index);
  put<std::uint32_t>(out + 28, 0);
}

wire_entry decode_entry(std::span<const std::byte, entry_size> in) noexcept {
  const auto* at = in.data();
  return {.offset = get<std::uint64_t>(at),
          .stride = get<std::uint64_t>(at + 8),
          .length = get<std::uint32_t>(at + 16),
          .count = get<std::uint32_t>(at + 20),
          .index = get<std::uint32_t>(at + 24)};
}

void encode_trailer(std::uint32_t status, std::byte* out) noexcept {
  put<std::uint32_t>(out, trailer_mark);
  put<std::uint32_t>(out + 4, status);
}

std::optional<std::uint32_t> decode_trailer(std::span<const std::byte, trailer_size> in) noexcept {
  if (get<std::uint32_t>(in.data()) != trailer_mark) return std::nullopt;
  return get<std::uint32_t>(in.data() + 4);
}

std::vector<std::byte> encode(const completion_body& body) {
  const auto listed = std::min(body.bad.size(), max_bad_listed);
  const auto head = 4 + listed * 4;
  const auto said = std::min(body.sentence.size(), max_completion_body - head);
  std::vector<std::byte> out(head + said);
  put<std::uint32_t>(out.data(), static_cast<std::uint32_t>(listed));
  for (std::size_t i = 0; i < listed; ++i) put<std::uint32_t>(out.data() + 4 + i * 4, body.bad[i]);
  std::memcpy(out.data() + head, body.sentence.data(), said);
  return out;
}

result<completion_body> decode_completion_body(std::span<const std::byte> in) {
  completion_body body;
  if (in.empty()) return body;
  if (in.size() < 4) return broken("completion body size", in.size(), "0 or at least 4");
  const auto listed = get<std::uint32_t>(in.data());
  if (listed > max_bad_listed || 4 + std::size_t{listed} * 4 > in.size()) {
    return broken("count of bad segments", listed, "what the body holds, at most 512");
  }
  body.bad.resize(listed);
  for (std::uint32_t i = 0; i < listed; ++i)
    body.bad[i] = get<std::uint32_t>(in.data() + 4 + i * 4);
  const auto said = in.subspan(4 + std::size_t{listed} * 4);
  body.sentence.assign(reinterpret_cast<const char*>(said.data()), said.size());
  // The sentence goes into logs, so keep only printable characters.
  std::replace_if(
      body.sentence.begin(), body.sentence.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return body;
}

hello_bytes encode(const hello& h) noexcept {
  hello_bytes out{};
  put<std::uint64_t>(out.data(), hello_magic);
  put<std::uint16_t>(out.data() + 8, protocol_version);
  put<std::uint16_t>(out.data() + 10, h.lane);
  put<std::uint16_t>(out.data() + 12, h.lanes);
  put<std::uint64_t>(out.data() + 16, h.link);
  put<std::uint64_t>(out.data() + 24, h.from.value);
  put<std::uint64_t>(out.data() + 32, h.to.value);
  std::ranges::copy(h.drawn, out.begin() + 40);
  return out;
}

result<void> check_hello_start(std::span<const std::byte> in) {
  std::array<std::byte, 8> magic{};
  put<std::uint64_t>(magic.data(), hello_magic);
  if (!std::equal(in.begin(),
                  in.begin() + static_cast<std::ptrdiff_t>(std::min(in.size(), magic.size())),
                  magic.begin())) {
    return fail(errc::unauthorized, "its first bytes are not those of a lane of ours");
  }
  return in.size() < 10 ? result<void>{} : check_version("it", get<std::uint16_t>(in.data() + 8));
}

result<hello> decode_hello(std::span<const std::byte, hello_size> in) {
  if (auto ok = check_hello_start(in); !ok) return fail(std::move(ok).error());
  const auto* at = in.data();
  if (get<std::uint16_t>(at + 14) != 0 || get<std::uint64_t>(at + 72) != 0) {
    return fail(errc::unauthorized, "a reserved field of its greeting is not 0");
  }
  hello h{.lane = get<std::uint16_t>(at + 10),
          .lanes = get<std::uint16_t>(at + 12),
          .link = get<std::uint64_t>(at + 16),
          .from = {get<std::uint64_t>(at + 24)},
          .to = {get<std::uint64_t>(at + 32)},
          .drawn = {}};
  std::memcpy(h.drawn.data(), at + 40, h.drawn.size());
  return h;
}

reply_bytes encode(const hello_reply& r) noexcept {
  reply_bytes out{};
  put<std::uint64_t>(out.data(), reply_magic);
  put<std::uint16_t>(out.data() + 8, protocol_version);
  put<std::uint8_t>(out.data() + 10, r.status);
  put<std::uint8_t>(out.data() + 11, static_cast<std::uint8_t>(r.kind));
  std::ranges::copy(r.body, out.begin() + 16);
  return out;
}

reply_bytes refusal_of(errc why) noexcept {
  return encode(hello_reply{
      .kind = reply_kind::refusal, .status = static_cast<std::uint8_t>(why), .body = {}});
}

result<hello_reply> decode_reply(std::span<const std::byte, reply_size> in) {
  const auto* at = in.data();
  if (get<std::uint64_t>(at) != reply_magic) {
    return fail(errc::peer_unreachable, "whoever answers at that address is not a Troupe node");
  }
  if (auto ok = check_version("the peer", get<std::uint16_t>(at + 8)); !ok) {
    return fail(std::move(ok).error());
  }
  const auto kind = get<std::uint8_t>(at + 11);
  const auto status = get<std::uint8_t>(at + 10);
  const bool refuses = kind == static_cast<std::uint8_t>(reply_kind::refusal);
  if (kind > static_cast<std::uint8_t>(reply_kind::verdict) || refuses != (status != 0) ||
      get<std::uint32_t>(at + 12) != 0) {
    return fail(errc::peer_unreachable, "whoever answers at that address violates the protocol");
  }
  hello_reply r{.kind = static_cast<reply_kind>(kind), .status = status, .body = {}};
  std::memcpy(r.body.data(), at + 16, r.body.size());
  // An errc that a later release has added.
  if (refuses && !is_errc(status)) r.status = static_cast<std::uint8_t>(errc::internal);
  return r;
}

std::vector<std::byte> encode(const offer_payload& offer) {
  constexpr std::size_t fixed = 2 + 2 + 8 + token_size + 2;
  std::vector<std::byte> out(fixed + offer.host.size());
  put<std::uint16_t>(out.data(), offer.port);
  put<std::uint16_t>(out.data() + 2, offer.lanes);
  put<std::uint64_t>(out.data() + 4, offer.link);
  std::ranges::copy(offer.secret, out.begin() + 12);
  put<std::uint16_t>(out.data() + 28, static_cast<std::uint16_t>(offer.host.size()));
  std::memcpy(out.data() + fixed, offer.host.data(), offer.host.size());
  return out;
}

result<offer_payload> decode_offer(std::span<const std::byte> in) {
  constexpr std::size_t fixed = 30;
  const auto malformed = [](const std::string& what) {
    return fail(errc::invalid_config, "the peer's tcp offer is malformed: " + what);
  };
  if (in.size() < fixed) return malformed(std::to_string(in.size()) + " bytes are too few");
  const auto host_size = get<std::uint16_t>(in.data() + 28);
  if (in.size() != fixed + host_size || host_size == 0 || host_size > 255) {
    return malformed("its host takes " + std::to_string(host_size) + " bytes of " +
                     std::to_string(in.size() - fixed));
  }
  offer_payload offer{.host = {reinterpret_cast<const char*>(in.data()) + fixed, host_size},
                      .port = get<std::uint16_t>(in.data()),
                      .lanes = get<std::uint16_t>(in.data() + 2),
                      .link = get<std::uint64_t>(in.data() + 4),
                      .secret = {}};
  std::memcpy(offer.secret.data(), in.data() + 12, token_size);
  if (offer.host.find('\0') != std::string::npos) return malformed("its host holds a zero byte");
  if (offer.port == 0) return malformed("its port is 0");
  if (offer.lanes == 0 || offer.lanes > max_lanes) {
    return malformed("it names " + std::to_string(offer.lanes) + " lanes, expected 1 to 64");
  }
  return offer;
}

}  // namespace troupe::transport::tcp
