#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>

namespace troupe::io {

/// Finds the numbered range that holds an address. Ranges may overlap and be equal. A lookup takes
/// logarithmic time, plus a step for each range that begins before the address by no more than the
/// length of the longest range.
class address_index {
 public:
  void add(std::uint64_t begin, std::uint64_t length, std::uint64_t number) {
    by_begin_.emplace(begin, range{length, number, ++last_});
    longest_ = std::max(longest_, length);
  }
  void remove(std::uint64_t begin, std::uint64_t number) {
    const auto [first, last] = by_begin_.equal_range(begin);
    const auto at =
        std::find_if(first, last, [&](const auto& one) { return one.second.number == number; });
    if (at != last) by_begin_.erase(at);
  }
  /// The newest range that holds all these bytes and that `accept` accepts.
  template <class Accept>
  [[nodiscard]] std::optional<std::uint64_t> find(std::uint64_t begin, std::uint64_t length,
                                                  Accept accept) const {
    const range* newest = nullptr;
    for (auto at = by_begin_.upper_bound(begin); at != by_begin_.begin();) {
      --at;
      const auto before = begin - at->first;
      if (before > longest_ || length > longest_ - before) break;
      const auto& one = at->second;
      if (before > one.length || length > one.length - before || !accept(one.number)) continue;
      if (newest == nullptr || newest->age < one.age) newest = &one;
    }
    if (newest == nullptr) return std::nullopt;
    return newest->number;
  }

 private:
  struct range {
    std::uint64_t length, number, age;
  };
  std::multimap<std::uint64_t, range> by_begin_;
  std::uint64_t longest_{0};  ///< of all ranges ever added
  std::uint64_t last_{0};
};

}  // namespace troupe::io
