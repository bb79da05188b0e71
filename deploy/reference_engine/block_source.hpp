#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "troupe/actors/engine.hpp"
#include "troupe/kvcache/block_pool.hpp"
#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::reference {

/// The blocks of one request, from one or more allocations, in the order of its tokens.
class held_blocks {
 public:
  held_blocks() = default;
  explicit held_blocks(kvcache::allocation first) { append(std::move(first)); }

  void append(kvcache::allocation more);
  void append(held_blocks more);
  [[nodiscard]] std::size_t size() const noexcept;
  [[nodiscard]] bool empty() const noexcept { return parts_.empty(); }
  [[nodiscard]] std::vector<block_id> ids() const;
  /// Removes and returns the blocks after the first `keep`.
  [[nodiscard]] held_blocks split_off(std::size_t keep);
  [[nodiscard]] const std::vector<kvcache::allocation>& parts() const noexcept { return parts_; }

 private:
  std::vector<kvcache::allocation> parts_;
};

/// The source of an engine's blocks. Not thread-safe.
class block_source {
 public:
  virtual ~block_source() = default;
  /// `pool_exhausted`.
  [[nodiscard]] virtual result<held_blocks> allocate(std::size_t count) = 0;
  virtual void free(const held_blocks& blocks) = 0;
  /// A transfer in these blocks begins (`pin`) or has become quiescent (`unpin`). Blocks freed in
  /// between are not given out.
  virtual void pin(const held_blocks& blocks) = 0;
  virtual void unpin(const held_blocks& blocks) = 0;
  [[nodiscard]] virtual std::size_t free_blocks() const = 0;
  /// Whether a `receive` that names no blocks gets them from here.
  [[nodiscard]] virtual bool serves_receives() const noexcept = 0;
};

/// The node's pool. It keeps pins and quarantine itself.
[[nodiscard]] std::unique_ptr<block_source> node_blocks(troupe::engine& node);
/// A cache that the engine brought, with its own bookkeeping.
[[nodiscard]] std::unique_ptr<block_source> own_blocks(std::uint32_t blocks);

}  // namespace troupe::reference
