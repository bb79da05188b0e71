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

/// Devices that one link can use at once.
inline constexpr std::size_t max_rails = 4;

/// How a peer can reach registered memory.
enum class reach : std::uint8_t {
  windows,  ///< only through a memory window: the registration's own key opens nothing
  key,      ///< with the registration's key, whoever knows it: for devices without windows
};

/// A region as the devices know it: in pieces of `piece_bytes` (the last may be shorter), each
/// registered once with every rail. Immutable.
class registered_region {
 public:
  registered_region(const region& memory, std::uint64_t piece_bytes) noexcept
      : address_{reinterpret_cast<std::uintptr_t>(memory.data())},
        size_{memory.size()},
        piece_bytes_{piece_bytes} {}

  [[nodiscard]] std::uint64_t address() const noexcept { return address_; }
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  /// At least its size, where it is registered in one.
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

/// The calls that register memory; tests have others. As ibv_reg_mr(3) says.
struct registrar {
  std::function<ibv_mr*(ibv_pd*, void* address, std::size_t bytes, int rights)> by_address;
  std::function<ibv_mr*(ibv_pd*, std::uint64_t offset, std::size_t bytes, std::uint64_t address,
                        int dmabuf, int rights)>
      by_dmabuf;

  [[nodiscard]] static registrar of_the_library();
};

struct registration_options {
  /// Bytes registered at once, at most (0: no limit); never more than what the devices report.
  std::uint64_t max_piece{0};
  /// Asked of each device, with the first thing that it registers; one that refuses is not asked again.
  bool relaxed_ordering{true};
  /// Told once of each device that refuses.
  std::function<void(const std::string& sentence)> notice{};
  registrar calls{registrar::of_the_library()};
};

/// Registers regions with the devices, each once, when it is first needed, and forgets them when the
/// endpoint does. Memory that was exported as a dma-buf is registered as that, where the device takes
/// it; else, and for all other memory, by its address. Thread-safe. Registering pins memory and may take
/// long: it happens on the thread of whoever asks, and holds up only those that ask for the same region.
class memory_keys {
 public:
  memory_keys(std::vector<std::shared_ptr<device>> rails, registration_options options);

  /// For people: "relaxed ordering", or why not.
  [[nodiscard]] std::string ordering() const;

  /// Valid as long as the caller keeps the region in use (`region_use`). What fails leaves nothing
  /// behind and may be tried again. `pool_exhausted`: the device or the system refused (the
  /// sentence names the limit, and of a dma-buf what was said to either way); `out_of_range`: in too
  /// many pieces.
  [[nodiscard]] result<const registered_region*> of(const region& memory, reach by);
  /// The region is gone, and with it every grant and batch: nothing is registered of it when this
  /// returns.
  void forget(region_id region);
  /// Regions of which something is registered, or is just being.
  [[nodiscard]] std::size_t size() const;

 private:
  struct entry {
    std::mutex mutex;
    std::array<std::unique_ptr<const registered_region>, 2> made;  ///< one for each `reach`
  };

  [[nodiscard]] result<std::unique_ptr<const registered_region>> register_with_all(
      const region& memory, reach by) const;
  void drop_if_empty(region_id region, std::shared_ptr<entry> failed);

  /// One piece of memory, with one rail.
  struct wanted_piece {
    std::byte* data{nullptr};
    std::uint64_t bytes{0};
    int dmabuf{-1};
    std::uint64_t offset{0};  ///< in the dma-buf
    int rights{0};
  };
  /// What the calls said: 0, or an `errno`; of the dma-buf -1 where there is none.
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
  /// The `errno` with which a rail refused relaxed ordering; 0: it did not.
  mutable std::array<std::atomic<int>, max_rails> strict_{};
  mutable std::mutex mutex_;
  std::unordered_map<region_id, std::shared_ptr<entry>> entries_;
};

}  // namespace troupe::transport::rdma
