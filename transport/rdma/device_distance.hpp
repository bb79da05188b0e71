#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

/// The distance between a device and the memory that it is to move, from what the kernel reports.
namespace troupe::transport::rdma {

/// Where in the machine a device is.
struct machine_place {
  std::int32_t numa_node{-1};  ///< -1 if unknown
  /// "pci0000:16", "0000:16:02.0", "0000:17:00.0": from the root complex over bridges and switches
  /// down to the device. Empty if it is no PCI device (Soft-RoCE over a virtual port).
  std::vector<std::string> pci_path;

  /// "0000:17:00.0", or empty.
  [[nodiscard]] std::string pci_address() const {
    return pci_path.empty() ? std::string{} : pci_path.back();
  }
};

/// `sysfs` is /sys. Anything missing there is reported as unknown.
[[nodiscard]] machine_place place_of_rdma_device(const std::string& name,
                                                 const std::filesystem::path& sysfs = "/sys");
/// `address` as in "0000:17:00.0".
[[nodiscard]] machine_place place_of_pci_device(const std::string& address,
                                                const std::filesystem::path& sysfs = "/sys");

/// The memory that a device is chosen for.
struct memory_place {
  /// The device that owns the memory. Empty for host memory.
  std::optional<machine_place> gpu;
  /// The NUMA nodes that host memory may be on.
  std::vector<std::int32_t> nodes;
  /// Distances between NUMA nodes as the firmware reports them: 10 is local (ACPI, SLIT).
  std::map<std::pair<std::int32_t, std::int32_t>, std::uint32_t> between;
};

/// Host memory first touched by threads on these processors, so on their NUMA nodes.
[[nodiscard]] memory_place memory_near(const std::vector<int>& processors,
                                       const std::filesystem::path& sysfs = "/sys");
/// Host memory of this process, derived from the processors that it may run on.
[[nodiscard]] memory_place memory_of_this_process();
/// Memory of the GPU at this PCI address.
[[nodiscard]] memory_place memory_of_gpu(const std::string& address,
                                         const std::filesystem::path& sysfs = "/sys");

/// A distance for comparison only. Host memory: the distance to the nearest of its NUMA nodes. GPU
/// memory: the number of bridges and switches on the path if both are below one root port or
/// switch; 100 more if they share only the root complex; 1000 plus the distance of their NUMA nodes
/// if they do not share even that. Empty if unknown.
[[nodiscard]] std::optional<std::uint32_t> distance(const machine_place& device,
                                                    const memory_place& memory);

}  // namespace troupe::transport::rdma
