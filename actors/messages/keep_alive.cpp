#include "troupe/actors/messages/keep_alive.hpp"

#include <cstring>
#include <string>

#include "troupe/actors/messages/session_messages.hpp"

namespace troupe::actors {

namespace {

constexpr std::size_t type_at = 2;
constexpr std::size_t word_at = 4;
constexpr std::size_t polls_at = 5;

}  // namespace

bool is_keep_alive(std::span<const std::byte> frame) noexcept {
  std::uint16_t type{0};
  if (frame.size() < type_at + sizeof type) return false;
  std::memcpy(&type, frame.data() + type_at, sizeof type);
  return type == keep_alive_type;
}

std::array<std::byte, keep_alive_bytes> encode(const keep_alive& what) noexcept {
  std::array<std::byte, keep_alive_bytes> frame{};
  std::memcpy(frame.data(), &session_version, sizeof session_version);
  std::memcpy(frame.data() + type_at, &keep_alive_type, sizeof keep_alive_type);
  frame[word_at] = static_cast<std::byte>(what.said);
  frame[polls_at] = std::byte{what.polls};
  return frame;
}

result<keep_alive> decode_keep_alive(std::span<const std::byte> frame) {
  if (frame.size() != keep_alive_bytes) {
    return fail(errc::out_of_range, "a keep-alive has " + std::to_string(keep_alive_bytes) +
                                        " bytes, this one has " + std::to_string(frame.size()));
  }
  std::uint16_t version{0};
  std::memcpy(&version, frame.data(), sizeof version);
  if (version != session_version) {
    return fail(errc::version_mismatch, "the peer speaks session version " +
                                            std::to_string(version) + ", this node speaks " +
                                            std::to_string(session_version) +
                                            "; run the same release on both");
  }
  keep_alive what;
  const auto word = std::to_integer<std::uint8_t>(frame[word_at]);
  if (word != 1 && word != 2) {
    return fail(errc::out_of_range, "keep_alive.word is " + std::to_string(word) +
                                        ", expected 1 (a question) or 2 (an answer)");
  }
  const auto polls = std::to_integer<std::uint8_t>(frame[polls_at]);
  if (polls > 1) {
    return fail(errc::out_of_range,
                "keep_alive.polls is " + std::to_string(polls) + ", expected 0 or 1");
  }
  what.said = static_cast<keep_alive::word>(word);
  what.polls = polls == 1;
  return what;
}

}  // namespace troupe::actors
