#include "troupe/io/wire.hpp"

#include <algorithm>
#include <string_view>
#include <utility>

#include <nettle/hmac.h>
#include <nettle/memops.h>

#include "troupe/io/bytes.hpp"
#include "troupe/kvcache/overloaded.hpp"

namespace troupe::io {

namespace {

enum class control_kind : std::uint8_t {
  challenge = 1,
  hello,
  welcome,
  refusal,
  link_wanted,
  link_answer,
  link_over,
  ping,
  pong,
  introduction,
  accepted,
};

constexpr std::size_t max_sentence = 2048;
constexpr std::size_t max_boot_id = 128;
constexpr std::size_t max_gpus = 256;
constexpr std::size_t max_bus_id = 64;
constexpr std::size_t max_own_descriptor = 2048;

// -- parts

void put(byte_writer& to, const troupe::error& why) {
  to.put(static_cast<std::uint8_t>(why.code));
  to.put_text(std::string_view{why.message}.substr(0, max_sentence));
}
troupe::error take_error(byte_reader& from) {
  const auto code = from.take<std::uint8_t>();
  auto sentence = from.take_text(max_sentence);
  if (!is_errc(code)) from.fail();
  return {is_errc(code) ? static_cast<errc>(code) : errc::internal, std::move(sentence)};
}

void put(byte_writer& to, const transport::host_identity& where) {
  to.put_text(where.boot_id);
  to.put(where.network_namespace);
  to.put(where.pid_namespace);
  to.put(where.user_namespace);
  to.put(where.pid);
  to.put(where.uid);
  const auto gpus = std::min(where.gpus.size(), max_gpus);
  to.put(static_cast<std::uint16_t>(gpus));
  for (std::size_t i = 0; i < gpus; ++i) to.put_text(where.gpus[i]);
}
transport::host_identity take_identity(byte_reader& from) {
  transport::host_identity where;
  where.boot_id = from.take_text(max_boot_id);
  where.network_namespace = from.take<std::uint64_t>();
  where.pid_namespace = from.take<std::uint64_t>();
  where.user_namespace = from.take<std::uint64_t>();
  where.pid = from.take<std::uint32_t>();
  where.uid = from.take<std::uint32_t>();
  const auto gpus = from.take<std::uint16_t>();
  if (gpus > max_gpus) from.fail();
  for (std::uint16_t i = 0; i < gpus && from.ok(); ++i) {
    where.gpus.push_back(from.take_text(max_bus_id));
  }
  return where;
}

void put(byte_writer& to, const notice_count& count) {
  to.put(count.notices);
  to.put(count.bytes);
}
notice_count take_count(byte_reader& from) {
  notice_count count;
  count.notices = from.take<std::uint64_t>();
  count.bytes = from.take<std::uint64_t>();
  return count;
}

void put(byte_writer& to, const transport::link_offer& offer) {
  to.put(static_cast<std::uint8_t>(offer.kind));
  to.put(offer.owner.value);
  to.put_bytes(offer.payload);
}
transport::link_offer take_offer(byte_reader& from) {
  transport::link_offer offer;
  const auto kind = transport::backend_kind_from(from.take<std::uint8_t>());
  offer.owner = incarnation{from.take<std::uint64_t>()};
  const auto payload = from.take_bytes(transport::link_offer::max_payload);
  offer.payload.assign(payload.begin(), payload.end());
  if (!kind) from.fail();
  offer.kind = kind.value_or(transport::backend_kind::tcp);
  return offer;
}

void put(byte_writer& to, const transport::remote_grant& grant) {
  to.put(grant.id);
  to.put(grant.region.value);
  to.put(grant.owner.value);
  to.put(grant.transfer.value);
  to.put(static_cast<std::uint8_t>(grant.rights));
  to.put(grant.region_size);
  const auto hull = grant.permitted.hull();
  to.put(hull.offset);
  to.put(hull.length);
  to.put_bytes(grant.key);
}
transport::remote_grant take_grant(byte_reader& from) {
  transport::remote_grant grant;
  grant.id = from.take<std::uint64_t>();
  grant.region = region_id{from.take<std::uint32_t>()};
  grant.owner = incarnation{from.take<std::uint64_t>()};
  grant.transfer = transfer_id{from.take<std::uint64_t>()};
  grant.standing = true;
  const auto rights = access_from(from.take<std::uint8_t>());
  grant.region_size = from.take<std::uint64_t>();
  const auto offset = from.take<std::uint64_t>();
  const auto length = from.take<std::uint64_t>();
  const auto key = from.take_bytes(transport::remote_grant::max_key_size);
  grant.key.assign(key.begin(), key.end());
  if (!rights || length > grant.region_size || offset > grant.region_size - length) from.fail();
  grant.rights = rights.value_or(transport::access::read);
  grant.permitted = {{offset, length, 0, 1}};
  return grant;
}

template <std::size_t Size>
std::array<std::byte, Size> take_array(byte_reader& from) {
  std::array<std::byte, Size> made{};
  std::ranges::copy(from.take_raw(Size), made.begin());
  return made;
}

unexpected no_message() {
  return fail(errc::unauthorized, "the bytes on the connection are not a message of an agent");
}

result<control_message> take_challenge(byte_reader& from) {
  challenge said;
  said.version = from.take<std::uint16_t>();
  if (from.ok() && said.version != control_version) {
    return fail(errc::version_mismatch, "the peer's agents speak version " +
                                            std::to_string(said.version) + ", ours version " +
                                            std::to_string(control_version) +
                                            "; use the same release of Troupe at both ends");
  }
  said.nonce = take_array<32>(from);
  return control_message{said};
}

control_message take_hello(byte_reader& from) {
  hello said;
  said.to = incarnation{from.take<std::uint64_t>()};
  said.from = incarnation{from.take<std::uint64_t>()};
  said.nonce = take_array<32>(from);
  said.proof = take_array<32>(from);
  said.where = take_identity(from);
  return said;
}

control_message take_welcome(byte_reader& from) {
  welcome said;
  said.proof = take_array<32>(from);
  said.where = take_identity(from);
  return said;
}

control_message take_introduction(byte_reader& from) {
  const auto self = from.take_bytes(max_own_descriptor);
  return introduction{{self.begin(), self.end()}};
}

control_message take_accepted(byte_reader& from) {
  accepted said;
  said.room = take_count(from);
  said.received = take_count(from);
  said.taken = take_count(from);
  return said;
}

control_message take_wanted(byte_reader& from) {
  link_wanted said;
  said.attempt = from.take<std::uint32_t>();
  said.lanes = from.take<std::uint32_t>();
  said.offer = take_offer(from);
  return said;
}

control_message take_answer(byte_reader& from) {
  link_answer said;
  said.attempt = from.take<std::uint32_t>();
  const auto refused = from.take<std::uint8_t>();
  if (refused > 1) from.fail();
  if (refused == 1) {
    said.refused = take_error(from);
  } else {
    said.offer = take_offer(from);
  }
  return said;
}

}  // namespace

// -- proofs

control_proof prove(proof_role who, const agent_token& token, const control_nonce& challenge,
                    const control_nonce& hello, incarnation dialer, incarnation acceptor) noexcept {
  // Labels of equal length: the boundary between role and nonces is unambiguous.
  constexpr std::string_view dials = "troupe agent dials v1";
  constexpr std::string_view waits = "troupe agent waits v1";
  static_assert(dials.size() == waits.size());
  hmac_sha256_ctx mac{};
  const auto add = [&mac](std::span<const std::byte> bytes) {
    hmac_sha256_update(&mac, bytes.size(), reinterpret_cast<const std::uint8_t*>(bytes.data()));
  };
  const auto add_number = [&](std::uint64_t number) {
    std::array<std::byte, 8> bytes{};
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::byte>((number >> (8 * i)) & 0xff);
    }
    add(bytes);
  };
  hmac_sha256_set_key(&mac, token.size(), reinterpret_cast<const std::uint8_t*>(token.data()));
  add(std::as_bytes(std::span{who == proof_role::dialer ? dials : waits}));
  add(challenge);
  add(hello);
  add_number(dialer.value);
  add_number(acceptor.value);
  control_proof made{};
  hmac_sha256_digest(&mac, made.size(), reinterpret_cast<std::uint8_t*>(made.data()));
  return made;
}

bool same_proof(const control_proof& a, const control_proof& b) noexcept {
  return memeql_sec(a.data(), b.data(), a.size()) != 0;
}

// -- on the connection

std::vector<std::byte> encode(const control_message& said) {
  byte_writer to;
  const auto kind = [&to](control_kind which) { to.put(static_cast<std::uint8_t>(which)); };
  std::visit(overloaded{
                 [&](const challenge& it) {
                   kind(control_kind::challenge);
                   to.put(it.version);
                   to.put_raw(it.nonce);
                 },
                 [&](const hello& it) {
                   kind(control_kind::hello);
                   to.put(it.to.value);
                   to.put(it.from.value);
                   to.put_raw(it.nonce);
                   to.put_raw(it.proof);
                   put(to, it.where);
                 },
                 [&](const welcome& it) {
                   kind(control_kind::welcome);
                   to.put_raw(it.proof);
                   put(to, it.where);
                 },
                 [&](const introduction& it) {
                   kind(control_kind::introduction);
                   to.put_bytes(it.self);
                 },
                 [&](const accepted& it) {
                   kind(control_kind::accepted);
                   put(to, it.room);
                   put(to, it.received);
                   put(to, it.taken);
                 },
                 [&](const refusal& it) {
                   kind(control_kind::refusal);
                   put(to, it.why);
                 },
                 [&](const link_wanted& it) {
                   kind(control_kind::link_wanted);
                   to.put(it.attempt);
                   to.put(it.lanes);
                   put(to, it.offer);
                 },
                 [&](const link_answer& it) {
                   kind(control_kind::link_answer);
                   to.put(it.attempt);
                   to.put(static_cast<std::uint8_t>(it.refused ? 1 : 0));
                   if (it.refused) {
                     put(to, *it.refused);
                   } else {
                     put(to, it.offer);
                   }
                 },
                 [&](const link_over& it) {
                   kind(control_kind::link_over);
                   to.put(it.attempt);
                 },
                 [&](const ping&) { kind(control_kind::ping); },
                 [&](const pong&) { kind(control_kind::pong); },
             },
             said);
  byte_writer whole;
  whole.put_bytes(to.bytes());
  return whole.take();
}

result<control_message> decode_control(std::span<const std::byte> bytes) {
  byte_reader from{bytes};
  const auto kind = from.take<std::uint8_t>();
  result<control_message> said = no_message();
  switch (static_cast<control_kind>(kind)) {
    case control_kind::challenge: said = take_challenge(from); break;
    case control_kind::hello: said = take_hello(from); break;
    case control_kind::welcome: said = take_welcome(from); break;
    case control_kind::introduction: said = take_introduction(from); break;
    case control_kind::accepted: said = take_accepted(from); break;
    case control_kind::refusal: said = control_message{refusal{take_error(from)}}; break;
    case control_kind::link_wanted: said = take_wanted(from); break;
    case control_kind::link_answer: said = take_answer(from); break;
    case control_kind::link_over:
      said = control_message{link_over{from.take<std::uint32_t>()}};
      break;
    case control_kind::ping: said = control_message{ping{}}; break;
    case control_kind::pong: said = control_message{pong{}}; break;
  }
  if (said && !from.at_end()) return no_message();
  return said;
}

// -- over a link

std::vector<std::byte> encode_frame(const link_frame& said) {
  byte_writer to;
  const auto kind = [&to](frame_kind which) { to.put(static_cast<std::uint8_t>(which)); };
  std::visit(overloaded{
                 [&](const note& it) {
                   kind(frame_kind::note);
                   to.put_raw(it.bytes);
                 },
                 [&](const grant_wanted& it) {
                   kind(frame_kind::grant_wanted);
                   to.put(it.memory);
                 },
                 [&](const grants& it) {
                   kind(frame_kind::grants);
                   to.put(it.memory);
                   to.put(static_cast<std::uint16_t>(it.parts.size()));
                   for (const auto& one : it.parts) put(to, one);
                 },
                 [&](const grants_refused& it) {
                   kind(frame_kind::grants_refused);
                   to.put(it.memory);
                   put(to, it.why);
                 },
                 [&](const taken& it) {
                   kind(frame_kind::taken);
                   put(to, it.received);
                   put(to, it.taken);
                   to.put(it.answers);
                 },
                 [&](const count_wanted& it) {
                   kind(frame_kind::count_wanted);
                   to.put(it.number);
                 },
             },
             said);
  return to.take();
}

result<link_frame> decode_frame(std::span<const std::byte> bytes) {
  const auto nonsense = [] {
    return fail(errc::link_broken, "the peer sent a frame that no agent sends");
  };
  byte_reader from{bytes};
  switch (static_cast<frame_kind>(from.take<std::uint8_t>())) {
    case frame_kind::note:
      if (!from.ok()) return nonsense();
      return link_frame{note{from.rest()}};
    case frame_kind::grant_wanted: {
      const grant_wanted said{from.take<std::uint64_t>()};
      if (!from.at_end()) return nonsense();
      return link_frame{said};
    }
    case frame_kind::grants: {
      grants said;
      said.memory = from.take<std::uint64_t>();
      const auto parts = from.take<std::uint16_t>();
      if (parts == 0 || parts > descriptor::max_parts) return nonsense();
      for (std::uint16_t i = 0; i < parts && from.ok(); ++i) said.parts.push_back(take_grant(from));
      if (!from.at_end()) return nonsense();
      return link_frame{std::move(said)};
    }
    case frame_kind::grants_refused: {
      grants_refused said;
      said.memory = from.take<std::uint64_t>();
      said.why = take_error(from);
      if (!from.at_end()) return nonsense();
      return link_frame{std::move(said)};
    }
    case frame_kind::taken: {
      taken said;
      said.received = take_count(from);
      said.taken = take_count(from);
      said.answers = from.take<std::uint64_t>();
      if (!from.at_end()) return nonsense();
      return link_frame{said};
    }
    case frame_kind::count_wanted: {
      const count_wanted said{from.take<std::uint64_t>()};
      if (!from.at_end()) return nonsense();
      return link_frame{said};
    }
  }
  return nonsense();
}

}  // namespace troupe::io
