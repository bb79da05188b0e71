#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "troupe/actors/engine.hpp"
#include "troupe/deploy/cli/bench_options.hpp"
#include "troupe/deploy/cli/bench_pattern.hpp"

namespace troupe::deploy::cli {

/// The cache of one side of the bench, divided among the requests that run at once.
class bench_slots {
 public:
  /// Takes all blocks of the node's pool. Errors of `engine::allocate_blocks`.
  [[nodiscard]] static result<bench_slots> create(engine& node, const bench_options& options);

  [[nodiscard]] std::size_t size() const noexcept { return slots_.size(); }
  [[nodiscard]] const std::vector<block_id>& blocks(std::size_t slot) const { return slots_[slot]; }
  [[nodiscard]] std::uint32_t tokens() const noexcept { return tokens_; }
  /// The cache of the request in that slot.
  [[nodiscard]] cache_part part(std::size_t slot) const noexcept {
    return {layout_, regions_, slots_[slot], tokens_};
  }

 private:
  const kvcache::cache_layout* layout_{nullptr};
  std::uint32_t tokens_{0};
  std::vector<std::span<std::byte>> regions_;
  std::vector<std::vector<block_id>> slots_;
};

}  // namespace troupe::deploy::cli
