#include "troupe/transport/rdma/device_distance.hpp"

#include <fstream>

#include <gtest/gtest.h>
#include <unistd.h>

// How far a NIC is from memory, read from a folder that looks like /sys of a server with two sockets:
//
//   node 0: pci0000:10  port 10:01.0 -- switch 11:00.0 -- 12:00.0 -- gpu 13:00.0
//                                                      `- 12:01.0 -- nic_switch 14:00.0
//                       port 10:02.0 -- nic_root 15:00.0
//           pci0000:20  port 20:01.0 -- nic_socket 21:00.0
//   node 1: pci0000:80  port 80:01.0 -- nic_far 81:00.0
namespace troupe::transport::rdma {

namespace {

using optional_distance = std::optional<std::uint32_t>;

class fake_sysfs {
 public:
  fake_sysfs() {
    const std::string gpu_switch = "pci0000:10/0000:10:01.0/0000:11:00.0/";
    pci_device(gpu_switch + "0000:12:00.0/0000:13:00.0", 0);
    nic("nic_switch", gpu_switch + "0000:12:01.0/0000:14:00.0", 0);
    nic("nic_root", "pci0000:10/0000:10:02.0/0000:15:00.0", 0);
    nic("nic_socket", "pci0000:20/0000:20:01.0/0000:21:00.0", 0);
    nic("nic_far", "pci0000:80/0000:80:01.0/0000:81:00.0", 1);
    pci_device("pci0000:a0/0000:a0:01.0/0000:ab:00.0", 1);
    nic("nic_lost", "pci0000:90/0000:90:01.0/0000:91:00.0", -1);
    write("devices/system/node/online", "0-1");
    write("devices/system/node/node0/cpulist", "0-3,8-11");
    write("devices/system/node/node0/distance", "10 21");
    write("devices/system/node/node1/cpulist", "4-7,12-15");
    write("devices/system/node/node1/distance", "21 10");
    // Like Soft-RoCE over a virtual port: no device behind it.
    std::filesystem::create_directories(root_ / "class/infiniband/rxe0");
  }
  ~fake_sysfs() { std::filesystem::remove_all(root_); }
  fake_sysfs(const fake_sysfs&) = delete;
  fake_sysfs& operator=(const fake_sysfs&) = delete;
  [[nodiscard]] const std::filesystem::path& root() const noexcept { return root_; }

 private:
  void write(const std::filesystem::path& file, const std::string& text) const {
    std::filesystem::create_directories((root_ / file).parent_path());
    std::ofstream{root_ / file} << text << "\n";
  }
  void pci_device(const std::string& path, int node) const {
    const auto place = std::filesystem::path{"devices"} / path;
    write(place / "numa_node", std::to_string(node));
    const auto link = root_ / "bus/pci/devices" / place.filename();
    std::filesystem::create_directories(link.parent_path());
    std::filesystem::create_directory_symlink(root_ / place, link);
  }
  void nic(const std::string& name, const std::string& path, int node) const {
    pci_device(path, node);
    const auto device = root_ / "devices" / path;
    std::filesystem::create_directories(device / "infiniband" / name);
    std::filesystem::create_directory_symlink("../..", device / "infiniband" / name / "device");
    std::filesystem::create_directories(root_ / "class/infiniband");
    std::filesystem::create_directory_symlink(device / "infiniband" / name,
                                              root_ / "class/infiniband" / name);
  }

  const std::filesystem::path root_{std::filesystem::path{::testing::TempDir()} /
                                    ("troupe-machine-" + std::to_string(::getpid()))};
};

struct device_distance : ::testing::Test {
  fake_sysfs sys;
  [[nodiscard]] optional_distance from(const std::string& nic, const memory_place& memory) const {
    return distance(place_of_rdma_device(nic, sys.root()), memory);
  }
};

}  // namespace

TEST_F(device_distance, a_device_is_placed_by_its_bus_and_its_node) {
  const auto place = place_of_rdma_device("nic_switch", sys.root());
  EXPECT_EQ(place.pci_address(), "0000:14:00.0");
  EXPECT_EQ(place.numa_node, 0);
  EXPECT_EQ(place.pci_path, (std::vector<std::string>{"pci0000:10", "0000:10:01.0", "0000:11:00.0",
                                                      "0000:12:01.0", "0000:14:00.0"}));
}

TEST_F(device_distance, what_the_kernel_does_not_say_is_not_known) {
  for (const auto* name : {"rxe0", "nobody"}) {
    const auto place = place_of_rdma_device(name, sys.root());
    EXPECT_EQ(place.numa_node, -1) << name;
    EXPECT_EQ(place.pci_address(), "") << name;
    EXPECT_EQ(distance(place, memory_near({0}, sys.root())), std::nullopt) << name;
    EXPECT_EQ(distance(place, memory_of_gpu("0000:13:00.0", sys.root())), std::nullopt) << name;
  }
  EXPECT_EQ(from("nic_far", memory_of_gpu("0000:ff:00.0", sys.root())), std::nullopt);
  EXPECT_EQ(from("nic_far", memory_near({0}, "/nowhere")), std::nullopt);
  EXPECT_EQ(from("nic_lost", memory_near({0}, sys.root())), std::nullopt);
}

TEST_F(device_distance, host_memory_is_as_far_as_the_nearest_node_that_the_process_runs_on) {
  struct row {
    std::vector<int> processors;
    const char* nic;
    optional_distance expected;
  };
  const std::vector<row> table{
      {{0, 1}, "nic_switch", 10}, {{0, 1}, "nic_far", 21},        {{5}, "nic_far", 10},
      {{12, 15}, "nic_root", 21}, {{0, 4}, "nic_root", 10},       {{0, 4}, "nic_far", 10},
      {{11}, "nic_socket", 10},   {{}, "nic_root", std::nullopt}, {{77}, "nic_root", std::nullopt},
  };
  for (const auto& [processors, nic, expected] : table) {
    EXPECT_EQ(from(nic, memory_near(processors, sys.root())), expected)
        << nic << " from processor " << (processors.empty() ? -1 : processors[0]);
  }
}

TEST_F(device_distance, memory_of_a_gpu_is_nearer_below_its_switch_than_its_root_than_its_socket) {
  // Also the way that drivers print it.
  for (const auto* address : {"0000:ab:00.0", "0000:AB:00.0", "00000000:AB:00.0"}) {
    EXPECT_EQ(memory_of_gpu(address, sys.root()).gpu->numa_node, 1) << address;
  }
  EXPECT_EQ(memory_of_gpu("00010000:ab:00.0", sys.root()).gpu->numa_node, -1);
  const auto gpu = memory_of_gpu("0000:13:00.0", sys.root());
  EXPECT_EQ(from("nic_switch", gpu), 4U);
  EXPECT_EQ(from("nic_root", gpu), 106U);
  EXPECT_EQ(from("nic_socket", gpu), 1010U);
  EXPECT_EQ(from("nic_far", gpu), 1021U);
  EXPECT_EQ(from("nic_lost", gpu), 2000U) << "elsewhere for certain, wherever";
}

TEST_F(device_distance, of_this_machine_it_is_told_without_failing) {
  const auto memory = memory_of_this_process();
  for (const auto& [pair, value] : memory.between) EXPECT_GT(value, 0U);
  EXPECT_FALSE(memory.gpu);
}

}  // namespace troupe::transport::rdma
