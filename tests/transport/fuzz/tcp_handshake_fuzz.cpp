#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "troupe/transport/tcp/wire.hpp"

// The other inputs that a stranger or a peer makes us decode: offers, greetings, answers,
// completions.
namespace tcp = troupe::transport::tcp;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> bytes{reinterpret_cast<const std::byte*>(data), size};
  if (auto offer = tcp::decode_offer(bytes)) {
    // An accepted offer must encode to the same bytes.
    const auto again = tcp::encode(*offer);
    if (again.size() != bytes.size() || !std::equal(again.begin(), again.end(), bytes.begin())) {
      std::abort();
    }
  }
  if (auto body = tcp::decode_completion_body(bytes)) {
    if (body->bad.size() > tcp::max_bad_listed) std::abort();
  }
  const auto readable = tcp::check_hello_start(bytes);
  if (size >= tcp::hello_size) {
    const auto said = bytes.first<tcp::hello_size>();
    if (auto hello = tcp::decode_hello(said)) {
      const auto again = tcp::encode(*hello);
      if (!readable || !std::equal(again.begin(), again.end(), said.begin())) std::abort();
    }
  }
  if (size >= tcp::reply_size) {
    if (auto reply = tcp::decode_reply(bytes.first<tcp::reply_size>())) {
      const bool refuses = reply->kind == tcp::reply_kind::refusal;
      if (refuses != (reply->status != 0)) std::abort();
    }
  }
  if (size >= tcp::trailer_size) {
    static_cast<void>(tcp::decode_trailer(bytes.first<tcp::trailer_size>()));
  }
  return 0;
}
