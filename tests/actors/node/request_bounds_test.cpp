// Requests that no honest peer makes: each is refused with the reason, and costs nothing.

#include <limits>

#include <gtest/gtest.h>

#include "listening_link.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {
namespace {

class request_bounds : public listened_runner {
 protected:
  void SetUp() override {
    context->layout = small_layout();
    meet("there-0", small_layout());
  }
  /// A growing send of the engine, without blocks so far.
  void grow(std::vector<group_blocks> groups = {}) {
    send_spec spec;
    spec.request = "r";
    spec.grows = true;
    spec.groups = std::move(groups);
    const auto operation = context->operations.begin({operation_kind::send, "r", 0, false, true});
    caf::anon_send(runner, engine_command{start_send{operation.value(), std::move(spec)}});
  }
  [[nodiscard]] static transfer_request request(std::uint32_t tokens) {
    transfer_request r;
    r.transfer = transfer_id{7};
    r.request = "r";
    r.token_end = tokens;
    r.deadline_ms = std::numeric_limits<std::uint32_t>::max();
    return r;
  }
  void expect_refusal(std::size_t number, errc code, const char* words) {
    const auto refused = said<transfer_abort>(number);
    ASSERT_TRUE(refused) << words;
    EXPECT_EQ(refused->code, code) << refused->reason;
    EXPECT_NE(refused->reason.find(words), std::string::npos) << refused->reason;
  }
  void expect_refused(transfer_request asked, errc code, const char* words) {
    asked.transfer = transfer_id{100 + said_before_};
    comes(std::move(asked));
    expect_refusal(said_before_++, code, words);
  }
  /// A receive of 16 tokens is answered with that offer.
  void expect_refused(receive_spec spec, transfer_offer offer, errc code, const char* words) {
    spec.request = "r";
    spec.sources = {"there-0"};
    spec.mode = transfer_mode::read;
    spec.tokens = 16;
    const auto operation = context->operations.begin({}).value();
    caf::anon_send(runner, engine_command{start_receive{operation, std::move(spec)}});
    const auto asked = said<transfer_request>(0);
    ASSERT_TRUE(asked);
    const auto session = heard->sessions.at(0);
    ASSERT_TRUE(session);
    offer.transfer = asked->transfer;
    offer.token_end = 16;
    caf::anon_send(*session, session_event{session_message{std::move(offer)}});
    expect_refusal(1, code, words);
  }

 private:
  std::size_t said_before_{0};
};

TEST_F(request_bounds, more_tokens_than_the_cache_holds_are_refused_of_a_send_that_grows) {
  grow();
  auto asked = request(std::numeric_limits<std::uint32_t>::max());
  const auto blocks = kvcache::blocks_in({0, asked.token_end}, context->layout->block_tokens);
  asked.blocks.assign(1, {{0}, static_cast<std::uint32_t>(blocks)});
  comes(std::move(asked));
  const auto refused = said<transfer_abort>(0);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, errc::out_of_range);
  EXPECT_NE(refused->reason.find("wants 4294967295 tokens"), std::string::npos) << refused->reason;
}

TEST_F(request_bounds, block_tables_of_groups_that_the_cache_has_not_are_refused) {
  grow();
  auto asked = request(16);
  asked.groups.resize(2);
  expect_refused(std::move(asked), errc::layout_mismatch, "2 groups of layers are named");
}

TEST_F(request_bounds, block_tables_of_groups_that_the_cache_has_not_are_refused_in_an_offer) {
  receive_spec spec;
  spec.blocks = {block_id{0}};
  transfer_offer offer;
  offer.groups.resize(3);
  expect_refused(std::move(spec), std::move(offer), errc::layout_mismatch,
                 "3 groups of layers are named");
}

TEST_F(request_bounds, what_no_transfer_can_use_is_not_kept_until_its_source_comes) {
  const auto refused = [&](const auto& change, const char* words) {
    auto asked = request(16);
    asked.mode = transfer_mode::read;
    change(asked);
    expect_refused(std::move(asked), errc::out_of_range, words);
  };
  refused([](auto& r) { r.grants.resize(25'000); }, "25000 grants");
  refused([](auto& r) { r.state_slots.resize(2); }, "2 slots of state tensors");
  refused(
      [](auto& r) {
        r.progress = transfer_progress{std::vector<std::uint32_t>(100), false};
      },
      "100 layers");
}

/// Two layers, each in a group of its own.
class group_bounds : public request_bounds {
 protected:
  void SetUp() override {
    auto layout = *small_layout();
    layout.groups = {{{0}}, {{1}}};
    const auto grouped = std::make_shared<const kvcache::cache_layout>(std::move(layout));
    context->layout = grouped;
    context->table_pools = kvcache::pools_of_tables(*grouped);
    meet("there-0", grouped);
  }
  [[nodiscard]] static std::vector<group_table> tables() {
    return {{0, 0, {{block_id{0}, 1}}}, {1, 0, {{block_id{1}, 1}}}};
  }
};

TEST_F(group_bounds, a_request_names_each_group_once_and_in_order_from_the_first_token_of_a_block) {
  grow({{0, {}}, {0, {}}});
  const auto refused = [&](const auto& change, errc code, const char* words) {
    auto asked = request(16);
    asked.groups = tables();
    change(asked);
    expect_refused(std::move(asked), code, words);
  };
  refused([](auto& r) { r.groups.clear(); }, errc::layout_mismatch, "0 groups of layers are named");
  refused([](auto& r) { r.groups.pop_back(); }, errc::layout_mismatch,
          "1 groups of layers are named");
  refused([](auto& r) { std::swap(r.groups[0], r.groups[1]); }, errc::out_of_range,
          "block table 0 is of group 1");
  refused([](auto& r) { r.groups[1].group = 0; }, errc::out_of_range,
          "block table 1 is of group 0");
  refused([](auto& r) { r.groups[1].token_begin = 5; }, errc::out_of_range, "from token 5 on");
  refused([](auto& r) { r.groups[0].blocks[0].count = 4'000'000'000; }, errc::out_of_range,
          "names 4000000000 blocks for tokens 0 to 16");
  refused([](auto& r) { r.groups[1].blocks.clear(); }, errc::out_of_range,
          "names 0 blocks for tokens 0 to 16");
  refused([](auto& r) { r.groups[1].token_begin = 16; }, errc::out_of_range,
          "names 1 blocks for tokens 16 to 16");
  refused([](auto& r) { r.groups[1].blocks[0].begin = block_id{4}; }, errc::out_of_range,
          "block 4 is not among");
}

TEST_F(group_bounds, a_request_that_waits_for_its_source_names_no_more_than_its_tokens_need) {
  auto asked = request(16);
  asked.groups = tables();
  asked.groups[0].blocks[0].count = 4'000'000'000;
  expect_refused(std::move(asked), errc::out_of_range, "names 4000000001 blocks");
}

TEST_F(group_bounds, who_keeps_what_is_not_held_is_refused_alone) {
  context->settings.default_deadline = 10 * troupe::testing::wait_limit;
  grow({{0, {}}, {16, {}}});
  auto asked = request(16);
  asked.groups = tables();
  comes(asked);
  const auto refused = said<transfer_abort>(0);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, errc::out_of_range);
  EXPECT_TRUE(refused->refused) << "other sources of the receive go on as well";
  asked.groups.clear();
  comes(asked);
  const auto other = said<transfer_abort>(1);
  ASSERT_TRUE(other);
  EXPECT_EQ(other->code, errc::layout_mismatch);
  EXPECT_FALSE(other->refused);
}

TEST_F(group_bounds, an_offer_is_of_what_was_asked_for) {
  receive_spec spec;
  spec.groups = {{0, {block_id{0}}}, {0, {block_id{1}}}};
  transfer_offer offer;
  offer.groups = tables();
  offer.groups[1] = {1, 16, {}};
  expect_refused(std::move(spec), std::move(offer), errc::out_of_range,
                 "offers different tokens of a group");
}

}  // namespace
}  // namespace troupe::actors::testing
