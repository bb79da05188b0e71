#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <variant>

#include "troupe/io/descriptor.hpp"
#include "troupe/io/wire.hpp"

// What a one-sided agent decodes: descriptors, messages of the connection, frames of links.
// Accepted input must encode to the same bytes.
namespace io = troupe::io;

namespace {

void must_equal(std::span<const std::byte> a, std::span<const std::byte> b) {
  if (!std::ranges::equal(a, b)) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> bytes{reinterpret_cast<const std::byte*>(data), size};
  if (const auto said = io::descriptor::decode(bytes)) must_equal(said->encode(), bytes);
  if (const auto said = io::decode_control(bytes)) {
    const auto again = io::encode(*said);
    // A sentence that is too long is cut, as is a list of GPUs.
    if (const auto back = io::decode_control(std::span{again}.subspan(4)); !back) std::abort();
  }
  if (const auto said = io::decode_frame(bytes)) {
    const auto again = io::encode_frame(*said);
    if (const auto back = io::decode_frame(again); !back) std::abort();
  }
  return 0;
}
