// A receive that could not end with a complete cache, or a value in its place, is refused at once
// with the reason. A cache is complete only if each rank of the prefill replica has sent its part
// of it, once, to the rank that it takes the receiver for, and into the receiver's own blocks.

#include <string>

#include <gmock/gmock.h>

#include "fails_with.hpp"
#include "listening_link.hpp"
#include "ways.hpp"

namespace troupe::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// A decode node whose deployment has two ranks of prefill, and two replicas of decode.
class checked_calls : public ::testing::Test {
 protected:
  std::unique_ptr<cluster> c;
  std::unique_ptr<engine> node;

  void SetUp() override {
    auto options = unhurried();
    options.prefill_tp = 2;
    options.decodes = 2;
    c = std::make_unique<cluster>(options);
    cluster::quiet("decode-0");
    node = c->start("decode-0");
    ASSERT_TRUE(node);
  }
  troupe::error refusal(const std::vector<std::string>& names) {
    const auto asked = node->receive({"r", names, actors::transfer_mode::write, 32});
    return asked ? troupe::error{errc::internal, "it was taken"} : asked.error();
  }
};

TEST_F(checked_calls, receive_from_no_replica_that_lacks_a_rank) {
  const auto why = refusal({"prefill-0-tp0"});
  EXPECT_EQ(why.code, errc::invalid_config);
  EXPECT_THAT(why.message, AllOf(HasSubstr("`prefill-0-tp1` is missing"), HasSubstr("rank 1 of 2"),
                                 HasSubstr("prefill-0-tp0")));
}

TEST_F(checked_calls, pin_no_block_that_only_holds_the_prefix) {
  const auto all = node->allocate_blocks(node->layout().blocks);
  ASSERT_TRUE(all);
  const std::vector<block_id> four{all->blocks.begin(), all->blocks.begin() + 4};
  const std::vector<block_id> prefix{four.begin(), four.begin() + 2};
  const std::vector<block_id> partly{four[2]};
  // No node offers the request, so it lives until the abort.
  const auto asked = node->receive(
      {"r", {"prefill-0-tp0", "prefill-0-tp1"}, actors::transfer_mode::write, 64, 40, four});
  ASSERT_TRUE(asked) << to_string(asked.error());
  ASSERT_TRUE(node->free_blocks(all->owner, prefix));
  EXPECT_TRUE(node->allocate_blocks(2)) << "the prefix of 40 tokens is all of two blocks";
  ASSERT_TRUE(node->free_blocks(all->owner, partly));
  EXPECT_FALSE(node->allocate_blocks(1)) << "the third is written to";
  ASSERT_TRUE(node->abort(*asked, "seen"));
  listener events{*node};
  ASSERT_TRUE(events.unpinned(*asked));
  EXPECT_TRUE(node->allocate_blocks(1));
  // Freed blocks cannot hold a prefix.
  ASSERT_TRUE(node->free_blocks(all->owner, {four.begin() + 3, four.end()}));
  const std::vector<block_id> freed{four[3], all->blocks[4]};
  EXPECT_FALSE(node->receive(
      {"s", {"prefill-0-tp0", "prefill-0-tp1"}, actors::transfer_mode::write, 32, 16, freed}));
}

TEST_F(checked_calls, receive_only_over_an_edge_and_in_its_mode) {
  const auto refused = [&](const std::vector<std::string>& names, actors::transfer_mode mode) {
    const auto asked = node->receive({"r", names, mode, 32});
    return asked ? troupe::error{errc::internal, "it was taken"} : asked.error();
  };
  const auto other = refused({"prefill-0-tp0", "prefill-0-tp1"}, actors::transfer_mode::read);
  EXPECT_EQ(other.code, errc::invalid_config);
  EXPECT_THAT(other.message, AllOf(HasSubstr("mode read"), HasSubstr("`prefill`"),
                                   HasSubstr("`decode` has write")));
  const auto none = refused({"decode-1"}, actors::transfer_mode::write);
  EXPECT_EQ(none.code, errc::invalid_config);
  EXPECT_THAT(none.message, HasSubstr("no edge over which layers move from stage `decode`"));
}

TEST_F(checked_calls, receive_from_no_rank_twice) {
  for (const auto& names : {std::vector<std::string>{"prefill-0-tp0", "prefill-0-tp0"},
                            {"prefill-0-tp0", "prefill-0-tp1", "prefill-0-tp1"}}) {
    const auto why = refusal(names);
    EXPECT_EQ(why.code, errc::invalid_config);
    EXPECT_THAT(why.message, AllOf(HasSubstr(names.back()), HasSubstr("twice")));
  }
}

TEST_F(checked_calls, receive_from_one_replica_at_a_time) {
  for (const auto& names : {std::vector<std::string>{"decode-0", "decode-1"},
                            {"prefill-0-tp0", "decode-1", "prefill-0-tp1"}}) {
    const auto why = refusal(names);
    EXPECT_EQ(why.code, errc::invalid_config);
    EXPECT_THAT(why.message,
                AllOf(HasSubstr(names[0]), HasSubstr(names[1]), HasSubstr("different replicas")));
  }
}

TEST_F(checked_calls, receive_into_no_block_twice) {
  const auto own = node->allocate_blocks(3);
  ASSERT_TRUE(own);
  const auto& b = own->blocks;
  const auto asked = node->receive({"r",
                                    {"prefill-0-tp0", "prefill-0-tp1"},
                                    actors::transfer_mode::write,
                                    64,
                                    0,
                                    {b[0], b[1], b[2], b[1]}});
  ASSERT_THAT(asked,
              fails_with(errc::invalid_config,
                         HasSubstr("block " + std::to_string(b[1].value) + " is named twice")));
}

TEST_F(checked_calls, put_only_where_an_edge_leads) {
  static const std::vector<std::byte> bytes(
      10);  // longer than the node lives: the outcomes do not matter
  for (const std::string peer : {"store-0", "supervisor"}) {
    const auto asked = node->put(peer, "key", bytes);
    ASSERT_THAT(asked,
                fails_with(errc::invalid_config, HasSubstr("no edge between stage `decode` and `")))
        << peer;
  }
  for (const std::string peer : {"decode-0", "decode-1", "prefill-0-tp0"})
    EXPECT_TRUE(node->put(peer, "key", bytes)) << peer;
}

TEST_F(checked_calls, get_query_and_remove_only_where_an_edge_leads) {
  for (const std::string peer : {"store-0", "supervisor"}) {
    for (const auto& asked :
         {node->get(peer, "key"), node->query(peer, "key"), node->remove(peer, "key")}) {
      ASSERT_THAT(asked, fails_with(errc::invalid_config,
                                    HasSubstr("no edge between stage `decode` and `")))
          << peer;
    }
  }
  for (const std::string peer : {"decode-0", "decode-1", "prefill-0-tp0"})
    EXPECT_TRUE(node->get(peer, "key")) << peer;
}

TEST_F(checked_calls, take_the_ranks_in_any_order) {
  const auto asked =
      node->receive({"r", {"prefill-0-tp1", "prefill-0-tp0"}, actors::transfer_mode::write, 32});
  EXPECT_TRUE(asked) << to_string(asked.error());
}

TEST(layout_of_an_engine, says_the_rank_that_the_deployment_makes_of_its_node) {
  auto options = unhurried();
  options.decode_tp = 2;
  const cluster c{options};
  kvcache::cache_shape shape;
  shape.layers = kvcache::attention_layers(4, 2, 32);
  shape.dtype = "fp16";
  shape.blocks = 8;
  for (const auto& [rank, size] : {std::pair{0u, 2u}, std::pair{0u, 1u}}) {
    shape.tp_rank = rank;
    shape.tp_size = size;
    engine_options with;
    with.layout = kvcache::make_layout(shape, {}).value();
    std::vector<std::vector<std::byte>> memory;
    for (const auto bytes : kvcache::region_sizes(*with.layout)) memory.emplace_back(bytes);
    for (auto& one : memory) with.regions.emplace_back(one);
    const auto node = engine::start(c.deployment(), "decode-0-tp1", with);
    ASSERT_THAT(node, fails_with(errc::layout_mismatch,
                                 AllOf(HasSubstr("decode-0-tp1"), HasSubstr("rank 1 of 2"),
                                       HasSubstr("rank 0 of " + std::to_string(size)))));
  }
}

}  // namespace
}  // namespace troupe::testing

namespace troupe::actors::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// A peer, rank 1 of 2 by the deployment, whose layout or requests name another rank.
class confused_peer : public listened_runner {
 protected:
  /// The peer requests the offered source over its first link with that layout. Expects a refusal
  /// with these words.
  void expect_refusal(const layout_ptr& its_layout, std::uint32_t rank, std::uint32_t ranks,
                      const ::testing::Matcher<const std::string&>& words) {
    context->layout = small_layout();
    context->settings.nodes["there-0-tp1"] = {"there", 0, 1, 2};
    meet("there-0-tp1", its_layout);
    const auto operation = context->operations.begin({});
    ASSERT_TRUE(operation);
    send_spec spec;
    spec.request = "r";
    caf::anon_send(runner, engine_command{start_send{*operation, spec}});
    transfer_request request;
    request.transfer = transfer_id{9};
    request.request = spec.request;
    request.rank = rank;
    request.ranks = ranks;
    request.deadline_ms = 60'000;
    comes(request);
    const auto refused = said<transfer_abort>(0);
    ASSERT_TRUE(refused);
    EXPECT_EQ(refused->code, errc::layout_mismatch);
    EXPECT_THAT(refused->reason, words);
  }
};

TEST_F(confused_peer, that_asks_as_another_rank_than_its_layout_says_is_refused) {
  expect_refusal(
      small_layout(1, 2), 0, 1,
      AllOf(HasSubstr("rank 0 of 1"), HasSubstr("there-0-tp1"), HasSubstr("rank 1 of 2")));
}

TEST_F(confused_peer, whose_layout_says_another_rank_than_the_deployment_is_refused) {
  expect_refusal(
      small_layout(0, 2), 0, 2,
      AllOf(HasSubstr("there-0-tp1"), HasSubstr("rank 1 of 2"), HasSubstr("rank 0 of 2")));
}

TEST_F(confused_peer, whose_layers_are_those_of_another_part_is_refused) {
  auto first = *small_layout();
  first.total_layers = 4;
  expect_refusal(std::make_shared<const kvcache::cache_layout>(first), 1, 2,
                 AllOf(HasSubstr("there-0-tp1"), HasSubstr("rank 1 of 2"),
                       HasSubstr("says rank 0 of 1 and layers 0 to 1 of the model's 4")));
}

/// A peer that requests a source more often than allowed, or whose part in it fails.
class asking_peer : public listened_runner {
 protected:
  operation_id source;

  void offer(std::vector<block_id> blocks = {block_id{1}}) {
    context->layout = small_layout();
    context->settings.edges.emplace(std::pair{context->self.stage, std::string{"there"}},
                                    edge_mode);
    context->settings.nodes["there-0"] = {"there", 0, 0, 1};
    meet("there-0", small_layout());
    source = context->operations.begin({}).value();
    send_spec spec;
    spec.request = "r";
    spec.blocks = std::move(blocks);
    caf::anon_send(runner, engine_command{start_send{source, spec}});
  }
  void asks(std::uint64_t transfer, std::uint32_t tokens = 16,
            std::vector<kvcache::block_run> blocks = {{{2}, 1}}) {
    transfer_request request;
    request.transfer = transfer_id{transfer};
    request.request = "r";
    request.token_end = tokens;
    request.blocks = std::move(blocks);
    request.grants.resize(grants);
    request.deadline_ms = 60'000;
    comes(request);
  }
  std::size_t grants{1};  ///< one for each region
  transfer_mode edge_mode{transfer_mode::write};
};

TEST_F(asking_peer, is_served_no_more_transfers_at_once_than_there_may_be_operations) {
  context->settings.max_operations = 3;
  offer();
  for (const std::uint64_t transfer : {1, 2, 3, 4}) asks(transfer);
  const auto refused = said<transfer_abort>(0);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->transfer, transfer_id{4});
  EXPECT_EQ(refused->code, errc::overloaded);
  EXPECT_THAT(refused->reason, HasSubstr("limits.max_operations"));
}

TEST_F(asking_peer, whose_blocks_are_not_those_of_its_tokens_is_refused_and_costs_nothing) {
  context->settings.retry_window = 10 * troupe::testing::wait_limit;
  offer();
  // Four billion blocks in a few bytes, one block too many, one too few, and none.
  asks(1, 16, {{{0}, 0xFFFF'FFFFU}});
  asks(2, 16, {{{0}, 2}});
  asks(3, 16, {});
  asks(4, 0xFFFF'FFFFU, {{{0}, 0x1000'0000U}});
  // A block that is in no pool of this layout, and a request without grants.
  asks(5, 16, {{{4}, 1}});
  grants = 0;
  asks(6);
  for (const std::size_t index : {0, 1, 2, 3, 4, 5}) {
    const auto refused = said<transfer_abort>(index);
    ASSERT_TRUE(refused) << index;
    EXPECT_EQ(refused->transfer, transfer_id{index + 1});
    EXPECT_EQ(refused->code, errc::out_of_range) << refused->reason;
  }
  grants = 1;
  asks(7);
  EXPECT_TRUE(heard->sessions.at(0)) << "the source is there";
}

TEST_F(asking_peer, that_is_early_waits_only_with_blocks_that_its_tokens_need) {
  context->layout = small_layout();
  context->settings.nodes["there-0"] = {"there", 0, 0, 1};
  meet("there-0", small_layout());
  asks(1, 16, {{{0}, 0xFFFF'FFFFU}});
  asks(2, 80, {{{0}, 5}});  // the cache here has four blocks
  for (const std::size_t index : {0, 1}) {
    const auto refused = said<transfer_abort>(index);
    ASSERT_TRUE(refused) << index;
    EXPECT_EQ(refused->transfer, transfer_id{index + 1});
    EXPECT_EQ(refused->code, errc::out_of_range) << refused->reason;
  }
}

TEST_F(asking_peer, in_another_mode_than_that_of_the_edge_is_refused) {
  edge_mode = transfer_mode::read;
  offer();
  asks(1);
  const auto refused = said<transfer_abort>(0);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, errc::invalid_config);
  EXPECT_THAT(refused->reason, AllOf(HasSubstr("mode write"), HasSubstr("has read")));
}

TEST_F(asking_peer, that_names_a_block_twice_is_refused) {
  context->settings.retry_window = 10 * troupe::testing::wait_limit;
  offer({block_id{1}, block_id{0}});
  asks(1, 32, {{{2}, 1}, {{2}, 1}});
  const auto refused = said<transfer_abort>(0);
  ASSERT_TRUE(refused);
  EXPECT_THAT(refused->reason, HasSubstr("block 2 twice"));
}

TEST_F(asking_peer, whose_receive_another_source_refused_fails_no_send_here) {
  offer();
  asks(1);
  ASSERT_TRUE(heard->sessions.at(0));
  comes(transfer_abort{transfer_id{1}, errc::out_of_range, "another source holds less", true});
  ASSERT_TRUE(said<transfer_quiescent>(0));
  asks(2);
  ASSERT_TRUE(heard->sessions.at(1)) << "the source is gone";
  EXPECT_TRUE(context->events.wait(0ms, 1).empty()) << "the source has an outcome";
  comes(transfer_abort{transfer_id{2}, errc::out_of_range, "its engine gives up"});
  const auto events = context->events.wait(troupe::testing::wait_limit, 1);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_TRUE(std::holds_alternative<event_failed>(events.front().what));
}

TEST_F(asking_peer, whose_session_crashes_here_leaves_the_source_to_others) {
  context->settings.retry_window = 10 * troupe::testing::wait_limit;
  offer();
  asks(1);
  const auto session = heard->sessions.at(0);
  ASSERT_TRUE(session);
  caf::anon_send_exit(*session, caf::exit_reason::unhandled_exception);
  const auto told = said<transfer_abort>(0);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->code, errc::internal);
  asks(2);
  EXPECT_TRUE(heard->sessions.at(1));
  EXPECT_TRUE(context->events.wait(0ms, 1).empty()) << "the source has an outcome";
}

/// A peer that takes a source and is lost while another node holds it, which then lets go.
TEST_F(asking_peer, that_is_lost_opens_its_place_again_when_the_node_that_would_fill_it_lets_go) {
  context->settings.retry_window = std::chrono::milliseconds{50};
  context->settings.nodes["there-1"] = {"there", 1, 0, 1};
  offer();
  asks(1);
  ASSERT_TRUE(heard->sessions.at(0));
  link_handle holder = link;
  holder.peer = "there-1";
  holder.peer_incarnation = incarnation{6};
  holder.actor = host.system().spawn(listening_link, std::make_shared<heard_words>());
  holder.id = holder.actor.id();
  host.own(holder.actor);
  caf::anon_send(runner, runner_event{link_ready{holder}});
  caf::anon_send(runner, runner_event{unrouted_message{holder, transfer_hold{{2}, "r", 0}}});
  comes(transfer_abort{{1}, errc::aborted, "it has crashed"});
  // The place counts as filled while the hold lasts.
  EXPECT_TRUE(context->events.wait(std::chrono::milliseconds{200}, 1).empty());
  const troupe::error over{errc::aborted, "not wanted any more"};
  caf::anon_send(runner, runner_event{unrouted_message{holder, make_abort({2}, over)}});
  const auto events = context->events.wait(troupe::testing::wait_limit, 1);
  ASSERT_EQ(events.size(), 1U);
  const auto* failed = std::get_if<event_failed>(&events.front().what);
  ASSERT_NE(failed, nullptr);
  EXPECT_THAT(failed->why.message, HasSubstr("it has crashed"));
}

}  // namespace
}  // namespace troupe::actors::testing
