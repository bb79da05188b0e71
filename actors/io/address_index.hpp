#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace troupe::io {

/// Finds the newest numbered range that holds a stretch of addresses. Ranges may overlap and be
/// equal: a peer chooses those of its memories. Not thread-safe, `find` neither.
///
/// The ranges are the leaves of trees, in the order of their age. A node knows which ranges below it
/// are in no other range below it. In the order of their beginnings these are also in the order of
/// their ends, so one binary search tells whether any range below the node holds a stretch. A lookup
/// follows one path from the newest tree that has one. An older tree has more leaves than the next
/// newer one, so trees are few and shallow.
class address_index {
 public:
  /// `number` is not in the index.
  void add(std::uint64_t begin, std::uint64_t length, std::uint64_t number) {
    auto made = std::make_unique<node>();
    made->own = {begin, begin + std::min(length, UINT64_MAX - begin)};
    made->number = number;
    made->newest = last_ + 1;
    // All that may fail comes first.
    std::vector<std::unique_ptr<node>> parents;
    auto leaves = made->leaves;
    for (auto tree = trees_.rbegin(); tree != trees_.rend() && (*tree)->leaves <= leaves; ++tree) {
      leaves += (*tree)->leaves;
      parents.push_back(std::make_unique<node>());
    }
    trees_.reserve(trees_.size() + 1);
    ages_.emplace(number, made->newest);
    ++last_;
    for (auto& parent : parents) {
      parent->newest = made->newest;
      parent->leaves = trees_.back()->leaves + made->leaves;
      parent->older = std::move(trees_.back());
      parent->newer = std::move(made);
      trees_.pop_back();
      made = std::move(parent);
    }
    trees_.push_back(std::move(made));
  }

  void remove(std::uint64_t number) {
    const auto known = ages_.find(number);
    if (known == ages_.end()) return;
    const auto age = known->second;
    ages_.erase(known);
    const auto tree =
        std::ranges::find_if(trees_, [&](const auto& one) { return age <= one->newest; });
    if (take_out(*tree, age)) trees_.erase(tree);
  }

  [[nodiscard]] std::optional<std::uint64_t> find(std::uint64_t begin, std::uint64_t length) const {
    std::size_t nodes = 0;
    return find(begin, length, nodes);
  }
  /// As above, and adds the number of nodes that it looked at.
  [[nodiscard]] std::optional<std::uint64_t> find(std::uint64_t begin, std::uint64_t length,
                                                  std::size_t& nodes) const {
    if (length > UINT64_MAX - begin) return std::nullopt;
    const stretch wanted{begin, begin + length};
    for (auto tree = trees_.rbegin(); tree != trees_.rend(); ++tree) {
      ++nodes;
      if (!holds(**tree, wanted)) continue;
      auto* at = tree->get();
      for (; at->older; ++nodes) at = (holds(*at->newer, wanted) ? at->newer : at->older).get();
      return at->number;
    }
    return std::nullopt;
  }

 private:
  struct stretch {
    std::uint64_t begin{0}, end{0};
  };
  struct node {
    std::unique_ptr<node> older{}, newer{};  ///< both, or neither in a leaf
    std::uint64_t newest{0};                 ///< the age of the newest leaf
    std::size_t leaves{1};
    stretch own{};            ///< of a leaf
    std::uint64_t number{0};  ///< of a leaf
    /// The ranges below that are in no other range below; empty until a lookup needs them.
    std::vector<stretch> outer{};
  };

  static bool holds(node& in, const stretch& wanted) {
    const auto outer = outer_of(in);
    const auto after = std::ranges::upper_bound(outer, wanted.begin, {}, &stretch::begin);
    return after != outer.begin() && std::prev(after)->end >= wanted.end;
  }
  static std::span<const stretch> outer_of(node& of) {
    if (!of.older) return {&of.own, 1};
    if (!of.outer.empty()) return of.outer;
    const auto older = outer_of(*of.older);
    const auto newer = outer_of(*of.newer);
    std::vector<stretch> both(older.size() + newer.size());
    // Of ranges that begin together the longest is first, and holds the others.
    std::ranges::merge(older, newer, both.begin(), [](const stretch& a, const stretch& b) {
      return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
    });
    std::uint64_t end = 0;
    std::erase_if(both, [&](const stretch& one) {
      return one.end <= std::exchange(end, std::max(end, one.end));
    });
    return of.outer = std::move(both);
  }
  /// Returns whether `from` is that leaf, and is to go.
  static bool take_out(std::unique_ptr<node>& from, std::uint64_t age) noexcept {
    if (!from->older) return true;
    const bool is_old = age <= from->older->newest;
    if (take_out(is_old ? from->older : from->newer, age)) {
      auto rest = std::move(is_old ? from->newer : from->older);
      from = std::move(rest);
      return false;
    }
    from->newest = from->newer->newest;
    --from->leaves;
    from->outer.clear();
    return false;
  }

  std::vector<std::unique_ptr<node>> trees_;               ///< oldest first
  std::unordered_map<std::uint64_t, std::uint64_t> ages_;  ///< by number
  std::uint64_t last_{0};
};

}  // namespace troupe::io
