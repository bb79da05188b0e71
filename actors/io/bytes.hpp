#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// The encoding of numbers, strings and lists between agents: numbers are little-endian; a string
/// or a run of bytes follows its length in 4 bytes.
namespace troupe::io {

class byte_writer {
 public:
  template <std::unsigned_integral Number>
  void put(Number number) {
    for (std::size_t i = 0; i < sizeof number; ++i) {
      bytes_.push_back(static_cast<std::byte>(number & 0xff));
      if constexpr (sizeof number > 1) number = static_cast<Number>(number >> 8);
    }
  }
  /// Writes no length.
  void put_raw(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  void put_bytes(std::span<const std::byte> bytes) {
    put(static_cast<std::uint32_t>(bytes.size()));
    put_raw(bytes);
  }
  void put_text(std::string_view text) { put_bytes(std::as_bytes(std::span{text})); }

  [[nodiscard]] const std::vector<std::byte>& bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::vector<std::byte> take() noexcept { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

/// Reads untrusted bytes. A missing field reads as 0 or empty, and `ok` is false from then on;
/// nothing is allocated for a length that the bytes do not have.
class byte_reader {
 public:
  explicit byte_reader(std::span<const std::byte> bytes) noexcept : left_{bytes} {}

  template <std::unsigned_integral Number>
  [[nodiscard]] Number take() noexcept {
    const auto raw = take_raw(sizeof(Number));
    Number number = 0;
    for (std::size_t i = raw.size(); i > 0; --i) {
      if constexpr (sizeof number > 1) number = static_cast<Number>(number << 8);
      number = static_cast<Number>(number | std::to_integer<Number>(raw[i - 1]));
    }
    return number;
  }
  [[nodiscard]] std::span<const std::byte> take_raw(std::size_t size) noexcept {
    if (size > left_.size()) {
      ok_ = false;
      left_ = {};
      return {};
    }
    const auto taken = left_.first(size);
    left_ = left_.subspan(size);
    return taken;
  }
  [[nodiscard]] std::span<const std::byte> take_bytes(std::size_t longest) noexcept {
    const auto size = take<std::uint32_t>();
    if (size <= longest) return take_raw(size);
    ok_ = false;
    left_ = {};
    return {};
  }
  [[nodiscard]] std::string take_text(std::size_t longest) {
    const auto bytes = take_bytes(longest);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  void fail() noexcept {
    ok_ = false;
    left_ = {};
  }

  /// Whether every read so far succeeded.
  [[nodiscard]] bool ok() const noexcept { return ok_; }
  /// Whether every read succeeded and nothing follows.
  [[nodiscard]] bool at_end() const noexcept { return ok_ && left_.empty(); }
  [[nodiscard]] std::span<const std::byte> rest() const noexcept { return left_; }

 private:
  std::span<const std::byte> left_;
  bool ok_{true};
};

}  // namespace troupe::io
