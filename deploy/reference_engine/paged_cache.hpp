#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "troupe/deploy/reference_engine/number_format.hpp"
#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/layout.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::reference {

/// The memory of one rank's cache: a layout and its regions, checked against each other once. The
/// owner of the memory keeps it alive longer than every copy of this object. Immutable.
class cache_memory {
 public:
  /// Errors of `kvcache::validate`, and `invalid_config` for a dtype that is not stored here.
  [[nodiscard]] static result<std::shared_ptr<const cache_memory>> create(
      kvcache::cache_layout layout, std::vector<std::span<std::byte>> regions);
  /// Allocates zeroed memory for a private cache.
  [[nodiscard]] static result<std::shared_ptr<const cache_memory>> allocate(
      kvcache::cache_layout layout);

  [[nodiscard]] const kvcache::cache_layout& layout() const noexcept { return layout_; }
  [[nodiscard]] std::span<std::byte> region(std::size_t index) const { return regions_[index]; }
  [[nodiscard]] number_format format() const noexcept { return format_; }

 private:
  cache_memory() = default;
  kvcache::cache_layout layout_;
  std::vector<std::span<std::byte>> regions_;
  std::vector<std::vector<std::byte>> owned_;
  number_format format_{number_format::fp32};
};

/// The cache of one request in one rank's memory: the blocks that hold its tokens, and the slot of
/// its state. Reads and writes fp32 values, for any stored type and arrangement. Thread rule: one
/// thread at a time for one request; requests with disjoint blocks do not disturb each other.
class paged_cache {
 public:
  /// `out_of_range` for a block or slot that is not in the layout, or a missing slot of a layout
  /// with state.
  [[nodiscard]] static result<paged_cache> create(std::shared_ptr<const cache_memory> memory,
                                                  std::vector<block_id> blocks,
                                                  std::optional<std::uint32_t> state_slot = {});

  /// Tokens that the blocks hold.
  [[nodiscard]] std::uint32_t capacity() const noexcept;
  /// Heads of the model that this rank holds in a layer; of a latent 0..1, of a recurrence none.
  [[nodiscard]] kvcache::head_span heads(std::uint32_t layer) const noexcept;
  [[nodiscard]] const kvcache::cache_layout& layout() const noexcept { return memory_->layout(); }

  /// One head's values of one token. `plane` 0: K or the latent, 1: V. `head` counts over the model
  /// and must be held here; `values` has head_dim elements.
  void write(std::uint32_t layer, std::uint32_t plane, std::uint32_t head, std::uint32_t token,
             std::span<const float> values);
  /// One head's values of the tokens [0, tokens), token after token: tokens * head_dim elements.
  void read(std::uint32_t layer, std::uint32_t plane, std::uint32_t head, std::uint32_t tokens,
            std::span<float> values) const;

  /// All that this rank holds of the tokens [0, tokens) and of the state, in an order that depends
  /// on the model and the parallel coordinates only, not on the arrangement.
  [[nodiscard]] std::vector<std::byte> export_tokens(std::uint32_t tokens) const;
  /// The reverse of `export_tokens`, into a cache of the same model, rank and stored type.
  /// `layout_mismatch` if the number of bytes does not match these tokens.
  [[nodiscard]] result<void> import_tokens(std::uint32_t tokens, std::span<const std::byte> bytes);

  /// This rank's part of the request's state tensor `index`: bytes [first, first + size) of the
  /// model's.
  struct state_part {
    std::uint64_t first{0};
    std::span<std::byte> bytes;
  };
  [[nodiscard]] state_part state(std::size_t index) const;

 private:
  paged_cache() = default;
  [[nodiscard]] std::byte* at(const kvcache::plane& plane, std::uint32_t local_head,
                              std::uint32_t token) const noexcept;
  std::shared_ptr<const cache_memory> memory_;
  std::vector<block_id> blocks_;
  std::uint32_t state_slot_{0};
};

/// The whole cache of one request, put together from the caches of ranks. A value is written to
/// every part that holds its head and read from the first that does. With one part of parallel size
/// 1 it is just that cache.
class model_cache {
 public:
  /// `layout_mismatch` when some head of some layer or part of a state is in none of the parts;
  /// `invalid_config` without parts.
  [[nodiscard]] static result<model_cache> create(std::vector<paged_cache> parts);

  [[nodiscard]] std::uint32_t capacity() const noexcept;
  void write(std::uint32_t layer, std::uint32_t plane, std::uint32_t head, std::uint32_t token,
             std::span<const float> values);
  void read(std::uint32_t layer, std::uint32_t plane, std::uint32_t head, std::uint32_t tokens,
            std::span<float> values) const;
  /// The values of state tensor `index` of the whole model, fp32.
  void write_state(std::size_t index, std::span<const float> values);
  void read_state(std::size_t index, std::span<float> values) const;
  [[nodiscard]] const std::vector<paged_cache>& parts() const noexcept { return parts_; }

 private:
  explicit model_cache(std::vector<paged_cache> parts) : parts_{std::move(parts)} {}
  std::vector<paged_cache> parts_;
};

}  // namespace troupe::reference
