#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "troupe/kvcache/result.hpp"

namespace troupe::transport {

/// The numbers of a list as the kernel prints it: "0-3,8,10-11".
[[nodiscard]] std::vector<int> numbers_in(const std::string& text);

/// The NUMA nodes with memory that this process may allocate on, ascending. {0} where the system does
/// not say.
[[nodiscard]] std::vector<int> numa_nodes(const std::filesystem::path& sysfs = "/sys",
                                          const std::filesystem::path& proc = "/proc");

/// Bytes that can be had on the node, or anywhere, without swapping, as the kernel estimates it; huge
/// pages not counted. UINT64_MAX where it does not say.
[[nodiscard]] std::uint64_t available_bytes(std::optional<std::uint32_t> node = {},
                                            const std::filesystem::path& sysfs = "/sys",
                                            const std::filesystem::path& proc = "/proc");

/// While it lives, pages that the calling thread makes the kernel allocate are on one NUMA node. To be
/// destroyed by the thread that made it.
class numa_scope {
 public:
  /// Without a node, or with the only one there is, nothing is changed. `invalid_config`: no such node;
  /// `backend_unavailable`: the kernel does not let this process choose.
  [[nodiscard]] static result<numa_scope> enter(std::optional<std::uint32_t> node);
  numa_scope(numa_scope&& other) noexcept;
  numa_scope& operator=(numa_scope&&) = delete;
  ~numa_scope();

 private:
  struct policy {
    int mode{0};
    std::array<std::uint64_t, 16> nodes{};  ///< a bit for each
  };
  explicit numa_scope(std::optional<policy> former) : former_{former} {}

  std::optional<policy> former_;  ///< of the thread; empty: it was not changed
};

}  // namespace troupe::transport
