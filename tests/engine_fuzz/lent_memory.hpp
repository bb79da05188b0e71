#pragma once

/// Memory that an engine lends to a put until its outcome, and what the engine then does to it.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "scenario.hpp"

namespace troupe::engine_fuzz {

class lent_memory {
 public:
  virtual ~lent_memory() = default;
  lent_memory(const lent_memory&) = delete;
  lent_memory& operator=(const lent_memory&) = delete;

  [[nodiscard]] std::span<const std::byte> bytes() const { return memory_; }
  [[nodiscard]] std::size_t size() const { return given_.size(); }
  /// Whether those are the bytes that were lent.
  [[nodiscard]] bool is(std::span<const std::byte> other) const;
  /// Call when the put has begun.
  virtual void put_began() {}
  /// Call when the outcome has come. `bytes` must not be read afterwards.
  virtual void take_back() = 0;

 protected:
  explicit lent_memory(std::span<std::byte> memory) : memory_{memory} {}
  /// Remembers the bytes that are lent from now on.
  void lend() { given_.assign(memory_.begin(), memory_.end()); }

  std::span<std::byte> memory_;

 private:
  std::vector<std::byte> given_;
};

/// A block that the engine puts a value from.
struct lent_block {
  std::span<std::byte> bytes;
  std::function<void()> give_back;  ///< also overwrites it
  /// Gives the block back unchanged, then takes another one from the pool and overwrites that,
  /// since a put reads the first. `give_back` then applies to the other block. Null for the
  /// engine's own memory.
  std::function<void()> swap;
};
using block_lender = std::function<std::optional<lent_block>()>;

/// Lends memory of each kind.
class memory_lender {
 public:
  explicit memory_lender(block_lender blocks);
  ~memory_lender();

  /// `seed` determines its bytes.
  [[nodiscard]] std::unique_ptr<lent_memory> lend(const put_plan& put, std::uint64_t seed);

 private:
  struct slab;
  block_lender blocks_;
  std::shared_ptr<slab> slab_;
};

}  // namespace troupe::engine_fuzz
