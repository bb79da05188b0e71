// What a peer may say of a request, and no honest one does: it is refused by name, and costs nothing.

#include <limits>

#include <gtest/gtest.h>

#include "listening_link.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {
namespace {

class request_bounds : public listened_port {
 protected:
  void SetUp() override {
    context->layout = small_layout();
    meet("there-0", small_layout());
  }
  /// A send of the engine that grows, of no blocks yet.
  void grow() {
    send_spec spec;
    spec.request = "r";
    spec.grows = true;
    const auto operation = context->operations.begin({operation_kind::send, "r", 0, false, true});
    caf::anon_send(port, engine_command{start_send{operation.value(), std::move(spec)}});
  }
  [[nodiscard]] static transfer_request request(std::uint32_t tokens) {
    transfer_request r;
    r.transfer = transfer_id{7};
    r.request = "r";
    r.token_end = tokens;
    r.deadline_ms = std::numeric_limits<std::uint32_t>::max();
    return r;
  }
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

TEST_F(request_bounds, block_tables_of_groups_are_refused_in_a_request) {
  grow();
  auto asked = request(16);
  asked.groups.resize(2);
  comes(std::move(asked));
  const auto refused = said<transfer_abort>(0);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, errc::layout_mismatch);
  EXPECT_NE(refused->reason.find("each of 2 groups"), std::string::npos) << refused->reason;
}

TEST_F(request_bounds, block_tables_of_groups_are_refused_in_an_offer) {
  receive_spec spec;
  spec.request = "r";
  spec.sources = {"there-0"};
  spec.mode = transfer_mode::read;
  spec.tokens = 16;
  spec.blocks = {block_id{0}};
  const auto operation = context->operations.begin({}).value();
  caf::anon_send(port, engine_command{start_receive{operation, spec}});
  const auto asked = said<transfer_request>(0);
  ASSERT_TRUE(asked);
  const auto session = heard->sessions.at(0);
  ASSERT_TRUE(session);
  transfer_offer offer;
  offer.transfer = asked->transfer;
  offer.token_end = 16;
  offer.groups.resize(3);
  caf::anon_send(*session, session_event{session_message{std::move(offer)}});
  const auto refused = said<transfer_abort>(1);
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code, errc::layout_mismatch);
  EXPECT_NE(refused->reason.find("each of 3 groups"), std::string::npos) << refused->reason;
}

}  // namespace
}  // namespace troupe::actors::testing
