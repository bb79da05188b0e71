#pragma once

/// Reads and checks arguments of C calls: those that are null, too small, too new or out of range
/// are refused by name.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/deploy/c/status.hpp"
#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::c {

/// No struct of this ABI will be larger; a `size` above it was never set.
inline constexpr std::uint32_t max_struct_bytes = 4096;
/// No text argument may be longer: a deployment has at most 1 MiB.
inline constexpr std::size_t max_text_bytes = std::size_t{1} << 20U;
/// No list may be longer: a cache has at most 2^32 blocks, a request far fewer.
inline constexpr std::size_t max_list_items = std::size_t{1} << 28U;

/// The smallest valid `size` of a struct: the end of its first release. Specialised once a struct
/// has grown.
template <class Struct>
inline constexpr std::uint32_t first_size = sizeof(Struct);
template <>
inline constexpr std::uint32_t first_size<troupe_cache_geometry> = offsetof(troupe_cache_geometry,
                                                                            model);
template <>
inline constexpr std::uint32_t first_size<troupe_outcome> = offsetof(troupe_outcome, waited_us);
template <>
inline constexpr std::uint32_t first_size<troupe_engine_options> = offsetof(troupe_engine_options,
                                                                            cores);
template <>
inline constexpr std::uint32_t first_size<troupe_identity> = offsetof(troupe_identity,
                                                                      supervisor_incarnation);
template <>
inline constexpr std::uint32_t first_size<troupe_placement_request> =
    offsetof(troupe_placement_request, failed);
template <>
inline constexpr std::uint32_t first_size<troupe_placement_info> = offsetof(troupe_placement_info,
                                                                            fingerprint);
template <>
inline constexpr std::uint32_t first_size<troupe_node_info> = offsetof(troupe_node_info,
                                                                       replica_name);
template <>
inline constexpr std::uint32_t first_size<troupe_state_tensor> = offsetof(troupe_state_tensor,
                                                                          parts);
template <>
inline constexpr std::uint32_t first_size<troupe_send_spec> = offsetof(troupe_send_spec, flags);
template <>
inline constexpr std::uint32_t first_size<troupe_receive_spec> = offsetof(troupe_receive_spec,
                                                                          lives);

[[nodiscard]] result<void> check_size(std::uint32_t size, std::uint32_t least, std::size_t known,
                                      std::string_view name);

/// Refuses a null pointer.
template <class T>
[[nodiscard]] result<void> present(const T* pointer, std::string_view name) {
  if (pointer) return {};
  return bad_argument("`" + std::string{name} + "` is NULL");
}
struct named_pointer {
  const void* at;
  std::string_view name;
};
/// Refuses the first null pointer among several.
[[nodiscard]] result<void> present(std::initializer_list<named_pointer> all);

/// Reads a struct that begins with `size`: fields that the caller does not know are 0.
template <class Struct>
[[nodiscard]] result<Struct> read(const Struct* given, std::string_view name) {
  if (auto here = present(given, name); !here) return fail(here.error());
  std::uint32_t size = 0;
  std::memcpy(&size, given, sizeof size);
  if (auto fits = check_size(size, first_size<Struct>, sizeof(Struct), name); !fits)
    return fail(fits.error());
  const auto* bytes = reinterpret_cast<const std::byte*>(given);
  if (size > sizeof(Struct) && std::any_of(bytes + sizeof(Struct), bytes + size,
                                           [](std::byte b) { return b != std::byte{}; }))
    return fail(errc::version_mismatch,
                "`" + std::string{name} +
                    "` uses fields that this release of libtroupe does not know; load the release "
                    "that the program was compiled against");
  Struct known{};
  std::memcpy(&known, given, std::min<std::size_t>(size, sizeof known));
  return known;
}

/// Checks that an output struct can be filled in. Call this before the call has any effect.
template <class Struct>
[[nodiscard]] result<void> writable(const Struct* out, std::string_view name) {
  if (auto here = present(out, name); !here) return here;
  std::uint32_t size = 0;
  std::memcpy(&size, out, sizeof size);
  return check_size(size, first_size<Struct>, sizeof(Struct), name);
}

/// Fills in as much of a struct as the caller knows; fields that this release does not know are 0.
template <class Struct>
void write(Struct value, Struct* out) noexcept {
  std::uint32_t size = 0;
  std::memcpy(&size, out, sizeof size);
  std::memset(out, 0, size);
  std::memcpy(&value, &size, sizeof size);
  std::memcpy(out, &value, std::min<std::size_t>(size, sizeof value));
}

/// A caller's array of structs, each of the caller's own size, filled in from its beginning. `size`
/// is at least that of `Struct`.
template <class Struct>
class filled_array {
 public:
  filled_array(Struct* first, std::size_t size, std::size_t capacity)
      : first_{reinterpret_cast<std::byte*>(first)}, size_{size}, capacity_{capacity} {}

  [[nodiscard]] std::size_t count() const noexcept { return count_; }
  [[nodiscard]] std::size_t room() const noexcept { return capacity_ - count_; }
  void add(const Struct& what) noexcept {
    auto* at = first_ + count_++ * size_;
    std::memset(at, 0, size_);
    std::memcpy(at, &what, sizeof what);
  }

 private:
  std::byte* first_;
  std::size_t size_, capacity_;
  std::size_t count_{0};
};

/// Calls `add_next`, which adds one struct and returns whether there was one, until there is none or
/// the array is full. If memory runs out, the array keeps the structs that it has; `std::bad_alloc`
/// passes only if it has none.
template <class Struct, class AddNext>
void fill(filled_array<Struct>& to, AddNext add_next) {
  try {
    while (to.room() != 0 && add_next()) {
    }
  } catch (const std::bad_alloc&) {
    if (to.count() == 0) throw;
  }
}

/// A text that is neither NULL nor empty.
[[nodiscard]] result<std::string> text(const char* given, std::string_view name);
/// A text, empty if `given` is NULL.
[[nodiscard]] result<std::string> optional_text(const char* given, std::string_view name);
/// A list of texts, none of them NULL.
[[nodiscard]] result<std::vector<std::string>> texts(const char* const* given, std::size_t count,
                                                     std::string_view name);
/// A list, which may be NULL if it is empty.
template <class T>
[[nodiscard]] result<std::span<const T>> list(const T* given, std::size_t count,
                                              std::string_view name) {
  if (count > max_list_items)
    return bad_argument("`" + std::string{name} + "` has too many entries");
  if (count != 0)
    if (auto here = present(given, name); !here) return fail(here.error());
  return std::span{given, count};
}
[[nodiscard]] result<std::span<const std::uint32_t>> numbers(const std::uint32_t* given,
                                                             std::size_t count,
                                                             std::string_view name);
[[nodiscard]] result<std::vector<block_id>> blocks(const std::uint32_t* given, std::size_t count,
                                                   std::string_view name);
[[nodiscard]] result<std::span<const std::byte>> bytes(const void* given, std::size_t size,
                                                       std::string_view name);
/// A duration given by C; more than ten years counts as ten years.
[[nodiscard]] constexpr std::chrono::milliseconds milliseconds(std::uint64_t given) noexcept {
  constexpr std::uint64_t ten_years = 315'360'000'000;
  return std::chrono::milliseconds{std::min(given, ten_years)};
}
/// Refuses unknown flags.
[[nodiscard]] result<void> known_flags(std::uint32_t given, std::uint32_t known,
                                       std::string_view name);
/// Checks an index into `count` `things`, such as "ranks".
[[nodiscard]] result<void> check_index(std::uint32_t given, std::size_t count,
                                       std::string_view things);
/// Checks a value of an enum that begins at 0 or 1.
[[nodiscard]] result<void> in_range(std::uint32_t given, std::uint32_t first, std::uint32_t last,
                                    std::string_view name);

/// A copy that `troupe_free` frees. At least one byte, so that a copy of nothing is not NULL.
[[nodiscard]] void* copy_for_c(const void* data, std::size_t size);
/// The same, NUL-terminated.
[[nodiscard]] char* copy_for_c(std::string_view text);

}  // namespace troupe::c
