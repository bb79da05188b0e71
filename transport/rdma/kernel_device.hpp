#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace troupe::transport::rdma {

/// Where the kernel tells of its devices, and where programs open them.
struct kernel_folders {
  std::filesystem::path sysfs{"/sys"};
  std::filesystem::path dev{"/dev"};
};

/// A device that the kernel has, whatever the user-space library makes of it.
struct kernel_device {
  std::string name;
  /// Of the PCI device that it is on: "bnxt_en". Empty: it is on none (Soft-RoCE).
  std::string driver;
  /// What programs open under /dev/infiniband: "uverbs0". Empty: the kernel lets none in.
  std::string verbs;
  /// Version of what its driver and the user-space one have to agree on: "8". Empty: not known.
  std::string abi;
};

/// By name. What is not there is left empty.
[[nodiscard]] std::vector<kernel_device> kernel_devices(
    const std::filesystem::path& sysfs = "/sys");

/// Of a device that the user-space library does not list: why, and what to do.
[[nodiscard]] std::string why_not_listed(const kernel_device& device,
                                         const std::filesystem::path& dev = "/dev");

}  // namespace troupe::transport::rdma
