#include "troupe/deploy/c/arguments.hpp"

#include <cstdlib>
#include <new>

namespace troupe::c {

namespace {

std::string in_quotes(std::string_view name) {
  std::string out{"`"};
  out.append(name).append("`");
  return out;
}

}  // namespace

result<void> present(std::initializer_list<named_pointer> all) {
  for (const auto& [at, name] : all)
    if (auto here = present(at, name); !here) return here;
  return {};
}

result<void> check_size(std::uint32_t size, std::uint32_t least, std::size_t known,
                        std::string_view name) {
  if (size >= least && size <= max_struct_bytes) return {};
  std::string why{"`"};
  why.append(name).append(".size` is ").append(std::to_string(size));
  why.append("; set it to the size of the struct, here ").append(std::to_string(known));
  return bad_argument(std::move(why));
}

result<std::string> optional_text(const char* given, std::string_view name) {
  if (!given) return std::string{};
  const auto length = ::strnlen(given, max_text_bytes + 1);
  if (length > max_text_bytes) return bad_argument(in_quotes(name).append(" has more than 1 MiB"));
  return std::string(given, length);
}

result<std::string> text(const char* given, std::string_view name) {
  if (auto here = present(given, name); !here) return fail(here.error());
  auto out = optional_text(given, name);
  if (out && out->empty()) return bad_argument(in_quotes(name).append(" is empty"));
  return out;
}

result<std::vector<std::string>> texts(const char* const* given, std::size_t count,
                                       std::string_view name) {
  if (count > max_list_items) return bad_argument(in_quotes(name).append(" has too many entries"));
  if (count != 0)
    if (auto here = present(given, name); !here) return fail(here.error());
  std::vector<std::string> out;
  out.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::string entry{name};
    entry.append("[").append(std::to_string(i)).append("]");
    auto one = text(given[i], entry);
    if (!one) return fail(one.error());
    out.push_back(std::move(*one));
  }
  return out;
}

result<std::span<const std::uint32_t>> numbers(const std::uint32_t* given, std::size_t count,
                                               std::string_view name) {
  return list(given, count, name);
}

result<std::vector<block_id>> blocks(const std::uint32_t* given, std::size_t count,
                                     std::string_view name) {
  if (auto fine = numbers(given, count, name); !fine) return fail(fine.error());
  std::vector<block_id> out(count);
  static_assert(sizeof(block_id) == sizeof(std::uint32_t));
  if (count != 0) std::memcpy(static_cast<void*>(out.data()), given, count * sizeof *given);
  return out;
}

result<std::span<const std::byte>> bytes(const void* given, std::size_t size,
                                         std::string_view name) {
  if (size != 0)
    if (auto here = present(given, name); !here) return fail(here.error());
  return std::span{static_cast<const std::byte*>(given), size};
}

result<void> known_flags(std::uint32_t given, std::uint32_t known, std::string_view name) {
  if ((given & ~known) == 0) return {};
  return bad_argument(in_quotes(name).append(" has bits that this release does not know: ") +
                      std::to_string(given & ~known));
}

result<void> check_index(std::uint32_t given, std::size_t count, std::string_view things) {
  if (given < count) return {};
  std::string why{"`index` is "};
  why.append(std::to_string(given)).append(" of ").append(std::to_string(count));
  return fail(errc::out_of_range, why.append(" ").append(things));
}

result<void> in_range(std::uint32_t given, std::uint32_t first, std::uint32_t last,
                      std::string_view name) {
  if (given >= first && given <= last) return {};
  auto why = in_quotes(name);
  why.append(" is ").append(std::to_string(given)).append("; it goes from ");
  why.append(std::to_string(first)).append(" to ").append(std::to_string(last));
  return bad_argument(std::move(why));
}

void* copy_for_c(const void* data, std::size_t size) {
  void* out = std::malloc(size + 1);
  if (!out) throw std::bad_alloc{};
  if (size != 0) std::memcpy(out, data, size);
  static_cast<char*>(out)[size] = '\0';
  return out;
}

char* copy_for_c(std::string_view text) {
  return static_cast<char*>(copy_for_c(text.data(), text.size()));
}

}  // namespace troupe::c
