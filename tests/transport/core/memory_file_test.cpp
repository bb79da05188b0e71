#include "troupe/transport/memory_file.hpp"

#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/numa.hpp"

#include "scratch_folder.hpp"

namespace troupe::transport {

namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::uint64_t mib = std::uint64_t{1} << 20U;

TEST(memory_file_test, huge_pages_are_taken_where_they_are_free_and_else_said_to_be_missing) {
  const auto before = huge_pages_now();
  const auto page = before.size == 0 ? 2 * mib : before.size;
  const auto size = page * 2 - 1000;
  const auto made = memory_file::create("kv", size, {});
  ASSERT_TRUE(made) << to_string(made.error());
  const auto& file = **made;
  ASSERT_EQ(file.bytes().size(), size);
  file.bytes().front() = file.bytes().back() = std::byte{1};
  const std::array files{*made};
  const auto text = describe_pages(files, {});
  if (file.huge()) {
    EXPECT_EQ(file.mapped_size(), page * 2);
    EXPECT_EQ(text, "huge pages of " + page_text(page));
    EXPECT_LT(huge_pages_now().free, before.free);
  } else {
    EXPECT_LT(before.free, 2U) << file.why_not_huge();
    EXPECT_EQ(file.mapped_size(), size);
    EXPECT_THAT(text, AllOf(HasSubstr("pages of "), HasSubstr(file.why_not_huge()),
                            HasSubstr(before.size == 0 ? "no huge pages" : "vm.nr_hugepages")));
    if (before.size != 0) {
      EXPECT_THAT(text, HasSubstr("mmap: Cannot allocate memory")) << "what the system said";
    }
  }
  EXPECT_NE(::ftruncate(file.fd(), 10), 0) << "a peer that shrinks it would kill us by SIGBUS";
}

TEST(memory_file_test, a_region_that_would_waste_most_of_a_huge_page_is_of_ordinary_ones) {
  const auto made = memory_file::create("kv", 100'000, {});
  ASSERT_TRUE(made);
  EXPECT_FALSE((*made)->huge());
  EXPECT_FALSE((*made)->why_not_huge().empty());
}

TEST(memory_file_test, what_was_allocated_is_given_back_with_the_last_owner) {
  auto made = memory_file::create("kv", 4096, {});
  ASSERT_TRUE(made);
  const int fd = (*made)->fd();
  made->reset();
  EXPECT_EQ(::fcntl(fd, F_GETFD), -1);
  EXPECT_EQ(errno, EBADF);
}

TEST(memory_file_test, regions_are_allocated_together_or_not_at_all) {
  endpoint_options options;
  options.self = incarnation{1};
  options.max_regions = 3;
  const auto place = endpoint::create(std::move(options)).value();
  const std::array<std::uint64_t, 2> two{100'000, 4096};
  const auto made = place->allocate(two, "kv", {});
  ASSERT_TRUE(made) << to_string(made.error());
  ASSERT_EQ(made->regions.size(), 2U);
  EXPECT_EQ(place->bytes(made->regions[0])->size(), two[0]);
  EXPECT_EQ(place->bytes(made->regions[1])->size(), two[1]);
  EXPECT_THAT(made->pages, HasSubstr("pages of "));
  EXPECT_EQ(place->allocate(two, "more", {}).error().code, errc::overloaded);
  EXPECT_TRUE(place->allocate(4096, "last")) << "the first of the refused ones is still there";
}

TEST(memory_file_test, a_table_that_is_full_refuses_before_memory_is_asked_for) {
  endpoint_options options;
  options.self = incarnation{1};
  options.max_regions = 2;
  const auto place = endpoint::create(std::move(options)).value();
  ASSERT_TRUE(place->allocate(4096, "first"));
  // More than any machine has, so really allocating it would fail with an error.
  constexpr auto too_much = std::uint64_t{1} << 55U;
  const std::array<std::uint64_t, 2> two{4096, too_much};
  EXPECT_EQ(place->allocate(two, "kv", {}).error().code, errc::overloaded);
  ASSERT_TRUE(place->allocate(4096, "second"));
  const auto refused = place->allocate(too_much, "third");
  EXPECT_EQ(refused.error().code, errc::overloaded);
  EXPECT_THAT(refused.error().message,
              AllOf(HasSubstr("the maximum is 2"), HasSubstr("deregister some first")));
}

TEST(memory_file_test, sums_that_do_not_fit_and_sizes_of_0_are_refused) {
  endpoint_options options;
  options.self = incarnation{1};
  const auto place = endpoint::create(std::move(options)).value();
  const std::array<std::uint64_t, 2> wrapping{UINT64_MAX - 10, 4096};
  const auto refused = place->allocate(wrapping, "kv", {});
  EXPECT_EQ(refused.error().code, errc::pool_exhausted);
  EXPECT_THAT(refused.error().message, AllOf(HasSubstr("2 regions"), HasSubstr("MiB are free")));
  const std::array<std::uint64_t, 1> none{0};
  EXPECT_EQ(place->allocate(none, "kv", {}).error().code, errc::invalid_config);
}

// -- NUMA

TEST(numa_test, lists_of_the_kernel_are_read) {
  EXPECT_THAT(numbers_in("0-2,8,10-11"), ElementsAre(0, 1, 2, 8, 10, 11));
  EXPECT_THAT(numbers_in("0"), ElementsAre(0));
  EXPECT_TRUE(numbers_in("").empty());
}

TEST(numa_test, nodes_without_memory_or_that_the_process_may_not_use_are_left_out) {
  const testing::scratch_folder folder;
  const std::filesystem::path root{folder.path()};
  const auto nodes = root / "sys/devices/system/node";
  std::filesystem::create_directories(nodes / "node3");
  std::filesystem::create_directories(root / "proc/self");
  EXPECT_THAT(numa_nodes(root / "sys", root / "proc"), ElementsAre(0));
  std::ofstream{nodes / "has_memory"} << "0-1,3\n";
  std::ofstream{root / "proc/self/status"} << "Mems_allowed:\tf\nMems_allowed_list:\t1-3\n";
  EXPECT_THAT(numa_nodes(root / "sys", root / "proc"), ElementsAre(1, 3));

  std::ofstream{root / "proc/meminfo"} << "MemTotal: 900 kB\nMemAvailable:   800 kB\n";
  std::ofstream{nodes / "node3/meminfo"} << "Node 3 MemTotal:       500 kB\n"
                                            "Node 3 MemFree:        100 kB\n"
                                            "Node 3 Active(file):    20 kB\n"
                                            "Node 3 Inactive(file):   3 kB\n";
  EXPECT_EQ(available_bytes({}, root / "sys", root / "proc"), 800U << 10U);
  EXPECT_EQ(available_bytes(3, root / "sys", root / "proc"), 123U << 10U);
}

TEST(numa_test, a_node_that_is_not_there_is_refused_and_those_that_are_are_named) {
  const auto refused = memory_file::create("kv", 4096, {.numa_node = 4000});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::invalid_config);
  EXPECT_THAT(refused.error().message,
              AllOf(HasSubstr("NUMA node 4000"), HasSubstr("on node "), HasSubstr("or none")));
}

TEST(numa_test, every_page_is_on_the_node_and_the_threads_policy_is_what_it_was) {
  for (const auto node : numa_nodes()) {
    for (const auto pages : {page_choice::ordinary, page_choice::huge_if_available}) {
      const host_memory_options how{pages, static_cast<std::uint32_t>(node)};
      const auto made = memory_file::create("kv", 4 * mib, how);
      if (!made && made.error().code == errc::backend_unavailable)
        GTEST_SKIP() << made.error().message;
      ASSERT_TRUE(made) << to_string(made.error());
      const auto bytes = (*made)->bytes();
      for (std::uint64_t at = 0; at < bytes.size(); at += 4096) {
        bytes[at] = std::byte{1};
        int on = -1;
        if (::syscall(SYS_get_mempolicy, &on, nullptr, 0, &bytes[at], MPOL_F_NODE | MPOL_F_ADDR) !=
            0)
          GTEST_SKIP() << "the kernel does not say where a page is";
        ASSERT_EQ(on, node) << "at " << at;
      }
      int policy = -1;
      ASSERT_EQ(::syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0), 0);
      EXPECT_EQ(policy, MPOL_DEFAULT);
    }
  }
}

}  // namespace

}  // namespace troupe::transport
