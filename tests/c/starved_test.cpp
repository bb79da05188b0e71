/// A call of the C ABI that takes something and finds no memory has taken nothing: the next call gets
/// it.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <poll.h>

#include "allocations.hpp"
#include "c_fixture.hpp"
#include "own_agent.hpp"

namespace troupe::testing {

namespace {

/// Runs `call`, which returns a status, with its first allocation failing, then its second, and so
/// on, until it succeeds and `is_done`, or none fails. Returns the last status.
template <class Call>
troupe_status starve(
    Call&& call, const std::function<bool()>& is_done = [] { return true; }) {
  for (std::size_t made = 0;; ++made) {
    SCOPED_TRACE(made);
    allocations.left = made;
    const troupe_status status = call();
    const bool starved = *allocations.left == 0;
    allocations.left.reset();
    if (!starved || (status == TROUPE_OK && is_done())) return status;
    if (status != TROUPE_OK) {
      EXPECT_EQ(status, TROUPE_POOL_EXHAUSTED) << troupe_last_error();
    }
  }
}

bool is_readable(int fd, std::uint64_t timeout_ms) {
  pollfd readable{fd, POLLIN, 0};
  return ::poll(&readable, 1, static_cast<int>(timeout_ms)) == 1;
}

/// Takes structs, `capacity` at a time, in calls that fail at every place where they can, until
/// `is_last` accepts one, or no more come. `fd` is readable while some wait.
template <class Struct, class Take>
std::vector<Struct> take_until(int fd, std::size_t capacity, Take take,
                               const std::function<bool(const Struct&)>& is_last) {
  std::vector<Struct> out;
  std::vector<Struct> some(capacity);
  while (out.empty() || !is_last(out.back())) {
    if (!is_readable(fd, long_enough)) {
      ADD_FAILURE() << "no more come after " << out.size();
      return out;
    }
    std::size_t count = 0;
    const auto status =
        starve([&] { return take(some.data(), &count); }, [&count] { return count != 0; });
    out.insert(out.end(), some.begin(), some.begin() + static_cast<std::ptrdiff_t>(count));
    EXPECT_EQ(status, TROUPE_OK) << troupe_last_error();
  }
  return out;
}

troupe_announcement announced(const char* replica) {
  static constexpr troupe_label labels[] = {{"engine", "one"}, {"http", "10.0.0.1:8000"}};
  troupe_announcement join{};
  join.size = sizeof join;
  join.stage = "engines";
  join.replica = replica;
  join.labels = labels;
  join.label_count = 2;
  return join;
}

/// All events of the engine up to one of that kind, by kind. Takes `capacity` at a time.
std::map<std::uint32_t, std::vector<troupe_event>> events_until(troupe_engine* engine,
                                                                std::uint32_t kind,
                                                                std::size_t capacity) {
  int fd = -1;
  EXPECT_EQ(troupe_engine_event_fd(engine, &fd), TROUPE_OK) << troupe_last_error();
  const auto all = take_until<troupe_event>(
      fd, capacity,
      [&](troupe_event* first, std::size_t* count) {
        return troupe_engine_take(engine, first, sizeof *first, capacity, 0, count);
      },
      [kind](const troupe_event& last) { return last.kind == kind; });
  std::map<std::uint32_t, std::vector<troupe_event>> out;
  for (const auto& each : all) out[each.kind].push_back(each);
  return out;
}

void free_all(std::map<std::uint32_t, std::vector<troupe_event>>& events) {
  for (auto& [kind, all] : events) troupe_events_free(all.data(), sizeof(troupe_event), all.size());
}

std::string bytes_of(const troupe_detail* detail) {
  const void* bytes = nullptr;
  std::size_t size = 0;
  EXPECT_EQ(troupe_detail_bytes(detail, &bytes, &size), TROUPE_OK) << troupe_last_error();
  return {static_cast<const char*>(bytes), size};
}

/// Two engines whose blocks are their pools'.
class c_starved_pool : public ::testing::TestWithParam<std::size_t> {
 protected:
  static std::string deployment(std::uint16_t port) {
    constexpr const char* pool =
        "engine: external, pool: {size: 1MiB}, transport: {peer_silence: 1min, connect_timeout: "
        "1min}}\n";
    return "cluster: c-starved\nsupervisor: {host: 127.0.0.1, port: " + std::to_string(port) +
           ", heartbeat_interval: 100ms, heartbeat_timeout: 10min, state_file: none}\n"
           "security: {mode: none}\n"
           "model: {layers: 2, kv_heads: 2, head_dim: 16, dtype: bf16, block_tokens: 16}\n"
           "stages:\n  - {name: prefill, role: prefill, " +
           pool + "  - {name: decode, role: decode, " + pool +
           "edges:\n  - {from: prefill, to: decode, mode: write}\n";
  }
  void SetUp() override {
    ASSERT_NE(supervisor.port(), 0);
    const auto text = deployment(supervisor.port());
    for (auto& [name, engine] : engines) {
      troupe_engine_options options{};
      options.size = sizeof options;
      options.deployment_text = text.c_str();
      options.node = name;
      ASSERT_DONE(troupe_engine_start(&options, &engine));
    }
    for (auto& [name, engine] : engines)
      ASSERT_DONE(troupe_engine_wait_registered(engine, long_enough));
  }
  ~c_starved_pool() override {
    for (auto& [name, engine] : engines) troupe_engine_free(engine);
  }

  own_supervisor supervisor{deployment(0)};
  std::pair<const char*, troupe_engine*> engines[2]{{"prefill-0", nullptr}, {"decode-0", nullptr}};
};
INSTANTIATE_TEST_SUITE_P(taking, c_starved_pool, ::testing::Values(1U, 8U));

TEST_P(c_starved_pool, loses_no_event_of_a_receive_and_so_none_of_its_blocks) {
  auto* const prefill = engines[0].second;
  auto* const decode = engines[1].second;
  constexpr std::uint32_t two_blocks = 32;
  std::uint32_t blocks[2] = {};
  std::uint64_t owner = 0;
  ASSERT_DONE(troupe_engine_allocate_blocks(prefill, 2, &owner, blocks));
  auto send = send_of("r");
  send.blocks = blocks;
  send.block_count = 2;
  troupe_operation operation = 0;
  ASSERT_DONE(troupe_engine_send(prefill, &send, &operation));
  const std::string aux(100, 'a');
  ASSERT_DONE(troupe_engine_seal(prefill, operation, two_blocks, aux.data(), aux.size()));
  static const char* const sources[] = {"prefill-0"};
  auto receive = receive_of("r", sources);
  receive.tokens = two_blocks;
  receive.blocks = nullptr;
  receive.block_count = 0;
  ASSERT_DONE(troupe_engine_receive(decode, &receive, &operation));

  auto events = events_until(decode, TROUPE_EVENT_UNPINNED, GetParam());
  ASSERT_EQ(events[TROUPE_EVENT_ALLOCATED].size(), 1U);
  const std::uint32_t* allocated = nullptr;
  std::size_t count = 0;
  ASSERT_DONE(
      troupe_detail_blocks(events[TROUPE_EVENT_ALLOCATED][0].detail, &owner, &allocated, &count));
  EXPECT_EQ(count, 2U);
  ASSERT_DONE(troupe_engine_free_blocks(decode, owner, allocated, count));
  std::uint32_t layers = 0;
  for (const auto& each : events[TROUPE_EVENT_LAYERS]) {
    EXPECT_EQ(each.u.layers.layer_begin, layers);
    layers = each.u.layers.layer_end;
  }
  EXPECT_EQ(layers, 2U);
  ASSERT_EQ(events[TROUPE_EVENT_DONE].size(), 1U);
  EXPECT_EQ(bytes_of(events[TROUPE_EVENT_DONE][0].detail), aux);
  free_all(events);
}

/// Two engines of one cluster.
class c_starved_engine : public ::testing::TestWithParam<std::size_t> {
 protected:
  void SetUp() override {
    ASSERT_NE(supervisor.port(), 0);
    ASSERT_DONE(troupe_engine_wait_registered(a.get(), long_enough));
    ASSERT_DONE(troupe_engine_wait_registered(b.get(), long_enough));
  }
  static int fd_of(const own_engine& engine) {
    int fd = -1;
    EXPECT_EQ(troupe_engine_event_fd(engine.get(), &fd), TROUPE_OK) << troupe_last_error();
    return fd;
  }
  static std::map<std::uint32_t, std::vector<troupe_event>> events_until(const own_engine& of,
                                                                         std::uint32_t kind) {
    return testing::events_until(of.get(), kind, GetParam());
  }

  own_supervisor supervisor{open_deployment_text(0)};
  own_engine a{supervisor.port(), announced("a")};
  own_engine b{supervisor.port(), announced("b"), TROUPE_CALLS};
};
INSTANTIATE_TEST_SUITE_P(taking, c_starved_engine, ::testing::Values(1U, 8U));

TEST_P(c_starved_engine, loses_no_reason_and_no_call) {
  const auto text = open_deployment_text(supervisor.port());
  const auto options = cluster_options_of(text);
  troupe_cluster* cluster = nullptr;
  ASSERT_DONE(troupe_cluster_connect(&options, &cluster));
  const std::string said(100, 's');
  std::jthread caller{[&] {
    void* answer = nullptr;
    std::size_t size = 0;
    EXPECT_EQ(troupe_cluster_call(cluster, "engines.b.0", "say", said.data(), said.size(), 0,
                                  &answer, &size),
              TROUPE_OK)
        << troupe_last_error();
    EXPECT_EQ(size, said.size());
    troupe_free(answer);
  }};
  auto events = events_until(b, TROUPE_EVENT_CALL);
  ASSERT_EQ(events[TROUPE_EVENT_CALL].size(), 1U);
  const auto& call = events[TROUPE_EVENT_CALL][0];
  EXPECT_STREQ(troupe_detail_method(call.detail), "say");
  EXPECT_EQ(bytes_of(call.detail), said);
  EXPECT_EQ(starve([&] {
              return troupe_engine_reply(b.get(), call.u.call.id, TROUPE_OK, nullptr, said.data(),
                                         said.size());
            }),
            TROUPE_OK);
  caller.join();
  troupe_cluster_free(cluster);
  free_all(events);

  troupe_operation operation = 0;
  ASSERT_DONE(troupe_engine_query(b.get(), "engines.a.0", "no such key", &operation));
  events = events_until(b, TROUPE_EVENT_FAILED);
  ASSERT_EQ(events[TROUPE_EVENT_FAILED].size(), 1U);
  EXPECT_STRNE(troupe_detail_reason(events[TROUPE_EVENT_FAILED][0].detail), "");
  free_all(events);
}

TEST_P(c_starved_engine, loses_no_member_and_none_of_its_labels) {
  const own_engine watching{supervisor.port(), announced("w"), TROUPE_WATCH};
  std::map<std::string, std::uint32_t> states;
  while (states["engines.a.0"] != TROUPE_UP || states["engines.b.0"] != TROUPE_UP) {
    auto events = events_until(watching, TROUPE_EVENT_MEMBER);
    if (HasFailure()) return;
    for (const auto& each : events[TROUPE_EVENT_MEMBER]) {
      states[troupe_detail_node(each.detail)] = each.u.member.state;
      const troupe_label* labels = nullptr;
      std::size_t count = 0;
      ASSERT_DONE(troupe_detail_labels(each.detail, &labels, &count));
      ASSERT_EQ(count, 2U);
      EXPECT_STREQ(labels[1].value, "10.0.0.1:8000");
    }
    free_all(events);
  }
}

TEST_P(c_starved_engine, loses_no_outcome_of_an_operation_that_it_waits_for) {
  const std::string value(100'000, 'v');
  troupe_operation operation = 0;
  ASSERT_DONE(
      troupe_engine_put(b.get(), "engines.a.0", "key", value.data(), value.size(), 0, &operation));
  ASSERT_DONE(troupe_engine_wait(b.get(), operation, long_enough, nullptr));
  troupe_outcome outcome{};
  outcome.size = sizeof outcome;
  const auto wait = [&] { return troupe_engine_wait(b.get(), operation, 0, &outcome); };

  ASSERT_DONE(troupe_engine_get(b.get(), "engines.a.0", "key", &operation));
  ASSERT_TRUE(is_readable(fd_of(b), long_enough)) << "it has ended";
  ASSERT_DONE(starve(wait));
  EXPECT_EQ(bytes_of(outcome.detail), value);
  troupe_detail_free(outcome.detail);

  troupe_placement_request request{};
  request.size = sizeof request;
  request.request = "r";
  request.timeout_ms = 30'000;
  ASSERT_DONE(troupe_engine_place(b.get(), &request, &operation));
  ASSERT_TRUE(is_readable(fd_of(b), long_enough)) << "it has ended";
  ASSERT_DONE(starve(wait));
  troupe_placement* placement = nullptr;
  ASSERT_DONE(troupe_detail_placement(outcome.detail, &placement));
  troupe_placement_free(placement);
  troupe_detail_free(outcome.detail);
}

class c_starved_agent : public ::testing::TestWithParam<std::size_t> {
 protected:
  /// All events of `a` up to one of that kind.
  std::vector<troupe_io_event> events_until(std::uint32_t kind) {
    int fd = -1;
    EXPECT_EQ(troupe_io_event_fd(a.get(), &fd), TROUPE_OK) << troupe_last_error();
    return take_until<troupe_io_event>(
        fd, GetParam(),
        [&](troupe_io_event* first, std::size_t* count) {
          return troupe_io_take(a.get(), first, sizeof *first, GetParam(), 0, count);
        },
        [kind](const troupe_io_event& last) { return last.kind == kind; });
  }

  own_agent a{"a"}, b{"an agent whose name is no short string"};
  troupe_io_peer b_of_a = b.known_to(a);
};
INSTANTIATE_TEST_SUITE_P(taking, c_starved_agent, ::testing::Values(1U, 8U));

TEST_P(c_starved_agent, loses_no_event) {
  troupe_io_plan over = 0;
  ASSERT_DONE(troupe_io_session(a.get(), a.kv, b_of_a, b.kv, &over));
  const troupe_io_segment all{0, 0, 4096, 0, 0, 0, 0};
  std::vector<troupe_io_transfer> transfers(3);
  for (auto& each : transfers) {
    ASSERT_DONE(troupe_io_move(a.get(), TROUPE_IO_WRITE, over, &all, 1, nullptr, 0, 0, &each));
    EXPECT_EQ(a.ended(each).state, static_cast<std::uint32_t>(TROUPE_IO_DONE));
  }
  ASSERT_DONE(troupe_io_agent_close(b.get()));
  auto events = events_until(TROUPE_IO_PEER_LOST);
  ASSERT_EQ(events.size(), 4U);
  for (std::size_t i = 0; i < transfers.size(); ++i) EXPECT_EQ(events[i].transfer, transfers[i]);
  EXPECT_EQ(events[3].peer, b_of_a);
  EXPECT_NE(events[3].code, TROUPE_OK);
  ASSERT_NE(events[3].reason, nullptr);
  EXPECT_STRNE(events[3].reason, "");
  troupe_io_events_free(events.data(), sizeof events[0], events.size());
}

TEST_P(c_starved_agent, loses_no_notice) {
  const std::string long_notice(1000, 'n');
  const auto itself = b.known_to(b);  // what it sends itself is there at once
  for (const auto& each : {long_notice, std::string{}, long_notice}) {
    ASSERT_DONE(troupe_io_notify(b.get(), itself, each.data(), each.size()));
  }
  std::vector<troupe_io_notice> taken;
  std::vector<troupe_io_notice> some(GetParam());
  while (taken.size() < 3) {
    std::size_t count = 0;
    const auto take = [&] {
      return troupe_io_take_notices(b.get(), some.data(), sizeof some[0], some.size(), 0, &count);
    };
    ASSERT_DONE(starve(take, [&count] { return count != 0; }));
    ASSERT_NE(count, 0U) << "no more after " << taken.size();
    taken.insert(taken.end(), some.begin(), some.begin() + static_cast<std::ptrdiff_t>(count));
  }
  ASSERT_EQ(taken.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_STREQ(taken[i].from, "an agent whose name is no short string");
    EXPECT_NE(taken[i].bytes, nullptr);
    EXPECT_EQ(std::string(static_cast<const char*>(taken[i].bytes), taken[i].byte_count),
              i == 1 ? std::string{} : long_notice);
  }
  troupe_io_notices_free(taken.data(), sizeof taken[0], taken.size());
  EXPECT_EQ(taken[0].bytes, nullptr);
}

}  // namespace

}  // namespace troupe::testing
