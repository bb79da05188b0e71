#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "troupe/kvcache/segment.hpp"

namespace troupe::kvcache {

/// A copy of `length` contiguous bytes, repeated along up to five dimensions (head, token, block,
/// plane, layer), each with its own stride on both sides. `simplify` merges dimensions: one that is
/// dense on both sides lengthens the contiguous bytes, and two with matching steps become one. The
/// rest is written as the fewest segments: the longest dimension as their repetition, one segment
/// for each step of the others.
class strided_copy {
 public:
  explicit strided_copy(std::uint64_t length) noexcept : length_{length} {}

  /// Adds a dimension, at most five, in any order. A count of 1 has no effect.
  void repeat(std::uint64_t count, std::uint64_t local_stride,
              std::uint64_t remote_stride) noexcept;
  /// Merges dimensions where possible. Call it after the last `repeat` and before `append_to`.
  void simplify() noexcept;

  /// Number of segments that one `append_to` adds.
  [[nodiscard]] std::uint64_t segments() const noexcept;
  /// Number of contiguous runs of bytes in them: the copies needed without strides.
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
  bool repeats_{false};  ///< each segment repeats along dimensions_[0]
};

}  // namespace troupe::kvcache
