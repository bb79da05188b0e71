#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "two_nodes.hpp"

// A batch whose bytes have landed while its target has no room for one more notice. In the machine
// of tests/verbs.
namespace troupe::transport::rdma {

namespace {

using namespace std::chrono_literals;
using contract::end;
using contract::t1;
using contract::t2;

constexpr std::uint64_t size = 64 << 10;

void make(end& e, char side, std::uint32_t workers) {
  auto options = two_nodes::options_of(side);
  options.num_workers = workers;
  two_nodes::create(e, std::move(options));
  e.region = e.place->allocate(size, "test").value();
  e.memory = e.place->bytes(e.region).value();
}

/// Batches of one transfer of b, into a's memory, each with a notice.
class notices {
 public:
  notices(two_nodes& nodes, transfer_id transfer)
      : nodes_{nodes},
        transfer_{transfer},
        granted_{std::make_shared<const remote_grant>(
            nodes.a.wire->grant(nodes.a.region, {{0, size, 0, 1}}, access::write, transfer)
                .value())} {}
  batch_id post() {
    batch work{.id = batch_id{++last_},
               .transfer = transfer_,
               .dir = direction::write,
               .pieces = {},
               .frame = {std::byte{'x'}}};
    work.pieces.push_back(
        {nodes_.b.region, granted_, {{.local_offset = 0, .remote_offset = 0, .length = size}}});
    const auto ok = nodes_.b.wire->post(std::move(work));
    EXPECT_TRUE(ok) << to_string(ok.error());
    return batch_id{last_};
  }

 private:
  inline static std::uint64_t last_{0};
  two_nodes& nodes_;
  transfer_id transfer_;
  std::shared_ptr<const remote_grant> granted_;
};

}  // namespace

TEST(rdma_notices, a_fence_ends_a_batch_that_waits_until_the_peer_takes_one) {
  constexpr std::size_t more_than_there_is_room_for = 4096;
  two_nodes nodes;
  make(nodes.a, 'a', 0);
  make(nodes.b, 'b', 1);
  nodes.polls_a = true;
  nodes.join();
  auto& sink = *nodes.b.sink;
  notices first{nodes, t1};
  first.post();
  ASSERT_TRUE(nodes.until([&] { return sink.completed() == 1 && nodes.a.sink->framed() == 1; }));
  // From here on a takes nothing. If the wait here is too short, the test fences batches that are
  // still in flight.
  std::size_t posted = 1;
  batch_id last;
  const auto ends_soon = [&] {
    for (const auto end = contract::clock::now() + 500ms; sink.completed() != posted;) {
      if (contract::clock::now() > end) return false;
      std::this_thread::sleep_for(1ms);
    }
    return true;
  };
  do {
    last = first.post();
    ++posted;
  } while (posted < more_than_there_is_room_for && ends_soon());
  ASSERT_LT(posted, more_than_there_is_room_for);
  const auto answer = nodes.b.wire->fence(t1);
  EXPECT_TRUE(answer == fence_state::quiescent ||
              testing::comes_true([&] { return sink.is_quiescent(t1); }));
  ASSERT_TRUE(testing::comes_true([&] { return sink.completed() == posted; })) << "no outcome";
  const auto ended = sink.outcome_of(last.value);
  ASSERT_TRUE(ended.failure);
  EXPECT_EQ(ended.failure->code, errc::aborted) << to_string(*ended.failure);

  ASSERT_TRUE(nodes.until([&] { return nodes.a.sink->framed() == posted - 1; }));
  notices other{nodes, t2};
  other.post();
  EXPECT_TRUE(nodes.until([&] { return nodes.a.sink->framed() == posted; }));
  EXPECT_FALSE(sink.is_broken());
}

}  // namespace troupe::transport::rdma
