// A put on both sides of its last message: a put reported as failed is not stored later, one that
// may be stored says so, and nothing waits for ever.

#include <set>

#include <gmock/gmock.h>
#include <sys/mman.h>

#include "troupe/actors/values/value_regions.hpp"

#include "listening_link.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using troupe::testing::comes_true;

constexpr transfer_id op{77};

class put_phases : public listened_runner {
 protected:
  std::vector<std::byte> bytes = std::vector<std::byte>(100, std::byte{7});

  void meet(std::string backend = {}) {
    listened_runner::meet("there-0", nullptr, std::move(backend));
  }
};

// -- the side that puts

class putting : public put_phases {
 protected:
  operation_id operation;
  std::vector<block_id> pinned;  ///< what the next put takes the value from; empty: from no blocks
  session_actor session;

  void put() { put(link.peer, bytes); }
  void put(const std::string& peer, std::span<const std::byte> value) {
    operation = context->operations.begin({}).value();
    start_value order;
    order.operation = operation;
    order.peer = peer;
    order.verb = value_verb::put;
    order.key = "k";
    order.value = value;
    order.pinned = pinned;
    caf::anon_send(runner, engine_command{std::move(order)});
  }
  /// A put whose bytes the peer confirms, up to and including the commit.
  void put_up_to_the_last_word(std::chrono::milliseconds deadline) {
    context->settings.default_deadline = deadline;
    meet();
    this->put();
    const auto put = said<store_put>(0);
    ASSERT_TRUE(put);
    session = heard->sessions.at(0).value();
    caf::anon_send(session, session_event{session_message{store_held{put->op}}});
    ASSERT_TRUE(said<store_commit>(1));
  }
  void answer(std::uint8_t failed) {
    store_reply reply;
    reply.failed = failed;
    caf::anon_send(session, session_event{session_message{reply}});
  }
  std::optional<event> outcome() {
    auto events = context->events.wait(troupe::testing::wait_limit, 1);
    if (events.empty()) return std::nullopt;
    return std::move(events.front());
  }
  /// Returns why it failed; adds a test failure if it did not.
  troupe::error failure() {
    const auto e = outcome();
    const auto* failed = e ? std::get_if<event_failed>(&e->what) : nullptr;
    if (failed == nullptr) {
      ADD_FAILURE() << "it did not fail";
      return {};
    }
    return failed->why;
  }
};

TEST_F(putting, ends_as_the_store_says_when_it_is_given_up_behind_its_last_word) {
  put_up_to_the_last_word(10 * troupe::testing::wait_limit);
  caf::anon_send(runner, engine_command{abort_operation{operation, "changed my mind"}});
  answer(0);
  const auto e = outcome();
  ASSERT_TRUE(e);
  EXPECT_TRUE(std::holds_alternative<event_done>(e->what));
  EXPECT_TRUE(said<store_release>(2)) << "the store would keep its session";
}

TEST_F(putting,
       that_gets_no_answer_to_its_last_word_ends_at_its_deadline_and_says_what_is_not_known) {
  put_up_to_the_last_word(200ms);
  const auto why = failure();
  EXPECT_EQ(why.code, errc::deadline);
  EXPECT_THAT(why.message, HasSubstr("it is not known whether the value is stored"));
}

TEST_F(putting, whose_store_crashes_behind_its_last_word_says_what_is_not_known) {
  put_up_to_the_last_word(10 * troupe::testing::wait_limit);
  caf::anon_send(session,
                 session_event{session_message{transfer_abort{op, errc::internal, "crashed"}}});
  const auto why = failure();
  EXPECT_EQ(why.code, errc::internal);
  EXPECT_THAT(why.message, HasSubstr("it is not known whether the value is stored"));
}

TEST_F(putting, whose_last_word_the_link_could_not_take_fails_and_is_not_stored) {
  put_up_to_the_last_word(10 * troupe::testing::wait_limit);
  caf::anon_send(session, session_event{abort_session{{errc::overloaded, "too much is queued"}}});
  EXPECT_EQ(failure().code, errc::overloaded);
  EXPECT_TRUE(said<store_release>(2)) << "the store would wait for the last word";
}

TEST_F(putting, says_its_last_word_again_over_the_next_link) {
  put_up_to_the_last_word(10 * troupe::testing::wait_limit);
  caf::anon_send(session, session_event{link_is_back{2, "tcp"}});
  ASSERT_TRUE(said<store_commit>(2));
  answer(0);
  const auto e = outcome();
  ASSERT_TRUE(e);
  EXPECT_TRUE(std::holds_alternative<event_done>(e->what));
}

// -- which memory the peer reads

/// A value that is larger than a frame, and a peer that never confirms a fence.
class putting_large : public putting {
 protected:
  void SetUp() override {
    transport::endpoint_options options;
    options.self = incarnation{7};
    context->endpoint = transport::endpoint::create(options).value();
    context->settings.default_deadline = 100ms;
    bytes.assign(100'000, std::byte{7});
    heard->fences = false;
  }
  void TearDown() override {
    heard->fences = true;
    for (std::size_t i = 0; i < heard->sessions.size(); ++i)
      caf::anon_send(heard->sessions.at(i).value(), session_event{transfer_fenced{}});
  }
  /// The bytes that the peer may read for put number `index`.
  std::span<const std::byte> granted(std::size_t index) {
    const auto wish = heard->wishes.at(index);
    if (!wish) return {};
    const auto region = context->endpoint->bytes(wish->region);
    if (!region) return {};
    const auto where = wish->permitted.hull();
    return region->subspan(where.offset, where.length);
  }
};

TEST_F(putting_large, over_a_wire_is_read_where_it_lies_and_has_its_outcome_behind_the_fence) {
  meet("tcp");
  put();
  EXPECT_EQ(granted(0).data(), bytes.data());
  ASSERT_TRUE(said<store_release>(1)) << "its deadline passed, and the store was not told";
  EXPECT_TRUE(context->events.wait(100ms, 1).empty()) << "the peer may still read it";
  caf::anon_send(heard->sessions.at(0).value(), session_event{transfer_fenced{}});
  EXPECT_EQ(failure().code, errc::deadline);
  EXPECT_TRUE(granted(0).empty()) << "it is still registered";
}

TEST_F(putting_large, to_a_peer_that_reaches_in_is_read_from_a_copy_and_has_its_outcome_in_time) {
  meet("shm");
  const auto given = bytes;
  put();
  EXPECT_NE(granted(0).data(), bytes.data());
  EXPECT_EQ(failure().code, errc::deadline);
  bytes.assign(bytes.size(), std::byte{8});
  EXPECT_TRUE(std::ranges::equal(granted(0), given));
  put();
  EXPECT_TRUE(std::ranges::equal(granted(1), bytes));
  EXPECT_TRUE(std::ranges::equal(granted(0), given)) << "the peer may still read it";
}

TEST_F(putting_large, shares_a_registration_only_while_no_put_of_it_has_ended) {
  const std::span<const std::byte> all{bytes};
  const auto part = all.subspan(10, 1000);
  const auto first = register_value(*context, all, "a");
  const auto second = register_value(*context, part, "b");
  ASSERT_TRUE(first && second);
  EXPECT_EQ(first->region, second->region);
  EXPECT_EQ(second->offset, 10u);
  EXPECT_TRUE(unregister_value(*context, first->region));
  const auto third = register_value(*context, part, "c");
  ASSERT_FALSE(third);
  EXPECT_EQ(third.error().code, errc::already_exists);
  EXPECT_TRUE(unregister_value(*context, second->region));
  const auto fourth = register_value(*context, part, "d");
  ASSERT_TRUE(fourth);
  EXPECT_NE(fourth->region, first->region);
  EXPECT_EQ(fourth->offset, 0u);
  EXPECT_TRUE(unregister_value(*context, fourth->region));
}

// -- when an actor crashes

constexpr auto planted = caf::exit_reason::unhandled_exception;

TEST_F(putting_large, whose_actor_crashes_leaves_its_copy_to_the_peer_that_may_still_read_it) {
  context->settings.default_deadline = 10 * troupe::testing::wait_limit;
  meet("shm");
  const auto given = bytes;
  put();
  ASSERT_TRUE(std::ranges::equal(granted(0), given));
  caf::anon_send_exit(heard->sessions.at(0).value(), planted);
  EXPECT_EQ(failure().code, errc::internal);
  bytes.assign(bytes.size(), std::byte{8});
  put();
  EXPECT_TRUE(std::ranges::equal(granted(1), bytes));
  EXPECT_TRUE(std::ranges::equal(granted(0), given)) << "its room was given to the next put";
}

TEST_F(putting_large, over_a_wire_whose_actor_crashes_has_its_outcome_behind_the_fence) {
  context->settings.default_deadline = 10 * troupe::testing::wait_limit;
  meet("tcp");
  put();
  ASSERT_EQ(granted(0).data(), bytes.data());
  caf::anon_send_exit(heard->sessions.at(0).value(), planted);
  ASSERT_TRUE(said<transfer_abort>(1)) << "the store was not told";
  const auto fencing = heard->sessions.at(1);
  ASSERT_TRUE(fencing) << "nobody fences it";
  EXPECT_TRUE(context->events.wait(100ms, 1).empty()) << "the peer may still read it";
  caf::anon_send(*fencing, session_event{transfer_fenced{}});
  const auto why = failure();
  EXPECT_EQ(why.code, errc::internal);
  EXPECT_THAT(why.message, HasSubstr("it is not known whether the value is stored"));
  EXPECT_TRUE(granted(0).empty()) << "it is still registered";
}

TEST_F(putting_large, from_blocks_whose_actor_crashes_leaves_them_pinned_until_the_fence) {
  context->settings.default_deadline = 10 * troupe::testing::wait_limit;
  context->pool = std::make_unique<cache_pool>(4);
  const auto given = context->pool->allocate(1).value();
  pinned = given.blocks;
  ASSERT_TRUE(context->pool->pin(pinned));
  ASSERT_TRUE(context->pool->free(given.owner, given.blocks));
  meet("tcp");
  put();
  ASSERT_EQ(granted(0).data(), bytes.data());
  caf::anon_send_exit(heard->sessions.at(0).value(), planted);
  EXPECT_EQ(failure().code, errc::internal) << "the pins keep the memory, so it is told at once";
  EXPECT_EQ(context->pool->counters().free, 3u) << "the peer may still read it";
  const auto fencing = heard->sessions.at(1);
  ASSERT_TRUE(fencing) << "nobody fences it";
  caf::anon_send(*fencing, session_event{transfer_fenced{}});
  EXPECT_TRUE(comes_true([&] { return context->pool->counters().free == 4; }))
      << "nothing reads it any more";
}

// -- when the node has stopped

/// Memory that the caller has already given back: any read of it crashes. Small values travel in a
/// frame, large ones are copied or granted.
class putting_late : public putting_large, public ::testing::WithParamInterface<std::size_t> {
 protected:
  void* const page = ::mmap(nullptr, 100'000, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

  void SetUp() override {
    putting_large::SetUp();
    ASSERT_NE(page, MAP_FAILED);
    context->settings.default_deadline = 10 * troupe::testing::wait_limit;
    context->values = value_store::create(*context->endpoint, 1u << 20).value();
  }
  ~putting_late() override { ::munmap(page, 100'000); }
  void expect_untouched(const std::string& peer) {
    context->lent.shut_out();
    put(peer, {static_cast<const std::byte*>(page), GetParam()});
    EXPECT_EQ(failure().code, errc::aborted);
    EXPECT_FALSE(context->lent.is_read());
  }
};

TEST_P(putting_late, over_a_wire_reads_nothing) {
  heard->fences = true;
  meet("tcp");
  expect_untouched(link.peer);
}

TEST_P(putting_late, to_a_peer_that_reaches_in_reads_nothing) {
  heard->fences = true;
  meet("shm");
  expect_untouched(link.peer);
}

TEST_P(putting_late, to_the_node_itself_reads_nothing) {
  meet("tcp");
  expect_untouched(context->self.name);
}

TEST_P(putting_late, whose_link_comes_back_reads_nothing_again) {
  heard->fences = true;
  meet("tcp");
  ASSERT_EQ(::mprotect(page, GetParam(), PROT_READ), 0);
  put(link.peer, {static_cast<const std::byte*>(page), GetParam()});
  ASSERT_TRUE(said<store_put>(0));
  context->lent.shut_out();
  ASSERT_EQ(::mprotect(page, GetParam(), PROT_NONE), 0);
  caf::anon_send(heard->sessions.at(0).value(), session_event{link_is_back{2, "shm"}});
  EXPECT_EQ(failure().code, errc::aborted);
}

INSTANTIATE_TEST_SUITE_P(, putting_late, ::testing::Values(100, 100'000));

// -- the side that stores, or reads

class storing : public put_phases {
 protected:
  void SetUp() override {
    transport::endpoint_options options;
    options.self = incarnation{7};
    context->endpoint = transport::endpoint::create(options).value();
    context->values = value_store::create(*context->endpoint, 1u << 20).value();
  }
  [[nodiscard]] bool stored() const { return context->values->query("k").has_value(); }
  void comes_put() {
    store_put put;
    put.op = op.value;
    put.key = "k";
    put.size = bytes.size();
    put.value = bytes;
    comes(put);
  }
  /// A put of a value that is read through its grant.
  [[nodiscard]] store_put put_by_grant(std::uint64_t size) const {
    store_put put;
    put.op = op.value;
    put.key = "k";
    put.size = size;
    put.source.emplace();
    put.source->permitted = {{0, size, 0, 1}};
    return put;
  }
  /// Whether the space reserved under the key becomes free again.
  bool room_comes() {
    return comes_true([&] { return context->values->reserve("k", 10, {}).has_value(); });
  }
};

TEST_F(storing, waits_for_the_last_word_and_answers_it_however_often_it_comes) {
  meet();
  comes_put();
  ASSERT_TRUE(said<store_held>(0));
  EXPECT_FALSE(stored());
  for (const std::size_t answer : {1, 2}) {
    comes(store_commit{op.value});
    const auto reply = said<store_reply>(answer);
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->failed, 0);
    EXPECT_TRUE(stored());
  }
}

TEST_F(storing, asks_once_more_when_the_last_word_is_late) {
  context->settings.peer_silence = 0ms;  // every message counts as late
  meet();
  comes_put();
  ASSERT_TRUE(said<store_held>(0));
  std::this_thread::sleep_for(2ms);
  comes(store_commit{op.value});
  ASSERT_TRUE(said<store_held>(1));
  EXPECT_FALSE(stored());
  std::this_thread::sleep_for(2ms);
  comes(store_commit{op.value});
  const auto reply = said<store_reply>(2);
  ASSERT_TRUE(reply) << "one that is slow would be asked for ever";
  EXPECT_TRUE(stored());
}

TEST_F(storing, lets_go_of_what_is_given_up_or_whose_putter_crashed) {
  meet();
  std::size_t words = 0;
  for (const session_message& end :
       {session_message{store_release{op.value}},
        session_message{transfer_abort{op, errc::internal, "crashed"}}}) {
    comes_put();
    ASSERT_TRUE(said<store_held>(words++));
    comes(end);
    EXPECT_TRUE(room_comes());
    EXPECT_FALSE(stored());
    comes(store_commit{op.value});
    const auto reply = said<store_reply>(words++);
    ASSERT_TRUE(reply);
    EXPECT_EQ(static_cast<errc>(reply->failed), errc::not_found);
    EXPECT_FALSE(stored());
  }
}

TEST_F(storing, takes_no_key_that_is_the_stores_own) {
  meet();
  const std::string scratch{
      "\0"
      "1",
      2};
  store_put put;
  put.op = op.value;
  put.key = scratch;
  put.size = bytes.size();
  put.value = bytes;
  comes(put);
  comes(store_get{op.value, scratch, 1000});
  comes(store_query{op.value, scratch});
  comes(store_remove{op.value, scratch});
  for (const std::size_t index : {0, 1, 2, 3}) {
    const auto refused = said<store_reply>(index);
    ASSERT_TRUE(refused) << index;
    EXPECT_EQ(static_cast<errc>(refused->failed), errc::invalid_config) << index;
  }
}

TEST_F(storing, lets_go_of_one_that_its_putter_has_forgotten) {
  context->settings.default_deadline = 100ms;
  context->settings.peer_silence = 100ms;
  meet();
  comes_put();
  ASSERT_TRUE(said<store_held>(0));
  EXPECT_TRUE(room_comes());
  EXPECT_FALSE(stored());
}

TEST_F(storing, serves_no_more_at_once_than_it_may_have_operations) {
  context->settings.max_operations = 2;
  meet();
  store_put put;
  put.value = bytes;
  put.size = bytes.size();
  for (const std::uint64_t number : {1, 2, 3}) {
    put.op = number;
    put.key = std::string{"k"}.append(std::to_string(number));
    comes(put);
  }
  // Each is handled by an actor of its own, in any order.
  std::set<std::uint64_t> held;
  for (const std::size_t index : {0, 1, 2}) {
    if (const auto word = said<store_held>(index)) {
      held.insert(word->op);
      continue;
    }
    const auto refused = said<store_reply>(index);
    ASSERT_TRUE(refused);
    EXPECT_EQ(refused->op, 3U);
    EXPECT_EQ(static_cast<errc>(refused->failed), errc::overloaded);
    EXPECT_THAT(refused->sentence, HasSubstr("limits.max_operations"));
  }
  EXPECT_EQ(held, (std::set<std::uint64_t>{1, 2}));
  // An operation that ends makes room for another.
  comes(store_release{1});
  EXPECT_TRUE(comes_true([&] { return context->values->reserve("k1", 10, {}).has_value(); }));
  comes(put);
  EXPECT_TRUE(said<store_held>(3));
}

TEST_F(storing, reads_once_over_each_link) {
  meet();
  auto put = put_by_grant(100'000);
  comes(put);
  ASSERT_TRUE(heard->batches.at(0));
  comes(put);
  link.epoch = 2;
  comes(put);
  ASSERT_TRUE(heard->batches.at(1));
  EXPECT_EQ(heard->batches.at(1)->second, 2u) << "of two reads the first would count for both";
  comes(store_release{op.value});
  EXPECT_TRUE(room_comes());
}

TEST_F(storing, keeps_the_memory_of_a_value_that_was_read_again_until_the_former_read_is_over) {
  meet();
  auto put = put_by_grant(1u << 20);  // the whole store
  comes(put);
  ASSERT_TRUE(heard->batches.at(0));
  link.epoch = 2;
  comes(put);
  ASSERT_TRUE(heard->batches.at(1));
  const auto session = heard->sessions.at(0);
  ASSERT_TRUE(session);
  transport::completion read;
  read.id = transport::batch_id{1};
  read.bytes = put.size;
  caf::anon_send(*session, session_event{read});
  ASSERT_TRUE(said<store_held>(0));
  comes(store_commit{op.value});
  ASSERT_TRUE(said<store_reply>(1));
  ASSERT_TRUE(context->values->remove("k"));
  EXPECT_FALSE(context->values->reserve("other", 10, {})) << "it would lie where the read writes";
  comes(store_release{op.value});
  EXPECT_TRUE(room_comes()) << "nothing writes any more";
}

TEST_F(storing, refuses_to_read_again_what_a_grant_does_not_cover) {
  meet();
  auto put = put_by_grant(100'000);
  comes(put);
  ASSERT_TRUE(heard->batches.at(0));
  link.epoch = 2;
  put.source->permitted = {{0, 1, 0, 1}};
  comes(put);
  put.source->permitted = {{0, put.size, 0, 1}};
  link.epoch = 3;
  comes(put);
  const auto again = heard->batches.at(1);
  ASSERT_TRUE(again);
  EXPECT_EQ(again->second, 3u);
  comes(store_release{op.value});
  EXPECT_TRUE(room_comes());
}

// -- when an actor crashes while bytes move

/// Values of which the store has room for one.
class crashing : public storing {
 protected:
  static constexpr std::uint64_t large = 700'000;

  void crash(std::size_t session) {
    heard->fences = false;
    caf::anon_send_exit(heard->sessions.at(session).value(), planted);
  }
  /// Whether the runner has noticed, and the peer was told with message `word`.
  bool peer_is_told(std::size_t word) { return said<transfer_abort>(word).has_value(); }
  /// Fences the one session that crashed.
  void expect_room_is_taken_until_the_fence() {
    EXPECT_FALSE(context->values->reserve("next", large, {})) << "bytes may still move there";
    const auto fencing = heard->sessions.at(1);
    ASSERT_TRUE(fencing) << "nobody fences it";
    caf::anon_send(*fencing, session_event{transfer_fenced{}});
    EXPECT_TRUE(comes_true([&] { return context->values->reserve("next", large, {}).has_value(); }))
        << "nothing moves there any more";
  }
};

TEST_F(crashing, store_that_reads_a_put_keeps_the_room_that_the_bytes_may_still_land_in) {
  meet();
  comes(put_by_grant(large));
  ASSERT_TRUE(heard->batches.at(0));
  crash(0);
  ASSERT_TRUE(peer_is_told(0));
  expect_room_is_taken_until_the_fence();
}

TEST_F(crashing, store_that_lends_a_value_keeps_it_where_the_peer_may_still_read_it) {
  ASSERT_TRUE(context->values->put("k", std::vector<std::byte>(large), {}));
  meet();
  comes(store_get{op.value, "k", UINT64_MAX});
  ASSERT_TRUE(said<store_reply>(0));
  crash(0);
  ASSERT_TRUE(peer_is_told(1));
  ASSERT_TRUE(context->values->remove("k"));
  expect_room_is_taken_until_the_fence();
}

TEST_F(crashing, reader_keeps_the_room_that_the_bytes_may_still_land_in) {
  meet();
  start_value get;
  get.operation = context->operations.begin({}).value();
  get.peer = link.peer;
  get.key = "k";
  caf::anon_send(runner, engine_command{std::move(get)});
  const auto asked = said<store_get>(0);
  ASSERT_TRUE(asked);
  store_reply reply;
  reply.op = asked->op;
  reply.size = large;
  reply.source = put_by_grant(large).source;
  caf::anon_send(heard->sessions.at(0).value(), session_event{session_message{reply}});
  ASSERT_TRUE(heard->batches.at(0));
  crash(0);
  ASSERT_TRUE(peer_is_told(1));
  expect_room_is_taken_until_the_fence();
}

}  // namespace
}  // namespace troupe::actors::testing
