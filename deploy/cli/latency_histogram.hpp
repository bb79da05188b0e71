#pragma once

#include <array>
#include <chrono>
#include <cstdint>

namespace troupe::deploy::cli {

/// Counts any number of durations in bounded memory: a percentile is at most 1/64 above the exact
/// one; smallest and largest are exact.
class latency_histogram {
 public:
  void add(std::chrono::nanoseconds value) noexcept;
  [[nodiscard]] std::uint64_t count() const noexcept { return count_; }
  [[nodiscard]] std::chrono::nanoseconds max() const noexcept { return max_; }
  /// 0 when empty.
  [[nodiscard]] std::chrono::duration<double, std::nano> mean() const noexcept {
    return std::chrono::duration<double, std::nano>{
        count_ == 0 ? 0.0 : sum_ns_ / static_cast<double>(count_)};
  }
  /// The smallest value that at least this share (0 to 1) of all values do not exceed. 0 when
  /// empty.
  [[nodiscard]] std::chrono::nanoseconds percentile(double share) const noexcept;

 private:
  static constexpr unsigned sub_bits = 6;
  std::array<std::uint64_t, (64 - sub_bits + 1) << sub_bits> counts_{};
  std::uint64_t count_{0};
  std::chrono::nanoseconds max_{0};
  double sum_ns_{0};  // the values of a long run do not fit an integer
};

}  // namespace troupe::deploy::cli
