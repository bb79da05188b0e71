#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "troupe/kvcache/result.hpp"

namespace troupe::transport {

/// The numbers of a list in the kernel's format: "0-3,8,10-11".
[[nodiscard]] std::vector<int> numbers_in(const std::string& text);

/// The NUMA nodes with memory on which this process may allocate, ascending. {0} if the system does
/// not say.
[[nodiscard]] std::vector<int> numa_nodes(const std::filesystem::path& sysfs = "/sys",
                                          const std::filesystem::path& proc = "/proc");

/// The kernel's estimate of the bytes available without swapping, on the node or anywhere; huge
/// pages not counted. UINT64_MAX if the kernel does not say.
[[nodiscard]] std::uint64_t available_bytes(std::optional<std::uint32_t> node = {},
                                            const std::filesystem::path& sysfs = "/sys",
                                            const std::filesystem::path& proc = "/proc");

/// While it lives, pages allocated for the calling thread are on one NUMA node. Destroy it on the
/// thread that created it.
class numa_scope {
 public:
  /// Does nothing without a node, or if the machine has only this one. `invalid_config`: no such
  /// node; `backend_unavailable`: the kernel does not let this process choose.
  [[nodiscard]] static result<numa_scope> enter(std::optional<std::uint32_t> node);
  numa_scope(numa_scope&& other) noexcept;
  numa_scope& operator=(numa_scope&&) = delete;
  ~numa_scope();

 private:
  struct policy {
    int mode{0};
    std::array<std::uint64_t, 16> nodes{};  ///< one bit per node
  };
  explicit numa_scope(std::optional<policy> former) : former_{former} {}

  std::optional<policy> former_;  ///< of the thread; empty if it was not changed
};

}  // namespace troupe::transport
