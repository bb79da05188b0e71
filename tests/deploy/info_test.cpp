#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <link.h>
#include <nlohmann/json.hpp>
#include <sys/mount.h>

#include "command.hpp"
#include "sanitized.hpp"
#include "scratch_folder.hpp"

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using troupe::testing::have_verbs;
using troupe::testing::run;

/// A backend's entry in `troupe info --json`.
nlohmann::json backend_of(const nlohmann::json& info, const std::string& name) {
  for (const auto& backend : info.at("backends")) {
    if (backend.at("name") == name) return backend;
  }
  return {};
}

TEST(info, names_every_backend_and_gives_the_reason_of_each) {
  const auto ended = run({"info", "--json"});
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto info = nlohmann::json::parse(ended.out);
  std::map<std::string, bool> usable;
  for (const auto& backend : info.at("backends")) {
    usable[backend.at("name")] = backend.at("usable");
    EXPECT_NE(backend.at("reason"), "") << backend;
  }
  EXPECT_EQ(usable.count("shm"), 1u);
  EXPECT_EQ(usable.count("rdma"), 1u);
  EXPECT_EQ(usable.count("xgmi"), 1u);
  EXPECT_TRUE(usable["tcp"]);
}

TEST(info, says_for_people_what_it_says_as_json) {
  const auto text = run({"info"});
  const auto info = nlohmann::json::parse(run({"info", "--json"}).out);
  ASSERT_EQ(text.code, 0);
  for (const auto* key : {"version", "compiler", "CAF", "build type"})
    EXPECT_THAT(text.out, HasSubstr(info.at("troupe").at(key).get<std::string>()));
  for (const auto* key : {"kernel", "processor", "cores"})
    EXPECT_THAT(text.out, HasSubstr(info.at("machine").at(key).get<std::string>()));
}

/// With the devices of tests/verbs: two rails, at both ends.
struct info_of_rdma : ::testing::Test {
  void SetUp() override {
    if (!have_verbs()) GTEST_SKIP() << "needs RDMA devices: tests/run verbs";
  }
};

TEST_F(info_of_rdma, shows_every_device_with_its_port_and_the_address_that_it_would_use) {
  const auto ended = run({"info", "--json"});
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto info = nlohmann::json::parse(ended.out);
  const std::string devices = info.at("machine").at("RDMA devices");
  const std::pair<const char*, const char*> expected[]{{"rxe0a", "10.77.0.1"},
                                                       {"rxe0b", "10.77.0.2"},
                                                       {"rxe1a", "10.77.1.1"},
                                                       {"rxe1b", "10.77.1.2"}};
  for (const auto& [name, address] : expected) {
    const auto begin = devices.find(std::string{name} + " port 1: ");
    ASSERT_NE(begin, std::string::npos) << name << " in " << devices;
    EXPECT_THAT(devices.substr(begin, devices.find(';', begin) - begin),
                AllOf(HasSubstr("port 1: active, Ethernet, "), HasSubstr(" Gb/s, MTU 4096, "),
                      HasSubstr("GID 1 ::ffff:" + std::string{address} + " (RoCE v2)")));
  }
  const auto rdma = backend_of(info, "rdma");
  EXPECT_EQ(rdma.at("usable"), true);
  EXPECT_THAT(rdma.at("reason").get<std::string>(), HasSubstr("rxe0a port 1 gid 1"));

  const auto text = run({"info"}).out;
  for (const auto& [name, address] : expected) {
    EXPECT_THAT(text, AllOf(HasSubstr(name), HasSubstr(address)));
  }
}

/// Hides the content of a folder of this machine for the lifetime of the object.
class emptied_folder {
 public:
  explicit emptied_folder(const char* path) : path_{path} {
    EXPECT_EQ(::mount("tmpfs", path_, "tmpfs", 0, nullptr), 0) << path_;
  }
  ~emptied_folder() { ::umount(path_); }
  emptied_folder(const emptied_folder&) = delete;
  emptied_folder& operator=(const emptied_folder&) = delete;

 private:
  const char* path_;
};

/// Makes a file of this machine appear empty for the lifetime of the object.
class emptied_file {
 public:
  explicit emptied_file(std::string path) : path_{std::move(path)} {
    std::ofstream{empty_.path() + "/empty"};
    EXPECT_EQ(::mount((empty_.path() + "/empty").c_str(), path_.c_str(), nullptr, MS_BIND, nullptr),
              0)
        << path_;
  }
  ~emptied_file() { ::umount(path_.c_str()); }
  emptied_file(const emptied_file&) = delete;
  emptied_file& operator=(const emptied_file&) = delete;

 private:
  const std::string path_;
  const troupe::testing::scratch_folder empty_;
};

/// The path at which the loader finds the library. Empty if it does not.
std::string file_of_library(const char* name) {
  void* library = ::dlopen(name, RTLD_LAZY);
  const link_map* loaded = nullptr;
  if (library == nullptr || ::dlinfo(library, RTLD_DI_LINKMAP, &loaded) != 0) return {};
  std::string path = loaded->l_name;
  ::dlclose(library);
  return std::filesystem::canonical(path);
}

/// What `info` reports of an unusable rdma backend: its reason, and the devices.
std::vector<std::string> said_of_unusable_rdma() {
  const auto info = nlohmann::json::parse(run({"info", "--json"}).out);
  const auto rdma = backend_of(info, "rdma");
  EXPECT_EQ(rdma.at("usable"), false);
  return {rdma.at("reason"), info.at("machine").at("RDMA devices")};
}

TEST_F(info_of_rdma, names_the_devices_that_no_user_space_driver_knows) {
  const emptied_folder drivers{"/etc/libibverbs.d"};
  for (const auto& said : said_of_unusable_rdma()) {
    for (const auto* device : {"rxe0a: ", "rxe0b: ", "rxe1a: ", "rxe1b: "})
      EXPECT_THAT(said, HasSubstr(device + std::string{"the kernel has it (ABI 2), but no user-"}));
    EXPECT_THAT(said, HasSubstr("install ibverbs-providers"));
  }
}

TEST_F(info_of_rdma, says_that_the_library_is_missing) {
  const emptied_file library{file_of_library("libibverbs.so.1")};
  for (const auto& said : said_of_unusable_rdma())
    EXPECT_THAT(said, AllOf(HasSubstr("rxe0a: libibverbs cannot be opened ("),
                            HasSubstr("install Debian's libibverbs1")));
}

TEST_F(info_of_rdma, names_the_devices_that_a_container_was_not_given) {
  const emptied_folder given{"/dev/infiniband"};
  for (const auto& said : said_of_unusable_rdma()) {
    EXPECT_THAT(said, HasSubstr("rxe0a: the kernel has it (ABI 2), but /dev/infiniband/uverbs"));
    EXPECT_THAT(said, AllOf(HasSubstr("is not here"), Not(HasSubstr("ibverbs-providers"))));
  }
}

}  // namespace
