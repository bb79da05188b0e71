#include "troupe/transport/rdma/kernel_device.hpp"

#include <algorithm>
#include <system_error>
#include <utility>

#include "troupe/transport/folder.hpp"

namespace troupe::transport::rdma {

std::vector<kernel_device> kernel_devices(const std::filesystem::path& sysfs) {
  std::vector<kernel_device> devices;
  for (const auto& entry : entries_of(sysfs / "class/infiniband")) {
    kernel_device device;
    device.name = entry.filename().string();
    std::error_code none;
    device.driver =
        std::filesystem::read_symlink(entry / "device/driver", none).filename().string();
    devices.push_back(std::move(device));
  }
  std::ranges::sort(devices, {}, &kernel_device::name);
  // This folder also holds a plain file.
  for (const auto& entry : entries_of(sysfs / "class/infiniband_verbs")) {
    const auto name = line_of(entry / "ibdev");
    const auto device = std::ranges::find(devices, name, &kernel_device::name);
    if (device == devices.end()) continue;
    device->verbs = entry.filename().string();
    device->abi = line_of(entry / "abi_version");
  }
  return devices;
}

std::string why_not_listed(const kernel_device& device, const std::filesystem::path& dev) {
  std::string known = device.driver.empty() ? "" : "driver " + device.driver;
  if (!device.abi.empty()) known += (known.empty() ? "ABI " : ", ABI ") + device.abi;
  const auto it_is_there = "the kernel has it" + (known.empty() ? "" : " (" + known + ")");
  if (device.verbs.empty()) {
    return it_is_there + ", but gives programs no access to it: load the kernel's module ib_uverbs";
  }
  const auto file = dev / "infiniband" / device.verbs;
  std::error_code none;
  // The library lists no device without its file, as in a container that was not given the device.
  if (!std::filesystem::exists(file, none)) {
    return it_is_there + ", but " + file.string() +
           " is not here: give /dev/infiniband to this container, or have udev make it";
  }
  return it_is_there +
         ", but no user-space driver here knows it: install ibverbs-providers of the same release "
         "as the kernel's driver";
}

}  // namespace troupe::transport::rdma
