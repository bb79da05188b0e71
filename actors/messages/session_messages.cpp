#include "troupe/actors/messages/session_messages.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstring>
#include <limits>
#include <string_view>
#include <type_traits>
#include <utility>

#include "troupe/transport/backend.hpp"

namespace troupe::actors {
namespace {

static_assert(
    std::endian::native == std::endian::little,
    "frames are written as memory holds them; a big-endian port swaps in reader and writer");

constexpr std::size_t max_frame = transport::link::max_frame;
constexpr std::size_t unbounded = max_frame;

template <class M, class Struct>
concept is = std::same_as<std::remove_const_t<M>, Struct>;

/// Whether a number is in range for an enum of the wire.
constexpr bool in_range(transfer_mode, std::uint8_t n) {
  return is_transfer_mode(n);
}
constexpr bool in_range(transport::access, std::uint8_t n) {
  return n >= 1 && n <= 3;
}
bool in_range(errc, std::uint8_t n) {
  return is_errc(n);
}

// -- numbers of blocks

/// Maps distances of both signs to numbers, small distances to small numbers.
std::uint64_t folded(std::int64_t distance) noexcept {
  return (static_cast<std::uint64_t>(distance) << 1) ^ static_cast<std::uint64_t>(distance >> 63);
}
std::int64_t unfolded(std::uint64_t number) noexcept {
  return static_cast<std::int64_t>(number >> 1) ^ -static_cast<std::int64_t>(number & 1);
}

constexpr std::uint64_t block_numbers = std::uint64_t{1} << 32;

// -- the writer and the reader
//
// Both offer the same member functions, one per kind of field. `fields` below states once for each
// struct its fields, their order and their bounds. Both stop at the first problem.

class writer {
 public:
  explicit writer(std::string_view type) : type_{type} { out_.reserve(256); }

  template <std::unsigned_integral T>
  void number(const char*, T value) {
    append(&value, sizeof value);
  }
  void flag(const char* name, bool value) { number<std::uint8_t>(name, value ? 1 : 0); }
  template <class Tag, class Rep>
  void id(const char* name, const strong_id<Tag, Rep>& value) {
    number(name, value.value);
  }
  template <class Enum>
  void enumerator(const char* name, Enum value) {
    const auto n = static_cast<std::uint8_t>(value);
    if (!in_range(value, n))
      return refuse(name, "is " + std::to_string(n) + ", which is not a valid value");
    number(name, n);
  }
  void failure_code(const char* name, std::uint8_t value) {
    if (value != 0 && !is_errc(value)) {
      return refuse(name, "is " + std::to_string(value) + ", which is not an error code");
    }
    number(name, value);
  }
  template <class Bytes>
  void byte_list(const char* name, const Bytes& value, std::size_t least, std::size_t most) {
    if (!sized(name, value.size(), least, most)) return;
    append(value.data(), value.size());
  }
  template <class Item>
  void numbers(const char* name, const std::vector<Item>& list) {
    static_assert(sizeof(Item) == 4 && std::is_trivially_copyable_v<Item>);
    if (!sized(name, list.size(), 0, unbounded / 4)) return;
    append(list.data(), list.size() * 4);
  }
  void blocks(const char* name, const std::vector<kvcache::block_run>& runs) {
    if (!sized(name, runs.size(), 0, unbounded)) return;
    std::int64_t behind = 0;
    for (const auto& run : runs) {
      if (run.count == 0 || run.begin.value + std::uint64_t{run.count} > block_numbers) {
        return refuse(name, "name a run of " + std::to_string(run.count) + " from " +
                                std::to_string(run.begin.value) +
                                " on, which are not block numbers");
      }
      const auto distance = folded(std::int64_t{run.begin.value} - behind);
      leb128(distance << 1 | (run.count > 1 ? 1 : 0));
      if (run.count > 1) leb128(run.count - 2);
      behind = std::int64_t{run.begin.value} + run.count;
    }
  }
  template <class Item, class Each>
  void list(const char* name, const std::vector<Item>& items, std::size_t, std::size_t least,
            std::size_t most, Each&& each) {
    if (!sized(name, items.size(), least, most)) return;
    for (const auto& item : items) {
      if (failed_) return;
      each(*this, item);
    }
  }
  template <class T, class Each>
  void maybe(const char* name, const std::optional<T>& value, Each&& each) {
    flag(name, value.has_value());
    if (value) each(*this, *value);
  }

  void refuse(const char* name, const std::string& what) {
    if (failed_) return;
    failed_ = error{errc::out_of_range, std::string{type_} + "." + name + " " + what};
  }

  [[nodiscard]] result<std::vector<std::byte>> finish() && {
    if (failed_) return fail(*std::move(failed_));
    return std::move(out_);
  }

 private:
  bool sized(const char* name, std::size_t size, std::size_t least, std::size_t most) {
    if (size < least || size > most) {
      refuse(name, "has " + std::to_string(size) + " items, allowed are " + std::to_string(least) +
                       " to " + std::to_string(most));
      return false;
    }
    number(name, static_cast<std::uint32_t>(size));
    return !failed_;
  }
  void leb128(std::uint64_t number) {
    std::array<std::uint8_t, 10> digits{};
    std::size_t count = 0;
    for (; number >= 128; number >>= 7) digits[count++] = static_cast<std::uint8_t>(number | 128);
    digits[count++] = static_cast<std::uint8_t>(number);
    append(digits.data(), count);
  }
  void append(const void* data, std::size_t size) {
    if (failed_ || size == 0) return;
    if (size > max_frame - out_.size()) {
      failed_ =
          error{errc::out_of_range, std::string{type_} + " does not fit a frame of " +
                                        std::to_string(max_frame) + " bytes; move less at once"};
      return;
    }
    const auto old = out_.size();
    out_.resize(old + size);
    std::memcpy(out_.data() + old, data, size);
  }

  std::string_view type_;
  std::vector<std::byte> out_;
  std::optional<error> failed_;
};

class reader {
 public:
  reader(std::string_view type, std::span<const std::byte> in) : type_{type}, in_{in} {}

  template <std::unsigned_integral T>
  void number(const char* name, T& value) {
    if (!take(name, sizeof(T))) return;
    std::memcpy(&value, in_.data() - sizeof(T), sizeof(T));
  }
  void flag(const char* name, bool& value) {
    std::uint8_t n{0};
    number(name, n);
    if (n > 1) refuse(name, "is " + std::to_string(n) + ", expected 0 or 1");
    value = n == 1;
  }
  template <class Tag, class Rep>
  void id(const char* name, strong_id<Tag, Rep>& value) {
    number(name, value.value);
  }
  template <class Enum>
  void enumerator(const char* name, Enum& value) {
    std::uint8_t n{0};
    number(name, n);
    if (failed_) return;
    if (!in_range(Enum{}, n))
      return refuse(name, "is " + std::to_string(n) + ", which is not a valid value");
    value = static_cast<Enum>(n);
  }
  void failure_code(const char* name, std::uint8_t& value) {
    number(name, value);
    if (!failed_ && value != 0 && !is_errc(value)) {
      refuse(name, "is " + std::to_string(value) + ", which is not an error code");
    }
  }
  template <class Bytes>
  void byte_list(const char* name, Bytes& value, std::size_t least, std::size_t most) {
    const auto count = sized(name, 1, least, most);
    if (failed_ || !take(name, count)) return;
    const auto* first = in_.data() - count;
    if constexpr (std::is_same_v<Bytes, std::string>) {
      value.assign(reinterpret_cast<const char*>(first), count);
    } else {
      value.assign(first, first + count);
    }
  }
  template <class Item>
  void numbers(const char* name, std::vector<Item>& list) {
    static_assert(sizeof(Item) == 4 && std::is_trivially_copyable_v<Item>);
    const auto count = sized(name, 4, 0, unbounded / 4);
    if (failed_ || !take(name, count * 4)) return;
    list.resize(count);
    if (count > 0) std::memcpy(list.data(), in_.data() - count * 4, count * 4);
  }
  void blocks(const char* name, std::vector<kvcache::block_run>& runs) {
    const auto count = sized(name, 1, 0, unbounded);
    if (failed_) return;
    runs.reserve(count);
    std::int64_t behind = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const auto first = leb128(name);
      const auto more = (first & 1) == 0 ? 0 : leb128(name) + 1;
      if (failed_) return;
      const auto begin = behind + unfolded(first >> 1);
      const auto end = begin + 1 + static_cast<std::int64_t>(more);
      const bool none = begin < 0 || end > static_cast<std::int64_t>(block_numbers) ||
                        more >= std::numeric_limits<std::uint32_t>::max();
      if (none) {
        return refuse(name, "name blocks " + std::to_string(begin) + " to " + std::to_string(end) +
                                ", which no pool has");
      }
      runs.push_back({{static_cast<std::uint32_t>(begin)}, static_cast<std::uint32_t>(more + 1)});
      behind = end;
    }
  }
  /// `item_bytes` is the smallest size of an item: a count that the rest of the frame cannot hold
  /// is refused before anything is allocated.
  template <class Item, class Each>
  void list(const char* name, std::vector<Item>& items, std::size_t item_bytes, std::size_t least,
            std::size_t most, Each&& each) {
    const auto count = sized(name, item_bytes, least, most);
    if (failed_) return;
    items.reserve(count);
    for (std::size_t i = 0; i < count && !failed_; ++i) each(*this, items.emplace_back());
  }
  template <class T, class Each>
  void maybe(const char* name, std::optional<T>& value, Each&& each) {
    bool there{false};
    flag(name, there);
    if (!failed_ && there) each(*this, value.emplace());
  }

  void refuse(const char* name, const std::string& what) {
    if (failed_) return;
    failed_ = error{errc::out_of_range, std::string{type_} + "." + name + " " + what};
  }

  [[nodiscard]] result<void> finish() && {
    if (!failed_ && !in_.empty()) {
      failed_ =
          error{errc::out_of_range, std::string{type_} + " ends " + std::to_string(in_.size()) +
                                        " bytes before its frame does"};
    }
    if (failed_) return fail(*std::move(failed_));
    return {};
  }

 private:
  std::size_t sized(const char* name, std::size_t item_bytes, std::size_t least, std::size_t most) {
    std::uint32_t count{0};
    number(name, count);
    if (failed_) return 0;
    if (count < least || count > most) {
      refuse(name, "has " + std::to_string(count) + " items, allowed are " + std::to_string(least) +
                       " to " + std::to_string(most));
      return 0;
    }
    if (count > in_.size() / item_bytes) {
      refuse(name, "claims " + std::to_string(count) + " items, the frame has " +
                       std::to_string(in_.size()) + " bytes left");
      return 0;
    }
    return count;
  }
  /// Reads a number of at most 35 bits.
  std::uint64_t leb128(const char* name) {
    std::uint64_t number = 0;
    for (std::uint32_t shift = 0; shift < 35; shift += 7) {
      std::uint8_t digit = 0;
      this->number(name, digit);
      if (failed_) return 0;
      number |= std::uint64_t{digit & 127U} << shift;
      if (digit == 0 && shift != 0) refuse(name, "have a number that is longer than it need be");
      if (digit < 128) return number;
    }
    refuse(name, "have a number of more than 5 bytes");
    return 0;
  }
  /// Steps over `size` bytes; they end where `in_` begins afterwards.
  bool take(const char* name, std::size_t size) {
    if (failed_) return false;
    if (size > in_.size()) {
      refuse(name, "is cut off: it needs " + std::to_string(size) + " bytes, the frame has " +
                       std::to_string(in_.size()) + " left");
      return false;
    }
    in_ = in_.subspan(size);
    return true;
  }
  std::string_view type_;
  std::span<const std::byte> in_;
  std::optional<error> failed_;
};

// -- the fields

constexpr std::size_t extent_bytes = 3 * 8 + 4;
/// The size of a grant with an empty key.
constexpr std::size_t least_grant_bytes = 8 + 4 + 8 + 8 + 1 + 8 + 4;

/// All fields of a grant except the bytes that it permits.
template <class A, class G>
void grant_fields(A& a, G& g) {
  a.number("grant.id", g.id);
  a.id("grant.region", g.region);
  a.id("grant.owner", g.owner);
  a.id("grant.transfer", g.transfer);
  a.enumerator("grant.rights", g.rights);
  a.number("grant.region_size", g.region_size);
  a.byte_list("grant.key", g.key, 0, transport::remote_grant::max_key_size);
}

template <class A, class List>
void extents(A& a, List& list) {
  a.list("grant.extents", list, extent_bytes, 1, transport::remote_grant::max_extents,
         [](auto& b, auto& e) {
           b.number("extent.offset", e.offset);
           b.number("extent.length", e.length);
           b.number("extent.stride", e.stride);
           b.number("extent.count", e.count);
         });
}
void permitted_bytes(writer& out, const byte_set& permitted) {
  if (!permitted.is_listed()) return out.refuse("grant.extents", "are not listed");
  extents(out, permitted.extents());
}
void permitted_bytes(reader& in, byte_set& permitted) {
  std::vector<extent> list;
  extents(in, list);
  if (!std::ranges::is_sorted(list, {}, &extent::offset)) {
    return in.refuse("grant.extents", "are not sorted by offset");
  }
  permitted = byte_set{std::move(list)};
}

template <class A, class List>
void grants(A& a, List& list) {
  a.list("grants", list, least_grant_bytes, 0, unbounded,
         [](auto& b, auto& g) { grant_fields(b, g); });
}

template <class A, class Optional>
void source(A& a, Optional& value) {
  a.maybe("source", value, [](auto& b, auto& g) {
    grant_fields(b, g);
    permitted_bytes(b, g.permitted);
  });
}

template <class A, class List>
void groups(A& a, List& list) {
  a.list("groups", list, 12, 0, max_groups, [](auto& b, auto& g) {
    b.number("group.group", g.group);
    b.number("group.token_begin", g.token_begin);
    b.blocks("group.blocks", g.blocks);
  });
}

template <class A, is<transfer_request> M>
void fields(A& a, M& m) {
  a.id("transfer", m.transfer);
  a.byte_list("request", m.request, 1, max_request_id);
  a.enumerator("mode", m.mode);
  a.number("rank", m.rank);
  a.number("ranks", m.ranks);
  a.number("token_begin", m.token_begin);
  a.number("token_end", m.token_end);
  a.blocks("blocks", m.blocks);
  a.numbers("state_slots", m.state_slots);
  grants(a, m.grants);
  a.number("deadline_ms", m.deadline_ms);
  a.maybe("progress", m.progress, [](auto& b, auto& p) {
    b.numbers("progress.here", p.here);
    b.flag("progress.state", p.state);
  });
  a.number("placed_by", m.placed_by);
  a.number("placed_at", m.placed_at);
  groups(a, m.groups);
  a.number("life", m.life);
  a.maybe("park_ms", m.park_ms, [](auto& b, auto& ms) { b.number("park_ms", ms); });
  a.byte_list("expect", m.expect, 0, max_expect);
  a.flag("again", m.again);
}

template <class A, is<transfer_offer> M>
void fields(A& a, M& m) {
  a.id("transfer", m.transfer);
  a.number("token_end", m.token_end);
  a.blocks("blocks", m.blocks);
  a.numbers("state_slots", m.state_slots);
  grants(a, m.grants);
  a.byte_list("aux", m.aux, 0, max_aux);
  groups(a, m.groups);
}

template <class A, is<layers_landed> M>
void fields(A& a, M& m) {
  a.id("transfer", m.transfer);
  a.number("slice.layer_begin", m.slice.layer_begin);
  a.number("slice.layer_end", m.slice.layer_end);
  a.number("slice.token_begin", m.slice.token_begin);
  a.number("slice.token_end", m.slice.token_end);
  a.flag("state", m.state);
  a.maybe("seal", m.seal, [](auto& b, auto& s) {
    b.number("seal.token_end", s.token_end);
    b.number("seal.batches", s.batches);
    b.byte_list("seal.aux", s.aux, 0, max_aux);
  });
}

template <class A, is<transfer_sealed> M>
void fields(A& a, M& m) {
  a.id("transfer", m.transfer);
  a.number("token_end", m.token_end);
  a.number("batches", m.batches);
  a.byte_list("aux", m.aux, 0, max_aux);
}

template <class A, class M>
requires(is<M, transfer_release> || is<M, transfer_quiescent>) void fields(A& a, M& m) {
  a.id("transfer", m.transfer);
}

template <class A, is<transfer_abort> M>
void fields(A& a, M& m) {
  a.id("transfer", m.transfer);
  a.enumerator("code", m.code);
  a.byte_list("reason", m.reason, 0, max_sentence);
  a.flag("refused", m.refused);
}

template <class A, class M>
requires(is<M, transfer_hold> || is<M, transfer_forget>) void fields(A& a, M& m) {
  a.id("transfer", m.transfer);
  a.byte_list("request", m.request, 1, max_request_id);
  a.number("life", m.life);
}

template <class A, is<store_put> M>
void fields(A& a, M& m) {
  a.number("op", m.op);
  a.byte_list("key", m.key, 1, max_key);
  a.number("size", m.size);
  a.number("ttl_ms", m.ttl_ms);
  a.byte_list("value", m.value, 0, max_inline);
  source(a, m.source);
}

template <class A, is<store_get> M>
void fields(A& a, M& m) {
  a.number("op", m.op);
  a.byte_list("key", m.key, 1, max_key);
  a.number("max_size", m.max_size);
}

template <class A, class M>
requires(is<M, store_query> || is<M, store_remove>) void fields(A& a, M& m) {
  a.number("op", m.op);
  a.byte_list("key", m.key, 1, max_key);
}

template <class A, is<store_reply> M>
void fields(A& a, M& m) {
  a.number("op", m.op);
  a.failure_code("failed", m.failed);
  a.byte_list("sentence", m.sentence, 0, max_sentence);
  a.number("size", m.size);
  a.number("ttl_ms", m.ttl_ms);
  a.byte_list("value", m.value, 0, max_inline);
  source(a, m.source);
}

template <class A, class M>
requires(is<M, store_release> || is<M, store_held> || is<M, store_commit>) void fields(A& a, M& m) {
  a.number("op", m.op);
}

constexpr std::array<std::string_view, std::variant_size_v<session_message>> type_names{
    "transfer_request", "transfer_offer", "layers_landed",      "transfer_sealed",
    "transfer_release", "transfer_abort", "transfer_quiescent", "store_put",
    "store_get",        "store_query",    "store_remove",       "store_reply",
    "store_release",    "store_held",     "store_commit",       "transfer_hold",
    "transfer_forget"};

template <std::size_t Index>
result<session_message> read_as(std::span<const std::byte> body) {
  session_message message{std::in_place_index<Index>};
  reader in{type_names[Index], body};
  fields(in, *std::get_if<Index>(&message));
  if (auto end = std::move(in).finish(); !end) return fail(std::move(end).error());
  return message;
}

using read_function = result<session_message> (*)(std::span<const std::byte>);

template <std::size_t... Index>
constexpr std::array<read_function, sizeof...(Index)> all_readers(std::index_sequence<Index...>) {
  return {&read_as<Index>...};
}

constexpr auto readers =
    all_readers(std::make_index_sequence<std::variant_size_v<session_message>>{});

}  // namespace

result<std::vector<std::byte>> encode(const session_message& message) {
  writer out{type_name(message)};
  out.number("version", session_version);
  out.number("type", static_cast<std::uint16_t>(message.index() + 1));
  std::visit([&out](const auto& m) { fields(out, m); }, message);
  return std::move(out).finish();
}

result<session_message> decode(std::span<const std::byte> frame) {
  std::uint16_t version{0};
  std::uint16_t type{0};
  constexpr std::size_t head = sizeof version + sizeof type;
  if (frame.size() < head) {
    return fail(errc::out_of_range,
                "a session frame begins with 4 bytes of version and type, this one has " +
                    std::to_string(frame.size()) + " in all");
  }
  if (frame.size() > max_frame) {
    return fail(errc::out_of_range, "a session frame has at most " + std::to_string(max_frame) +
                                        " bytes, this one has " + std::to_string(frame.size()));
  }
  std::memcpy(&version, frame.data(), sizeof version);
  std::memcpy(&type, frame.data() + sizeof version, sizeof type);
  if (version != session_version) {
    return fail(errc::version_mismatch, "the peer speaks session version " +
                                            std::to_string(version) + ", this node speaks " +
                                            std::to_string(session_version) +
                                            "; run the same release on both");
  }
  if (type == 0 || type > readers.size()) {
    return fail(errc::out_of_range, "session frame type " + std::to_string(type) +
                                        " is unknown, known are 1 to " +
                                        std::to_string(readers.size()));
  }
  return readers[type - 1](frame.subspan(head));
}

transfer_abort make_abort(transfer_id transfer, const error& why) {
  auto reason = why.message;
  if (reason.size() > max_sentence) {
    std::size_t size = max_sentence;
    // Do not cut a multi-byte character, whose later bytes are 10xxxxxx.
    while (size > 0 && (static_cast<unsigned char>(reason[size]) & 0xC0u) == 0x80u) --size;
    reason.resize(size);
  }
  return transfer_abort{transfer, why.code, std::move(reason)};
}

transfer_abort make_refusal(transfer_id transfer, const error& why) {
  auto abort = make_abort(transfer, why);
  abort.refused = true;
  return abort;
}

transfer_id route_of(const session_message& message) noexcept {
  const auto route = []<class Message>(const Message& m) -> transfer_id {
    if constexpr (requires { m.op; }) {
      return {m.op};
    } else {
      return m.transfer;
    }
  };
  return std::visit(route, message);
}

bool is_final_message(const session_message& message) noexcept {
  if (const auto* reply = std::get_if<store_reply>(&message)) {
    return reply->value.empty() && !reply->source;
  }
  return std::holds_alternative<transfer_release>(message) ||
         std::holds_alternative<transfer_abort>(message) ||
         std::holds_alternative<transfer_quiescent>(message) ||
         std::holds_alternative<store_release>(message);
}

std::string_view type_name(const session_message& message) noexcept {
  return message.index() < type_names.size() ? type_names[message.index()] : "no message";
}

}  // namespace troupe::actors
