#include "troupe/deploy/reference_engine/kept_prefixes.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace troupe::reference {

namespace {

std::size_t common_beginning(const std::vector<token>& a, const std::vector<token>& b) {
  const auto differ = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  return static_cast<std::size_t>(std::distance(a.begin(), differ.first));
}

}  // namespace

kept_prefixes::match kept_prefixes::take(const std::vector<token>& prompt,
                                         std::uint32_t block_tokens) {
  const auto shorter = [&](const entry& a, const entry& b) {
    return common_beginning(a.prompt, prompt) < common_beginning(b.prompt, prompt);
  };
  const auto best = std::max_element(entries_.begin(), entries_.end(), shorter);
  if (best == entries_.end()) return {};
  const std::size_t tokens = common_beginning(best->prompt, prompt);
  // Less than a block is not worth taking an entry that another request may want.
  if (tokens < block_tokens) return {};
  match found;
  found.tokens = static_cast<std::uint32_t>(tokens);
  found.blocks = std::move(best->blocks);
  found.surplus = found.blocks.split_off((tokens + block_tokens - 1) / block_tokens);
  entries_.erase(best);
  return found;
}

held_blocks kept_prefixes::keep(entry what) {
  if (limit_ == 0) return std::move(what.blocks);
  held_blocks dropped;
  if (entries_.size() == limit_) {
    dropped = std::move(entries_.front().blocks);
    entries_.pop_front();
  }
  entries_.push_back(std::move(what));
  return dropped;
}

held_blocks kept_prefixes::clear() {
  held_blocks blocks;
  for (auto& e : entries_) blocks.append(std::move(e.blocks));
  entries_.clear();
  return blocks;
}

}  // namespace troupe::reference
