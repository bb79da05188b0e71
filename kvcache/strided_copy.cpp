#include "troupe/kvcache/strided_copy.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace troupe::kvcache {

void strided_copy::repeat(std::uint64_t count, std::uint64_t local_stride,
                          std::uint64_t remote_stride) noexcept {
  if (count <= 1 || used_ == dimensions_.size()) return;
  dimensions_[used_++] = {count, local_stride, remote_stride};
}

void strided_copy::simplify() noexcept {
  while (absorb_one() || fuse_one()) {
  }
  choose_repetition();
}

bool strided_copy::absorb_one() noexcept {
  for (std::size_t i = 0; i < used_; ++i) {
    if (dimensions_[i].local == length_ && dimensions_[i].remote == length_) {
      length_ *= dimensions_[i].count;
      remove(i);
      return true;
    }
  }
  return false;
}

bool strided_copy::fuse_one() noexcept {
  for (std::size_t i = 0; i < used_; ++i) {
    dimension& inner = dimensions_[i];
    for (std::size_t j = 0; j < used_; ++j) {
      const dimension& outer = dimensions_[j];
      if (i == j || outer.local != inner.local * inner.count ||
          outer.remote != inner.remote * inner.count ||
          inner.count * outer.count > std::numeric_limits<std::uint32_t>::max()) {
        continue;
      }
      inner.count *= outer.count;
      remove(j);
      return true;
    }
  }
  return false;
}

void strided_copy::remove(std::size_t index) noexcept {
  for (std::size_t i = index + 1; i < used_; ++i) dimensions_[i - 1] = dimensions_[i];
  --used_;
}

/// Moves the longest dimension that a segment can express to the front: its repetitions must not
/// overlap on either side. The others follow in the order of their addresses.
void strided_copy::choose_repetition() noexcept {
  std::size_t best = used_;
  for (std::size_t i = 0; i < used_; ++i) {
    const dimension& d = dimensions_[i];
    const bool sayable = d.local >= length_ && d.remote >= length_ &&
                         d.count <= std::numeric_limits<std::uint32_t>::max();
    if (sayable && (best == used_ || d.count > dimensions_[best].count)) best = i;
  }
  repeats_ = best < used_;
  if (repeats_) std::swap(dimensions_[0], dimensions_[best]);
  std::sort(dimensions_.begin() + (repeats_ ? 1 : 0),
            dimensions_.begin() + static_cast<std::ptrdiff_t>(used_),
            [](const dimension& a, const dimension& b) { return a.local < b.local; });
}

std::uint64_t strided_copy::segments() const noexcept {
  std::uint64_t product = 1;
  for (std::size_t i = repeats_ ? 1 : 0; i < used_; ++i) product *= dimensions_[i].count;
  return product;
}

std::uint64_t strided_copy::copies() const noexcept {
  return segments() * (repeats_ ? dimensions_[0].count : 1);
}

void strided_copy::append_to(std::vector<segment>& out, std::uint64_t local,
                             std::uint64_t remote) const {
  segment next{local, remote, length_, 0, 0, 1};
  if (repeats_) {
    next.local_stride = dimensions_[0].local;
    next.remote_stride = dimensions_[0].remote;
    next.count = static_cast<std::uint32_t>(dimensions_[0].count);
  }
  std::array<std::uint64_t, 5> at{};
  for (;;) {
    out.push_back(next);
    std::size_t d = repeats_ ? 1 : 0;
    for (; d < used_; ++d) {
      next.local_offset += dimensions_[d].local;
      next.remote_offset += dimensions_[d].remote;
      if (++at[d] < dimensions_[d].count) break;
      next.local_offset -= dimensions_[d].local * dimensions_[d].count;
      next.remote_offset -= dimensions_[d].remote * dimensions_[d].count;
      at[d] = 0;
    }
    if (d >= used_) return;
  }
}

}  // namespace troupe::kvcache
