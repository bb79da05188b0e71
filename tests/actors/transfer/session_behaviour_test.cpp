// Behaviour beyond the transition tables: batches, merging, chunks, prefixes, state, and sentences.
#include <array>
#include <chrono>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "troupe/actors/transfer/receive_session.hpp"
#include "troupe/actors/transfer/send_session.hpp"

#include "session_table.hpp"

namespace troupe::actors {
namespace {

using testing::HasSubstr;

constexpr transfer_id the_id{5};

transfer_request asking(std::uint32_t begin, std::uint32_t end,
                        transfer_mode mode = transfer_mode::write) {
  transfer_request r;
  r.transfer = the_id;
  r.request = std::string{"r"};
  r.mode = mode;
  r.token_begin = begin;
  r.token_end = end;
  return r;
}

struct shape {
  std::uint32_t layers{4};
  std::uint32_t layers_per_batch{0};
  std::uint32_t max_in_flight{8};
  bool has_state{false};
};

template <class Session>
typename Session::options options_of(const shape& s) {
  typename Session::options o;
  o.layers = s.layers;
  o.layers_per_batch = s.layers_per_batch;
  o.max_in_flight = s.max_in_flight;
  o.has_state = s.has_state;
  o.deadline = time_point{} + std::chrono::seconds{10};
  return o;
}

send_session sender(const shape& s, const transfer_request& request, std::string* did = nullptr) {
  send_session out{options_of<send_session>(s)};
  const std::vector<std::uint32_t> nothing(s.layers, 0);
  const auto actions = describe(out.start(request, nothing, std::nullopt, {}));
  if (did != nullptr) *did = actions;
  return out;
}

receive_session receiver(const shape& s, const transfer_request& request) {
  receive_session out{options_of<receive_session>(s), request};
  EXPECT_EQ(describe(out.start()), "send(transfer_request)");
  return out;
}

std::string acknowledge(send_session& s, std::uint64_t id) {
  return describe(s.batch_completed(transport::batch_id{id}, std::nullopt));
}
std::string acknowledge(receive_session& s, std::uint64_t id) {
  return describe(s.batch_completed(transport::batch_id{id}, std::nullopt));
}
layers_landed came(const cache_slice& slice, bool state = false) {
  return {the_id, slice, state, std::nullopt};
}
transfer_sealed seal(std::uint32_t tokens, std::uint32_t batches) {
  return {the_id, tokens, batches, {}};
}
transfer_offer offer(std::uint32_t tokens) {
  return {the_id, tokens, {}, {}, {}, {}};
}

std::string sentence(const session_actions& actions) {
  for (const auto& action : actions) {
    if (const auto* c = std::get_if<conclude>(&action))
      return c->failure ? c->failure->message : "done";
  }
  return "no outcome";
}

TEST(send_session, ranges_that_wait_for_a_batch_in_flight_merge_into_one) {
  auto s = sender({.layers = 4, .max_in_flight = 1}, asking(0, 32));
  EXPECT_EQ(describe(s.source_ready(0, 1, 16)), "post(1: 0-1 x 0-16)");
  EXPECT_EQ(describe(s.source_ready(1, 2, 16)), "");
  EXPECT_EQ(describe(s.source_ready(2, 4, 16)), "");
  EXPECT_EQ(acknowledge(s, 1), "post(2: 1-4 x 0-16)");
  EXPECT_EQ(describe(s.source_ready(0, 4, 24)), "");
  EXPECT_EQ(describe(s.source_ready(0, 4, 32)), "");
  EXPECT_EQ(acknowledge(s, 2), "post(3: 0-4 x 16-32)");
}

TEST(send_session, takes_at_most_layers_per_batch_layers_into_one) {
  auto s = sender({.layers = 5, .layers_per_batch = 2}, asking(0, 8));
  EXPECT_EQ(describe(s.source_ready(0, 5, 8)),
            "post(1: 0-2 x 0-8) post(2: 2-4 x 0-8) post(3: 4-5 x 0-8)");
}

TEST(send_session, posts_only_layers_with_the_same_tokens_in_one_batch) {
  auto s = sender({.layers = 3, .max_in_flight = 1}, asking(0, 8));
  EXPECT_EQ(describe(s.source_ready(1, 2, 4)), "post(1: 1-2 x 0-4)");
  EXPECT_EQ(describe(s.source_ready(0, 3, 8)), "");
  EXPECT_EQ(acknowledge(s, 1), "post(2: 0-1 x 0-8)");
  EXPECT_EQ(acknowledge(s, 2), "post(3: 1-2 x 4-8)");
  EXPECT_EQ(acknowledge(s, 3), "post(4: 2-3 x 0-8)");
}

TEST(send_session, leaves_out_the_prefix_and_what_lies_behind_the_request) {
  auto s = sender({.layers = 1}, asking(6, 10));
  EXPECT_EQ(describe(s.source_ready(0, 1, 4)), "");
  EXPECT_EQ(describe(s.source_ready(0, 1, 8)), "post(1: 0-1 x 6-8)");
  EXPECT_EQ(describe(s.source_ready(0, 1, 16)), "post(2: 0-1 x 8-10)");
  EXPECT_EQ(describe(s.sealed(16, {})), "send(transfer_sealed 2)");
}

TEST(send_session, layers_of_opaque_blocks_are_posted_by_whole_blocks) {
  auto options = options_of<send_session>({.layers = 2});
  options.tokens_at_once = {1, 4};
  send_session s{options};
  const std::vector<std::uint32_t> nothing(2, 0);
  EXPECT_EQ(describe(s.start(asking(0, 10), nothing, std::nullopt, {})), "");
  EXPECT_EQ(describe(s.source_ready(0, 2, 3)), "post(1: 0-1 x 0-3)");
  EXPECT_EQ(describe(s.source_ready(0, 2, 6)), "post(2: 0-1 x 3-6) post(3: 1-2 x 0-4)");
  EXPECT_EQ(describe(s.source_ready(0, 2, 7)), "post(4: 0-1 x 6-7)");
  EXPECT_EQ(describe(s.source_ready(0, 2, 10)), "post(5: 0-1 x 7-10) post(6: 1-2 x 4-8)");
  // A block that still receives tokens must not be visible, since all of it may be written again.
  EXPECT_EQ(describe(s.source_ready(0, 2, 11)), "");
  EXPECT_EQ(describe(s.source_ready(0, 2, 12)), "post(7: 1-2 x 8-10)");
}

TEST(send_session, an_opaque_block_that_begins_in_the_prefix_is_posted_whole) {
  auto options = options_of<send_session>({.layers = 1});
  options.tokens_at_once = {4};
  send_session s{options};
  const std::vector<std::uint32_t> nothing(1, 0);
  EXPECT_EQ(describe(s.start(asking(6, 10), nothing, std::nullopt, {})), "");
  EXPECT_EQ(describe(s.source_ready(0, 1, 7)), "");
  EXPECT_EQ(describe(s.source_ready(0, 1, 9)), "post(1: 0-1 x 6-8)");
  EXPECT_EQ(describe(s.source_ready(0, 1, 10)), "");
  EXPECT_EQ(describe(s.sealed(10, {})), "post(2: 0-1 x 8-10) sealed 2");
}

TEST(send_session, a_chunk_said_twice_or_moved_back_posts_nothing) {
  auto s = sender({.layers = 1}, asking(0, 10));
  EXPECT_EQ(describe(s.source_ready(0, 1, 8)), "post(1: 0-1 x 0-8)");
  EXPECT_EQ(describe(s.source_ready(0, 1, 8)), "");
  EXPECT_EQ(describe(s.source_ready(0, 1, 4)), "");
  EXPECT_EQ(describe(s.source_ready(0, 1, 10)), "post(2: 0-1 x 8-10)");
}

TEST(send_session, sends_what_was_ready_before_the_request_came) {
  send_session s{options_of<send_session>({.layers = 2})};
  const std::array<std::uint32_t, 2> ready{8, 4};
  EXPECT_EQ(describe(s.start(asking(0, 8), ready, std::nullopt, {})),
            "post(1: 0-1 x 0-8) post(2: 1-2 x 0-4)");
}

TEST(send_session, state_goes_with_the_last_batch_behind_the_seal) {
  auto s = sender({.layers = 2, .layers_per_batch = 1, .max_in_flight = 1, .has_state = true},
                  asking(0, 8));
  EXPECT_EQ(describe(s.source_ready(0, 2, 8)), "post(1: 0-1 x 0-8)");
  EXPECT_EQ(describe(s.sealed(8, {})), "");
  EXPECT_EQ(acknowledge(s, 1), "post(2: 1-2 x 0-8 state) sealed 2");
}

TEST(send_session, state_goes_alone_when_all_tokens_went_before_the_seal) {
  auto s = sender({.layers = 2, .max_in_flight = 1, .has_state = true}, asking(0, 8));
  EXPECT_EQ(describe(s.source_ready(0, 2, 8)), "post(1: 0-2 x 0-8)");
  EXPECT_EQ(describe(s.sealed(8, {})), "");
  EXPECT_EQ(acknowledge(s, 1), "post(2: 0-0 x 8-8 state) sealed 2");
}

// Data that comes with the seal, such as the first token, is still needed.
TEST(send_session, a_transfer_with_nothing_to_move_waits_for_the_seal_in_either_mode) {
  const std::vector<std::byte> aux{std::byte{1}};
  for (const auto mode : {transfer_mode::write, transfer_mode::read}) {
    std::string did;
    auto s = sender({.layers = 2, .has_state = true}, asking(8, 8, mode), &did);
    EXPECT_EQ(did, "");
    EXPECT_EQ(describe(s.source_ready(0, 2, 8)), "");
    const auto seal = s.sealed(8, aux);
    ASSERT_EQ(describe(seal), "send(transfer_sealed 0)");
    EXPECT_EQ(std::get<transfer_sealed>(std::get<send_message>(seal[0]).message).aux, aux);
    EXPECT_EQ(describe(s.peer_released()), "conclude(done) fence");
  }
}

TEST(send_session, the_seal_carries_what_the_engine_gave_with_it) {
  const std::vector<std::byte> aux{std::byte{1}, std::byte{2}};
  auto s = sender({.layers = 1}, asking(0, 1));
  static_cast<void>(s.source_ready(0, 1, 1));
  const auto actions = s.sealed(1, aux);
  ASSERT_EQ(actions.size(), 1u);
  EXPECT_EQ(std::get<transfer_sealed>(std::get<send_message>(actions[0]).message).aux, aux);

  send_session at_once{options_of<send_session>({.layers = 1})};
  const auto with_batch = at_once.start(asking(0, 1), std::array{1u}, 1, aux);
  ASSERT_EQ(describe(with_batch), "post(1: 0-1 x 0-1) sealed 1");
  EXPECT_EQ(std::get<post_slice>(with_batch[0]).seal, (seal_notice{1, 1, aux}));

  auto read = sender({.layers = 1}, asking(0, 1, transfer_mode::read));
  static_cast<void>(read.source_ready(0, 1, 1));
  EXPECT_EQ(std::get<send_offer>(read.sealed(1, aux).at(0)).aux, aux);
}

TEST(send_session, a_request_for_more_tokens_than_the_sealed_source_has_fails_at_both_sides) {
  send_session s{options_of<send_session>({.layers = 1})};
  const std::array<std::uint32_t, 1> ready{4};
  const auto actions = s.start(asking(0, 8), ready, 4, {});
  EXPECT_EQ(describe(actions), "send(transfer_abort out_of_range) conclude(out_of_range) fence");
  EXPECT_THAT(sentence(actions), HasSubstr("wants 8 tokens"));
  EXPECT_THAT(sentence(actions), HasSubstr("with 4"));
  // The same for a request that has nothing to move.
  send_session empty{options_of<send_session>({.layers = 1})};
  EXPECT_THAT(describe(empty.start(asking(8, 8), ready, 4, {})),
              HasSubstr("conclude(out_of_range)"));
}

TEST(send_session, a_seal_before_a_layer_is_ready_fails_naming_the_layer) {
  auto s = sender({.layers = 3}, asking(0, 8));
  static_cast<void>(s.source_ready(0, 3, 4));
  static_cast<void>(s.source_ready(0, 2, 8));
  const auto actions = s.sealed(8, {});
  EXPECT_THAT(describe(actions), HasSubstr("conclude(invalid_config)"));
  EXPECT_THAT(sentence(actions), HasSubstr("layer 2 is ready up to token 4"));
}

TEST(send_session, a_request_that_makes_no_sense_fails_at_both_sides) {
  std::string did;
  static_cast<void>(sender({}, asking(9, 8), &did));
  EXPECT_EQ(did, "send(transfer_abort out_of_range) conclude(out_of_range) fence");
  auto rank = asking(0, 8);
  rank.rank = rank.ranks = 2;
  static_cast<void>(sender({}, rank, &did));
  EXPECT_EQ(did, "send(transfer_abort out_of_range) conclude(out_of_range) fence");
}

TEST(send_session, a_release_before_the_batches_are_acknowledged_is_their_acknowledgement) {
  auto s = sender({.layers = 1}, asking(0, 8));
  static_cast<void>(s.source_ready(0, 1, 8));
  EXPECT_EQ(describe(s.sealed(8, {})), "send(transfer_sealed 1)");
  EXPECT_EQ(describe(s.peer_released()), "conclude(done) fence");
  EXPECT_EQ(describe(s.batch_completed(transport::batch_id{1}, error{errc::aborted, "fenced"})),
            "");
  EXPECT_EQ(describe(s.quiescent()), "unpin");
}

TEST(send_session,
     a_batch_refused_by_the_fence_of_a_peer_that_gave_up_fails_for_the_reason_of_the_peer) {
  auto s = sender({.layers = 1, .max_in_flight = 1}, asking(0, 8));
  EXPECT_EQ(describe(s.source_ready(0, 1, 4)), "post(1: 0-1 x 0-4)");
  EXPECT_EQ(
      describe(s.batch_completed(transport::batch_id{1}, error{errc::grant_revoked, "fenced"})),
      "");
  EXPECT_EQ(describe(s.source_ready(0, 1, 8)), "");  // nothing more goes out
  EXPECT_EQ(describe(s.peer_aborted({errc::deadline, "too late"})), "conclude(deadline) fence");
}

/// Whether the outcome, and any abort, are marked as a refusal.
bool says_refused(const session_actions& actions) {
  bool says = true;
  for (const auto& action : actions) {
    if (const auto* what = std::get_if<conclude>(&action)) says = says && what->refused;
    const auto* order = std::get_if<send_message>(&action);
    if (order == nullptr) continue;
    const auto* abort = std::get_if<transfer_abort>(&order->message);
    says = says && (abort == nullptr || abort->refused);
  }
  return says;
}

TEST(send_session, does_not_fail_by_what_another_source_refused) {
  auto s = sender({.layers = 1}, asking(0, 8));
  const auto refused = s.peer_refused({errc::out_of_range, "another source holds less"});
  EXPECT_EQ(describe(refused), "conclude(out_of_range) fence");
  EXPECT_TRUE(says_refused(refused));
  EXPECT_EQ(describe(s.quiescent()), "send(transfer_quiescent) unpin");
  auto other = sender({.layers = 1}, asking(0, 8));
  EXPECT_FALSE(says_refused(other.peer_aborted({errc::out_of_range, "nonsense"})));
}

TEST(send_session, refuses_who_expects_another_request_and_fails_by_a_short_seal) {
  auto request = asking(0, 8);
  request.expect = {std::byte{1}};
  auto s = sender({.layers = 1}, request);
  const auto refused = s.sealed(8, {std::byte{2}});
  EXPECT_EQ(describe(refused),
            "send(transfer_abort layout_mismatch) conclude(layout_mismatch) fence");
  EXPECT_TRUE(says_refused(refused));
  auto other = sender({.layers = 1}, asking(0, 8));
  EXPECT_FALSE(says_refused(other.sealed(4, {})));
}

TEST(receive_session, hands_on_that_a_source_refused_it) {
  auto at_that_source = receiver({.layers = 1}, asking(0, 8));
  const auto refused = at_that_source.peer_refused({errc::out_of_range, "it holds less"});
  EXPECT_EQ(describe(refused), "conclude(out_of_range) fence");
  EXPECT_TRUE(says_refused(refused));
  auto at_another = receiver({.layers = 1}, asking(0, 8));
  const auto given_up = at_another.refused_elsewhere({errc::out_of_range, "it holds less"});
  EXPECT_EQ(describe(given_up), "send(transfer_abort out_of_range) conclude(out_of_range) fence");
  EXPECT_TRUE(says_refused(given_up));
  auto aborted = receiver({.layers = 1}, asking(0, 8));
  EXPECT_FALSE(says_refused(aborted.local_abort({errc::aborted, "the engine gave up"})));
}

TEST(receive_session, tells_layers_in_token_order_whatever_order_they_land_in) {
  auto s = receiver({.layers = 2}, asking(2, 12));
  EXPECT_EQ(describe(s.landed(came({0, 2, 8, 12}))), "");
  EXPECT_EQ(describe(s.landed(came({0, 1, 4, 8}))), "");
  EXPECT_EQ(describe(s.landed(came({0, 2, 2, 4}))), "tell(0-1 x 2-12) tell(1-2 x 2-4)");
  EXPECT_EQ(describe(s.sealed(seal(12, 4))), "");
  EXPECT_EQ(describe(s.landed(came({1, 2, 4, 8}))), "tell(1-2 x 4-12) fence");
}

TEST(receive_session, a_seal_that_overtakes_its_last_batch_waits_for_it) {
  auto s = receiver({.layers = 1}, asking(0, 8));
  EXPECT_EQ(describe(s.sealed(seal(8, 1))), "");
  EXPECT_EQ(describe(s.landed(came({0, 1, 0, 8}))), "tell(0-1 x 0-8) fence");
}

TEST(receive_session, everything_landed_is_not_done_before_the_seal) {
  auto s = receiver({.layers = 1}, asking(0, 8));
  EXPECT_EQ(describe(s.landed(came({0, 1, 0, 8}))), "tell(0-1 x 0-8)");
  EXPECT_EQ(describe(s.sealed(seal(8, 1))), "fence");
}

TEST(receive_session, a_seal_that_comes_with_a_batch_counts_that_batch_first) {
  const std::vector<std::byte> aux{std::byte{7}};
  auto last = came({0, 1, 0, 8});
  last.seal = {8, 1, aux};
  auto s = receiver({.layers = 1}, asking(0, 8));
  EXPECT_EQ(describe(s.landed(last)), "tell(0-1 x 0-8) fence");
  const auto outcome = s.quiescent();
  EXPECT_EQ(describe(outcome), "conclude(done)");
  EXPECT_EQ(std::get<conclude>(outcome[0]).aux, aux);

  // Another batch is still in flight.
  last.seal->batches = 2;
  auto waits = receiver({.layers = 2}, asking(0, 8));
  EXPECT_EQ(describe(waits.landed(last)), "tell(0-1 x 0-8)");
  EXPECT_EQ(describe(waits.landed(came({1, 2, 0, 8}))), "tell(1-2 x 0-8) fence");

  // A valid seal does not excuse an invalid batch, nor the reverse.
  auto twice = receiver({.layers = 2}, asking(0, 8));
  static_cast<void>(twice.landed(came({0, 1, 0, 8})));
  EXPECT_EQ(describe(twice.landed(last)),
            "send(transfer_abort out_of_range) conclude(out_of_range) fence");
  last.seal->batches = 0;
  auto none = receiver({.layers = 2}, asking(0, 8));
  EXPECT_EQ(describe(none.landed(last)),
            "tell(0-1 x 0-8) send(transfer_abort out_of_range) conclude(out_of_range) fence");
}

TEST(receive_session, any_overlap_of_what_lands_fails_the_transfer) {
  const std::array<cache_slice, 6> twice{
      {{0, 1, 0, 2}, {0, 1, 3, 5}, {0, 1, 6, 8}, {0, 1, 7, 10}, {0, 1, 4, 9}, {0, 2, 9, 12}}};
  for (const auto& slice : twice) {
    auto s = receiver({.layers = 2}, asking(0, 16));
    static_cast<void>(s.landed(came({0, 1, 0, 4})));
    static_cast<void>(s.landed(came({0, 2, 6, 10})));
    const auto actions = s.landed(came(slice));
    EXPECT_EQ(describe(actions), "send(transfer_abort out_of_range) conclude(out_of_range) fence")
        << slice.token_begin;
    EXPECT_THAT(sentence(actions), HasSubstr("layer 0 landed twice"));
  }
  auto fits = receiver({.layers = 1}, asking(0, 16));
  static_cast<void>(fits.landed(came({0, 1, 0, 4})));
  static_cast<void>(fits.landed(came({0, 1, 6, 10})));
  EXPECT_EQ(describe(fits.landed(came({0, 1, 4, 6}))), "tell(0-1 x 4-10)");
}

TEST(receive_session, a_gap_that_is_left_when_all_batches_landed_fails_naming_the_layer) {
  auto s = receiver({.layers = 2}, asking(0, 8));
  static_cast<void>(s.landed(came({0, 1, 0, 8})));
  static_cast<void>(s.landed(came({1, 2, 4, 8})));
  const auto actions = s.sealed(seal(8, 2));
  EXPECT_THAT(describe(actions), HasSubstr("conclude(out_of_range)"));
  EXPECT_THAT(sentence(actions), HasSubstr("layer 1 misses what follows token 0"));
}

TEST(receive_session, more_batches_than_sealed_fail_the_transfer) {
  auto early = receiver({.layers = 2}, asking(0, 8));
  static_cast<void>(early.landed(came({0, 1, 0, 4})));
  static_cast<void>(early.landed(came({0, 1, 4, 8})));
  EXPECT_THAT(describe(early.sealed(seal(8, 1))), HasSubstr("conclude(out_of_range)"));
}

TEST(receive_session, is_not_complete_without_the_state_that_its_layout_has) {
  auto s = receiver({.layers = 1, .has_state = true}, asking(0, 8));
  static_cast<void>(s.landed(came({0, 1, 0, 8})));
  const auto actions = s.sealed(seal(8, 1));
  EXPECT_THAT(describe(actions), HasSubstr("conclude(out_of_range)"));
  EXPECT_THAT(sentence(actions), HasSubstr("state"));

  auto with = receiver({.layers = 1, .has_state = true}, asking(0, 8));
  static_cast<void>(with.landed(came({0, 1, 0, 8})));
  static_cast<void>(with.sealed(seal(8, 2)));
  EXPECT_EQ(describe(with.landed(came({0, 0, 8, 8}, true))), "fence");

  auto twice = receiver({.layers = 1, .has_state = true}, asking(0, 8));
  static_cast<void>(twice.landed(came({0, 0, 8, 8}, true)));
  EXPECT_THAT(describe(twice.landed(came({0, 1, 0, 8}, true))),
              HasSubstr("conclude(out_of_range)"));
}

TEST(receive_session, pulls_groups_of_layers_bounded_in_flight_with_the_state_in_the_last) {
  auto s = receiver({.layers = 5, .layers_per_batch = 2, .max_in_flight = 2, .has_state = true},
                    asking(3, 8, transfer_mode::read));
  EXPECT_EQ(describe(s.offered(offer(8))), "post(1: 0-2 x 3-8) post(2: 2-4 x 3-8)");
  EXPECT_EQ(acknowledge(s, 2), "tell(2-4 x 3-8) post(3: 4-5 x 3-8 state)");
  EXPECT_EQ(acknowledge(s, 3), "tell(4-5 x 3-8)");
  EXPECT_EQ(acknowledge(s, 1), "tell(0-2 x 3-8) fence");
}

TEST(receive_session, a_transfer_with_nothing_to_move_is_done_by_a_seal_or_an_offer) {
  for (const auto mode : {transfer_mode::write, transfer_mode::read}) {
    auto sealed = receiver({.layers = 2, .has_state = true}, asking(8, 8, mode));
    EXPECT_EQ(describe(sealed.sealed(seal(8, 0))), "fence");
    EXPECT_EQ(describe(sealed.quiescent()), "conclude(done)");
    auto offered = receiver({.layers = 2}, asking(8, 8, mode));
    EXPECT_EQ(describe(offered.offered(offer(8))), "fence");
  }
}

TEST(receive_session, the_outcome_carries_what_came_with_the_seal_or_the_offer) {
  const std::vector<std::byte> aux{std::byte{7}};
  auto s = receiver({.layers = 1}, asking(8, 8));
  static_cast<void>(s.sealed({the_id, 8, 0, aux}));
  EXPECT_EQ(std::get<conclude>(s.quiescent().at(0)).aux, aux);
  auto read = receiver({.layers = 1}, asking(0, 8, transfer_mode::read));
  static_cast<void>(read.offered({the_id, 8, {}, {}, {}, aux}));
  static_cast<void>(acknowledge(read, 1));
  EXPECT_EQ(std::get<conclude>(read.quiescent().at(0)).aux, aux);
}

/// A session whose part has arrived, while the rest of the receive is still open.
receive_session with_its_part_here() {
  auto s = receiver({.layers = 1}, asking(8, 8));
  static_cast<void>(s.sealed(seal(8, 0)));
  EXPECT_EQ(describe(s.quiescent()), "conclude(done)");
  return s;
}

// Otherwise this part could not be received again, and the other sources would be useless.
TEST(receive_session, gives_a_source_back_unreleased_when_the_receive_fails_elsewhere) {
  auto s = with_its_part_here();
  EXPECT_EQ(describe(s.local_abort({errc::peer_lost, "another source is gone"})),
            "send(transfer_abort peer_lost) unpin");
  auto other = with_its_part_here();
  const auto refused = other.refused_elsewhere({errc::out_of_range, "another source holds less"});
  EXPECT_EQ(describe(refused), "send(transfer_abort out_of_range) unpin");
  EXPECT_TRUE(says_refused(refused));
}

TEST(receive_session, says_nothing_to_a_source_that_ended_or_whose_link_is_gone) {
  auto ended = with_its_part_here();
  EXPECT_EQ(describe(ended.peer_aborted({errc::aborted, "the engine stops"})),
            "send(transfer_quiescent)");
  EXPECT_EQ(describe(ended.received_whole()), "unpin");
  auto gone = with_its_part_here();
  EXPECT_EQ(describe(gone.link_lost({errc::peer_lost, "gone"})), "");
  EXPECT_EQ(describe(gone.received_whole()), "unpin");
}

// Otherwise one side reports aborted and the other delivered, and the request could not be received
// again.
TEST(receive_session, an_abort_behind_the_last_byte_reaches_the_source_in_place_of_the_release) {
  auto s = receiver({.layers = 1}, asking(8, 8));
  EXPECT_EQ(describe(s.sealed(seal(8, 0))), "fence");
  EXPECT_EQ(describe(s.local_abort({errc::aborted, "the engine gave up"})),
            "send(transfer_abort aborted) conclude(aborted)");
  EXPECT_EQ(describe(s.quiescent()), "unpin");
}

/// A session whose first of two reads was refused by the peer's fence.
receive_session with_a_refused_read() {
  auto s = receiver({.layers = 2, .layers_per_batch = 1}, asking(0, 8, transfer_mode::read));
  EXPECT_EQ(describe(s.offered(offer(8))), "post(1: 0-1 x 0-8) post(2: 1-2 x 0-8)");
  EXPECT_EQ(
      describe(s.batch_completed(transport::batch_id{1}, error{errc::grant_revoked, "fenced"})),
      "");
  EXPECT_EQ(acknowledge(s, 2), "tell(1-2 x 0-8)");
  return s;
}

TEST(receive_session,
     a_read_refused_by_the_fence_of_a_peer_that_gave_up_fails_for_the_reason_of_the_peer) {
  auto s = with_a_refused_read();
  EXPECT_EQ(describe(s.peer_aborted({errc::aborted, "gone"})), "conclude(aborted) fence");
}

// The peer's end of the link broke first, so it refuses what this end still reads over the old
// link.
TEST(receive_session, a_read_refused_since_the_link_broke_at_the_peer_is_read_over_the_next_link) {
  auto s = with_a_refused_read();
  static_cast<void>(s.link_back());
  EXPECT_EQ(describe(s.offered(offer(8))), "post(3: 0-1 x 0-8)");
  EXPECT_EQ(acknowledge(s, 3), "tell(0-1 x 0-8) fence");
}

TEST(receive_session, a_flood_of_gaps_is_refused_before_it_fills_the_memory) {
  constexpr std::uint32_t many = 300'000;
  auto s = receiver({.layers = 1}, asking(0, many));
  std::string last;
  for (std::uint32_t token = 1; token + 1 < many && last.empty(); token += 2) {
    last = describe(s.landed(came({0, 1, token, token + 1})));
  }
  EXPECT_EQ(last, "send(transfer_abort overloaded) conclude(overloaded) fence");
}

}  // namespace
}  // namespace troupe::actors
