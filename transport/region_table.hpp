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

#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/transport/host_memory.hpp"
#include "troupe/transport/memory_file.hpp"
#include "troupe/transport/owned_fd.hpp"
#include "troupe/transport/types.hpp"

namespace troupe::transport {

/// One registered range of memory. Immutable except for its use count. Owns the mapping and the
/// descriptor of memory that the endpoint allocated; engine memory stays owned by the engine. Lives
/// for as long as it is registered or used.
class region {
 public:
  struct description {
    region_id id;
    std::span<std::byte> bytes;
    memory_kind kind{memory_kind::host};
    std::string name;
    /// Keeps memory allocated for the region alive; empty for engine memory. Destroyed last.
    std::shared_ptr<void> owner{};
    std::shared_ptr<const memory_file> file{};  ///< behind the bytes; null for engine memory
    owned_fd dmabuf{};                          ///< behind the bytes; empty if none is known
    std::uint64_t dmabuf_offset{0};             ///< bytes, of the first byte in the dma-buf
    /// The GPU that can copy this device memory; empty if no GPU of this process can, or for host
    /// memory.
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
  /// Index among the GPUs that this process sees; empty for host memory, and for memory of a device
  /// that is not one of these GPUs.
  [[nodiscard]] std::optional<std::uint32_t> gpu() const noexcept { return what_.gpu; }
  [[nodiscard]] const std::string& name() const noexcept { return what_.name; }
  /// The memfd behind the bytes, from its offset 0; -1 for memory that the engine owns.
  [[nodiscard]] int fd() const noexcept { return what_.file ? what_.file->fd() : -1; }
  /// Bytes of the memfd that a peer maps: whole pages.
  [[nodiscard]] std::uint64_t mapped_size() const noexcept {
    return what_.file ? what_.file->mapped_size() : size();
  }
  /// -1 for memory that was not exported as a dma-buf.
  [[nodiscard]] int dmabuf() const noexcept { return what_.dmabuf.get(); }
  /// For callers that lend the memory for longer than the region lives. Empty for engine memory.
  [[nodiscard]] const std::shared_ptr<void>& owner() const noexcept { return what_.owner; }
  /// Offset of the first byte in the dma-buf.
  [[nodiscard]] std::uint64_t dmabuf_offset() const noexcept { return what_.dmabuf_offset; }

 private:
  friend class region_use;
  friend class region_table;
  void end_use() noexcept {
    if (uses_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
  description what_;
  /// Grants and batches that use the region, plus one while it is in the table. One counter for
  /// both keeps the cost to one atomic operation per batch.
  std::atomic<std::uint32_t> uses_{1};
  bool withdrawn_{false};  ///< under the table's lock
};

/// Keeps a region registered while a grant or a batch needs it. Movable; an empty use holds no
/// region.
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
  /// Another use of the same region, which may outlast this one.
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

/// The registered memory of one endpoint. Thread-safe. A lookup takes a shared lock, once per grant
/// or batch and piece; the copies then work on the `region_use`.
class region_table {
 public:
  explicit region_table(std::uint64_t max_regions) : max_regions_{max_regions} {}
  region_table(const region_table&) = delete;
  region_table& operator=(const region_table&) = delete;
  /// Regions still in use are freed with their last use.
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
  /// GPU memory, kept alive by `owner` if given. The errors of `add`.
  [[nodiscard]] result<region_id> add_of_gpu(std::span<std::byte> bytes, std::string name,
                                             std::uint32_t gpu, std::shared_ptr<void> owner = {});
  /// Memory exported as a dma-buf; `gpu` is given if it belongs to a GPU of this process. The
  /// errors of `add`, and `invalid_config` for a description that fits no dma-buf.
  [[nodiscard]] result<region_id> add(std::span<std::byte> bytes, std::string name,
                                      const exported_memory& as,
                                      std::optional<std::uint32_t> gpu = {},
                                      std::shared_ptr<void> owner = {});
  /// Refuses new uses of the region from now on. Idempotent. `unknown_region`.
  [[nodiscard]] result<void> withdraw(region_id id);
  /// `unknown_region`, `overloaded` while the region is used.
  [[nodiscard]] result<void> remove(region_id id);
  /// Registers a handler for removals, until `forget_listener` with the number that is returned. It
  /// is called by the removing thread, without a lock, after the region has left the table. Must
  /// not be called while regions are removed.
  std::uint64_t on_removed(std::function<void(region_id)> handler);
  void forget_listener(std::uint64_t number);
  /// `unknown_region`, also once the region is withdrawn.
  [[nodiscard]] result<region_use> use(region_id id) const;
  /// For backends whose bytes go through the CPU. `unknown_region`; `backend_unavailable` if it is
  /// device memory, which `by` cannot reach.
  [[nodiscard]] result<region_use> use_on_host(region_id id, backend_kind by) const;
  /// For backends that also copy GPU memory by way of the host. `unknown_region`;
  /// `backend_unavailable` if it is device memory of no GPU of this process.
  [[nodiscard]] result<region_use> use_by_way_of_host(region_id id, backend_kind by) const;
  /// `unknown_region`.
  [[nodiscard]] result<std::span<std::byte>> bytes(region_id id) const;
  [[nodiscard]] std::size_t size() const;
  /// The GPUs that have a region, each once.
  [[nodiscard]] std::set<std::uint32_t> gpus() const;
  /// Whether any host memory is owned by the engine: no other process can map that.
  [[nodiscard]] bool has_engine_memory() const;

 private:
  /// The table's own use of a region.
  struct let_go {
    void operator()(region* of) const noexcept { of->end_use(); }
  };
  using owned_region = std::unique_ptr<region, let_go>;

  /// `overloaded` unless the table has room for `count` more regions.
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
