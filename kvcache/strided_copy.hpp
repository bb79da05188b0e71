#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "troupe/kvcache/segment.hpp"

namespace troupe::kvcache {

/// A copy of `length` contiguous bytes, repeated along up to five dimensions (head, token, block,
/// plane, layer), each with its own stride on both sides. Simplified as it is built: a dimension
/// that is dense on both sides lengthens the bytes, and two that step alike become one. What is
/// left is written as the fewest segments: the longest dimension as their repetition, the others
/// one segment each.
class strided_copy {
 public:
  explicit strided_copy(std::uint64_t length) noexcept : length_{length} {}

  /// Adds a dimension. Order does not matter. A count of 1 is nothing. At most five.
  void repeat(std::uint64_t count, std::uint64_t local_stride,
              std::uint64_t remote_stride) noexcept;
  /// Merges what merges; after the last `repeat`, before `append_to`.
  void simplify() noexcept;

  /// Segments that one `append_to` adds.
  [[nodiscard]] std::uint64_t segments() const noexcept;
  /// Contiguous runs of bytes in them: what it would take without strides.
  [[nodiscard]] std::uint64_t copies() const noexcept;
  /// Appends the copy that begins at these offsets.
  void append_to(std::vector<segment>& out, std::uint64_t local, std::uint64_t remote) const;

 private:
  struct dimension {
    std::uint64_t count{1};
    std::uint64_t local{0};
    std::uint64_t remote{0};
  };

  bool absorb_one() noexcept;
  bool fuse_one() noexcept;
  void remove(std::size_t index) noexcept;
  void choose_repetition() noexcept;

  std::uint64_t length_;
  std::array<dimension, 5> dimensions_{};
  std::size_t used_{0};
  bool repeats_{false};  ///< dimensions_[0] is what each segment repeats along
};

}  // namespace troupe::kvcache
