#include "troupe/io/descriptor.hpp"

#include <algorithm>

#include "troupe/io/agent.hpp"
#include "troupe/io/bytes.hpp"

namespace troupe::io {

namespace {

constexpr std::array magic{std::byte{0x89}, std::byte{'T'}, std::byte{'R'},  std::byte{'P'},
                           std::byte{'I'},  std::byte{'O'}, std::byte{'\n'}, std::byte{0}};
constexpr std::size_t size_at = 10;  ///< offset of the field `size`
constexpr std::size_t header_size = 14;
constexpr std::size_t check_size = 8;

std::uint64_t check_of(std::span<const std::byte> bytes) noexcept {
  std::uint64_t sum = 0xcbf29ce484222325;
  for (const auto byte : bytes) {
    sum = (sum ^ std::to_integer<std::uint64_t>(byte)) * 0x100000001b3;
  }
  return sum;
}

unexpected no_descriptor(const std::string& why) {
  return fail(errc::invalid_config,
              "these bytes are not an agent's descriptor: " + why +
                  "; give `add_peer` what `describe` returned at the peer, whole and unchanged");
}

void put(byte_writer& to, const described_memory& memory) {
  to.put(memory.number);
  to.put(static_cast<std::uint8_t>(memory.rights));
  to.put(static_cast<std::uint16_t>(memory.parts.size()));
  for (const auto& part : memory.parts) {
    to.put(part.region.value);
    to.put(part.offset);
    to.put(part.address);
    to.put(part.length);
  }
}

/// Empty if the memory is malformed.
std::optional<described_memory> take_memory(byte_reader& from) {
  described_memory memory{.number = from.take<std::uint64_t>(), .rights = {}, .parts = {}};
  const auto rights = access_from(from.take<std::uint8_t>());
  const auto parts = from.take<std::uint16_t>();
  if (!from.ok() || !rights || parts == 0 || parts > descriptor::max_parts) return std::nullopt;
  memory.rights = *rights;
  for (std::uint16_t i = 0; i < parts && from.ok(); ++i) {
    memory_part part{.region = region_id{from.take<std::uint32_t>()},
                     .offset = from.take<std::uint64_t>(),
                     .address = from.take<std::uint64_t>(),
                     .length = from.take<std::uint64_t>()};
    const bool wraps = part.length == 0 || part.address > UINT64_MAX - part.length ||
                       part.offset > UINT64_MAX - part.length;
    const bool gap = !memory.parts.empty() &&
                     memory.parts.back().address + memory.parts.back().length != part.address;
    if (wraps || gap) return std::nullopt;
    memory.parts.push_back(part);
  }
  return memory;
}

}  // namespace

std::optional<transport::access> access_from(std::uint8_t number) noexcept {
  for (const auto rights :
       {transport::access::read, transport::access::write, transport::access::read_write}) {
    if (static_cast<std::uint8_t>(rights) == number) return rights;
  }
  return std::nullopt;
}

std::vector<std::byte> descriptor::encode() const {
  byte_writer to;
  to.put_raw(magic);
  to.put(version);
  to.put(std::uint32_t{0});  // the size, below
  to.put(life.value);
  to.put_raw(token);
  to.put(port);
  to.put_text(host);
  to.put_text(name);
  to.put(static_cast<std::uint32_t>(memories.size()));
  for (const auto& one : memories) put(to, one);
  auto bytes = to.take();
  const auto size = static_cast<std::uint32_t>(bytes.size() + check_size);
  for (std::size_t i = 0; i < sizeof size; ++i) {
    bytes[size_at + i] = static_cast<std::byte>((size >> (8 * i)) & 0xff);
  }
  byte_writer check;
  check.put(check_of(bytes));
  bytes.insert(bytes.end(), check.bytes().begin(), check.bytes().end());
  return bytes;
}

result<descriptor> descriptor::decode(std::span<const std::byte> bytes) {
  if (bytes.size() > agent::max_descriptor_size) {
    return no_descriptor("there are " + std::to_string(bytes.size()) + ", the most is " +
                         std::to_string(agent::max_descriptor_size));
  }
  byte_reader from{bytes};
  if (!std::ranges::equal(from.take_raw(magic.size()), magic)) {
    return no_descriptor("they do not begin like one");
  }
  if (const auto other = from.take<std::uint16_t>(); from.ok() && other != version) {
    return fail(errc::version_mismatch,
                "the peer's descriptor is of version " + std::to_string(other) + ", ours is " +
                    std::to_string(version) + "; use the same release of Troupe at both ends");
  }
  const auto size = from.take<std::uint32_t>();
  if (!from.ok() || size != bytes.size() || size < header_size + check_size) {
    return no_descriptor("there are " + std::to_string(bytes.size()) +
                         ", and they say that there are " + std::to_string(size));
  }
  byte_reader check{bytes.last(std::min(check_size, bytes.size()))};
  if (check.take<std::uint64_t>() != check_of(bytes.first(bytes.size() - check_size))) {
    return no_descriptor("they were damaged on the way");
  }
  from = byte_reader{from.rest().first(from.rest().size() - check_size)};
  descriptor made;
  made.life = incarnation{from.take<std::uint64_t>()};
  const auto token = from.take_raw(made.token.size());
  std::ranges::copy(token, made.token.begin());
  made.port = from.take<std::uint16_t>();
  made.host = from.take_text(max_host);
  made.name = from.take_text(max_name);
  const auto count = from.take<std::uint32_t>();
  if (!from.ok() || made.life.value == 0 || made.port == 0 || made.host.empty() ||
      made.name.empty()) {
    return no_descriptor("life, port, host or name is missing");
  }
  for (std::uint32_t i = 0; i < count; ++i) {
    auto one = take_memory(from);
    if (!one) return no_descriptor("memory " + std::to_string(i) + " makes no sense");
    made.memories.push_back(std::move(*one));
  }
  if (!from.at_end()) return no_descriptor("something follows their end");
  return made;
}

}  // namespace troupe::io
