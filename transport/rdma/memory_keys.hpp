#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/rdma/device.hpp"
#include "troupe/transport/region_table.hpp"

namespace troupe::transport::rdma {

/// The most devices that one link can use.
inline constexpr std::size_t max_rails = 4;

/// How a peer can reach registered memory.
enum class reach : std::uint8_t {
  windows,  ///< only through a memory window: the registration's own key opens nothing
  key,      ///< with the registration's key, by anyone who knows it: for devices without windows
};

/// A region as registered with the devices: in pieces of `piece_bytes` (the last may be shorter),
/// each registered once with every rail. Immutable.
class registered_region {
 public:
  registered_region(const region& memory, std::uint64_t piece_bytes) noexcept
      : address_{reinterpret_cast<std::uintptr_t>(memory.data())},
        size_{memory.size()},
        piece_bytes_{piece_bytes} {}

  [[nodiscard]] std::uint64_t address() const noexcept { return address_; }
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  /// At least `size()` if the region is registered in one piece.
  [[nodiscard]] std::uint64_t piece_bytes() const noexcept { return piece_bytes_; }
  [[nodiscard]] std::size_t pieces() const noexcept { return pieces_.size(); }
  /// The piece that the byte at `offset` of the region lies in.
  [[nodiscard]] std::size_t piece_at(std::uint64_t offset) const noexcept {
    return pieces_.size() == 1 ? 0 : offset / piece_bytes_;
  }
  [[nodiscard]] std::uint32_t local_key(std::size_t piece, std::size_t rail) const noexcept {
    return pieces_[piece].local[rail];
  }
  [[nodiscard]] ibv_mr* memory(std::size_t piece, std::size_t rail) const noexcept {
    return pieces_[piece].registered[rail].get();
  }

 private:
  friend class memory_keys;
  struct deregister {
    void operator()(ibv_mr* registered) const noexcept { ::ibv_dereg_mr(registered); }
  };
  struct part {
    std::array<std::uint32_t, max_rails> local{};
    std::array<std::unique_ptr<ibv_mr, deregister>, max_rails> registered;
  };

  const std::uint64_t address_, size_, piece_bytes_;
  std::vector<part> pieces_;
};

/// The calls that register memory, replaceable in tests. See ibv_reg_mr(3).
struct registrar {
  std::function<ibv_mr*(ibv_pd*, void* address, std::size_t bytes, int rights)> by_address;
  std::function<ibv_mr*(ibv_pd*, std::uint64_t offset, std::size_t bytes, std::uint64_t address,
                        int dmabuf, int rights)>
      by_dmabuf;

  [[nodiscard]] static registrar of_the_library();
};

struct registration_options {
  /// The most bytes per registration (0: no limit), never more than the devices report.
  std::uint64_t max_piece{0};
  /// Requested from each device with its first registration; a device that refuses is not asked
  /// again.
  bool relaxed_ordering{true};
  /// Called once for each device that refuses relaxed ordering.
  std::function<void(const std::string& sentence)> notice{};
  registrar calls{registrar::of_the_library()};
};

/// Registers each region with the devices once, at its first use, and forgets it when the endpoint
/// does. Memory exported as a dma-buf is registered as a dma-buf if the device accepts that;
/// otherwise, like all other memory, by its address. Thread-safe. Registering pins memory and may
/// take long: it runs on the caller's thread and blocks only callers that need the same region.
class memory_keys {
 public:
  memory_keys(std::vector<std::shared_ptr<device>> rails, registration_options options);

  /// For people: "relaxed ordering", or why it is not used.
  [[nodiscard]] std::string ordering() const;

  /// Valid as long as the caller keeps the region in use (`region_use`). A failed call leaves
  /// nothing registered and may be repeated. `pool_exhausted`: the device or the system refused
  /// (the sentence names the limit, and for a dma-buf the answers to both ways of registering);
  /// `out_of_range`: the region would need too many pieces.
  [[nodiscard]] result<const registered_region*> of(const region& memory, reach by);
  /// Deregisters a region that is gone, and with it all its grants and batches. Nothing of the
  /// region is registered when this returns.
  void forget(region_id region);
  /// The number of regions that are registered or being registered.
  [[nodiscard]] std::size_t size() const;

 private:
  struct entry {
    std::mutex mutex;
    std::array<std::unique_ptr<const registered_region>, 2> made;  ///< one per `reach`
  };

  [[nodiscard]] result<std::unique_ptr<const registered_region>> register_with_all(
      const region& memory, reach by) const;
  void drop_if_empty(region_id region, std::shared_ptr<entry> failed);

  /// One piece of memory to register with one rail.
  struct wanted_piece {
    std::byte* data{nullptr};
    std::uint64_t bytes{0};
    int dmabuf{-1};
    std::uint64_t offset{0};  ///< in the dma-buf
    int rights{0};
  };
  /// What each call returned: 0 or an `errno`; `by_dmabuf` is -1 if there is no dma-buf.
  struct refusal {
    int by_dmabuf{-1};
    int by_address{0};
  };
  [[nodiscard]] ibv_mr* try_both(const device& rail, const wanted_piece& piece, int more_rights,
                                 refusal& why) const;
  [[nodiscard]] ibv_mr* register_piece(std::size_t rail, const wanted_piece& piece,
                                       refusal& why) const;
  [[nodiscard]] unexpected refused(const region& memory, const device& by, reach wanted,
                                   const refusal& why) const;

  const std::vector<std::shared_ptr<device>> rails_;
  const registration_options options_;
  const std::uint64_t piece_bytes_;
  /// The `errno` with which a rail refused relaxed ordering; 0 if it did not.
  mutable std::array<std::atomic<int>, max_rails> strict_{};
  mutable std::mutex mutex_;
  std::unordered_map<region_id, std::shared_ptr<entry>> entries_;
};

}  // namespace troupe::transport::rdma
