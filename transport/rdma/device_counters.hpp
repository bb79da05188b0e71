#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace troupe::transport::rdma {

/// Something that a device counts, under the name that its driver gives it.
struct device_counter {
  std::string name;
  std::uint64_t value{0};
};

/// What a port has counted of packets sent again, refused, lost or late, and of times that it went
/// down, since its driver was loaded; what is still 0 is left out. By name. Empty where the driver
/// counts nothing: the names are its own.
[[nodiscard]] std::vector<device_counter> trouble_of_port(
    const std::string& device, std::uint8_t port,
    const std::filesystem::path& sysfs = "/sys/class/infiniband");

/// How often a port has sent requests again since its driver was loaded: its peers did not answer in
/// time, missed something, or were not ready. Of all queue pairs of all processes: no device counts
/// it for one. Empty where the driver has none of the counters for it that are known here.
[[nodiscard]] std::optional<std::uint64_t> retries_of_port(
    const std::string& device, std::uint8_t port,
    const std::filesystem::path& sysfs = "/sys/class/infiniband");

/// What came to a counter since it read `before`. Where a driver was reloaded meanwhile, and began
/// at 0 again, what it has counted since then.
[[nodiscard]] std::optional<std::uint64_t> counted_since(std::optional<std::uint64_t> before,
                                                         std::optional<std::uint64_t> now);

}  // namespace troupe::transport::rdma
