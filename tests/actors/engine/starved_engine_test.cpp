// A call of the engine that finds no memory has changed nothing, or what it began ends once. So does
// whatever is live when the node ends.

#include <functional>
#include <new>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/actors/node/node_end.hpp"

#include "allocations.hpp"
#include "cluster_fixture.hpp"

namespace troupe::testing {
namespace {

class starved_engine : public ::testing::Test {
 protected:
  cluster c{unhurried([] {
    cluster_options options;
    options.decode_has_store = true;
    return options;
  }())};
  std::unique_ptr<engine> node;
  std::string request = std::string(100, 'r');

  void SetUp() override {
    cluster::quiet("prefill-0");
    start("prefill-0");
  }
  void start(const std::string& name) {
    node.reset();
    node = c.start(name);
    ASSERT_TRUE(node);
  }
  /// Calls with the first allocation failing, then with the second, and so on, until a call is not
  /// refused. `look` is called after each that was.
  template <class Call>
  auto starve(
      Call call, const std::function<void()>& look = [] {}) {
    for (std::size_t made = 0;; ++made) {
      SCOPED_TRACE(made);
      allocations.left = made;
      allocations.once = true;
      decltype(call()) done = fail(errc::pool_exhausted, "");
      try {
        done = call();
      } catch (const std::bad_alloc&) {  // the test's own copies of what it gives
      }
      allocations.left.reset();
      allocations.once = false;
      if (done) return done;
      EXPECT_EQ(done.error().code, errc::pool_exhausted) << to_string(done.error());
      if (done.error().code != errc::pool_exhausted || ::testing::Test::HasFailure()) return done;
      look();
    }
  }
  void expect_open(std::uint64_t operations) {
    EXPECT_EQ(node->report().operations_open, operations);
  }
  /// Pinned blocks would be in quarantine.
  void expect_unpinned(const kvcache::allocation& blocks) {
    ASSERT_TRUE(node->free_blocks(blocks.owner, blocks.blocks));
    EXPECT_EQ(node->report().pool.blocks_quarantined, 0u);
  }
  void expect_aborted(operation_id operation) {
    const auto end = node->wait(operation, std::chrono::milliseconds{wait_limit});
    ASSERT_TRUE(end) << "it has no outcome";
    ASSERT_FALSE(*end);
    EXPECT_EQ(end->error().code, errc::aborted) << to_string(end->error());
    expect_open(0);
  }
};

TEST_F(starved_engine, begins_a_send_or_does_not_and_loses_none_of_its_input) {
  const auto blocks = node->allocate_blocks(2).value();
  const std::vector<block_id> first{blocks.blocks[0]}, second{blocks.blocks[1]};
  const auto send = starve(
      [&] {
        send_spec spec;
        spec.request = request;
        spec.blocks = first;
        spec.grows = true;
        return node->send(std::move(spec));
      },
      [&] { expect_open(0); });
  ASSERT_TRUE(send);
  ASSERT_TRUE(starve([&] { return node->add_blocks(*send, second); }));
  ASSERT_TRUE(starve([&] { return node->layers_ready(*send, 0, 4, 32); }));
  ASSERT_TRUE(starve([&] { return node->seal(*send, 32, std::vector<std::byte>(100)); }));
  EXPECT_EQ(node->seal(*send, 32).error().code, errc::already_exists);
  ASSERT_TRUE(starve([&] { return node->abort(*send, std::string(100, 'w')); }));
  expect_aborted(*send);
  expect_unpinned(blocks);
}

TEST_F(starved_engine, begins_a_placement_or_does_not) {
  actors::placement_request wanted;
  wanted.request = request;
  const auto placed = starve([&] { return node->place(wanted); }, [&] { expect_open(0); });
  ASSERT_TRUE(placed);
  ASSERT_TRUE(node->wait(*placed, std::chrono::milliseconds{wait_limit}));
  expect_open(0);
}

/// What is carried out before the call returns: the first allocation that fails there ends the node,
/// and the operation with it.
TEST_F(starved_engine, ends_once_what_it_begins_and_could_not_carry_out) {
  const std::vector<std::byte> value(100);
  std::vector<block_id> blocks;
  const std::vector<std::function<result<operation_id>()>> calls{
      [&] { return node->put("store-0", request, value); },
      [&] { return node->get("store-0", request); },
      [&] { return node->release(request, {"prefill-0"}); },
      [&] { return node->hold(request, {"prefill-0"}); },
      [&] {
        receive_spec spec;
        spec.request = request;
        spec.sources = {"prefill-0"};
        spec.tokens = 16;
        spec.blocks = blocks;
        return node->receive(std::move(spec));
      },
  };
  for (std::size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE("call " + std::to_string(i));
    start("decode-0");
    blocks = node->allocate_blocks(1).value().blocks;
    const auto begun = starve(calls[i], [&] { expect_open(0); });
    ASSERT_TRUE(begun);
    (void)node->abort(*begun, {});  // if it goes on
    const auto end = node->wait(*begun, std::chrono::milliseconds{wait_limit});
    ASSERT_TRUE(end) << "it has no outcome";
  }
}

TEST_F(starved_engine, that_stops_ends_what_is_live) {
  bool had_enough = false;
  for (std::size_t made = 0; !had_enough; ++made) {
    SCOPED_TRACE(made);
    start("prefill-0");
    send_spec spec;
    spec.request = request;
    spec.blocks = node->allocate_blocks(1).value().blocks;
    const auto send = node->send(std::move(spec));
    ASSERT_TRUE(send) << to_string(send.error());
    allocations.left = made;
    node->stop();
    had_enough = *allocations.left > 0;
    allocations.left.reset();
    const auto end = node->wait(*send, std::chrono::milliseconds{wait_limit});
    ASSERT_TRUE(end) << "it has no outcome";
    ASSERT_FALSE(*end);
    EXPECT_EQ(end->error().code, errc::aborted) << to_string(end->error());
  }
}

TEST(starved_node, that_ends_fails_what_is_live_and_who_waits_to_be_registered) {
  bool had_enough = false;
  for (std::size_t made = 0; !had_enough; ++made) {
    SCOPED_TRACE(made);
    actors::node_context context{{}};
    const auto operation = context.operations.begin({}).value();
    allocations.left = made;
    actors::end_node(context, "the operation runner, or whatever else, crashed");
    had_enough = *allocations.left > 0;
    allocations.left.reset();
    const auto why = context.registration.wait({});
    ASSERT_TRUE(why);
    EXPECT_EQ(why->code, errc::internal);
    const auto told = context.events.wait(std::chrono::milliseconds{wait_limit}, 16);
    ASSERT_EQ(told.size(), 1u) << "it has no outcome";
    EXPECT_EQ(told.front().operation, operation);
    EXPECT_EQ(std::get<event_failed>(told.front().what).why.code, errc::internal);
  }
}

}  // namespace
}  // namespace troupe::testing
