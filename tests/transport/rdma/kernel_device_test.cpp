#include "troupe/transport/rdma/kernel_device.hpp"

#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "troupe/transport/rdma/device.hpp"

// Devices that the kernel has and the user-space library does not list, read from folders that look
// like the kernel's. The library reads the real folders, in which no device has these names.
namespace troupe::transport::rdma {

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class fake_kernel {
 public:
  fake_kernel() {
    // Everything is there except a user-space driver.
    device("bnxt_re7", "bnxt_en");
    verbs("uverbs0", "bnxt_re7", "8");
    write("dev/infiniband/uverbs0", "");
    // As in a container that was given only the first device.
    device("mlx5_77", "mlx5_core");
    verbs("uverbs1", "mlx5_77", "1");
    device("ionic_7", "ionic");
    // Like Soft-RoCE over a virtual port: no device behind it.
    std::filesystem::create_directories(sysfs() / "class/infiniband/rxe_7");
    verbs("uverbs3", "rxe_7", "2");
    write("dev/infiniband/uverbs3", "");
    write("sys/class/infiniband_verbs/abi_version", "6");
  }
  ~fake_kernel() { std::filesystem::remove_all(root_); }
  fake_kernel(const fake_kernel&) = delete;
  fake_kernel& operator=(const fake_kernel&) = delete;
  [[nodiscard]] kernel_folders folders() const { return {.sysfs = sysfs(), .dev = root_ / "dev"}; }
  [[nodiscard]] std::filesystem::path sysfs() const { return root_ / "sys"; }

 private:
  void write(const std::filesystem::path& file, const std::string& text) const {
    std::filesystem::create_directories((root_ / file).parent_path());
    std::ofstream{root_ / file} << text << "\n";
  }
  void device(const std::string& name, const std::string& driver) const {
    const auto pci = sysfs() / "devices/pci0000:10" / name;
    std::filesystem::create_directories(pci / "infiniband" / name);
    std::filesystem::create_directory_symlink("../..", pci / "infiniband" / name / "device");
    std::filesystem::create_directories(sysfs() / "bus/pci/drivers" / driver);
    std::filesystem::create_directory_symlink(sysfs() / "bus/pci/drivers" / driver, pci / "driver");
    std::filesystem::create_directories(sysfs() / "class/infiniband");
    std::filesystem::create_directory_symlink(pci / "infiniband" / name,
                                              sysfs() / "class/infiniband" / name);
  }
  void verbs(const std::string& file, const std::string& name, const std::string& abi) const {
    const auto folder = std::filesystem::path{"sys/class/infiniband_verbs"} / file;
    write(folder / "ibdev", name);
    write(folder / "abi_version", abi);
  }

  const std::filesystem::path root_{std::filesystem::path{::testing::TempDir()} /
                                    ("troupe-kernel-" + std::to_string(::getpid()))};
};

struct devices_of_the_kernel : ::testing::Test {
  fake_kernel kernel;

  [[nodiscard]] device_view look_at(const std::string& name) const {
    for (auto& view : look_at_devices({}, kernel.folders())) {
      if (view.name == name) return view;
    }
    ADD_FAILURE() << name << " is not seen";
    return {};
  }
  /// The device that is chosen among these, or the error.
  [[nodiscard]] static std::string chosen(const std::string& wanted,
                                          const std::vector<device_view>& devices) {
    const auto places = choose_places({.device = wanted}, devices);
    if (places) return places->at(0).device;
    EXPECT_EQ(places.error().code, errc::no_device);
    return places.error().message;
  }
  [[nodiscard]] static device_view good_device() {
    device_view made;
    made.name = "good_0";
    port_view port;
    port.number = 1;
    port.attributes.state = IBV_PORT_ACTIVE;
    port.gids.resize(1);
    made.ports.push_back(port);
    return made;
  }
};

}  // namespace

TEST_F(devices_of_the_kernel, a_user_space_driver_that_does_not_fit_is_named_by_the_kernels) {
  EXPECT_EQ(describe(look_at("bnxt_re7")),
            "bnxt_re7: the kernel has it (driver bnxt_en, ABI 8), but no user-space driver here "
            "knows it: install ibverbs-providers of the same release as the kernel's driver");
  EXPECT_THAT(
      describe(look_at("rxe_7")),
      AllOf(HasSubstr("has it (ABI 2), but no user-space driver"), Not(HasSubstr("driver ,"))));
}

TEST_F(devices_of_the_kernel, one_that_programs_cannot_reach_is_no_matter_of_drivers) {
  const auto not_given = describe(look_at("mlx5_77"));
  EXPECT_THAT(not_given, HasSubstr("has it (driver mlx5_core, ABI 1), but "));
  EXPECT_THAT(not_given, HasSubstr("/dev/infiniband/uverbs1 is not here"));
  const auto not_offered = describe(look_at("ionic_7"));
  EXPECT_THAT(not_offered, HasSubstr("has it (driver ionic), but "));
  EXPECT_THAT(not_offered, HasSubstr("ib_uverbs"));
  for (const auto& said : {not_given, not_offered}) {
    EXPECT_THAT(said, Not(HasSubstr("ibverbs-providers")));
  }
}

TEST_F(devices_of_the_kernel, naming_one_says_what_it_lacks_whatever_works_beside_it) {
  auto devices = look_at_devices({}, kernel.folders());
  devices.push_back(good_device());
  for (const auto* name : {"bnxt_re7", "good_0,bnxt_re7"}) {
    EXPECT_THAT(chosen(name, devices), AllOf(HasSubstr("RDMA device bnxt_re7: the kernel has it"),
                                             HasSubstr("ibverbs-providers")))
        << name;
  }
}

TEST_F(devices_of_the_kernel, passed_by_on_its_own_and_named_where_nothing_is_left) {
  const std::vector<device_view> bad{look_at("bnxt_re7"), look_at("ionic_7")};
  EXPECT_THAT(chosen("auto", bad),
              AllOf(HasSubstr("bnxt_re7: the kernel has it"), HasSubstr("ibverbs-providers"),
                    HasSubstr("ionic_7: the kernel has it"), HasSubstr("ib_uverbs")));
  EXPECT_EQ(chosen("auto", {bad[0], good_device(), bad[1]}), "good_0");
  EXPECT_EQ(chosen("^ionic_7", {bad[0], good_device(), bad[1]}), "good_0");
}

TEST_F(devices_of_the_kernel, without_the_kernels_folders_there_is_none) {
  EXPECT_TRUE(kernel_devices("/nowhere").empty());
  EXPECT_EQ(kernel_devices(kernel.sysfs()).size(), 4u);
}

}  // namespace troupe::transport::rdma
