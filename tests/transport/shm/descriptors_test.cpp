#include <array>
#include <cstdint>
#include <variant>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "troupe/transport/owned_fd.hpp"
#include "troupe/transport/shm/peer_regions.hpp"
#include "troupe/transport/shm/wire.hpp"

// Descriptors from a peer: their memory may have no pages, and this process may have no descriptor
// left.
namespace troupe::transport::shm {

namespace {

constexpr std::uint64_t size = std::uint64_t{8} << 20;

/// Memory as a peer shares it. `reserved`: its pages are allocated.
owned_fd shared_memory(bool reserved) {
  owned_fd fd{::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(size)), 0);
  if (reserved) {
    EXPECT_EQ(::posix_fallocate(fd.get(), 0, static_cast<off_t>(size)), 0);
  }
  EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
  return fd;
}

/// As long as it lives, this process gets no new descriptor.
class no_descriptors {
 public:
  no_descriptors() {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    rlimit none_left = before_;
    {
      const owned_fd next_free{::dup(0)};
      none_left.rlim_cur = static_cast<rlim_t>(next_free.get());
    }
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &none_left), 0);
  }
  ~no_descriptors() { EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before_), 0); }
  no_descriptors(const no_descriptors&) = delete;
  no_descriptors& operator=(const no_descriptors&) = delete;

 private:
  rlimit before_{};
};

}  // namespace

/// Sharing terabytes without reserving them takes a moment; a process that fills the pages pays for
/// them.
TEST(peer_regions, memory_that_a_peer_has_not_reserved_is_not_filled_in_here) {
  peer_regions regions;
  ASSERT_TRUE(regions.add({1, 0, size}, shared_memory(false)));
  EXPECT_FALSE(regions.has_fresh());
  EXPECT_NE(regions.find(region_id{1}), nullptr) << "it can be used";
  ASSERT_TRUE(regions.add({2, 0, size}, shared_memory(true)));
  EXPECT_TRUE(regions.has_fresh());
}

TEST(control_socket, says_that_descriptors_were_lost_rather_than_that_the_peer_lies) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()), 0);
  const owned_fd here{ends[0]};
  const owned_fd there{ends[1]};
  const auto memory = shared_memory(true);
  const std::array fds{memory.get()};
  ASSERT_TRUE(send_message(there.get(), region_shared_message{1, 0, size}, fds));
  ASSERT_TRUE(send_message(there.get(), region_shared_message{2, 0, size}, fds));
  {
    const no_descriptors none;
    const auto got = receive_message(here.get(), fds_allowed::yes);
    ASSERT_FALSE(got);
    EXPECT_EQ(got.error().code, errc::overloaded);
    EXPECT_NE(got.error().message.find("limit of open files"), std::string::npos)
        << got.error().message;
  }
  const auto next = receive_message(here.get(), fds_allowed::yes);
  ASSERT_TRUE(next);
  EXPECT_EQ(std::get<received>(*next).fds.size(), 1U);
}

}  // namespace troupe::transport::shm
