#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace troupe::transport::rdma {

/// Where the kernel describes its devices, and where programs open them.
struct kernel_folders {
  std::filesystem::path sysfs{"/sys"};
  std::filesystem::path dev{"/dev"};
};

/// A device that the kernel has, whether or not the user-space library lists it.
struct kernel_device {
  std::string name;
  /// Driver of its PCI device: "bnxt_en". Empty if it has none (Soft-RoCE).
  std::string driver;
  /// What programs open under /dev/infiniband: "uverbs0". Empty if the kernel offers nothing to
  /// open.
  std::string verbs;
  /// ABI version that the kernel driver and the user-space driver must share: "8". Empty if
  /// unknown.
  std::string abi;
};

/// Sorted by name. Fields that the kernel does not provide are empty.
[[nodiscard]] std::vector<kernel_device> kernel_devices(
    const std::filesystem::path& sysfs = "/sys");

/// Why the user-space library does not list a device, and what to do.
[[nodiscard]] std::string why_not_listed(const kernel_device& device,
                                         const std::filesystem::path& dev = "/dev");

}  // namespace troupe::transport::rdma
