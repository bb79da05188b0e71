#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include "troupe/kvcache/result.hpp"
#include "troupe/kvcache/segment.hpp"

namespace troupe {

/// A set of place numbers, such as the blocks of a request. A lookup takes constant time if the
/// places are spread evenly, else logarithmic time; each place takes 12 bytes.
class place_list {
 public:
  place_list() = default;
  /// The places may be in any order, and repeated.
  explicit place_list(std::vector<std::uint32_t> places);

  /// How many consecutive places from `place` on are in the list; 0 if `place` is not.
  [[nodiscard]] std::uint64_t run_at(std::uint64_t place) const noexcept;
  [[nodiscard]] bool empty() const noexcept { return runs_.empty(); }
  /// The first and the last place; the list must not be empty.
  [[nodiscard]] std::uint32_t first() const noexcept { return runs_.front().begin; }
  [[nodiscard]] std::uint32_t last() const noexcept { return runs_.back().last; }

 private:
  struct run {
    std::uint32_t begin, last;
  };
  std::vector<run> runs_;
  /// For each stretch of 2^shift_ places from the first on, the first run that ends in it or later.
  std::vector<std::uint32_t> stretches_;
  std::uint32_t shift_{0};
};

/// The bytes that every place of a region holds, repeated from place to place. Immutable.
class place_form {
 public:
  /// Bytes [offset, offset + length) of place 0; place n is `n * stride` further on.
  struct piece {
    std::uint64_t offset{0}, length{0}, stride{0};
  };
  /// For at most `places` places. No two pieces may share a byte at any place.
  place_form(std::vector<piece> pieces, std::uint64_t places);

  [[nodiscard]] bool empty() const noexcept { return groups_.empty(); }
  /// How many groups of pieces one call of `run_at` may visit.
  [[nodiscard]] std::size_t looks() const noexcept { return apart_ ? 1 : groups_.size(); }
  /// Length of a run of bytes from `offset` on that belong to places in the list; 0 if there is
  /// none. The run may end where it continues in another piece.
  [[nodiscard]] std::uint64_t run_at(std::uint64_t offset, const place_list& places) const noexcept;
  /// From the first to the last byte of all places in the list, which must not be empty.
  [[nodiscard]] extent hull(const place_list& places) const noexcept;

 private:
  struct part {
    std::uint64_t offset, length;
  };
  /// Pieces with the same stride that lie within one stride.
  struct group {
    std::uint64_t base{0}, stride{0};
    std::vector<part> parts;  ///< sorted, relative to the base
    [[nodiscard]] std::uint64_t width() const noexcept {
      return parts.back().offset + parts.back().length;
    }
  };
  [[nodiscard]] static std::uint64_t run_in(const group& in, std::uint64_t offset,
                                            const place_list& places) noexcept;
  std::vector<group> groups_;  ///< sorted by base
  bool apart_{true};           ///< no group reaches past the base of the next
};

/// Bytes of one region, as permitted by a grant. Compact for repeated bytes, cheap to copy,
/// immutable.
class byte_set {
 public:
  /// The bytes of a form at each of the places in a list.
  struct placed {
    std::shared_ptr<const place_form> form;
    std::shared_ptr<const place_list> places;
    friend bool operator==(const placed&, const placed&) = default;
  };
  /// The empty set.
  byte_set();
  // No moves: a byte_set always has its parts.
  byte_set(const byte_set&) = default;
  byte_set& operator=(const byte_set&) = default;
  ~byte_set() = default;
  /// The bytes of these extents, in any order. They are kept as given, not in their shortest form.
  byte_set(std::vector<extent> extents);  // NOLINT(google-explicit-constructor): it is that list
  byte_set(std::initializer_list<extent> extents);
  /// The bytes of all these places, and of these extents.
  byte_set(std::vector<placed> places, std::vector<extent> extents);

  /// Whether every byte of the range is in the set. The range may span adjacent parts of the set.
  [[nodiscard]] bool covers(const extent& range) const noexcept;
  /// `check_range` for each part of the set; the sentence names the part.
  [[nodiscard]] result<void> check_within(std::uint64_t size) const;
  /// From the first byte to the last; {0, 0} if the set is empty.
  [[nodiscard]] extent hull() const noexcept;
  /// The extents that the set was made from, sorted by offset; without its places.
  [[nodiscard]] const std::vector<extent>& extents() const noexcept;
  /// Whether `extents` is the whole set, without places.
  [[nodiscard]] bool is_listed() const noexcept;
  /// The single range that is the whole set; null if the set has another form.
  [[nodiscard]] const extent* whole() const noexcept;
  /// Whether both have the same extents and the same places.
  friend bool operator==(const byte_set& a, const byte_set& b);

 private:
  struct parts;
  std::shared_ptr<const parts> parts_;
};

}  // namespace troupe
