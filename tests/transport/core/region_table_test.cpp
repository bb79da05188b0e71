#include "troupe/transport/region_table.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fails_with.hpp"

namespace troupe::transport {

namespace {

using troupe::testing::fails_with;

TEST(region_table_test, allocated_memory_is_zeroed_writable_and_cannot_be_shrunk_under_a_peer) {
  region_table table{4};
  const auto id = table.allocate(100'000, "kv");
  ASSERT_TRUE(id);
  const auto bytes = table.bytes(*id).value();
  ASSERT_EQ(bytes.size(), 100'000U);
  for (const auto byte : bytes) ASSERT_EQ(byte, std::byte{0});
  bytes.front() = bytes.back() = std::byte{1};
  const auto use = table.use(*id).value();
  ASSERT_GE(use->fd(), 0);
  EXPECT_NE(::ftruncate(use->fd(), 10), 0) << "a peer that shrinks it would kill us by SIGBUS";
  EXPECT_NE(::ftruncate(use->fd(), 1 << 20), 0);
}

TEST(region_table_test, only_memory_that_the_engine_brought_is_the_engines) {
  region_table table{4};
  ASSERT_TRUE(table.allocate(4096, "ours"));
  EXPECT_FALSE(table.has_engine_memory());
  std::vector<std::byte> memory(100);
  ASSERT_TRUE(table.add_of_gpu(memory, "of a GPU", 0));
  EXPECT_FALSE(table.has_engine_memory()) << "no processor copies it";
  std::vector<std::byte> more(100);
  const auto region = table.add(more, "the engine's");
  ASSERT_TRUE(region);
  EXPECT_TRUE(table.has_engine_memory());
  ASSERT_TRUE(table.remove(*region));
  EXPECT_FALSE(table.has_engine_memory());
}

TEST(region_table_test, an_overlap_is_refused_and_names_the_region_that_is_there) {
  region_table table{10};
  std::vector<std::byte> memory(1000);
  const std::span all{memory};
  ASSERT_TRUE(table.add(all.subspan(100, 100), "first"));
  for (const auto& [from, size] : {std::pair{100, 100}, {150, 10}, {50, 51}, {199, 1}, {0, 1000}}) {
    const auto refused = table.add(
        all.subspan(static_cast<std::size_t>(from), static_cast<std::size_t>(size)), "second");
    ASSERT_THAT(refused, fails_with(errc::already_exists, ::testing::HasSubstr("'first'")))
        << from << " " << size;
  }
  EXPECT_TRUE(table.add(all.subspan(0, 100), "before"));
  EXPECT_TRUE(table.add(all.subspan(200, 100), "behind"));
}

TEST(region_table_test, null_empty_and_too_much_memory_are_refused) {
  region_table table{1};
  EXPECT_EQ(table.allocate(0, "none").error().code, errc::invalid_config);
  EXPECT_EQ(table.add({}, "null").error().code, errc::invalid_config);
  const auto huge = table.allocate(std::uint64_t{1} << 62, "huge");
  ASSERT_THAT(huge, fails_with(errc::pool_exhausted, ::testing::HasSubstr("MiB are free")));
  ASSERT_TRUE(table.allocate(10, "one"));
  EXPECT_EQ(table.allocate(10, "two").error().code, errc::overloaded);
}

/// Two pages, and a descriptor in place of a dma-buf. Only a device could tell that it is none.
struct exported_pages {
  alignas(4096) std::array<std::byte, 8192> bytes{};
  int fd{::memfd_create("exported", MFD_CLOEXEC)};
  ~exported_pages() { ::close(fd); }
};

TEST(region_table_test, exported_memory_keeps_a_descriptor_of_its_own_as_long_as_it_is_used) {
  region_table table{4};
  exported_pages pages;
  const auto id = table.add(pages.bytes, "gpu", {.dmabuf = pages.fd, .offset = 4096}).value();
  auto used = table.use(id).value();
  const int own = used->dmabuf();
  EXPECT_NE(own, pages.fd);
  EXPECT_EQ(used->dmabuf_offset(), 4096U);
  EXPECT_EQ(used->kind(), memory_kind::device);
  EXPECT_NE(::fcntl(own, F_GETFD) & FD_CLOEXEC, 0);
  used.release();
  ASSERT_TRUE(table.remove(id));
  EXPECT_EQ(::fcntl(own, F_GETFD), -1);
  EXPECT_GE(::fcntl(pages.fd, F_GETFD), 0) << "the caller's was closed";
}

TEST(region_table_test, exported_memory_that_cannot_be_is_refused_and_says_what_is_wrong) {
  region_table table{4};
  exported_pages pages;
  const auto refused = [&](std::span<std::byte> bytes, exported_memory as) {
    const auto made = table.add(bytes, "gpu", as);
    EXPECT_FALSE(made);
    EXPECT_EQ(made.error().code, errc::invalid_config);
    return made.error().message;
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(refused({}, {.dmabuf = pages.fd}), HasSubstr("null or empty"));
  EXPECT_THAT(refused(pages.bytes, {.dmabuf = -1}), HasSubstr("descriptor -1"));
  EXPECT_THAT(refused(pages.bytes, {.dmabuf = 987'654}), HasSubstr("Bad file descriptor"));
  EXPECT_THAT(refused(pages.bytes, {.dmabuf = pages.fd, .offset = 100}), HasSubstr("in a page"));
  EXPECT_THAT(refused(pages.bytes, {.dmabuf = pages.fd, .offset = ~std::uint64_t{4095}}),
              HasSubstr("wraps"));
  EXPECT_EQ(table.size(), 0U);
}

TEST(region_table_test, memory_of_a_device_is_nothing_for_backends_that_copy) {
  region_table table{4};
  exported_pages pages;
  const std::span<std::byte> both{pages.bytes};
  const auto gpu = table.add(both.first(4096), "gpu", {.dmabuf = pages.fd}).value();
  const auto host = table
                        .add(both.subspan(4096), "host",
                             {.dmabuf = pages.fd, .offset = 4096, .kind = memory_kind::host})
                        .value();
  for (const auto by : {backend_kind::tcp, backend_kind::shm}) {
    const auto refused = table.use_on_host(gpu, by);
    ASSERT_THAT(refused, fails_with(errc::backend_unavailable, ::testing::HasSubstr("'gpu'")));
    EXPECT_THAT(refused.error().message, ::testing::HasSubstr(std::string{to_string(by)}));
    EXPECT_TRUE(table.use_on_host(host, by));
    EXPECT_EQ(table.use_on_host(region_id{77}, by).error().code, errc::unknown_region);
  }
  EXPECT_TRUE(table.use(gpu));
}

TEST(region_table_test, a_region_goes_when_its_last_use_ends_and_its_id_never_comes_back) {
  region_table table{4};
  const auto id = table.allocate(10, "kv").value();
  {
    auto first = table.use(id).value();
    const auto second = table.use(id).value();
    first.release();
    EXPECT_EQ(table.remove(id).error().code, errc::overloaded);
  }
  EXPECT_TRUE(table.remove(id));
  EXPECT_EQ(table.remove(id).error().code, errc::unknown_region);
  EXPECT_EQ(table.use(id).error().code, errc::unknown_region);
  EXPECT_NE(table.allocate(10, "kv").value(), id);
}

TEST(region_table_test, a_withdrawn_region_goes_on_for_those_that_use_it_and_takes_no_others) {
  region_table table{4};
  const auto id = table.allocate(10, "kv").value();
  auto used = table.use(id).value();
  EXPECT_TRUE(table.withdraw(id));
  EXPECT_TRUE(table.withdraw(id));
  const auto late = table.use(id);
  ASSERT_THAT(late, fails_with(errc::unknown_region, ::testing::HasSubstr("'kv' was withdrawn")));
  const auto again = used.again();
  EXPECT_EQ(table.remove(id).error().code, errc::overloaded);
  used.release();
  EXPECT_EQ(table.remove(id).error().code, errc::overloaded);
  EXPECT_EQ(again->size(), 10U);
  used = {};
  EXPECT_EQ(table.withdraw(region_id{77}).error().code, errc::unknown_region);
}

TEST(region_table_test, memory_that_is_used_outlives_its_table) {
  region_use last;
  {
    region_table table{4};
    const auto id = table.allocate(4096, "kv").value();
    last = table.use(id).value();
  }
  last->data()[4095] = std::byte{1};
  EXPECT_EQ(last->data()[4095], std::byte{1});
}

}  // namespace

}  // namespace troupe::transport
