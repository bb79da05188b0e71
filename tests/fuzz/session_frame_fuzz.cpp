// A frame that decodes equals the encoding of its message; a frame that does not gives the reason.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

#include "troupe/actors/messages/session_messages.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace troupe::actors;
  const auto frame = std::as_bytes(std::span{data, size});
  const auto stop = [](const char* why) {
    std::fprintf(stderr, "%s\n", why);
    std::abort();
  };
  const auto message = decode(frame);
  if (!message) {
    if (message.error().message.empty()) stop("a refusal without a sentence");
    return 0;
  }
  if (type_name(*message).empty()) stop("a message without a name");
  const auto again = encode(*message);
  if (!again) stop("a message that was decoded does not encode");
  if (!std::equal(frame.begin(), frame.end(), again->begin(), again->end())) {
    stop("a message does not encode to the frame it came from");
  }
  return 0;
}
