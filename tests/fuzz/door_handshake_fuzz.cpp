// A stranger's bytes, arriving in pieces, never prove anything, never make an end send more than it
// was told to, and never make it read more than it asked for.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

#include "troupe/actors/door/door_handshake.hpp"

namespace {

using namespace troupe::actors;

void stop(const char* why) {
  std::fprintf(stderr, "%s\n", why);
  std::abort();
}

void listen_to(door_handshake::role who, door_security::mode how, std::span<const std::byte> said,
               std::size_t piece) {
  static const door_key key = door_key_of("a secret that the fuzzer does not find");
  door_nonce nonce{};
  nonce.fill(std::byte{7});
  // The port that a HELLO asks for, so that the bytes after it are processed.
  const std::uint16_t port =
      said.size() < 14 ? 7400
                       : static_cast<std::uint16_t>(std::to_integer<unsigned>(said[12]) |
                                                    (std::to_integer<unsigned>(said[13]) << 8u));
  door_handshake end{who, how, {key}, nonce, port};
  std::size_t got = 0;
  std::size_t answered = 0;
  if (who == door_handshake::role::client) end.sent(end.to_send().size());
  while (got < said.size() && end.wants() > 0) {
    const auto take = std::min({piece, end.wants(), said.size() - got});
    end.take(said.subspan(got, take));
    got += take;
    answered += end.to_send().size();
    end.sent(end.to_send().size());
    if (who == door_handshake::role::server && answered > got) stop("an answer that is too long");
  }
  if (end.where() == door_handshake::state::proven) stop("a stranger proved itself");
  if (end.where() == door_handshake::state::refused && end.why().message.empty())
    stop("a refusal without a sentence");
  if (end.where() == door_handshake::state::refused && end.wants() != 0)
    stop("an end that is over and still reads");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const auto said = std::as_bytes(std::span{data, size}).subspan(2);
  const auto who =
      (data[0] & 1u) != 0 ? door_handshake::role::client : door_handshake::role::server;
  const auto how = static_cast<door_security::mode>((data[0] >> 1u) % 3);
  listen_to(who, how, said, std::size_t{data[1]} % 64 + 1);
  return 0;
}
