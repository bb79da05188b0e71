#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "troupe/transport/tcp/frame_decoder.hpp"

// Feeds the frame decoder arbitrary bytes in arbitrary pieces. It must terminate, consume no more
// than it was given, announce nothing beyond the protocol's bounds, and decode the same however the
// bytes are cut.
namespace {

using troupe::transport::tcp::frame_decoder;
namespace tcp = troupe::transport::tcp;

void check(bool holds) {
  if (!holds) std::abort();
}

struct meaning {
  std::size_t frames{0};
  std::size_t session{0};
  std::size_t data{0};
  std::size_t begun{0};
  bool malformed{false};
  friend bool operator==(const meaning&, const meaning&) = default;
};

meaning listen(std::span<const std::byte> stream, std::size_t step) {
  meaning out;
  frame_decoder decoder;
  std::size_t begin = 0;  // of the bytes not consumed yet
  std::size_t end = 0;
  while (end < stream.size()) {
    end = std::min(stream.size(), end + step);
    while (true) {
      auto in = stream.subspan(begin, end - begin);
      const auto before = in.size();
      const auto event = decoder.next(in);
      check(in.size() <= before);
      begin += before - in.size();
      if (event.what == frame_decoder::kind::need_more) {
        // A receiver buffers no more than one head.
        check(before < tcp::max_head || decoder.session_left() > 0 || decoder.data_left() > 0);
        break;
      }
      const auto& header = decoder.header();
      if (event.what == frame_decoder::kind::malformed) {
        out.malformed = true;
        check(!decoder.reason().empty());
        return out;
      }
      if (event.what == frame_decoder::kind::begin) {
        ++out.begun;
        check(header.entries <= tcp::max_entries && header.data_size <= tcp::max_data &&
              header.session_size <= tcp::max_session);
        check(event.bytes.size() == header.entries * tcp::entry_size);
      }
      if (event.what == frame_decoder::kind::session) out.session += event.bytes.size();
      if (event.what == frame_decoder::kind::data) out.data += event.bytes.size();
      if (event.what == frame_decoder::kind::end) ++out.frames;
    }
  }
  check(out.frames <= out.begun && out.begun <= out.frames + 1);
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 1) return 0;
  const std::span<const std::byte> stream{reinterpret_cast<const std::byte*>(data) + 1, size - 1};
  const auto whole = listen(stream, stream.size() + 1);
  const auto cut = listen(stream, 1 + data[0]);
  check(whole == cut);
  return 0;
}
