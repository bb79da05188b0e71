#include "troupe/deploy/reference_engine/block_source.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace troupe::reference {

void held_blocks::append(kvcache::allocation more) {
  if (!more.blocks.empty()) parts_.push_back(std::move(more));
}

void held_blocks::append(held_blocks more) {
  std::move(more.parts_.begin(), more.parts_.end(), std::back_inserter(parts_));
}

std::size_t held_blocks::size() const noexcept {
  std::size_t count = 0;
  for (const auto& part : parts_) count += part.blocks.size();
  return count;
}

std::vector<block_id> held_blocks::ids() const {
  std::vector<block_id> all;
  for (const auto& part : parts_) all.insert(all.end(), part.blocks.begin(), part.blocks.end());
  return all;
}

held_blocks held_blocks::split_off(std::size_t keep) {
  held_blocks kept;
  held_blocks cut;
  for (auto& part : parts_) {
    const auto here = std::min(keep, part.blocks.size());
    const auto at = part.blocks.begin() + static_cast<std::ptrdiff_t>(here);
    kept.append(kvcache::allocation{part.owner, {part.blocks.begin(), at}});
    cut.append(kvcache::allocation{part.owner, {at, part.blocks.end()}});
    keep -= here;
  }
  *this = std::move(kept);
  return cut;
}

namespace {

class node_source final : public block_source {
 public:
  explicit node_source(troupe::engine& node) : node_{node} {}

  result<held_blocks> allocate(std::size_t count) override {
    auto blocks = node_.allocate_blocks(static_cast<std::uint32_t>(count));
    if (!blocks) return fail(blocks.error());
    return held_blocks{std::move(*blocks)};
  }
  void free(const held_blocks& blocks) override {
    // Cannot fail: it refuses only foreign blocks, and we free only our own.
    for (const auto& part : blocks.parts()) (void)node_.free_blocks(part.owner, part.blocks);
  }
  void pin(const held_blocks&) override {}
  void unpin(const held_blocks&) override {}
  std::size_t free_blocks() const override { return node_.report().pool.blocks_free; }
  bool serves_receives() const noexcept override { return true; }

 private:
  troupe::engine& node_;
};

class own_source final : public block_source {
 public:
  explicit own_source(std::uint32_t blocks) : pool_{blocks} {}

  result<held_blocks> allocate(std::size_t count) override {
    auto blocks = pool_.allocate(static_cast<std::uint32_t>(count));
    if (!blocks) return fail(blocks.error());
    return held_blocks{std::move(*blocks)};
  }
  void free(const held_blocks& blocks) override {
    for (const auto& part : blocks.parts()) (void)pool_.free(part.owner, part.blocks);
  }
  void pin(const held_blocks& blocks) override {
    for (const auto& part : blocks.parts()) (void)pool_.pin(part.owner, part.blocks);
  }
  void unpin(const held_blocks& blocks) override {
    for (const auto& part : blocks.parts()) (void)pool_.unpin(part.owner, part.blocks);
  }
  std::size_t free_blocks() const override { return pool_.counters().free; }
  bool serves_receives() const noexcept override { return false; }

 private:
  kvcache::block_pool pool_;
};

}  // namespace

std::unique_ptr<block_source> node_blocks(troupe::engine& node) {
  return std::make_unique<node_source>(node);
}

std::unique_ptr<block_source> own_blocks(std::uint32_t blocks) {
  return std::make_unique<own_source>(blocks);
}

}  // namespace troupe::reference
