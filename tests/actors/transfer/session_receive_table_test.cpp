#include <array>
#include <chrono>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/actors/transfer/receive_session.hpp"

#include "transition_table.hpp"

namespace troupe::actors {
namespace {

receive_session begin(transfer_mode mode, std::uint32_t prefix = 0) {
  receive_session::options o;
  o.layers = layers;
  o.layers_per_batch = 1;
  o.max_in_flight = 1;
  o.deadline = deadline;
  return receive_session{o, request_for(mode, prefix)};
}

layers_landed batch(const cache_slice& slice, bool state = false) {
  return {transfer_id{5}, slice, state, std::nullopt};
}
/// Layer 1, after layer 0 has come.
layers_landed rest() {
  return batch({1, 2, 0, tokens});
}

/// The situations in which events arrive: each state, with the variants that behave differently.
receive_session idle() {
  return begin(transfer_mode::write);
}
receive_session requested(transfer_mode mode, std::uint32_t prefix = 0) {
  auto s = begin(mode, prefix);
  EXPECT_EQ(describe(s.start()), "send(transfer_request)");
  return s;
}
receive_session requested_write() {
  return requested(transfer_mode::write);
}
receive_session requested_read() {
  return requested(transfer_mode::read);
}
receive_session requested_empty() {
  return requested(transfer_mode::read, tokens);
}
/// One of two batches has landed, and the seal has announced both.
receive_session receiving_write() {
  auto s = requested_write();
  EXPECT_EQ(describe(s.landed(batch({0, 1, 0, tokens}))), "tell(0-1 x 0-8)");
  EXPECT_EQ(describe(s.sealed({transfer_id{5}, tokens, 2, {}})), "");
  return s;
}
/// The first pull is in flight.
receive_session receiving_read() {
  auto s = requested_read();
  EXPECT_EQ(describe(s.offered({transfer_id{5}, tokens, {}, {}, {}, {}})), "post(1: 0-1 x 0-8)");
  return s;
}
receive_session fencing_done() {
  auto s = receiving_write();
  EXPECT_EQ(describe(s.landed(rest())), "tell(1-2 x 0-8) fence");
  return s;
}
receive_session fencing_failed() {
  auto s = receiving_write();
  EXPECT_EQ(describe(s.local_abort(given_up)),
            "send(transfer_abort aborted) conclude(aborted) fence");
  return s;
}
/// This source's part has arrived; other sources may still be missing.
receive_session arrived() {
  auto s = fencing_done();
  EXPECT_EQ(describe(s.quiescent()), "conclude(done)");
  return s;
}
receive_session finished() {
  auto s = arrived();
  EXPECT_EQ(describe(s.received_whole()), "send(transfer_release) unpin");
  return s;
}

const std::array<situation<receive_session>, 10> situations{{{"idle", idle},
                                                             {"requested_write", requested_write},
                                                             {"requested_read", requested_read},
                                                             {"requested_empty", requested_empty},
                                                             {"receiving_write", receiving_write},
                                                             {"receiving_read", receiving_read},
                                                             {"fencing_done", fencing_done},
                                                             {"fencing_failed", fencing_failed},
                                                             {"arrived", arrived},
                                                             {"finished", finished}}};

using row = transition_row<receive_session, situations.size()>;

const std::vector<row>& table() {
  static const std::vector<row> rows{
      {"start again",
       [](auto& s) { return s.start(); },
       {"requested: send(transfer_request)", stays, stays, stays, stays, stays, stays, stays, stays,
        stays}},
      {"landed, the rest",
       [](auto& s) { return s.landed(rest()); },
       {stays, "receiving: tell(1-2 x 0-8)", is_refused, is_refused,
        "fencing: tell(1-2 x 0-8) fence", is_refused, stays, stays, stays, stays}},
      {"landed, outside the request",
       [](auto& s) {
         return s.landed(batch({0, layers, 0, tokens + 1}));
       },
       {stays, is_refused, is_refused, is_refused, is_refused, is_refused, stays, stays, stays,
        stays}},
      {"landed, no layer",
       [](auto& s) {
         return s.landed(batch({1, 1, 0, tokens}));
       },
       {stays, is_refused, is_refused, is_refused, is_refused, is_refused, stays, stays, stays,
        stays}},
      {"landed, a layer ahead of the layout",
       [](auto& s) {
         return s.landed(batch({0, layers + 1, 0, tokens}));
       },
       {stays, is_refused, is_refused, is_refused, is_refused, is_refused, stays, stays, stays,
        stays}},
      {"landed, state that is not",
       [](auto& s) {
         return s.landed(batch({1, 2, 0, tokens}, true));
       },
       {stays, is_refused, is_refused, is_refused, is_refused, is_refused, stays, stays, stays,
        stays}},
      {"landed, what had landed",
       [](auto& s) {
         return s.landed(batch({0, 1, 0, tokens}));
       },
       {stays, "receiving: tell(0-1 x 0-8)", is_refused, is_refused, is_refused, is_refused, stays,
        stays, stays, stays}},
      {"sealed, two batches",
       [](auto& s) {
         return s.sealed({transfer_id{5}, tokens, 2, {}});
       },
       {stays, "receiving: ", is_refused, is_refused, is_refused, is_refused, stays, stays, stays,
        stays}},
      {"sealed, no batches",
       [](auto& s) {
         return s.sealed({transfer_id{5}, tokens, 0, {}});
       },
       {stays, is_refused, is_refused, "fencing: fence", is_refused, is_refused, stays, stays,
        stays, stays}},
      {"sealed, another length",
       [](auto& s) {
         return s.sealed({transfer_id{5}, tokens + 1, 2, {}});
       },
       {stays, is_refused, is_refused, is_refused, is_refused, is_refused, stays, stays, stays,
        stays}},
      {"offered",
       [](auto& s) {
         return s.offered({transfer_id{5}, tokens, {}, {}, {}, {}});
       },
       {stays, is_refused, "receiving: post(1: 0-1 x 0-8)", "fencing: fence", is_refused,
        is_refused, stays, stays, stays, stays}},
      {"offered, more than asked for",
       [](auto& s) {
         return s.offered({transfer_id{5}, tokens + 1, {}, {}, {}, {}});
       },
       {stays, is_refused, "receiving: post(1: 0-1 x 0-8)", "fencing: fence", is_refused,
        is_refused, stays, stays, stays, stays}},
      {"offered, too few",
       [](auto& s) {
         return s.offered({transfer_id{5}, tokens - 1, {}, {}, {}, {}});
       },
       {stays, is_refused, is_refused, is_refused, is_refused, is_refused, stays, stays, stays,
        stays}},
      {"batch_completed",
       [](auto& s) { return s.batch_completed(transport::batch_id{1}, std::nullopt); },
       {stays, stays, stays, stays, stays, "receiving: tell(0-1 x 0-8) post(2: 1-2 x 0-8)", stays,
        stays, stays, stays}},
      {"batch_completed, failure",
       [](auto& s) { return s.batch_completed(transport::batch_id{1}, refused); },
       {stays, stays, stays, stays, stays,
        "fencing: send(transfer_abort overloaded) conclude(overloaded) fence", stays, stays, stays,
        stays}},
      {"batch_completed, revoked",
       [](auto& s) { return s.batch_completed(transport::batch_id{1}, revoked); },
       {stays, stays, stays, stays, stays, stays, stays, stays, stays, stays}},
      {"batch_completed, unknown",
       [](auto& s) { return s.batch_completed(transport::batch_id{9}, refused); },
       {stays, stays, stays, stays, stays, stays, stays, stays, stays, stays}},
      {"peer_aborted",
       [](auto& s) { return s.peer_aborted(given_up); },
       {"fencing: conclude(aborted) fence", "fencing: conclude(aborted) fence",
        "fencing: conclude(aborted) fence", "fencing: conclude(aborted) fence",
        "fencing: conclude(aborted) fence", "fencing: conclude(aborted) fence",
        "fencing: conclude(aborted)", stays, "arrived: send(transfer_quiescent)", stays}},
      {"peer_aborted, then quiescent",
       [](auto& s) { return then_quiescent(s, s.peer_aborted(given_up)); },
       {"finished: conclude(aborted) fence unpin",
        "finished: conclude(aborted) fence send(transfer_quiescent) unpin",
        "finished: conclude(aborted) fence send(transfer_quiescent) unpin",
        "finished: conclude(aborted) fence send(transfer_quiescent) unpin",
        "finished: conclude(aborted) fence send(transfer_quiescent) unpin",
        "finished: conclude(aborted) fence send(transfer_quiescent) unpin",
        "finished: conclude(aborted) send(transfer_quiescent) unpin",
        "finished: send(transfer_quiescent) unpin", "arrived: send(transfer_quiescent)", stays}},
      {"local_abort",
       [](auto& s) { return s.local_abort(given_up); },
       {"fencing: conclude(aborted) fence",
        "fencing: send(transfer_abort aborted) conclude(aborted) fence",
        "fencing: send(transfer_abort aborted) conclude(aborted) fence",
        "fencing: send(transfer_abort aborted) conclude(aborted) fence",
        "fencing: send(transfer_abort aborted) conclude(aborted) fence",
        "fencing: send(transfer_abort aborted) conclude(aborted) fence",
        "fencing: send(transfer_abort aborted) conclude(aborted)", stays,
        "finished: send(transfer_abort aborted) unpin", stays}},
      {"link_lost",
       [](auto& s) { return s.link_lost(broken); },
       {"fencing: conclude(link_broken) fence", "fencing: conclude(link_broken) fence",
        "fencing: conclude(link_broken) fence", "fencing: conclude(link_broken) fence",
        "fencing: conclude(link_broken) fence", "fencing: conclude(link_broken) fence", stays,
        stays, stays, stays}},
      {"link_lost, then quiescent",
       [](auto& s) { return then_quiescent(s, s.link_lost(broken)); },
       {"finished: conclude(link_broken) fence unpin",
        "finished: conclude(link_broken) fence unpin",
        "finished: conclude(link_broken) fence unpin",
        "finished: conclude(link_broken) fence unpin",
        "finished: conclude(link_broken) fence unpin",
        "finished: conclude(link_broken) fence unpin", "arrived: conclude(done)", "finished: unpin",
        stays, stays}},
      {"peer_aborted, link_lost, quiescent",
       [](auto& s) { return aborted_and_lost(s); },
       {"finished: conclude(aborted) fence unpin", "finished: conclude(aborted) fence unpin",
        "finished: conclude(aborted) fence unpin", "finished: conclude(aborted) fence unpin",
        "finished: conclude(aborted) fence unpin", "finished: conclude(aborted) fence unpin",
        "finished: conclude(aborted) unpin", "finished: unpin", "arrived: send(transfer_quiescent)",
        stays}},
      {"link_back",
       [](auto& s) { return s.link_back(); },
       {stays, "requested: send(transfer_request again 0 0)",
        "requested: send(transfer_request again)", "requested: send(transfer_request again)",
        "requested: send(transfer_request again 8 0)", "requested: send(transfer_request again)",
        stays, stays, stays, stays}},
      {"link_back, then what was posted again",
       [](auto& s) {
         auto did = s.link_back();
         did = join(std::move(did), s.landed(rest()));
         return join(std::move(did), s.sealed({transfer_id{5}, tokens, 1, {}}));
       },
       {stays,
        "fencing: send(transfer_request again 0 0) tell(1-2 x 0-8) send(transfer_abort "
        "out_of_range) conclude(out_of_range) fence",
        "fencing: send(transfer_request again) send(transfer_abort out_of_range) "
        "conclude(out_of_range) fence",
        "fencing: send(transfer_request again) send(transfer_abort out_of_range) "
        "conclude(out_of_range) fence",
        "fencing: send(transfer_request again 8 0) tell(1-2 x 0-8) fence",
        "fencing: send(transfer_request again) send(transfer_abort out_of_range) "
        "conclude(out_of_range) fence",
        stays, stays, stays, stays}},
      {"link_back, offered again",
       [](auto& s) {
         auto did = s.link_back();
         return join(std::move(did), s.offered({transfer_id{5}, tokens, {}, {}, {}, {}}));
       },
       {stays,
        "fencing: send(transfer_request again 0 0) send(transfer_abort out_of_range) "
        "conclude(out_of_range) fence",
        "receiving: send(transfer_request again) post(1: 0-1 x 0-8)",
        "fencing: send(transfer_request again) fence",
        "fencing: send(transfer_request again 8 0) send(transfer_abort out_of_range) "
        "conclude(out_of_range) fence",
        "receiving: send(transfer_request again) post(2: 0-1 x 0-8)", stays, stays, stays, stays}},
      {"quiescent",
       [](auto& s) { return s.quiescent(); },
       {stays, stays, stays, stays, stays, stays, "arrived: conclude(done)", "finished: unpin",
        stays, stays}},
      {"expire too early",
       [](auto& s) { return s.expire(deadline - std::chrono::milliseconds{1}); },
       {stays, stays, stays, stays, stays, stays, stays, stays, stays, stays}},
      {"expire",
       [](auto& s) { return s.expire(deadline); },
       {"fencing: conclude(deadline) fence",
        "fencing: send(transfer_abort deadline) conclude(deadline) fence",
        "fencing: send(transfer_abort deadline) conclude(deadline) fence",
        "fencing: send(transfer_abort deadline) conclude(deadline) fence",
        "fencing: send(transfer_abort deadline) conclude(deadline) fence",
        "fencing: send(transfer_abort deadline) conclude(deadline) fence",
        "fencing: send(transfer_abort deadline) conclude(deadline)", stays, stays, stays}},
      {"received_whole",
       [](auto& s) { return s.received_whole(); },
       {stays, stays, stays, stays, stays, stays, stays, stays,
        "finished: send(transfer_release) unpin", stays}},
  };
  return rows;
}

TEST(receive_session, takes_every_event_in_every_state_as_its_table_says) {
  expect_transitions(situations, table());
}

TEST(receive_session, answers_an_abort_once_that_comes_again_over_the_next_link) {
  auto s = arrived();
  EXPECT_EQ(describe(s.peer_aborted(given_up)), "send(transfer_quiescent)");
  EXPECT_TRUE(s.peer_aborted(given_up).empty());
  EXPECT_EQ(describe(s.received_whole()), "unpin");
}

}  // namespace
}  // namespace troupe::actors
