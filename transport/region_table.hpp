#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <shared_mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/transport/host_memory.hpp"
#include "troupe/transport/memory_file.hpp"
#include "troupe/transport/owned_fd.hpp"
#include "troupe/transport/types.hpp"

namespace troupe::transport {

/// One registered range of memory. Immutable but for its use count. Owns the mapping and the
/// descriptor of memory that the endpoint allocated; memory of the engine stays the engine's. Lives
/// while it is registered or used, whichever ends last.
class region {
 public:
  struct description {
    region_id id;
    std::span<std::byte> bytes;
    memory_kind kind{memory_kind::host};
    std::string name;
    /// Keeps memory that was allocated for the region; empty for memory of the engine. Ends last.
    std::shared_ptr<void> owner{};
    std::shared_ptr<const memory_file> file{};  ///< behind the bytes; null for memory of the engine
    owned_fd dmabuf{};                          ///< behind the bytes; empty: none that we know of
    std::uint64_t dmabuf_offset{0};             ///< bytes, of the first byte in the dma-buf
    /// The GPU whose copies reach memory of a device; empty: none of this process, or memory of the host.
    std::optional<std::uint32_t> gpu{};
  };

  explicit region(description what) : what_{std::move(what)} {}
  region(const region&) = delete;
  region& operator=(const region&) = delete;

  [[nodiscard]] region_id id() const noexcept { return what_.id; }
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return what_.bytes; }
  [[nodiscard]] std::byte* data() const noexcept { return what_.bytes.data(); }
  [[nodiscard]] std::uint64_t size() const noexcept { return what_.bytes.size(); }
  [[nodiscard]] memory_kind kind() const noexcept { return what_.kind; }
  /// Of this process, by its place among those that it sees; empty for memory of the host, and for
  /// memory of a device that is no GPU we know.
  [[nodiscard]] std::optional<std::uint32_t> gpu() const noexcept { return what_.gpu; }
  [[nodiscard]] const std::string& name() const noexcept { return what_.name; }
  /// The memfd behind the bytes, from its offset 0; -1 for memory that the engine owns.
  [[nodiscard]] int fd() const noexcept { return what_.file ? what_.file->fd() : -1; }
  /// What a peer maps of the memfd: its whole pages.
  [[nodiscard]] std::uint64_t mapped_size() const noexcept {
    return what_.file ? what_.file->mapped_size() : size();
  }
  /// -1 for memory that was not exported as a dma-buf.
  [[nodiscard]] int dmabuf() const noexcept { return what_.dmabuf.get(); }
  /// For who lends the memory to others longer than the region lasts. Empty for memory of the engine.
  [[nodiscard]] const std::shared_ptr<void>& owner() const noexcept { return what_.owner; }
  /// Of the first byte in the dma-buf.
  [[nodiscard]] std::uint64_t dmabuf_offset() const noexcept { return what_.dmabuf_offset; }

 private:
  friend class region_use;
  friend class region_table;
  void end_use() noexcept {
    if (uses_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
  description what_;
  /// Grants and batches that use it, and one more while it is in the table. One number for both, so
  /// that a batch pays for it once.
  std::atomic<std::uint32_t> uses_{1};
  bool withdrawn_{false};  ///< under the table's lock
};

/// Keeps a region registered while a grant or a batch needs it. Movable; an empty one uses nothing.
class region_use {
 public:
  region_use() = default;
  region_use(region_use&& other) noexcept : region_{std::exchange(other.region_, nullptr)} {}
  region_use& operator=(region_use&& other) noexcept {
    if (this != &other) {
      release();
      region_ = std::exchange(other.region_, nullptr);
    }
    return *this;
  }
  ~region_use() { release(); }

  explicit operator bool() const noexcept { return region_ != nullptr; }
  const region& operator*() const noexcept { return *region_; }
  const region* operator->() const noexcept { return region_; }
  /// Another use of the same region, for who may need it longer than this one lasts.
  [[nodiscard]] region_use again() const noexcept {
    if (region_ == nullptr) return {};
    region_->uses_.fetch_add(1, std::memory_order_relaxed);
    return region_use{*region_};
  }
  /// Ends the use early.
  void release() noexcept {
    if (region_ != nullptr) std::exchange(region_, nullptr)->end_use();
  }

 private:
  friend class region_table;
  explicit region_use(region& used) noexcept : region_{&used} {}
  region* region_{nullptr};
};

/// The registered memory of one endpoint. Thread-safe. Lookups take a shared lock, once per grant
/// or batch and piece; what moves bytes then works on the `region_use`.
class region_table {
 public:
  explicit region_table(std::uint64_t max_regions) : max_regions_{max_regions} {}
  region_table(const region_table&) = delete;
  region_table& operator=(const region_table&) = delete;
  /// What is still used goes with its last use.
  ~region_table() = default;

  /// Zeroed memory in a sealed memfd. `invalid_config`, `pool_exhausted`, `overloaded`.
  [[nodiscard]] result<region_id> allocate(std::uint64_t size, std::string name);
  /// One such region for each size, all or none, with these options. `invalid_config`,
  /// `pool_exhausted`, `overloaded`, `backend_unavailable`.
  [[nodiscard]] result<allocated_regions> allocate(std::span<const std::uint64_t> sizes,
                                                   const std::string& name,
                                                   const host_memory_options& how);
  /// Memory of the engine. `invalid_config`, `already_exists`, `overloaded`.
  [[nodiscard]] result<region_id> add(std::span<std::byte> bytes, std::string name);
  /// Memory of a GPU, kept by `owner` if that is not empty. The same.
  [[nodiscard]] result<region_id> add_of_gpu(std::span<std::byte> bytes, std::string name,
                                             std::uint32_t gpu, std::shared_ptr<void> owner = {});
  /// Memory that was exported as a dma-buf; of `gpu`, where its GPU is one of this process. The same,
  /// and `invalid_config` for what no dma-buf can be.
  [[nodiscard]] result<region_id> add(std::span<std::byte> bytes, std::string name,
                                      const exported_memory& as,
                                      std::optional<std::uint32_t> gpu = {},
                                      std::shared_ptr<void> owner = {});
  /// From now on nobody begins to use the region. Idempotent. `unknown_region`.
  [[nodiscard]] result<void> withdraw(region_id id);
  /// `unknown_region`, `overloaded` while it is used.
  [[nodiscard]] result<void> remove(region_id id);
  /// Whoever wants to know of each removal, until `forget_listener` with the number that this
  /// returns. Called by the thread that removed, after the region is out of the table and without a
  /// lock. To be set while nothing is removed.
  std::uint64_t on_removed(std::function<void(region_id)> handler);
  void forget_listener(std::uint64_t number);
  /// `unknown_region`, also once the region was withdrawn.
  [[nodiscard]] result<region_use> use(region_id id) const;
  /// For backends whose bytes go through the processor. `unknown_region`; `backend_unavailable`: it is
  /// memory of a device, which `by` cannot reach.
  [[nodiscard]] result<region_use> use_on_host(region_id id, backend_kind by) const;
  /// For backends that also copy memory of a GPU by way of the host. The same, of memory of a device
  /// that is no GPU of this process.
  [[nodiscard]] result<region_use> use_by_way_of_host(region_id id, backend_kind by) const;
  /// `unknown_region`.
  [[nodiscard]] result<std::span<std::byte>> bytes(region_id id) const;
  [[nodiscard]] std::size_t size() const;
  /// The GPUs that have a region, each once.
  [[nodiscard]] std::set<std::uint32_t> gpus() const;
  /// Whether there is memory of the host that the engine owns: no other process can map it.
  [[nodiscard]] bool has_engine_memory() const;

 private:
  /// The table's own use of a region.
  struct let_go {
    void operator()(region* of) const noexcept { of->end_use(); }
  };
  using owned_region = std::unique_ptr<region, let_go>;

  /// Whether the table has places for so many more. `overloaded`.
  [[nodiscard]] result<void> check_has_room(std::size_t count, const std::string& name) const;
  [[nodiscard]] result<void> check_has_room_locked(std::size_t count,
                                                   const std::string& name) const;
  [[nodiscard]] result<region_id> add_file(std::shared_ptr<const memory_file> file,
                                           std::string name);
  [[nodiscard]] result<region_id> add_checked(region::description what);
  [[nodiscard]] result<region_id> insert(region::description what);

  const std::uint64_t max_regions_;
  mutable std::shared_mutex mutex_;
  std::unordered_map<region_id, owned_region> regions_;
  std::map<std::uintptr_t, const region*> by_address_;
  std::uint32_t last_id_{0};
  std::uint64_t last_listener_{0};
  std::map<std::uint64_t, std::function<void(region_id)>> listeners_;
};

}  // namespace troupe::transport
