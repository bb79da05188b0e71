// The terms of a request beside its bytes: blocks that come later, the node that asks, the life of
// the source, how long to wait for it, the seal that is expected, and repetition.

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "broken_wire.hpp"
#include "cluster_fixture.hpp"

namespace troupe::testing {
namespace {

using actors::transfer_mode;

constexpr std::uint32_t block_tokens = 16;

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span{text});
  return {bytes.begin(), bytes.end()};
}

class request_terms : public ::testing::TestWithParam<transfer_mode> {
 protected:
  std::unique_ptr<cluster> c;
  std::unique_ptr<engine> prefill, decode;
  std::unique_ptr<listener> at_prefill, at_decode;
  std::unique_ptr<cache_bytes> source, destination;

  cluster_options options = unhurried();

  void SetUp() override {
    options.backend = "shm";
    options.mode = std::string{to_string(GetParam())};
    c = std::make_unique<cluster>(options);
    cluster::quiet("both");
    prefill = c->start("prefill-0");
    decode = c->start("decode-0");
    ASSERT_TRUE(prefill && decode);
    at_prefill = std::make_unique<listener>(*prefill);
    at_decode = std::make_unique<listener>(*decode);
    source = std::make_unique<cache_bytes>(*prefill);
    destination = std::make_unique<cache_bytes>(*decode);
  }
  void TearDown() override {
    if (prefill) prefill->stop();
    if (decode) decode->stop();
  }

  [[nodiscard]] std::uint32_t layers() const {
    return static_cast<std::uint32_t>(prefill->layout().layers.size());
  }
  [[nodiscard]] std::vector<block_id> blocks(std::uint32_t count) const {
    return prefill->allocate_blocks(count).value().blocks;
  }
  [[nodiscard]] receive_spec wish(const std::string& request, std::uint32_t tokens) const {
    receive_spec spec;
    spec.request = request;
    spec.sources = {"prefill-0"};
    spec.mode = GetParam();
    spec.tokens = tokens;
    return spec;
  }
  /// A send whose tokens are all computed and sealed.
  operation_id offer(const std::string& request, std::uint32_t tokens, std::uint64_t seed,
                     std::vector<std::byte> aux = {}) {
    send_spec spec{request, blocks((tokens + block_tokens - 1) / block_tokens)};
    source->fill(spec.blocks, 0, layers(), 0, tokens, seed);
    const auto send = prefill->send(std::move(spec)).value();
    EXPECT_TRUE(prefill->seal(send, tokens, std::move(aux)));
    return send;
  }
  void expect_done(listener& at, result<operation_id> operation) {
    ASSERT_TRUE(operation) << to_string(operation.error());
    ASSERT_TRUE(at.outcome(*operation));
    EXPECT_EQ(at.of(*operation).done, 1) << to_string(at.of(*operation).why);
  }
  troupe::error failure_of(listener& at, operation_id operation) {
    EXPECT_TRUE(at.outcome(operation));
    EXPECT_EQ(at.of(operation).failed, 1) << "it is done";
    return at.of(operation).why;
  }
  [[nodiscard]] result<operation_id> release(const std::string& request) const {
    return decode->release(request, {"prefill-0"});
  }
  [[nodiscard]] result<operation_id> hold(const std::string& request) const {
    return decode->hold(request, {"prefill-0"});
  }
  /// The error with which the receive failed.
  troupe::error failure_of(const receive_spec& spec) {
    const auto receive = decode->receive(spec);
    if (!receive) return receive.error();
    return failure_of(*at_decode, *receive);
  }
  void expect_arrives(const receive_spec& spec, std::uint64_t seed) {
    const auto receive = decode->receive(spec);
    ASSERT_TRUE(receive) << to_string(receive.error());
    expect_arrives(*receive, spec.tokens, seed);
  }
  /// The receive waits for its source, which is offered afterwards.
  void expect_waits_and_arrives(const receive_spec& spec, std::uint64_t seed) {
    const auto receive = decode->receive(spec);
    ASSERT_TRUE(receive) << to_string(receive.error());
    at_decode->listen_for(100ms);
    EXPECT_EQ(at_decode->of(*receive).failed, 0) << to_string(at_decode->of(*receive).why);
    offer(spec.request, spec.tokens, seed);
    expect_arrives(*receive, spec.tokens, seed);
  }
  void expect_arrives(operation_id receive, std::uint32_t tokens, std::uint64_t seed) {
    ASSERT_TRUE(at_decode->outcome(receive));
    const auto& told = at_decode->of(receive);
    ASSERT_EQ(told.done, 1) << to_string(told.why);
    EXPECT_EQ(destination->differing(told.allocated->blocks, 0, tokens, seed), 0U);
  }
};

// -- blocks that come later

TEST_P(request_terms, a_send_grows_while_it_is_received) {
  constexpr std::uint32_t tokens = 100;
  const auto all = blocks(7);
  const auto span = std::span{all};
  source->fill(all, 0, layers(), 0, tokens, 1);
  send_spec spec{"r", {all.begin(), all.begin() + 2}};
  spec.grows = true;
  const auto send = prefill->send(spec).value();
  const auto receive = decode->receive(wish("r", tokens)).value();
  ASSERT_TRUE(at_prefill->moving());
  ASSERT_TRUE(prefill->layers_ready(send, 0, layers(), 32));
  if (GetParam() == transfer_mode::write) {
    EXPECT_TRUE(at_decode->until([&] { return !at_decode->of(receive).layers.empty(); }));
  }
  for (std::size_t next = 2; next < all.size(); ++next) {
    const auto one = span.subspan(next, 1);
    ASSERT_TRUE(prefill->add_blocks(send, {one.begin(), one.end()}));
    const auto ready = std::min(tokens, static_cast<std::uint32_t>(next + 1) * block_tokens);
    ASSERT_TRUE(prefill->layers_ready(send, 0, layers(), ready));
  }
  ASSERT_TRUE(prefill->seal(send, tokens));
  expect_arrives(receive, tokens, 1);
  ASSERT_TRUE(at_prefill->unpinned(send));
  EXPECT_EQ(at_prefill->of(send).done, 1);
}

TEST_P(request_terms, a_send_that_grows_may_begin_with_nothing_and_be_asked_for_later) {
  send_spec spec{"r"};
  spec.grows = true;
  const auto send = prefill->send(spec).value();
  const auto all = blocks(3);
  source->fill(all, 0, layers(), 0, 48, 2);
  ASSERT_TRUE(prefill->add_blocks(send, all));
  ASSERT_TRUE(prefill->seal(send, 48));
  expect_arrives(wish("r", 48), 2);
}

TEST_P(request_terms, what_has_no_blocks_is_not_ready) {
  send_spec spec{"r", blocks(1)};
  spec.grows = true;
  const auto send = prefill->send(spec).value();
  EXPECT_EQ(prefill->layers_ready(send, 0, layers(), 17).error().code, errc::out_of_range);
  EXPECT_EQ(prefill->seal(send, 17).error().code, errc::out_of_range);
  ASSERT_TRUE(prefill->add_blocks(send, blocks(1)));
  EXPECT_TRUE(prefill->layers_ready(send, 0, layers(), 17));
  ASSERT_TRUE(prefill->abort(send, "enough"));
  EXPECT_TRUE(at_prefill->unpinned(send));
}

TEST_P(request_terms, blocks_that_cannot_be_added_are_not) {
  send_spec spec{"r", blocks(1)};
  const auto fixed = prefill->send(spec).value();
  const auto refused = prefill->add_blocks(fixed, blocks(1));
  EXPECT_EQ(refused.error().code, errc::invalid_config);
  EXPECT_NE(refused.error().message.find("`grows`"), std::string::npos) << refused.error().message;
  send_spec growing{"g", blocks(1)};
  growing.grows = true;
  const auto send = prefill->send(growing).value();
  EXPECT_EQ(prefill->add_blocks(send, {block_id{1}, block_id{1'000'000}}).error().code,
            errc::out_of_range);
  EXPECT_EQ(prefill->seal(send, 32).error().code, errc::out_of_range) << "one was added";
  const auto receive = decode->receive(wish("x", 16)).value();
  EXPECT_EQ(decode->add_blocks(receive, {}).error().code, errc::invalid_config);
  ASSERT_TRUE(prefill->seal(send, 16));
  EXPECT_EQ(prefill->add_blocks(send, blocks(1)).error().code, errc::already_exists);
  ASSERT_TRUE(prefill->abort(send, "enough"));
  ASSERT_TRUE(at_prefill->unpinned(send));
  EXPECT_EQ(prefill->add_blocks(send, blocks(1)).error().code, errc::not_found);
}

TEST_P(request_terms, blocks_that_were_added_are_pinned_until_the_send_has_ended) {
  send_spec spec{"r"};
  spec.grows = true;
  const auto send = prefill->send(spec).value();
  const auto added = prefill->allocate_blocks(2).value();
  const auto free_before = prefill->report().pool.blocks_free;
  ASSERT_TRUE(prefill->add_blocks(send, added.blocks));
  ASSERT_TRUE(prefill->free_blocks(added.owner, added.blocks));
  EXPECT_EQ(prefill->report().pool.blocks_free, free_before);
  ASSERT_TRUE(prefill->abort(send, "enough"));
  ASSERT_TRUE(at_prefill->unpinned(send));
  EXPECT_EQ(prefill->report().pool.blocks_free, free_before + 2);
}

TEST_P(request_terms, a_request_for_more_than_a_send_grew_to_fails_at_both_sides) {
  send_spec spec{"r"};
  spec.grows = true;
  const auto send = prefill->send(spec).value();
  const auto receive = decode->receive(wish("r", 64)).value();
  ASSERT_TRUE(at_prefill->moving());
  ASSERT_TRUE(prefill->add_blocks(send, blocks(2)));
  ASSERT_TRUE(prefill->seal(send, 32));
  ASSERT_TRUE(at_decode->outcome(receive));
  EXPECT_EQ(at_decode->of(receive).why.code, errc::out_of_range);
  ASSERT_TRUE(at_prefill->outcome(send));
  EXPECT_EQ(at_prefill->of(send).failed, 1);
}

// -- the node that asks

TEST_P(request_terms, a_send_tells_who_wants_it) {
  send_spec spec{"r", blocks(4)};
  spec.tell_wanted = true;
  const auto send = prefill->send(spec).value();
  auto asked = wish("r", 64);
  const auto prefix = decode->allocate_blocks(4).value();
  asked.blocks = prefix.blocks;
  asked.prefix_tokens = 16;
  const auto receive = decode->receive(asked).value();
  std::optional<event_wanted> wanted;
  const auto until = std::chrono::steady_clock::now() + wait_limit;
  while (!wanted && std::chrono::steady_clock::now() < until) {
    for (const auto& one : prefill->wait(20ms)) {
      EXPECT_EQ(one.operation, send);
      if (const auto* what = std::get_if<event_wanted>(&one.what)) wanted = *what;
    }
  }
  ASSERT_TRUE(wanted);
  EXPECT_EQ(wanted->node, "decode-0");
  EXPECT_EQ(wanted->rank, 0U);
  EXPECT_EQ(wanted->ranks, 1U);
  EXPECT_EQ(wanted->expected, 1U);
  EXPECT_EQ(wanted->token_begin, 16U);
  EXPECT_EQ(wanted->token_end, 64U);
  ASSERT_TRUE(prefill->seal(send, 64));
  ASSERT_TRUE(at_decode->outcome(receive));
  EXPECT_EQ(at_decode->of(receive).done, 1) << to_string(at_decode->of(receive).why);
}

TEST_P(request_terms, who_was_told_who_wants_a_send_may_wait_for_its_end) {
  send_spec spec{"r", blocks(1)};
  spec.tell_wanted = true;
  const auto send = prefill->send(spec).value();
  const auto receive = decode->receive(wish("r", 16)).value();
  ASSERT_FALSE(prefill->wait(wait_limit, 1).empty());
  ASSERT_TRUE(prefill->seal(send, 16));
  const auto end = prefill->wait(send);
  EXPECT_TRUE(end) << to_string(end.error());
  expect_done(*at_decode, receive);
}

TEST_P(request_terms, a_send_that_did_not_ask_tells_nothing) {
  const auto send = offer("r", 16, 1);
  expect_arrives(wish("r", 16), 1);
  for (const auto& one : prefill->wait(wait_limit)) {
    EXPECT_FALSE(std::holds_alternative<event_wanted>(one.what));
    EXPECT_EQ(one.operation, send);
  }
}

// -- the life of the source

TEST_P(request_terms, another_life_of_a_source_is_refused_naming_both) {
  offer("r", 16, 3);
  auto asked = wish("r", 16);
  const auto lives = prefill->report().node.incarnation;
  asked.lives = {lives + 1};
  const auto why = failure_of(asked);
  EXPECT_EQ(why.code, errc::stale_incarnation);
  EXPECT_NE(why.message.find("prefill-0 runs as incarnation"), std::string::npos) << why.message;
  asked.lives = {lives};
  expect_arrives(asked, 3);
}

TEST_P(request_terms, any_life_will_do_where_none_is_named) {
  offer("r", 16, 3);
  auto asked = wish("r", 16);
  asked.lives = {0};
  expect_arrives(asked, 3);
}

TEST_P(request_terms, lives_are_one_for_each_source) {
  auto asked = wish("r", 16);
  asked.lives = {1, 2};
  const auto why = failure_of(asked);
  EXPECT_EQ(why.code, errc::invalid_config);
  EXPECT_NE(why.message.find("2 incarnations for 1 source"), std::string::npos) << why.message;
}

// -- how long to wait for a source

TEST_P(request_terms, who_does_not_wait_for_a_source_hears_at_once_that_there_is_none) {
  auto asked = wish("r", 16);
  asked.park = 0ms;
  const auto why = failure_of(asked);
  EXPECT_EQ(why.code, errc::not_found);
  EXPECT_NE(why.message.find("`r` is not offered here"), std::string::npos) << why.message;
  offer("r", 16, 4);
  expect_arrives(asked, 4);
}

TEST_P(request_terms, who_waits_for_a_source_for_a_while_hears_then_that_there_is_none) {
  auto asked = wish("r", 16);
  asked.park = 30ms;
  EXPECT_EQ(failure_of(asked).code, errc::not_found);
  asked.park = 10 * wait_limit;
  expect_waits_and_arrives(asked, 5);
}

TEST_P(request_terms, who_waits_for_ever_waits) {
  auto asked = wish("r", 16);
  asked.park = std::chrono::milliseconds::max();
  expect_waits_and_arrives(asked, 5);
}

TEST_P(request_terms, no_time_to_wait_is_negative) {
  auto asked = wish("r", 16);
  asked.park = -1ms;
  EXPECT_EQ(failure_of(asked).code, errc::invalid_config);
}

// -- the expected seal

TEST_P(request_terms, the_beginning_of_aux_is_what_the_decode_engine_expects) {
  offer("r", 16, 6, bytes_of("hash-1 and more"));
  auto asked = wish("r", 16);
  asked.expect = bytes_of("hash-1");
  expect_arrives(asked, 6);
}

TEST_P(request_terms, another_beginning_of_aux_fails_it_naming_both_and_the_source_goes_on) {
  const auto send = offer("r", 16, 6, bytes_of("hash-1 and more"));
  auto asked = wish("r", 16);
  asked.expect = bytes_of("hash-2");
  destination->poison();
  const auto why = failure_of(asked);
  EXPECT_EQ(why.code, errc::layout_mismatch);
  for (const auto* part : {"0x686173682d31", "0x686173682d32"}) {  // "hash-1", "hash-2"
    EXPECT_NE(why.message.find(part), std::string::npos) << why.message;
  }
  asked.expect = bytes_of("hash-1");
  expect_arrives(asked, 6);
  expect_done(*at_prefill, send);
}

TEST_P(request_terms, who_expects_another_request_hears_so_at_its_seal) {
  const auto send = prefill->send({"r", blocks(1)}).value();
  auto asked = wish("r", 16);
  asked.expect = bytes_of("hash-2");
  const auto receive = decode->receive(asked).value();
  ASSERT_TRUE(at_prefill->moving());
  ASSERT_TRUE(prefill->seal(send, 16, bytes_of("hash-1")));
  EXPECT_EQ(failure_of(*at_decode, receive).code, errc::layout_mismatch);
  EXPECT_TRUE(at_decode->unpinned(receive));
  asked.expect = bytes_of("hash-1");
  const auto right = decode->receive(asked);
  expect_done(*at_decode, right);
  expect_done(*at_prefill, send);
}

TEST_P(request_terms, no_aux_is_not_what_was_expected) {
  offer("r", 16, 6);
  auto asked = wish("r", 16);
  asked.expect = bytes_of("x");
  EXPECT_NE(failure_of(asked).message.find("they are none"), std::string::npos);
}

TEST_P(request_terms, no_more_is_expected_than_can_be_compared) {
  auto asked = wish("r", 16);
  asked.expect.resize(65);
  EXPECT_EQ(failure_of(asked).code, errc::out_of_range);
}

// -- asked again

TEST_P(request_terms, what_was_delivered_is_waited_for_once_more) {
  const auto first = offer("r", 16, 7);
  expect_arrives(wish("r", 16), 7);
  ASSERT_TRUE(at_prefill->unpinned(first));
  EXPECT_EQ(failure_of(wish("r", 16)).code, errc::not_found);
  auto asked = wish("r", 16);
  asked.again = true;
  expect_waits_and_arrives(asked, 8);
}

TEST_P(request_terms, what_failed_is_told_also_to_who_asks_once_more) {
  send_spec spec{"r", blocks(1)};
  const auto send = prefill->send(spec).value();
  ASSERT_TRUE(prefill->abort(send, "the GPU is on fire"));
  ASSERT_TRUE(at_prefill->unpinned(send));
  auto asked = wish("r", 16);
  asked.again = true;
  const auto why = failure_of(asked);
  EXPECT_EQ(why.code, errc::aborted);
  EXPECT_NE(why.message.find("the GPU is on fire"), std::string::npos) << why.message;
}

// -- given back

TEST_P(request_terms, a_request_that_is_given_back_ends_its_send) {
  const auto send = offer("r", 16, 1);
  expect_done(*at_decode, release("r"));
  const auto why = failure_of(*at_prefill, send);
  EXPECT_EQ(why.code, errc::aborted);
  EXPECT_NE(why.message.find("decode-0 gave request `r` back"), std::string::npos) << why.message;
  EXPECT_TRUE(at_prefill->unpinned(send));
  expect_done(*at_decode, release("r"));
  EXPECT_EQ(failure_of(wish("r", 16)).code, errc::aborted);
}

TEST_P(request_terms, a_request_may_be_given_back_before_it_is_sent) {
  expect_done(*at_decode, release("r"));
  const auto send = prefill->send({"r", blocks(1)}).value();
  EXPECT_EQ(failure_of(*at_prefill, send).code, errc::aborted);
  ASSERT_TRUE(at_prefill->unpinned(send));
  // The earlier release counted once.
  offer("r", 16, 2);
  expect_arrives(wish("r", 16), 2);
}

TEST_P(request_terms, a_request_that_was_delivered_may_be_given_back_and_stays_delivered) {
  const auto first = offer("r", 16, 1);
  expect_arrives(wish("r", 16), 1);
  ASSERT_TRUE(at_prefill->unpinned(first));
  EXPECT_EQ(at_prefill->of(first).done, 1);
  expect_done(*at_decode, release("r"));
  offer("r", 16, 2);
  expect_arrives(wish("r", 16), 2);
}

TEST_P(request_terms, what_waits_for_a_request_that_is_given_back_is_told) {
  const auto receive = decode->receive(wish("r", 16)).value();
  ASSERT_TRUE(at_decode->moving());
  expect_done(*at_decode, release("r"));
  EXPECT_EQ(failure_of(*at_decode, receive).code, errc::aborted);
}

TEST_P(request_terms, what_is_wanted_when_it_was_given_back_is_told_at_once_and_so_is_its_send) {
  expect_done(*at_decode, release("r"));
  EXPECT_EQ(failure_of(wish("r", 16)).code, errc::aborted);
  const auto send = prefill->send({"r", blocks(1)}).value();
  EXPECT_EQ(failure_of(*at_prefill, send).code, errc::aborted);
}

TEST_P(request_terms, what_is_held_for_another_node_is_not_given_back) {
  send_spec spec{"r", blocks(1)};
  spec.held_for = {"store-0"};
  const auto send = prefill->send(spec).value();
  const auto why = failure_of(*at_decode, release("r").value());
  EXPECT_EQ(why.code, errc::already_exists);
  EXPECT_NE(why.message.find("goes on for store-0"), std::string::npos) << why.message;
  EXPECT_EQ(at_prefill->of(send).failed, 0);
}

TEST_P(request_terms, a_request_that_is_being_received_may_be_given_back) {
  const auto send = prefill->send({"r", blocks(2)}).value();
  const auto receive = decode->receive(wish("r", 32)).value();
  ASSERT_TRUE(at_prefill->moving());
  expect_done(*at_decode, release("r"));
  EXPECT_EQ(failure_of(*at_decode, receive).code, errc::aborted);
  EXPECT_EQ(failure_of(*at_prefill, send).code, errc::aborted);
  EXPECT_TRUE(at_decode->unpinned(receive));
  EXPECT_TRUE(at_prefill->unpinned(send));
}

TEST_P(request_terms, nothing_is_given_back_to_another_life) {
  const auto send = offer("r", 16, 1);
  const auto lives = prefill->incarnation();
  const auto stale = decode->release("r", {"prefill-0"}, {lives + 1}).value();
  EXPECT_EQ(failure_of(*at_decode, stale).code, errc::stale_incarnation);
  EXPECT_EQ(at_prefill->of(send).failed, 0);
  expect_done(*at_decode, decode->release("r", {"prefill-0"}, {lives}));
  EXPECT_EQ(failure_of(*at_prefill, send).code, errc::aborted);
}

TEST_P(request_terms, words_to_what_is_no_source_are_refused_at_once) {
  EXPECT_EQ(decode->release("r", {"nobody"}).error().code, errc::not_found);
  EXPECT_EQ(decode->release("r", {}).error().code, errc::invalid_config);
  EXPECT_EQ(decode->release("", {"prefill-0"}).error().code, errc::invalid_config);
  EXPECT_EQ(decode->release("r", {"prefill-0"}, {1, 2}).error().code, errc::invalid_config);
  // No edge moves layers from there to here.
  EXPECT_EQ(prefill->hold("r", {"decode-0"}).error().code, errc::invalid_config);
}

// -- held

TEST_P(request_terms, a_hold_ends_when_the_receive_has_asked) {
  const auto send = offer("r", 16, 1);
  const auto held = hold("r").value();
  EXPECT_EQ(hold("r").error().code, errc::already_exists);
  ASSERT_TRUE(at_prefill->until([&] { return prefill->report().links.size() == 1; }));
  expect_arrives(wish("r", 16), 1);
  expect_done(*at_decode, held);
  expect_done(*at_prefill, send);
}

TEST_P(request_terms, nothing_is_held_that_is_not_offered) {
  const auto why = failure_of(*at_decode, hold("r").value());
  EXPECT_EQ(why.code, errc::not_found);
  EXPECT_NE(why.message.find("nothing to hold"), std::string::npos) << why.message;
}

TEST_P(request_terms, what_was_delivered_need_not_be_held) {
  const auto send = offer("r", 16, 1);
  expect_arrives(wish("r", 16), 1);
  ASSERT_TRUE(at_prefill->unpinned(send));
  expect_done(*at_decode, hold("r"));
}

TEST_P(request_terms, a_hold_ends_as_its_source_does) {
  const auto send = offer("r", 16, 1);
  const auto held = hold("r").value();
  ASSERT_TRUE(at_decode->moving());
  ASSERT_TRUE(prefill->abort(send, "the GPU is on fire"));
  const auto why = failure_of(*at_decode, held);
  EXPECT_EQ(why.code, errc::aborted);
  EXPECT_NE(why.message.find("the GPU is on fire"), std::string::npos) << why.message;
}

TEST_P(request_terms, a_hold_ends_as_its_source_does_however_much_there_is_to_say) {
  const auto send = offer("r", 16, 1);
  const auto held = hold("r").value();
  ASSERT_TRUE(at_decode->moving());
  ASSERT_TRUE(prefill->abort(send, std::string(100'000, 'x')));
  EXPECT_EQ(failure_of(*at_decode, held).code, errc::aborted);
}

TEST_P(request_terms, a_hold_ends_when_its_source_stops) {
  offer("r", 16, 1);
  const auto held = hold("r").value();
  ASSERT_TRUE(at_decode->moving());
  prefill->stop();
  EXPECT_EQ(at_decode->outcome(held), true);
  EXPECT_EQ(at_decode->of(held).failed, 1);
}

TEST_P(request_terms, a_hold_outlasts_a_link_that_breaks) {
  const auto send = offer("r", 16, 1);
  const auto held = hold("r").value();
  ASSERT_TRUE(at_decode->moving());
  const std::set<int> spared{c->port(), prefill->report().node.port, decode->report().node.port};
  ASSERT_TRUE(at_decode->until([&] { return cut_connections(spared) > 0; }));
  ASSERT_TRUE(at_decode->until([&] {
    const auto links = decode->report().links;
    return links.size() == 1 && links.front().rebuilds > 0 && links.front().state == "up";
  }));
  EXPECT_EQ(at_decode->of(held).failed, 0) << to_string(at_decode->of(held).why);
  ASSERT_TRUE(prefill->abort(send, "the GPU is on fire"));
  const auto why = failure_of(*at_decode, held);
  EXPECT_NE(why.message.find("the GPU is on fire"), std::string::npos) << why.message;
}

INSTANTIATE_TEST_SUITE_P(modes, request_terms,
                         ::testing::Values(transfer_mode::write, transfer_mode::read),
                         [](const auto& p) { return std::string{to_string(p.param)}; });

/// A sealed source waits one second for a receiver.
class short_lease : public request_terms {
 protected:
  short_lease() { options.source_lease = "1s"; }
};

TEST_P(short_lease, does_not_run_out_while_the_source_is_held) {
  const auto send = prefill->send({"r", blocks(1)}).value();
  const auto held = hold("r").value();
  ASSERT_TRUE(at_prefill->until([&] { return prefill->report().links.size() == 1; }));
  at_decode->listen_for(200ms);  // a refusal would have come
  ASSERT_EQ(at_decode->of(held).failed, 0) << to_string(at_decode->of(held).why);
  ASSERT_TRUE(prefill->seal(send, 16));
  at_prefill->listen_for(3s);
  EXPECT_EQ(at_prefill->of(send).failed, 0) << to_string(at_prefill->of(send).why);
  ASSERT_TRUE(decode->abort(held, "enough"));
  EXPECT_EQ(failure_of(*at_decode, held).code, errc::aborted);
  EXPECT_EQ(failure_of(*at_prefill, send).code, errc::lease_expired);
}

TEST_P(short_lease, does_not_run_out_for_a_node_that_is_named_when_its_hold_ends) {
  send_spec spec{"r", blocks(1)};
  spec.held_for = {"decode-0"};
  const auto send = prefill->send(spec).value();
  ASSERT_TRUE(prefill->seal(send, 16));
  const auto held = hold("r").value();
  ASSERT_TRUE(at_decode->moving());
  ASSERT_TRUE(decode->abort(held, "enough"));
  EXPECT_EQ(failure_of(*at_decode, held).code, errc::aborted);
  at_prefill->listen_for(3s);
  EXPECT_EQ(at_prefill->of(send).failed, 0) << to_string(at_prefill->of(send).why);
}

TEST_P(short_lease, runs_out_when_the_node_that_held_the_source_stops) {
  const auto send = offer("r", 16, 1);
  const auto held = hold("r").value();
  ASSERT_TRUE(at_decode->moving());
  decode->stop();
  EXPECT_EQ(failure_of(*at_decode, held).code, errc::aborted);
  EXPECT_EQ(failure_of(*at_prefill, send).code, errc::lease_expired);
}

INSTANTIATE_TEST_SUITE_P(modes, short_lease,
                         ::testing::Values(transfer_mode::write, transfer_mode::read),
                         [](const auto& p) { return std::string{to_string(p.param)}; });

}  // namespace
}  // namespace troupe::testing
