#include <algorithm>
#include <atomic>
#include <string>

#include <infiniband/verbs.h>

#include "troupe/transport/link_check.hpp"

#include "two_nodes.hpp"

// As many lanes as a link may have, and devices with short completion queues. In the machine of
// tests/verbs; some of its devices only claim these lengths here.

namespace {

/// The length that rxe0b claims for its completion queues; 0: the real one.
std::atomic<int> short_queues{0};

}  // namespace

// The linker puts the __wrap function in place of the one of libibverbs (CMakeLists.txt).
extern "C" {
int __real_ibv_query_device(ibv_context* which,  // NOLINT(bugprone-reserved-identifier)
                            ibv_device_attr* about);
int __wrap_ibv_query_device(ibv_context* which,  // NOLINT(bugprone-reserved-identifier)
                            ibv_device_attr* about) {
  const int said = __real_ibv_query_device(which, about);
  const int shorter = short_queues;
  if (said == 0 && shorter != 0 && std::string{::ibv_get_device_name(which->device)} == "rxe0b") {
    about->max_cqe = shorter;
  }
  return said;
}
}

namespace troupe::transport::rdma {

namespace {

using contract::end;
using contract::t1;

constexpr std::uint64_t size = std::uint64_t{4} << 20;

void make(end& e, char side) {
  two_nodes::create(e, two_nodes::options_of(side));
  e.region = e.place->allocate(size, "test").value();
  e.memory = e.place->bytes(e.region).value();
  contract::fill(e.memory, static_cast<std::uint32_t>(side));
}

class rdma_many_lanes : public ::testing::Test {
 protected:
  void TearDown() override { short_queues = 0; }
};

/// Writes from a to b `count` times, to adjacent places, each with a notice. Posts all writes
/// before it waits for the first.
void write(two_nodes& two, std::size_t count) {
  const auto bytes = size / count;
  const auto grant = std::make_shared<const remote_grant>(
      two.b.wire->grant(two.b.region, {{0, size, 0, 1}}, access::write, t1).value());
  for (std::size_t i = 0; i < count; ++i) {
    batch work{.id = batch_id{i + 1},
               .transfer = t1,
               .dir = direction::write,
               .pieces = {},
               .frame = {std::byte{'x'}}};
    work.pieces.push_back({two.a.region, grant, {{i * bytes, i * bytes, bytes, 0, 0, 1}}});
    const auto ok = two.a.wire->post(std::move(work));
    ASSERT_TRUE(ok) << to_string(ok.error());
  }
  ASSERT_TRUE(two.until([&] {
    return two.a.sink->completed() == count && two.b.sink->framed() == count;
  })) << two.a.sink->completed()
      << " completed, " << two.b.sink->framed() << " told";
  EXPECT_TRUE(std::ranges::equal(two.a.memory, two.b.memory));
}

}  // namespace

TEST_F(rdma_many_lanes, a_link_has_as_many_over_one_device_as_a_link_may_have) {
  two_nodes two;
  make(two.a, 'a');
  make(two.b, 'b');
  two.join(max_link_lanes);
  EXPECT_EQ(two.a.wire->stats().lanes, max_link_lanes);
  write(two, 16);
}

/// The peer's room for notices may differ from ours: a peer with less room must report sooner what
/// it took.
TEST_F(rdma_many_lanes,
       a_device_with_short_completion_queues_is_told_no_more_than_it_has_room_for) {
  short_queues = 200;
  two_nodes two;
  make(two.a, 'a');
  make(two.b, 'b');
  two.join();
  write(two, 512);
}

TEST_F(rdma_many_lanes, a_device_whose_completion_queues_are_too_short_says_so) {
  short_queues = 140;
  two_nodes two;
  make(two.b, 'b');
  const auto none = two.b.place->open(
      backend_kind::rdma, {.role = link_role::initiator, .peer = incarnation{7}, .lanes = 8},
      two.b.sink);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, errc::overloaded);
  EXPECT_NE(none.error().message.find("rxe0b has completion queues of 140 entries"),
            std::string::npos)
      << to_string(none.error());
}

}  // namespace troupe::transport::rdma
