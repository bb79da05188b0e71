#include "troupe/deploy/cli/latency_histogram.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace troupe::deploy::cli {

namespace {

/// Below 2^bits every value has a bucket of its own; above, each power of two has 2^bits of them.
constexpr std::size_t bucket_of(std::uint64_t value, unsigned bits) noexcept {
  const auto width = static_cast<unsigned>(std::bit_width(value));
  if (width <= bits) return value;
  const auto shift = width - bits - 1;
  return (std::size_t{shift} << bits) + static_cast<std::size_t>(value >> shift);
}

constexpr std::uint64_t last_of(std::size_t bucket, unsigned bits) noexcept {
  const std::size_t per_power = std::size_t{1} << bits;
  if (bucket < 2 * per_power) return bucket;
  const auto shift = static_cast<unsigned>(bucket / per_power - 1);
  return ((std::uint64_t{bucket % per_power + per_power} + 1) << shift) - 1;
}

static_assert(bucket_of(127, 6) == 127 && bucket_of(128, 6) == 128 && bucket_of(129, 6) == 128);
static_assert(last_of(128, 6) == 129 && last_of(bucket_of(1'000'000, 6), 6) >= 1'000'000);

}  // namespace

void latency_histogram::add(std::chrono::nanoseconds value) noexcept {
  const auto ns = static_cast<std::uint64_t>(std::max<std::int64_t>(value.count(), 0));
  ++counts_[bucket_of(ns, sub_bits)];
  ++count_;
  sum_ns_ += static_cast<double>(ns);
  max_ = std::max(max_, value);
}

std::chrono::nanoseconds latency_histogram::percentile(double share) const noexcept {
  if (count_ == 0) return {};
  const auto wanted = static_cast<std::uint64_t>(
      std::ceil(std::clamp(share, 0.0, 1.0) * static_cast<double>(count_)));
  std::uint64_t seen = 0;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    seen += counts_[i];
    if (seen < std::max<std::uint64_t>(wanted, 1)) continue;
    const auto bound = std::chrono::nanoseconds{static_cast<std::int64_t>(last_of(i, sub_bits))};
    return std::min(bound, max_);
  }
  return max_;
}

}  // namespace troupe::deploy::cli
