#include "troupe/deploy/cli/process_name.hpp"

#include <algorithm>
#include <cstddef>

namespace troupe::deploy::cli {

namespace {

constexpr std::size_t max_name = 15;  // of a process, as Linux keeps it

/// The position of the numbers in a node's name: after "decode" in "decode-0-tp3". Its size if
/// there are none.
std::size_t numbers_of(std::string_view node) {
  const auto before_digits = [node](std::size_t end) {
    while (end > 0 && node[end - 1] >= '0' && node[end - 1] <= '9') --end;
    return end;
  };
  const auto ends_with = [node](std::size_t end, std::string_view word) {
    return node.substr(0, end).ends_with(word);
  };
  auto at = before_digits(node.size());
  if (at == node.size()) return at;
  constexpr std::string_view rank = "-tp";
  if (ends_with(at, rank)) {
    const auto end = at - rank.size();
    at = before_digits(end);
    if (at == end || !ends_with(at, "-")) return end;
  }
  return ends_with(at, "-") ? at - 1 : node.size();
}

}  // namespace

std::string process_name(std::string_view node) {
  const std::string prefix{"troupe:"};
  const auto room = max_name - prefix.size();
  if (node.size() <= room) return prefix + std::string{node};
  auto numbers = node.substr(numbers_of(node));
  numbers = numbers.substr(numbers.size() - std::min(numbers.size(), room));
  return prefix + std::string{node.substr(0, room - numbers.size())} + std::string{numbers};
}

}  // namespace troupe::deploy::cli
