#include <cerrno>
#include <memory>
#include <utility>

#include <sys/epoll.h>

#include "two_nodes.hpp"

// A link with two rails of which only one can be watched. In the machine of tests/verbs.

namespace {

/// So many descriptors this thread may still have watched; negative: any number.
thread_local int watches_left{-1};

}  // namespace

// The linker puts the __wrap function in place of the one of the C library (CMakeLists.txt).
extern "C" {
int __real_epoll_ctl(int set, int what, int fd,  // NOLINT(bugprone-reserved-identifier)
                     epoll_event* event);
int __wrap_epoll_ctl(int set, int what, int fd,  // NOLINT(bugprone-reserved-identifier)
                     epoll_event* event) {
  if (what == EPOLL_CTL_ADD && watches_left >= 0 && watches_left-- == 0) {
    watches_left = -1;
    errno = ENOSPC;
    return -1;
  }
  return __real_epoll_ctl(set, what, fd, event);
}
}

namespace troupe::transport::rdma {

TEST(rdma_link, is_not_held_by_the_watch_of_its_first_rail_when_the_second_cannot_be_watched) {
  two_nodes nodes;
  for (const char side : {'a', 'b'}) {
    auto options = two_nodes::options_of(side);
    options.rdma.device = contract::rdma_devices(side, 4);
    two_nodes::create(side == 'a' ? nodes.a : nodes.b, std::move(options));
  }
  const auto open = [](const contract::end& e, link_role role, incarnation peer) {
    return e.place
        ->open(backend_kind::rdma,
               {.role = role,
                .peer = peer,
                .lanes = 2,
                .connect_timeout = contract::longer_than_any_wait},
               e.sink)
        .value();
  };
  auto dialer = open(nodes.a, link_role::initiator, nodes.b.self);
  const auto acceptor = open(nodes.b, link_role::acceptor, nodes.a.self);
  watches_left = 1;
  const auto ok = dialer->connect(acceptor->offer());
  EXPECT_EQ(watches_left, -1) << "it watches one rail only";
  EXPECT_FALSE(ok);
  const std::weak_ptr<link> dropped = dialer;
  dialer.reset();
  EXPECT_TRUE(testing::comes_true([&] { return dropped.expired(); }));
  acceptor->close();
}

}  // namespace troupe::transport::rdma
