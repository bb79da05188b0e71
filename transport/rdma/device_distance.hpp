#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

/// How far a device is from the memory that it is to move, as the kernel describes the machine.
namespace troupe::transport::rdma {

/// Where in the machine a device is.
struct machine_place {
  std::int32_t numa_node{-1};  ///< -1: not known
  /// "pci0000:16", "0000:16:02.0", "0000:17:00.0": from the root complex over bridges and switches
  /// down to the device. Empty: no PCI device (Soft-RoCE over a virtual port).
  std::vector<std::string> pci_path;

  /// "0000:17:00.0", or empty.
  [[nodiscard]] std::string pci_address() const {
    return pci_path.empty() ? std::string{} : pci_path.back();
  }
};

/// `sysfs` is /sys. What is not there is not known.
[[nodiscard]] machine_place place_of_rdma_device(const std::string& name,
                                                 const std::filesystem::path& sysfs = "/sys");
/// `address` as in "0000:17:00.0".
[[nodiscard]] machine_place place_of_pci_device(const std::string& address,
                                                const std::filesystem::path& sysfs = "/sys");

/// The memory that a device is chosen for.
struct memory_place {
  /// The device whose memory it is. None: host memory.
  std::optional<machine_place> gpu;
  /// Host memory: the NUMA nodes that it may be on.
  std::vector<std::int32_t> nodes;
  /// From one node to another as the firmware tells: 10 is local (ACPI, SLIT).
  std::map<std::pair<std::int32_t, std::int32_t>, std::uint32_t> between;
};

/// Host memory that threads on these processors touch first: on their nodes.
[[nodiscard]] memory_place memory_near(const std::vector<int>& processors,
                                       const std::filesystem::path& sysfs = "/sys");
/// Host memory of this process, by the processors that it may run on.
[[nodiscard]] memory_place memory_of_this_process();
/// Memory of the GPU at this PCI address.
[[nodiscard]] memory_place memory_of_gpu(const std::string& address,
                                         const std::filesystem::path& sysfs = "/sys");

/// To be compared only. Host memory: that of the nearest of its nodes. Memory of a GPU: bridges and
/// switches on the way, where both are below one root port or switch; further by 100 where they only
/// have their root complex in common, and further by 1000 plus the distance of their nodes where not
/// even that. Empty: not known.
[[nodiscard]] std::optional<std::uint32_t> distance(const machine_place& device,
                                                    const memory_place& memory);

}  // namespace troupe::transport::rdma
