#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <vector>

#include "troupe/kvcache/result.hpp"
#include "troupe/kvcache/segment.hpp"

namespace troupe {

/// Numbers of places, of the blocks of a request say. To look one up takes a time that does not grow
/// with their number where they are spread evenly, and else with its logarithm; each takes 12 bytes.
class place_list {
 public:
  place_list() = default;
  /// In any order, also repeated.
  explicit place_list(std::vector<std::uint32_t> places);

  /// How many consecutive places from `place` on are in the list; 0: it is not.
  [[nodiscard]] std::uint64_t run_at(std::uint64_t place) const noexcept;
  [[nodiscard]] bool empty() const noexcept { return runs_.empty(); }
  /// Of a list that is not empty.
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

/// What each place of a region holds, where all hold the same: bytes that repeat from place to place.
/// Immutable.
class place_form {
 public:
  /// Bytes [offset, offset + length) of place 0, and of place n `n * stride` further on.
  struct piece {
    std::uint64_t offset{0}, length{0}, stride{0};
  };
  /// Of `places` places at most. No two pieces share a byte at any place.
  place_form(std::vector<piece> pieces, std::uint64_t places);

  [[nodiscard]] bool empty() const noexcept { return groups_.empty(); }
  /// At how many groups of pieces one call of `run_at` may look.
  [[nodiscard]] std::size_t looks() const noexcept { return apart_ ? 1 : groups_.size(); }
  /// Bytes from `offset` on, without a gap, that are of places in the list; 0: none. What goes on in
  /// another piece may be left out.
  [[nodiscard]] std::uint64_t run_at(std::uint64_t offset, const place_list& places) const noexcept;
  /// The first byte of any place in the list, which is not empty, and the one behind the last.
  [[nodiscard]] extent hull(const place_list& places) const noexcept;

 private:
  struct part {
    std::uint64_t offset, length;
  };
  /// Pieces of one stride that stand within it.
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
  bool apart_{true};           ///< no group reaches behind the base of the next
};

/// Bytes of one region: what a grant permits. Small where they repeat, cheap to copy, immutable.
class byte_set {
 public:
  /// All that a form holds at each of the places in a list.
  struct placed {
    std::shared_ptr<const place_form> form;
    std::shared_ptr<const place_list> places;
    friend bool operator==(const placed&, const placed&) = default;
  };
  /// None.
  byte_set();
  // No moves: there is no byte_set without its parts.
  byte_set(const byte_set&) = default;
  byte_set& operator=(const byte_set&) = default;
  ~byte_set() = default;
  /// These; sorted here. A list is what it was made from, not its shortest form.
  byte_set(std::vector<extent> extents);  // NOLINT(google-explicit-constructor): it is that list
  byte_set(std::initializer_list<extent> extents);
  /// All of the places in each list, and these.
  byte_set(std::vector<placed> places, std::vector<extent> extents);

  /// Whether every byte of the range is in the set. Bytes that touch are one range, wherever they come
  /// from.
  [[nodiscard]] bool covers(const extent& range) const noexcept;
  /// As `check_range` for each part of it; the sentence names the part.
  [[nodiscard]] result<void> check_within(std::uint64_t size) const;
  /// From the first byte to the last. No bytes: {0, 0}.
  [[nodiscard]] extent hull() const noexcept;
  /// Those that the set was made from, sorted by offset; without its places.
  [[nodiscard]] const std::vector<extent>& extents() const noexcept;
  /// Whether `extents` are all of it.
  [[nodiscard]] bool is_listed() const noexcept;
  /// The one range that is all of it; null: it is another form.
  [[nodiscard]] const extent* whole() const noexcept;
  /// The same lists, and the same places.
  friend bool operator==(const byte_set& a, const byte_set& b);

 private:
  struct parts;
  std::shared_ptr<const parts> parts_;
};

}  // namespace troupe
