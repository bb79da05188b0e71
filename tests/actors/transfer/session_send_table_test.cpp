#include <array>
#include <chrono>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/actors/transfer/send_session.hpp"

#include "transition_table.hpp"

namespace troupe::actors {
namespace {

send_session::options usual() {
  send_session::options o;
  o.layers = layers;
  o.deadline = deadline;
  return o;
}

/// The request that the tested machine was started with.
transfer_request asked;

session_actions begin(send_session& s, transfer_mode mode, std::uint32_t first = 0,
                      std::uint32_t end = tokens) {
  const std::array<std::uint32_t, layers> nothing{};
  asked = request_for(mode, first, end);
  return s.start(asked, nothing, std::nullopt, {});
}

/// The same request repeated, with the progress of each layer.
transfer_request again(std::vector<std::uint32_t> here) {
  auto request = asked;
  if (request.mode == transfer_mode::read) here.clear();
  request.progress = transfer_progress{std::move(here), false};
  return request;
}

/// The situations in which events arrive: each state, with the variants that behave differently.
send_session idle() {
  return send_session{usual()};
}
send_session streaming_write() {
  auto s = idle();
  EXPECT_EQ(describe(begin(s, transfer_mode::write)), "");
  EXPECT_EQ(describe(s.source_ready(0, 1, tokens)), "post(1: 0-1 x 0-8)");
  return s;
}
send_session streaming_read() {
  auto s = idle();
  EXPECT_EQ(describe(begin(s, transfer_mode::read)), "");
  EXPECT_EQ(describe(s.source_ready(0, layers, tokens)), "");
  return s;
}
send_session draining_write() {
  auto s = streaming_write();
  EXPECT_EQ(describe(s.source_ready(1, 2, tokens)), "post(2: 1-2 x 0-8)");
  EXPECT_EQ(describe(s.sealed(tokens, {})), "send(transfer_sealed 2)");
  return s;
}
send_session draining_read() {
  auto s = streaming_read();
  EXPECT_EQ(describe(s.sealed(tokens, {})), "offer(0-2 x 0-8)");
  return s;
}
send_session draining_empty() {
  auto s = idle();
  EXPECT_EQ(describe(begin(s, transfer_mode::read, 4, 4)), "");
  EXPECT_EQ(describe(s.sealed(4, {})), "send(transfer_sealed 0)");
  return s;
}
send_session fencing_done() {
  auto s = draining_write();
  EXPECT_EQ(describe(s.peer_released()), "conclude(done) fence");
  return s;
}
send_session fencing_failed() {
  auto s = streaming_write();
  EXPECT_EQ(describe(s.local_abort(given_up)),
            "send(transfer_abort aborted) conclude(aborted) fence");
  return s;
}
send_session finished() {
  auto s = fencing_done();
  EXPECT_EQ(describe(s.quiescent()), "unpin");
  return s;
}

session_actions back_then_again(send_session& s, std::vector<std::uint32_t> here) {
  auto did = s.link_back();
  return join(std::move(did), s.asked_again(again(std::move(here))));
}
session_actions sealed_when_ready(send_session& s) {
  static_cast<void>(s.source_ready(0, layers, tokens));
  return s.sealed(tokens, {});
}

const std::array<situation<send_session>, 9> situations{{{"idle", idle},
                                                         {"streaming_write", streaming_write},
                                                         {"streaming_read", streaming_read},
                                                         {"draining_write", draining_write},
                                                         {"draining_read", draining_read},
                                                         {"draining_empty", draining_empty},
                                                         {"fencing_done", fencing_done},
                                                         {"fencing_failed", fencing_failed},
                                                         {"finished", finished}}};

using row = transition_row<send_session, situations.size()>;

const std::vector<row>& table() {
  static const std::vector<row> rows{
      {"start again",
       [](auto& s) { return begin(s, transfer_mode::write, 0, tokens); },
       {"streaming: ", stays, stays, stays, stays, stays, stays, stays, stays}},
      {"start with everything ready and sealed",
       [](auto& s) {
         return s.start(request_for(transfer_mode::write), std::array{tokens, tokens}, tokens, {});
       },
       {"draining: post(1: 0-2 x 0-8) sealed 1", stays, stays, stays, stays, stays, stays, stays,
        stays}},
      {"source_ready",
       [](auto& s) { return s.source_ready(0, layers, tokens); },
       {stays, "streaming: post(2: 1-2 x 0-8)", stays, stays, stays, stays, stays, stays, stays}},
      {"source_ready of a layer that is not",
       [](auto& s) { return s.source_ready(0, layers + 1, tokens); },
       {stays, is_refused, is_refused, stays, stays, stays, stays, stays, stays}},
      {"sealed with all ready",
       [](auto& s) { return sealed_when_ready(s); },
       {stays, "draining: send(transfer_sealed 2)", "draining: offer(0-2 x 0-8)", stays, stays,
        stays, stays, stays, stays}},
      {"sealed with a layer missing",
       [](auto& s) { return s.sealed(tokens + 1, {}); },
       {stays, "fencing: send(transfer_abort invalid_config) conclude(invalid_config) fence",
        "fencing: send(transfer_abort invalid_config) conclude(invalid_config) fence", stays, stays,
        stays, stays, stays, stays}},
      {"sealed with too few tokens",
       [](auto& s) { return s.sealed(tokens - 1, {}); },
       {stays, is_refused, is_refused, stays, stays, stays, stays, stays, stays}},
      {"batch_completed",
       [](auto& s) { return s.batch_completed(transport::batch_id{1}, std::nullopt); },
       {stays, stays, stays, stays, stays, stays, stays, stays, stays}},
      {"batch_completed, failure",
       [](auto& s) { return s.batch_completed(transport::batch_id{1}, refused); },
       {stays, "fencing: send(transfer_abort overloaded) conclude(overloaded) fence", stays,
        "fencing: send(transfer_abort overloaded) conclude(overloaded) fence", stays, stays, stays,
        stays, stays}},
      {"batch_completed, revoked",
       [](auto& s) { return s.batch_completed(transport::batch_id{1}, revoked); },
       {stays, stays, stays, stays, stays, stays, stays, stays, stays}},
      {"batch_completed, unknown",
       [](auto& s) { return s.batch_completed(transport::batch_id{9}, refused); },
       {stays, stays, stays, stays, stays, stays, stays, stays, stays}},
      {"peer_released",
       [](auto& s) { return s.peer_released(); },
       {stays, "fencing: send(transfer_abort internal) conclude(internal) fence",
        "fencing: send(transfer_abort internal) conclude(internal) fence",
        "fencing: conclude(done) fence", "fencing: conclude(done) fence",
        "fencing: conclude(done) fence", stays, stays, stays}},
      {"peer_aborted",
       [](auto& s) { return s.peer_aborted(given_up); },
       {"finished: conclude(aborted) unpin", "fencing: conclude(aborted) fence",
        "fencing: conclude(aborted) fence", "fencing: conclude(aborted) fence",
        "fencing: conclude(aborted) fence", "fencing: conclude(aborted) fence", stays, stays,
        stays}},
      {"peer_aborted, then quiescent",
       [](auto& s) { return then_quiescent(s, s.peer_aborted(given_up)); },
       {"finished: conclude(aborted) unpin",
        "finished: conclude(aborted) fence send(transfer_quiescent) unpin",
        "finished: conclude(aborted) fence send(transfer_quiescent) unpin",
        "finished: conclude(aborted) fence send(transfer_quiescent) unpin",
        "finished: conclude(aborted) fence send(transfer_quiescent) unpin",
        "finished: conclude(aborted) fence send(transfer_quiescent) unpin",
        "finished: send(transfer_quiescent) unpin", "finished: send(transfer_quiescent) unpin",
        stays}},
      {"local_abort",
       [](auto& s) { return s.local_abort(given_up); },
       {"finished: conclude(aborted) unpin",
        "fencing: send(transfer_abort aborted) conclude(aborted) fence",
        "fencing: send(transfer_abort aborted) conclude(aborted) fence",
        "fencing: send(transfer_abort aborted) conclude(aborted) fence",
        "fencing: send(transfer_abort aborted) conclude(aborted) fence",
        "fencing: send(transfer_abort aborted) conclude(aborted) fence", stays, stays, stays}},
      {"link_lost",
       [](auto& s) { return s.link_lost(broken); },
       {"finished: conclude(link_broken) unpin", "fencing: conclude(link_broken) fence",
        "fencing: conclude(link_broken) fence", "fencing: conclude(link_broken) fence",
        "fencing: conclude(link_broken) fence", "fencing: conclude(link_broken) fence", stays,
        stays, stays}},
      {"peer_aborted, link_lost, quiescent",
       [](auto& s) { return aborted_and_lost(s); },
       {"finished: conclude(aborted) unpin", "finished: conclude(aborted) fence unpin",
        "finished: conclude(aborted) fence unpin", "finished: conclude(aborted) fence unpin",
        "finished: conclude(aborted) fence unpin", "finished: conclude(aborted) fence unpin",
        "finished: unpin", "finished: unpin", stays}},
      {"link_back",
       [](auto& s) { return s.link_back(); },
       {stays, stays, stays, stays, stays, stays, stays, stays, stays}},
      {"link_back, then what would go on",
       [](auto& s) {
         auto did = s.link_back();
         did = join(std::move(did), s.batch_completed(transport::batch_id{1}, broken));
         return join(std::move(did), sealed_when_ready(s));
       },
       {stays, stays, stays, stays, stays, stays, stays, stays, stays}},
      {"link_back, then the release that was lost",
       [](auto& s) {
         auto did = s.link_back();
         return join(std::move(did), s.peer_released());
       },
       {stays, "fencing: send(transfer_abort internal) conclude(internal) fence",
        "fencing: send(transfer_abort internal) conclude(internal) fence",
        "fencing: conclude(done) fence", "fencing: conclude(done) fence",
        "fencing: conclude(done) fence", stays, stays, stays}},
      {"asked_again although the link is the same",
       [](auto& s) {
         return s.asked_again(again({0, 0}));
       },
       {stays, stays, stays, stays, stays, stays, stays, stays, stays}},
      {"link_back, asked_again with nothing here",
       [](auto& s) {
         return back_then_again(s, {0, 0});
       },
       {stays, "streaming: post(2: 0-1 x 0-8)", stays, "draining: post(3: 0-2 x 0-8) sealed 1",
        "draining: offer(0-2 x 0-8)", "draining: send(transfer_sealed 0)", stays, stays, stays}},
      {"link_back, asked_again with some of it here",
       [](auto& s) {
         return back_then_again(s, {tokens, 3});
       },
       {stays, stays, stays, "draining: post(3: 1-2 x 3-8) sealed 1", "draining: offer(0-2 x 0-8)",
        "draining: send(transfer_sealed 0)", stays, stays, stays}},
      {"link_back, asked_again with all of it here",
       [](auto& s) {
         return back_then_again(s, {tokens, tokens});
       },
       {stays, stays, stays, "draining: send(transfer_sealed 0)", "draining: offer(0-2 x 0-8)",
        "draining: send(transfer_sealed 0)", stays, stays, stays}},
      {"link_back, asked_again with more here than was asked for",
       [](auto& s) {
         return back_then_again(s, {0, tokens + 1});
       },
       {stays, is_refused, stays, is_refused, "draining: offer(0-2 x 0-8)",
        "draining: send(transfer_sealed 0)", stays, stays, stays}},
      {"link_back, asked_again for something else",
       [](auto& s) {
         auto other = again({0, 0});
         ++other.token_end;
         auto did = s.link_back();
         return join(std::move(did), s.asked_again(other));
       },
       {stays, is_refused, is_refused, is_refused, is_refused, is_refused, stays, stays, stays}},
      {"quiescent",
       [](auto& s) { return s.quiescent(); },
       {stays, stays, stays, stays, stays, stays, "finished: unpin", "finished: unpin", stays}},
      {"expire too early",
       [](auto& s) { return s.expire(deadline - std::chrono::milliseconds{1}); },
       {stays, stays, stays, stays, stays, stays, stays, stays, stays}},
      {"expire",
       [](auto& s) { return s.expire(deadline); },
       {"finished: conclude(deadline) unpin",
        "fencing: send(transfer_abort deadline) conclude(deadline) fence",
        "fencing: send(transfer_abort deadline) conclude(deadline) fence",
        "fencing: send(transfer_abort deadline) conclude(deadline) fence",
        "fencing: send(transfer_abort deadline) conclude(deadline) fence",
        "fencing: send(transfer_abort deadline) conclude(deadline) fence", stays, stays, stays}},
  };
  return rows;
}

TEST(send_session, takes_every_event_in_every_state_as_its_table_says) {
  expect_transitions(situations, table());
}

}  // namespace
}  // namespace troupe::actors
