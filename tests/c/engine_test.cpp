/// Engines used through the C ABI: transfers, events, many threads, their end, forks.

#include <atomic>
#include <cstring>
#include <map>
#include <thread>

#include <gmock/gmock.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include "c_fixture.hpp"

namespace troupe::testing {

namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t long_enough = 60'000;

/// Two engines of one cluster, in this process.
class c_pair : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(supervisor.port(), 0);
    ASSERT_DONE(troupe_engine_wait_registered(prefill.get(), long_enough));
    ASSERT_DONE(troupe_engine_wait_registered(decode.get(), long_enough));
  }

  troupe_operation send(const char* request) {
    const auto spec = send_of(request);
    troupe_operation operation = 0;
    EXPECT_EQ(troupe_engine_send(prefill.get(), &spec, &operation), TROUPE_OK)
        << troupe_last_error();
    return operation;
  }
  troupe_operation receive(const char* request) {
    static const char* const sources[] = {"prefill-0"};
    const auto spec = receive_of(request, sources);
    troupe_operation operation = 0;
    EXPECT_EQ(troupe_engine_receive(decode.get(), &spec, &operation), TROUPE_OK)
        << troupe_last_error();
    return operation;
  }
  /// All events of an operation up to its last, by kind.
  std::vector<troupe_event> events_of(troupe_engine* engine, troupe_operation operation) {
    std::vector<troupe_event> out;
    while (out.empty() || out.back().kind != TROUPE_EVENT_UNPINNED) {
      troupe_event event{};
      std::size_t count = 0;
      EXPECT_EQ(troupe_engine_take(engine, &event, sizeof event, 1, long_enough, &count),
                TROUPE_OK);
      if (count == 0) {
        ADD_FAILURE() << "no event came";
        break;
      }
      EXPECT_EQ(event.operation, operation);
      out.push_back(event);
    }
    return out;
  }
  static void free_all(std::vector<troupe_event>& events) {
    troupe_events_free(events.data(), sizeof events[0], events.size());
  }

  own_supervisor supervisor;
  own_engine prefill{supervisor.port(), "prefill-0"};
  own_engine decode{supervisor.port(), "decode-0"};
};

TEST_F(c_pair, every_byte_arrives_and_each_layer_is_told) {
  for (std::size_t i = 0; i < prefill.memory.size(); ++i)
    prefill.memory[i] = static_cast<unsigned char>(i * 7 + 1);
  const auto sending = send("r");
  const auto receiving = receive("r");
  ASSERT_DONE(troupe_engine_layers_ready(prefill.get(), sending, 0, 1, tokens, nullptr));
  ASSERT_DONE(troupe_engine_seal(prefill.get(), sending, tokens, "token", 5));

  auto events = events_of(decode.get(), receiving);
  ASSERT_GE(events.size(), 3u);
  std::uint32_t layers = 0;
  for (const auto& event : events) {
    if (event.kind == TROUPE_EVENT_LAYERS) {
      layers = std::max(layers, event.u.layers.layer_end);
      EXPECT_EQ(event.u.layers.token_end, tokens);
    }
  }
  EXPECT_EQ(layers, 2u);
  const auto& done = events[events.size() - 2];
  EXPECT_EQ(done.kind, static_cast<std::uint32_t>(TROUPE_EVENT_DONE));
  // 2 layers, K and V, 2 heads of 8 elements of 2 bytes.
  EXPECT_EQ(done.u.done.bytes, tokens * 2u * 2u * 2u * 16u);
  EXPECT_EQ(done.u.done.aux_size, 5u);
  const std::string over{static_cast<const char*>(done.u.done.backend),
                         strnlen(static_cast<const char*>(done.u.done.backend), 4)};
  EXPECT_TRUE(over == "shm" || over == "tcp") << over;
  const void* aux = nullptr;
  std::size_t aux_size = 0;
  ASSERT_DONE(troupe_detail_bytes(done.detail, &aux, &aux_size));
  EXPECT_EQ(std::string(static_cast<const char*>(aux), aux_size), "token");
  free_all(events);

  troupe_outcome sent{};
  sent.size = sizeof sent;
  ASSERT_DONE(troupe_engine_wait(prefill.get(), sending, long_enough, &sent));
  EXPECT_EQ(sent.bytes, tokens * 2u * 2u * 2u * 16u);
  EXPECT_STRNE(static_cast<const char*>(sent.backend), "");
  EXPECT_GT(sent.segments, 0u);
  EXPECT_EQ(sent.kind, static_cast<std::uint32_t>(TROUPE_EVENT_DONE));
  EXPECT_EQ(sent.detail, nullptr);

  expect_same_cache(prefill, decode);
}

TEST_F(c_pair, layers_of_a_receive_that_has_ended_are_there_or_its_error_is_told) {
  troupe_compute_stream stream{};
  stream.size = sizeof stream;
  const auto sending = send("r");
  const auto done = receive("r");
  ASSERT_DONE(troupe_engine_seal(prefill.get(), sending, tokens, nullptr, 0));
  ASSERT_DONE(troupe_engine_wait(decode.get(), done, long_enough, nullptr));
  ASSERT_DONE(troupe_engine_await_layers(decode.get(), done, 0, 2, tokens, &stream));
  EXPECT_REFUSED(troupe_engine_await_layers(decode.get(), done, 0, 3, tokens, &stream),
                 TROUPE_OUT_OF_RANGE, "layers [0, 3) of 2");

  const auto failed = receive("never sent");
  ASSERT_DONE(troupe_engine_abort(decode.get(), failed, "the client is gone"));
  EXPECT_REFUSED(troupe_engine_wait(decode.get(), failed, long_enough, nullptr), TROUPE_ABORTED,
                 "the client is gone");
  EXPECT_REFUSED(troupe_engine_await_layers(decode.get(), failed, 0, 2, tokens, &stream),
                 TROUPE_ABORTED, "the client is gone");
  EXPECT_REFUSED(troupe_engine_await_layers(decode.get(), failed + 1'000, 0, 2, tokens, &stream),
                 TROUPE_NOT_FOUND, "");
}

TEST_F(c_pair, an_abort_ends_both_sides_with_its_reason) {
  const auto sending = send("r");
  const auto receiving = receive("r");
  // The engines have met once something has landed; before that, an abort reaches only its own
  // side.
  ASSERT_DONE(troupe_engine_layers_ready(prefill.get(), sending, 0, 1, tokens, nullptr));
  troupe_event landed{};
  std::size_t count = 0;
  ASSERT_DONE(troupe_engine_take(decode.get(), &landed, sizeof landed, 1, long_enough, &count));
  ASSERT_EQ(count, 1u);
  EXPECT_EQ(landed.kind, static_cast<std::uint32_t>(TROUPE_EVENT_LAYERS));
  ASSERT_DONE(troupe_engine_abort(decode.get(), receiving, "the client is gone"));
  auto events = events_of(decode.get(), receiving);
  ASSERT_GE(events.size(), 2u);
  const auto& failed = events[events.size() - 2];
  EXPECT_EQ(failed.kind, static_cast<std::uint32_t>(TROUPE_EVENT_FAILED));
  EXPECT_EQ(failed.code, TROUPE_ABORTED);
  EXPECT_THAT(troupe_detail_reason(failed.detail), HasSubstr("the client is gone"));
  free_all(events);
  EXPECT_REFUSED(troupe_engine_wait(prefill.get(), sending, long_enough, nullptr), TROUPE_ABORTED,
                 "");
}

TEST_F(c_pair, a_send_grows_and_tells_who_wants_it_on_terms_of_the_receive) {
  auto growing = send_of("r");
  growing.block_count = 1;
  growing.flags = TROUPE_GROWS | TROUPE_TELL_WANTED;
  troupe_operation sending = 0;
  ASSERT_DONE(troupe_engine_send(prefill.get(), &growing, &sending));
  troupe_identity source{};
  source.size = sizeof source;
  ASSERT_DONE(troupe_engine_identity(prefill.get(), &source));

  static const char* const sources[] = {"prefill-0"};
  auto spec = receive_of("r", sources);
  spec.lives = &source.incarnation;
  spec.expect = "tok";
  spec.expect_size = 3;
  spec.park_ms = long_enough;
  troupe_operation receiving = 0;
  EXPECT_REFUSED(troupe_engine_receive(decode.get(), &spec, &receiving), TROUPE_INVALID_CONFIG,
                 "TROUPE_PARK");
  spec.flags = TROUPE_PARK | TROUPE_AGAIN;
  ASSERT_DONE(troupe_engine_receive(decode.get(), &spec, &receiving));

  troupe_event wanted{};
  std::size_t count = 0;
  ASSERT_DONE(troupe_engine_take(prefill.get(), &wanted, sizeof wanted, 1, long_enough, &count));
  ASSERT_EQ(count, 1u);
  EXPECT_EQ(wanted.kind, static_cast<std::uint32_t>(TROUPE_EVENT_WANTED));
  EXPECT_STREQ(troupe_detail_node(wanted.detail), "decode-0");
  EXPECT_EQ(wanted.u.wanted.ranks, 1u);
  EXPECT_EQ(wanted.u.wanted.expected, 1u);
  EXPECT_EQ(wanted.u.wanted.token_end, tokens);
  troupe_detail_free(wanted.detail);
  EXPECT_STREQ(troupe_detail_node(nullptr), "");

  EXPECT_REFUSED(troupe_engine_seal(prefill.get(), sending, tokens, nullptr, 0),
                 TROUPE_OUT_OF_RANGE, "do not fit the blocks");
  ASSERT_DONE(troupe_engine_add_blocks(prefill.get(), sending, sent_blocks + 1, 2));
  ASSERT_DONE(troupe_engine_seal(prefill.get(), sending, tokens, "token", 5));
  EXPECT_EQ(troupe_engine_wait(decode.get(), receiving, long_enough, nullptr), TROUPE_OK)
      << troupe_last_error();
  EXPECT_EQ(troupe_engine_wait(prefill.get(), sending, long_enough, nullptr), TROUPE_OK)
      << troupe_last_error();
  EXPECT_REFUSED(troupe_engine_add_blocks(prefill.get(), sending, sent_blocks, 1), TROUPE_NOT_FOUND,
                 "has ended");

  const std::uint64_t another_life = source.incarnation + 1;
  spec.lives = &another_life;
  ASSERT_DONE(troupe_engine_receive(decode.get(), &spec, &receiving));
  EXPECT_REFUSED(troupe_engine_wait(decode.get(), receiving, long_enough, nullptr),
                 TROUPE_STALE_INCARNATION, "runs as incarnation");
  spec.lives = nullptr;
  spec.park_ms = 0;
  ASSERT_DONE(troupe_engine_receive(decode.get(), &spec, &receiving));
  EXPECT_REFUSED(troupe_engine_wait(decode.get(), receiving, long_enough, nullptr),
                 TROUPE_NOT_FOUND, "is not offered here");
}

TEST_F(c_pair, a_request_is_held_and_given_back) {
  static const char* const sources[] = {"prefill-0"};
  troupe_sources of{};
  of.size = sizeof of;
  of.source_count = 1;
  of.request = "r";
  of.sources = sources;
  const auto sending = send("r");
  troupe_operation held = 0;
  ASSERT_DONE(troupe_engine_hold(decode.get(), &of, &held));
  EXPECT_REFUSED(troupe_engine_hold(decode.get(), &of, &held), TROUPE_ALREADY_EXISTS, "live here");
  const auto receiving = receive("r");
  EXPECT_EQ(troupe_engine_wait(decode.get(), held, long_enough, nullptr), TROUPE_OK)
      << troupe_last_error();
  ASSERT_DONE(troupe_engine_seal(prefill.get(), sending, tokens, nullptr, 0));
  EXPECT_EQ(troupe_engine_wait(decode.get(), receiving, long_enough, nullptr), TROUPE_OK)
      << troupe_last_error();

  const auto unwanted = send("unwanted");
  of.request = "unwanted";
  troupe_operation given_back = 0;
  ASSERT_DONE(troupe_engine_release(decode.get(), &of, &given_back));
  EXPECT_EQ(troupe_engine_wait(decode.get(), given_back, long_enough, nullptr), TROUPE_OK)
      << troupe_last_error();
  EXPECT_REFUSED(troupe_engine_wait(prefill.get(), unwanted, long_enough, nullptr), TROUPE_ABORTED,
                 "decode-0 gave request `unwanted` back");
  const std::uint64_t lives[] = {7};
  of.lives = lives;
  ASSERT_DONE(troupe_engine_release(decode.get(), &of, &given_back));
  EXPECT_REFUSED(troupe_engine_wait(decode.get(), given_back, long_enough, nullptr),
                 TROUPE_STALE_INCARNATION, "runs as incarnation");
  of.source_count = 0;
  EXPECT_REFUSED(troupe_engine_release(decode.get(), &of, &given_back), TROUPE_INVALID_CONFIG,
                 "name the prefill nodes");
}

TEST_F(c_pair, specs_of_before_they_grew_mean_what_they_meant) {
  auto spec = send_of("r");
  spec.size = offsetof(troupe_send_spec, flags);
  spec.flags = 0xFFFF'FFFFu;  // from memory beyond the struct
  troupe_operation sending = 0;
  ASSERT_DONE(troupe_engine_send(prefill.get(), &spec, &sending));
  EXPECT_REFUSED(troupe_engine_add_blocks(prefill.get(), sending, sent_blocks, 1),
                 TROUPE_INVALID_CONFIG, "grows");
  spec.size = sizeof spec;
  EXPECT_REFUSED(troupe_engine_send(prefill.get(), &spec, &sending), TROUPE_INVALID_CONFIG,
                 "does not know");
}

TEST_F(c_pair, block_tables_of_groups_that_the_layout_has_not_are_refused) {
  const troupe_group_blocks group{0, 0, sent_blocks, 3};
  troupe_send_spec spec{};
  spec.size = sizeof spec;
  spec.request = "r";
  spec.groups = &group;
  spec.group_count = 1;
  troupe_operation operation = 0;
  EXPECT_REFUSED(troupe_engine_send(prefill.get(), &spec, &operation), TROUPE_INVALID_CONFIG,
                 "for 1 group of layers; the layout has 0 groups: name `blocks`");
  spec.groups = nullptr;
  EXPECT_REFUSED(troupe_engine_send(prefill.get(), &spec, &operation), TROUPE_INVALID_CONFIG,
                 "`spec.groups` is NULL");
  const troupe_group_blocks odd{0, 1, sent_blocks, 3};
  spec.groups = &odd;
  EXPECT_REFUSED(troupe_engine_send(prefill.get(), &spec, &operation), TROUPE_INVALID_CONFIG,
                 "`spec.groups[0].reserved` is not 0");
  spec.group_count = 65;
  EXPECT_REFUSED(troupe_engine_send(prefill.get(), &spec, &operation), TROUPE_INVALID_CONFIG,
                 "`spec.group_count` is more than 64");
  const auto sending = send("s");
  EXPECT_REFUSED(troupe_engine_add_group_blocks(prefill.get(), sending, 1, sent_blocks, 1),
                 TROUPE_OUT_OF_RANGE, "group 1 of layers, of 1");
}

TEST_F(c_pair, a_wait_that_is_over_takes_nothing) {
  const auto sending = send("r");
  EXPECT_REFUSED(troupe_engine_wait(prefill.get(), sending, 1, nullptr), TROUPE_TIMED_OUT,
                 "goes on");
  EXPECT_REFUSED(troupe_engine_wait(prefill.get(), sending + 1'000, 1, nullptr), TROUPE_NOT_FOUND,
                 "");
  ASSERT_DONE(troupe_engine_abort(prefill.get(), sending, nullptr));
  EXPECT_REFUSED(troupe_engine_wait(prefill.get(), sending, UINT64_MAX, nullptr), TROUPE_ABORTED,
                 "");
}

TEST_F(c_pair, the_descriptor_is_readable_while_events_wait) {
  int fd = -1;
  ASSERT_DONE(troupe_engine_event_fd(prefill.get(), &fd));
  pollfd readable{fd, POLLIN, 0};
  EXPECT_EQ(::poll(&readable, 1, 0), 0);
  troupe_operation operation = 0;
  ASSERT_DONE(troupe_engine_query(prefill.get(), "prefill-0", "no such key", &operation));
  EXPECT_EQ(::poll(&readable, 1, static_cast<int>(long_enough)), 1);
  EXPECT_EQ(::poll(&readable, 1, 0), 1) << "level-triggered";
  troupe_event event{};
  std::size_t count = 0;
  ASSERT_DONE(troupe_engine_take(prefill.get(), &event, sizeof event, 1, 0, &count));
  ASSERT_EQ(count, 1u);
  EXPECT_EQ(event.code, TROUPE_NOT_FOUND);
  troupe_events_free(&event, sizeof event, 1);
  EXPECT_EQ(::poll(&readable, 1, 0), 0);
}

TEST_F(c_pair, a_value_outlives_the_handle_of_its_engine) {
  const std::string value(100'000, 'v');
  troupe_operation operation = 0;
  ASSERT_DONE(troupe_engine_put(decode.get(), "prefill-0", "key", value.data(), value.size(), 0,
                                &operation));
  ASSERT_DONE(troupe_engine_wait(decode.get(), operation, long_enough, nullptr));
  troupe_outcome outcome{};
  outcome.size = sizeof outcome;
  ASSERT_DONE(troupe_engine_query(decode.get(), "prefill-0", "key", &operation));
  ASSERT_DONE(troupe_engine_wait(decode.get(), operation, long_enough, &outcome));
  EXPECT_EQ(outcome.value_size, value.size());
  EXPECT_EQ(outcome.detail, nullptr);

  auto reader = std::make_unique<own_engine>(supervisor.port(), "decode-0");
  reader.reset();  // its name is taken, so it never registers, and ends
  ASSERT_DONE(troupe_engine_get(decode.get(), "prefill-0", "key", &operation));
  ASSERT_DONE(troupe_engine_wait(decode.get(), operation, long_enough, &outcome));
  EXPECT_EQ(outcome.kind, static_cast<std::uint32_t>(TROUPE_EVENT_VALUE));
  const void* bytes = nullptr;
  std::size_t size = 0;
  ASSERT_DONE(troupe_engine_stop(decode.get()));
  ASSERT_DONE(troupe_detail_bytes(outcome.detail, &bytes, &size));
  EXPECT_EQ(std::string(static_cast<const char*>(bytes), size), value);
  troupe_placement* none = nullptr;
  EXPECT_REFUSED(troupe_detail_placement(outcome.detail, &none), TROUPE_NOT_FOUND, "no placement");
  troupe_detail_free(outcome.detail);
}

TEST_F(c_pair, many_threads_begin_and_end_operations_and_each_has_its_one_outcome) {
  constexpr int threads = 64, rounds = 20;
  std::atomic<int> right{0};
  std::vector<std::thread> all;
  for (int i = 0; i < threads; ++i) {
    all.emplace_back([&, i] {
      const auto key = "key-" + std::to_string(i);
      for (int round = 0; round < rounds; ++round) {
        troupe_operation put = 0, removed = 0;
        char* report = nullptr;
        if (troupe_engine_put(prefill.get(), "decode-0", key.c_str(), &i, sizeof i, 0, &put) ==
                TROUPE_OK &&
            troupe_engine_wait(prefill.get(), put, long_enough, nullptr) == TROUPE_OK &&
            troupe_engine_report(decode.get(), &report) == TROUPE_OK &&
            troupe_engine_remove(prefill.get(), "decode-0", key.c_str(), &removed) == TROUPE_OK &&
            troupe_engine_wait(prefill.get(), removed, long_enough, nullptr) == TROUPE_OK)
          ++right;
        troupe_free(report);
      }
    });
  }
  for (auto& each : all) each.join();
  EXPECT_EQ(right.load(), threads * rounds);
}

TEST_F(c_pair, calls_while_it_stops_and_after_are_refused_or_end) {
  std::atomic<bool> over{false};
  std::atomic<int> begun{0}, unexpected{0};
  std::vector<std::thread> all;
  for (int i = 0; i < 16; ++i) {
    all.emplace_back([&, i] {
      for (int round = 0; !over; ++round) {
        const auto request = std::to_string(i) + "." + std::to_string(round);
        const auto spec = send_of(request.c_str());
        troupe_operation operation = 0;
        if (troupe_engine_send(prefill.get(), &spec, &operation) != TROUPE_OK) continue;
        ++begun;
        (void)troupe_engine_abort(prefill.get(), operation, "enough");
        const auto ended = troupe_engine_wait(prefill.get(), operation, UINT64_MAX, nullptr);
        if (ended != TROUPE_ABORTED) ++unexpected;
      }
    });
  }
  while (begun < 100) std::this_thread::yield();
  ASSERT_DONE(troupe_engine_stop(prefill.get()));
  over = true;
  for (auto& each : all) each.join();
  EXPECT_EQ(unexpected.load(), 0);

  ASSERT_DONE(troupe_engine_stop(prefill.get())) << "again";
  troupe_operation operation = 0;
  troupe_send_spec spec{};
  spec.size = sizeof spec;
  spec.request = "late";
  EXPECT_REFUSED(troupe_engine_send(prefill.get(), &spec, &operation), TROUPE_ABORTED, "");
  EXPECT_REFUSED(troupe_engine_get(prefill.get(), "decode-0", "key", &operation), TROUPE_ABORTED,
                 "");
  EXPECT_NE(troupe_engine_layers_ready(prefill.get(), 1, 0, 1, 1, nullptr), TROUPE_OK);
  EXPECT_EQ(troupe_engine_set_queue_length(prefill.get(), 3), TROUPE_OK);
  troupe_identity identity{};
  identity.size = sizeof identity;
  EXPECT_EQ(troupe_engine_identity(prefill.get(), &identity), TROUPE_OK);
  EXPECT_NE(identity.incarnation, 0u);
  troupe_memory region{};
  EXPECT_EQ(troupe_engine_region(prefill.get(), 0, &region), TROUPE_OK);
  EXPECT_EQ(region.data, prefill.memory.data());
  EXPECT_REFUSED(troupe_engine_region(prefill.get(), 1, &region), TROUPE_OUT_OF_RANGE, "");
}

/// Runs `body` in a child process and returns its exit code: 0 is success.
template <class Body>
int in_child(Body body) {
  const auto child = ::fork();
  if (child == 0) {
    ::alarm(60);
    ::_exit(body());
  }
  int status = -1;
  (void)::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST_F(c_pair, a_forked_child_is_told_and_never_waits) {
  const auto sending = send("r");
  EXPECT_EQ(in_child([&] {
              troupe_operation operation = 0;
              if (troupe_engine_query(prefill.get(), "prefill-0", "k", &operation) !=
                  TROUPE_STALE_INCARNATION)
                return 1;
              if (!std::strstr(troupe_last_error(), "forked")) return 2;
              if (troupe_engine_wait(prefill.get(), sending, UINT64_MAX, nullptr) !=
                  TROUPE_STALE_INCARNATION)
                return 3;
              if (troupe_engine_stop(prefill.get()) != TROUPE_STALE_INCARNATION) return 4;
              const auto text = deployment_text(supervisor.port());
              troupe_engine_options options{};
              options.size = sizeof options;
              options.deployment_text = text.c_str();
              options.node = "prefill-0";
              troupe_engine* another = nullptr;
              if (troupe_engine_start(&options, &another) != TROUPE_STALE_INCARNATION) return 5;
              troupe_engine_free(prefill.get());  // only drops its copy
              return 0;
            }),
            0);
  // The parent's engine is intact.
  ASSERT_DONE(troupe_engine_abort(prefill.get(), sending, "enough"));
  EXPECT_REFUSED(troupe_engine_wait(prefill.get(), sending, long_enough, nullptr), TROUPE_ABORTED,
                 "");
}

TEST(c_fork, a_child_that_was_forked_before_the_first_engine_may_have_its_own) {
  const own_supervisor supervisor;
  ASSERT_NE(supervisor.port(), 0);
  EXPECT_EQ(in_child([&] {
              const own_engine node{supervisor.port(), "prefill-0"};
              return troupe_engine_wait_registered(node.get(), long_enough) == TROUPE_OK ? 0 : 1;
            }),
            0);
}

}  // namespace

}  // namespace troupe::testing
