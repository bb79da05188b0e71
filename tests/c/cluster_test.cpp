/// A frontend through the C ABI: status, placement, calls that come as events, carried requests.

#include <atomic>
#include <cstddef>
#include <cstring>
#include <thread>
#include <utility>

#include <gmock/gmock.h>

#include "c_fixture.hpp"
#include "waiting.hpp"

namespace troupe::testing {

namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t long_enough = 60'000;

/// Copies and frees a text that the library returned.
std::string taken(char* text) {
  std::string out = text ? text : "";
  troupe_free(text);
  return out;
}

class c_cluster : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(supervisor.port(), 0);
    ASSERT_DONE(troupe_engine_wait_registered(prefill.get(), long_enough));
    ASSERT_DONE(troupe_engine_wait_registered(decode.get(), long_enough));
    const auto text = deployment_text(supervisor.port());
    const auto options = cluster_options_of(text);
    ASSERT_DONE(troupe_cluster_connect(&options, &cluster));
    for (auto* engine : {prefill.get(), decode.get()})
      servers.emplace_back([this, engine] { serve(engine); });
  }
  ~c_cluster() override {
    over = true;
    for (auto& server : servers) server.join();
    troupe_cluster_free(cluster);
  }

  /// Answers each call with its method, a colon and its payload; `refuse` with an error. Never
  /// answers `sleep`.
  void serve(troupe_engine* engine) {
    while (!over) {
      troupe_event event{};
      std::size_t count = 0;
      if (troupe_engine_take(engine, &event, sizeof event, 1, 20, &count) != TROUPE_OK) return;
      if (count == 0) continue;
      EXPECT_EQ(event.kind, static_cast<std::uint32_t>(TROUPE_EVENT_CALL));
      EXPECT_EQ(event.operation, 0u);
      const std::string method = troupe_detail_method(event.detail);
      const void* bytes = nullptr;
      std::size_t size = 0;
      EXPECT_EQ(troupe_detail_bytes(event.detail, &bytes, &size), TROUPE_OK);
      const auto answer = method + ":" + std::string(static_cast<const char*>(bytes), size);
      if (method == "refuse") {
        EXPECT_EQ(troupe_engine_reply(engine, event.u.call.id, TROUPE_OVERLOADED, "not today",
                                      nullptr, 0),
                  TROUPE_OK);
      } else if (method != "sleep") {
        EXPECT_EQ(troupe_engine_reply(engine, event.u.call.id, TROUPE_OK, nullptr, answer.data(),
                                      answer.size()),
                  TROUPE_OK);
      }
      if (method != "sleep") {
        EXPECT_EQ(troupe_engine_reply(engine, event.u.call.id, TROUPE_OK, nullptr, nullptr, 0),
                  TROUPE_NOT_FOUND);
      } else {
        ++asleep;
      }
      troupe_events_free(&event, sizeof event, 1);
    }
  }

  own_supervisor supervisor;
  own_engine prefill{supervisor.port(), "prefill-0", TROUPE_CALLS};
  own_engine decode{supervisor.port(), "decode-0", TROUPE_CALLS};
  troupe_cluster* cluster{nullptr};
  std::atomic<bool> over{false};
  std::atomic<int> asleep{0};  ///< calls that stay unanswered
  std::vector<std::thread> servers;
};

TEST_F(c_cluster, members_reports_and_events_are_json_with_the_keys_of_the_command) {
  char* text = nullptr;
  ASSERT_DONE(troupe_cluster_members(cluster, &text));
  const auto members = taken(text);
  EXPECT_THAT(members, HasSubstr("\"cluster\": \"c-abi\""));
  EXPECT_THAT(members, HasSubstr("\"name\": \"prefill-0\""));
  EXPECT_THAT(members, HasSubstr("\"state\": \"up\""));
  ASSERT_DONE(troupe_cluster_report(cluster, "decode-0", &text));
  EXPECT_THAT(taken(text), HasSubstr("\"operations_open\": 0"));
  ASSERT_DONE(troupe_engine_report(decode.get(), &text));
  EXPECT_THAT(taken(text), HasSubstr("\"name\": \"decode-0\""));
  ASSERT_DONE(troupe_cluster_events(cluster, 0, 100, &text));
  EXPECT_THAT(taken(text), HasSubstr("\"event\": \"up\""));
  EXPECT_REFUSED(troupe_cluster_report(cluster, "decode-9", &text), TROUPE_NOT_FOUND, "decode-9");
}

TEST_F(c_cluster, a_placement_names_the_nodes) {
  troupe_placement_request request{};
  request.size = sizeof request;
  request.request = "r";
  request.timeout_ms = 30'000;
  troupe_placement* placement = nullptr;
  ASSERT_DONE(troupe_cluster_place(cluster, &request, &placement));
  troupe_placement_info info{};
  info.size = sizeof info;
  ASSERT_DONE(troupe_placement_read(placement, &info));
  EXPECT_STREQ(info.request, "r");
  EXPECT_EQ(info.mode, static_cast<std::uint32_t>(TROUPE_MODE_WRITE));
  ASSERT_EQ(info.prefill_count, 1u);
  ASSERT_EQ(info.decode_count, 1u);
  EXPECT_NE(info.supervisor_incarnation, 0u);
  troupe_node_info node{};
  node.size = sizeof node;
  ASSERT_DONE(troupe_placement_node(placement, TROUPE_DECODE, 0, &node));
  EXPECT_STREQ(node.name, "decode-0");
  EXPECT_STREQ(node.stage, "decode");
  troupe_identity identity{};
  identity.size = sizeof identity;
  ASSERT_DONE(troupe_engine_identity(decode.get(), &identity));
  EXPECT_EQ(node.incarnation, identity.incarnation);
  EXPECT_EQ(node.port, identity.port);
  EXPECT_REFUSED(troupe_placement_node(placement, TROUPE_DECODE, 1, &node), TROUPE_OUT_OF_RANGE,
                 "`index` is 1");
  EXPECT_REFUSED(troupe_placement_node(placement, 2, 0, &node), TROUPE_INVALID_CONFIG,
                 "`side` is 2");
  troupe_placement_free(placement);
  ASSERT_DONE(troupe_cluster_finished(cluster, "r"));
}

/// How often a request was placed, and whether its source is that of the previous attempt.
std::pair<std::uint32_t, std::uint32_t> placed_by(troupe_cluster* cluster,
                                                  const troupe_placement_request& request) {
  troupe_placement* placement = nullptr;
  EXPECT_EQ(troupe_cluster_place(cluster, &request, &placement), TROUPE_OK) << troupe_last_error();
  if (placement == nullptr) return {};
  troupe_placement_info info{};
  info.size = sizeof info;
  EXPECT_EQ(troupe_placement_read(placement, &info), TROUPE_OK);
  troupe_placement_free(placement);
  return {info.attempt, info.same_source};
}

TEST_F(c_cluster, a_request_is_placed_once_more_without_the_nodes_that_failed) {
  static const char* const failed[] = {"decode-0"};
  troupe_placement_request request{};
  request.size = sizeof request;
  request.request = "r";
  request.timeout_ms = 30'000;
  EXPECT_EQ(placed_by(cluster, request), std::pair(1u, 0u));
  request.failed = failed;
  request.failed_count = 1;
  request.keep_source = 1;
  EXPECT_EQ(placed_by(cluster, request), std::pair(2u, 1u));
  static const char* const both[] = {"decode-0", "prefill-0"};
  request.failed = both;
  request.failed_count = 2;
  EXPECT_EQ(placed_by(cluster, request), std::pair(3u, 0u)) << "the source was lost as well";
  request.failed_count = 1;
  troupe_placement* placement = nullptr;
  EXPECT_REFUSED(troupe_cluster_place(cluster, &request, &placement), TROUPE_PEER_LOST,
                 "limits.retry_budget");

  // A program compiled before the list existed: the library must not read beyond its struct.
  request.size = offsetof(troupe_placement_request, failed);
  EXPECT_EQ(placed_by(cluster, request), std::pair(1u, 0u));
  request.size = sizeof request;
  request.keep_source = 2;
  EXPECT_REFUSED(troupe_cluster_place(cluster, &request, &placement), TROUPE_INVALID_CONFIG,
                 "`request.keep_source` is 2");
  request.failed = nullptr;
  EXPECT_REFUSED(troupe_cluster_place(cluster, &request, &placement), TROUPE_INVALID_CONFIG,
                 "`request.failed` is NULL");
  ASSERT_DONE(troupe_cluster_finished(cluster, "r"));
}

TEST_F(c_cluster, calls_come_as_events_and_are_answered_once) {
  void* answer = nullptr;
  std::size_t size = 0;
  ASSERT_DONE(troupe_cluster_call(cluster, "prefill-0", "echo", "hello", 5, 0, &answer, &size));
  EXPECT_EQ(std::string(static_cast<char*>(answer), size), "echo:hello");
  troupe_free(answer);
  EXPECT_REFUSED(troupe_cluster_call(cluster, "prefill-0", "refuse", "", 0, 0, &answer, &size),
                 TROUPE_OVERLOADED, "not today");
  EXPECT_REFUSED(troupe_cluster_call(cluster, "prefill-0", "sleep", "", 0, 100, &answer, &size),
                 TROUPE_DEADLINE, "");
  EXPECT_REFUSED(troupe_cluster_call(cluster, "prefill-0", "", "", 0, 0, &answer, &size),
                 TROUPE_INVALID_CONFIG, "`method` is empty");
  EXPECT_REFUSED(troupe_engine_reply(prefill.get(), 77'777, TROUPE_OK, nullptr, nullptr, 0),
                 TROUPE_NOT_FOUND, "");
  EXPECT_REFUSED(troupe_engine_reply(prefill.get(), 1, 55, nullptr, nullptr, 0),
                 TROUPE_INVALID_CONFIG, "`code`");
}

// -- carrying

struct carried_calls {
  std::vector<std::string> seen;
  troupe_status answer{TROUPE_OK};
  const char* method{"carried"};
};

troupe_status call_of(void* user, const troupe_attempt* now, const troupe_node_info* node,
                      troupe_call_draft* draft) {
  auto& calls = *static_cast<carried_calls*>(user);
  calls.seen.emplace_back(node->name);
  EXPECT_THAT(now->source, HasSubstr("r#"));
  EXPECT_GT(now->left_ms, 0u);
  troupe_placement_info info{};
  info.size = sizeof info;
  EXPECT_EQ(troupe_placement_read(now->where, &info), TROUPE_OK);
  EXPECT_THAT(info.request, HasSubstr("r#"));
  if (calls.answer != TROUPE_OK) return calls.answer;
  return troupe_call_draft_set(draft, calls.method, node->name, std::strlen(node->name));
}

troupe_carried_request carried_by(carried_calls& calls) {
  troupe_carried_request request{};
  request.size = sizeof request;
  request.request = "r";
  request.from = "prefill";
  request.to = "decode";
  request.deadline_ms = long_enough;
  request.prefill = call_of;
  request.decode = call_of;
  request.user = &calls;
  return request;
}

TEST_F(c_cluster, a_carried_request_calls_both_engines_and_has_their_answers) {
  carried_calls calls;
  const auto request = carried_by(calls);
  troupe_carried* carried = nullptr;
  ASSERT_DONE(troupe_cluster_carry(cluster, &request, &carried));
  EXPECT_THAT(calls.seen, ::testing::UnorderedElementsAre("prefill-0", "decode-0"));
  troupe_carried_info info{};
  info.size = sizeof info;
  ASSERT_DONE(troupe_carried_read(carried, &info));
  EXPECT_EQ(info.attempts, 1u);
  EXPECT_EQ(info.prefills, 1u);
  ASSERT_EQ(info.decode_count, 1u);
  const void* answer = nullptr;
  std::size_t size = 0;
  ASSERT_DONE(troupe_carried_answer(carried, TROUPE_DECODE, 0, &answer, &size));
  EXPECT_EQ(std::string(static_cast<const char*>(answer), size), "carried:decode-0");
  EXPECT_REFUSED(troupe_carried_answer(carried, TROUPE_DECODE, 1, &answer, &size),
                 TROUPE_OUT_OF_RANGE, "`index`");
  troupe_placement* where = nullptr;
  ASSERT_DONE(troupe_carried_placement(carried, &where));
  troupe_placement_free(where);
  troupe_carried_free(carried);
}

TEST_F(c_cluster, a_callback_that_fails_gives_the_request_up_with_its_code) {
  carried_calls calls;
  calls.answer = 42;
  const auto request = carried_by(calls);
  troupe_carried* carried = nullptr;
  EXPECT_REFUSED(troupe_cluster_carry(cluster, &request, &carried), TROUPE_ABORTED, "returned 42");
  EXPECT_EQ(carried, nullptr);
}

/// The deadline is far longer than a test may take: neither the call nor the end of the frontend
/// waits for it.
TEST_F(c_cluster,
       a_stop_from_another_thread_ends_what_is_carried_and_the_calls_that_nobody_answers) {
  carried_calls calls;
  calls.method = "sleep";
  auto request = carried_by(calls);
  troupe_stop* stop = nullptr;
  ASSERT_DONE(troupe_stop_new(&stop));
  request.stop = stop;
  request.deadline_ms = 3'600'000;
  std::thread stopper{[&] {
    EXPECT_TRUE(comes_true([&] { return asleep == 2; }));
    EXPECT_EQ(troupe_stop_request(stop), TROUPE_OK);
  }};
  troupe_carried* carried = nullptr;
  EXPECT_REFUSED(troupe_cluster_carry(cluster, &request, &carried), TROUPE_ABORTED, "");
  stopper.join();
  troupe_stop_free(stop);
  request.stop = nullptr;
  request.decode = nullptr;
  EXPECT_REFUSED(troupe_cluster_carry(cluster, &request, &carried), TROUPE_INVALID_CONFIG,
                 "`request.decode` is NULL");
}

TEST(c_cluster_alone, a_cluster_that_nobody_is_at_is_told_apart_from_wrong_options) {
  troupe_cluster_options options{};
  options.size = sizeof options;
  troupe_cluster* cluster = nullptr;
  EXPECT_REFUSED(troupe_cluster_connect(&options, &cluster), TROUPE_INVALID_CONFIG,
                 "`options.port` is 0");
  options.port = free_port();
  options.host = "127.0.0.1";
  EXPECT_REFUSED(troupe_cluster_connect(&options, &cluster), TROUPE_PEER_UNREACHABLE, "");
  options.flags = TROUPE_LAZY;
  ASSERT_DONE(troupe_cluster_connect(&options, &cluster));
  char* json = nullptr;
  EXPECT_REFUSED(troupe_cluster_members(cluster, &json), TROUPE_PEER_UNREACHABLE, "");
  troupe_cluster_free(cluster);
}

}  // namespace

}  // namespace troupe::testing
