// Requests that a frontend carries through a cluster whose processes are killed and frozen under
// them: each ends once, with the text of an undisturbed run.

#include <csignal>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "troupe/actors/request_carrier.hpp"

#include "fails_with.hpp"
#include "free_port.hpp"
#include "own_connections.hpp"
#include "reference_cluster.hpp"

namespace troupe::reference {
namespace {

using namespace std::chrono_literals;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using troupe::testing::fails_with;
using troupe::testing::reset_connections;

/// Long enough to be hit during its computation, whose time grows with the square; a sanitizer
/// takes ten times as long.
constexpr std::uint32_t prompt_tokens = troupe::testing::sanitized ? 600 : 1500;
const sampling sampled{1.0f, 5, false};

struct carry_shape {
  std::uint32_t prefills{1}, decodes{1};
  std::string retry_window{"0s"};
  std::uint32_t retry_budget{2};
  std::uint32_t decode_ranks{1};
  bool state_file{false};
  std::string peer_silence{"1min"};
  std::string heartbeat_timeout{"30min"};
};

/// For tests in which a frozen node is lost to its peers or taken for dead.
const std::string short_timeout = std::to_string(testing::slowness) + "s";

/// Every node and the supervisor in a process of its own; the frontend is in the test's.
struct carried : ::testing::Test {
  ~carried() override {
    carrier.reset();
    for (auto& [name, child] : nodes) ::kill(child.pid(), SIGKILL);
    nodes.clear();
    if (HasFailure()) print_logs();
    client.reset();
  }

  void start(const carry_shape& of) {
    shape = of;
    const auto port = testing::free_port();
    std::ofstream{folder.path() + "/deployment.yaml"} << deployment(port);
    start_node("supervisor");
    for (std::uint32_t i = 0; i < of.prefills; ++i) start_node("prefill-" + std::to_string(i));
    for (std::uint32_t i = 0; i < of.decodes; ++i) {
      for (std::uint32_t rank = 0; rank < of.decode_ranks; ++rank) start_node(decode(i, rank));
    }
    client = actors::cluster_client::unconnected({.port = port, .timeout = 1s * testing::patience});
    carrier = std::make_unique<actors::request_carrier>(*client);
    ASSERT_TRUE(comes_true([&] { return up() == of.prefills + of.decodes * of.decode_ranks; }));
    const auto reply = model_reply_from(call(decode(0, 0), "model", {'{', '}'}).value()).value();
    model = transformer::create(reply.model).value();
    dtype = reply.dtype;
    block_tokens = reply.block_tokens;
  }
  std::string decode(std::uint32_t replica, std::uint32_t rank) const {
    return "decode-" + std::to_string(replica) +
           (shape.decode_ranks > 1 ? "-tp" + std::to_string(rank) : "");
  }
  std::string deployment(std::uint16_t port) const {
    std::ostringstream yaml;
    const auto stage = [&](const char* name, std::uint32_t replicas, std::uint32_t ranks) {
      yaml << "  - {name: " << name << ", role: " << name << ", replicas: " << replicas
           << ", tensor_parallel: " << ranks
           << ", pool: {size: 4MiB}, transport: {backend: tcp, max_reconnects: 1, connect_timeout: "
           << "1min, peer_silence: " << shape.peer_silence << "}}\n";
    };
    yaml << "cluster: carry\nsupervisor: {port: " << port
         << ", heartbeat_interval: 100ms, heartbeat_timeout: " << shape.heartbeat_timeout
         << ", state_file: " << (shape.state_file ? folder.path() + "/supervisor.state" : "none")
         << "}\nsecurity: {mode: none}\n"
         << "model: {layers: 3, kv_heads: 2, head_dim: 8, dtype: bf16, block_tokens: 4}\nstages:\n";
    stage("prefill", shape.prefills, 1);
    stage("decode", shape.decodes, shape.decode_ranks);
    yaml << "edges: [{from: prefill, to: decode, mode: write}]\nlimits: {transfer_deadline: 10min, "
         << "retry_window: " << shape.retry_window << ", retry_budget: " << shape.retry_budget
         << ", source_lease: 10min}\n";
    return yaml.str();
  }
  void start_node(const std::string& name) {
    auto child = deploy::child_process::start(
        REFERENCE_NODE, {"node", folder.path() + "/deployment.yaml", "--name", name},
        folder.path() + "/" + name + ".log");
    ASSERT_TRUE(child);
    nodes.insert_or_assign(name, std::move(*child));
  }
  bool has_logged(const std::string& name, std::string_view what) const {
    std::ifstream log{folder.path() + "/" + name + ".log"};
    for (std::string line; std::getline(log, line);) {
      if (line.find(what) != std::string::npos) return true;
    }
    return false;
  }
  void signal(const std::string& name, int which) { ::kill(nodes.at(name).pid(), which); }

  std::uint32_t up() {
    const auto members = client->members();
    return members ? static_cast<std::uint32_t>(std::ranges::count_if(
                         members->members,
                         [](const auto& m) {
                           return actors::node_state_from(m.state) == actors::node_state::up;
                         }))
                   : 0;
  }
  bool is(const std::string& name, actors::node_state state) {
    const auto members = client->members();
    return members && std::ranges::any_of(members->members, [&](const auto& m) {
             return m.node.name == name && actors::node_state_from(m.state) == state;
           });
  }
  result<payload> call(const std::string& node, const std::string& method, payload what) {
    const auto wait_ms = static_cast<std::uint32_t>(std::chrono::milliseconds{wait_limit}.count());
    return client->call(node, {method, std::move(what), wait_ms});
  }

  prefill_call prefill_of(const std::string& source) const {
    return {source, a_prompt(prompt_tokens, 1), 16, sampled, 0, 0};
  }
  decode_call decode_of(const std::string& source, const actors::placement& where) const {
    auto what = decode_at(where);
    what.request = source;
    what.prompt = a_prompt(prompt_tokens, 1);
    what.max_tokens = 4;
    what.how = sampled;
    return what;
  }
  actors::carried_request request(const std::string& id) {
    actors::carried_request what;
    what.request = id;
    what.from = "prefill";
    what.to = "decode";
    what.deadline = 2 * wait_limit;
    what.source_is_kept = shape.retry_window != "0s";
    what.prefill = [this](const actors::carried_attempt& now, const actors::node_info&) {
      return actors::call_request{"prefill", to_json(prefill_of(now.source)), 0};
    };
    what.decode = [this](const actors::carried_attempt& now, const actors::node_info&) {
      return actors::call_request{"decode", to_json(decode_of(now.source, now.where)), 0};
    };
    what.abort = [](const actors::carried_attempt& now, const actors::node_info&) {
      return actors::call_request{"abort", abort_to_json(now.source), 0};
    };
    return what;
  }
  std::uint32_t tries{0};
  using ending = result<actors::carried_outcome>;
  std::future<ending> carry(actors::carried_request what) {
    return std::async(std::launch::async,
                      [this, what = std::move(what)] { return carrier->carry(what); });
  }
  /// Waits for a node of that stage whose transfer has moved bytes. A request that ends before that
  /// was seen, because a core stalled, is carried again under another id.
  std::string moving(const std::string& stage, std::future<ending>* carried_again = nullptr) {
    std::string found;
    EXPECT_TRUE(comes_true([&] {
      if (carried_again != nullptr && carried_again->wait_for(0s) == std::future_status::ready) {
        expect_identical(carried_again->get());
        *carried_again = carry(request("r" + std::to_string(++tries)));
      }
      for (std::uint32_t i = 0; i < 2; ++i) {
        const auto name = stage == "decode" ? decode(i, 0) : stage + "-" + std::to_string(i);
        const auto report = nodes.contains(name)
                                ? client->report(name)
                                : result<actors::node_report>{fail(errc::not_found, name)};
        if (!report) continue;
        for (const auto& link : report->links) {
          if (!report->transfers.empty() && link.bytes_out + link.bytes_in > 0) found = name;
        }
      }
      return !found.empty();
    })) << "nothing moves in stage "
        << stage;
    return found;
  }
  void expect_identical(const ending& done) {
    ASSERT_TRUE(done) << to_string(done.error());
    ASSERT_EQ(done->decode.size(), shape.decode_ranks);
    const auto reply = decode_reply_from(done->decode.front());
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->text,
              generate_alone(*model, a_prompt(prompt_tokens, 1), 4, sampled, dtype, block_tokens)
                  .value());
  }
  /// Expects a single attempt at the first nodes, which hold nothing of it any more.
  void expect_carried_at_once(const ending& done) {
    ASSERT_TRUE(done) << to_string(done.error());
    expect_identical(done);
    EXPECT_EQ(done->attempts, 1u);
    EXPECT_EQ(done->prefills, 1u);
    expect_nothing_is_held("prefill-0");
    expect_nothing_is_held("decode-0");
  }
  void expect_nothing_is_held(const std::string& name) {
    EXPECT_TRUE(comes_true([&] {
      const auto report = client->report(name);
      return report && report->pool.blocks_free == report->pool.blocks_total &&
             report->pool.blocks_quarantined == 0;
    })) << name;
  }
  void print_logs() const {
    for (const auto& entry : std::filesystem::directory_iterator{folder.path()}) {
      std::ifstream in{entry.path()};
      std::cerr << "---- " << entry.path().filename() << "\n" << in.rdbuf() << "\n";
    }
  }

  carry_shape shape;
  testing::scratch_folder folder{"carry"};
  std::map<std::string, deploy::child_process> nodes;
  std::unique_ptr<actors::cluster_client> client;
  std::unique_ptr<actors::request_carrier> carrier;
  std::shared_ptr<const transformer> model;
  std::string dtype;
  std::uint32_t block_tokens{0};
};

TEST_F(carried, undisturbed_it_is_placed_once) {
  start({});
  const auto done = carry(request("r")).get();
  expect_identical(done);
  EXPECT_EQ(done->attempts, 1u);
  EXPECT_EQ(done->prefills, 1u);
  EXPECT_TRUE(prefill_reply_from(done->prefill.front()));
  expect_nothing_is_held("prefill-0");
  expect_nothing_is_held("decode-0");
}

TEST_F(carried, whose_prefill_is_killed_while_its_layers_stream_is_prefilled_elsewhere) {
  start({.prefills = 2, .decodes = 2});
  auto done = carry(request("r"));
  const auto decode = moving("decode", &done);
  signal(moving("prefill"), SIGKILL);
  const auto outcome = done.get();
  expect_identical(outcome);
  EXPECT_EQ(outcome->attempts, 2u);
  EXPECT_EQ(outcome->prefills, 2u);
  EXPECT_EQ(outcome->where.decode.front().name, decode) << "it lost nobody";
  expect_nothing_is_held(decode);
}

TEST_F(carried, whose_decode_is_killed_is_served_elsewhere_from_the_same_cache) {
  start({.prefills = 2, .decodes = 2, .retry_window = "10min"});
  auto done = carry(request("r"));
  signal(moving("decode", &done), SIGKILL);
  const auto outcome = done.get();
  expect_identical(outcome);
  EXPECT_EQ(outcome->attempts, 2u);
  EXPECT_EQ(outcome->prefills, 1u) << "it was prefilled again";
  EXPECT_EQ(outcome->where.same_source, 1);
  expect_nothing_is_held(outcome->where.prefill.front().name);
  expect_nothing_is_held(outcome->where.decode.front().name);
}

TEST_F(carried,
       whose_decode_lost_one_of_two_ranks_is_served_by_another_replica_from_the_same_cache) {
  start({.decodes = 2, .retry_window = "10min", .decode_ranks = 2, .state_file = true});
  auto done = carry(request("r"));
  const auto first_rank = moving("decode", &done);
  const auto lost = first_rank.substr(0, first_rank.size() - 1) + "1";
  signal(lost, SIGKILL);
  const auto outcome = done.get();
  expect_identical(outcome);
  EXPECT_EQ(outcome->attempts, 2u);
  EXPECT_EQ(outcome->prefills, 1u) << "the abort of the rank that lives ended the source";
  EXPECT_NE(outcome->where.decode.front().name, first_rank);
  expect_nothing_is_held("prefill-0");
  expect_nothing_is_held(first_rank);
  for (const auto& node : outcome->where.decode) expect_nothing_is_held(node.name);
}

TEST_F(carried, whose_decode_stands_still_for_less_than_the_cluster_allows_keeps_its_prefill) {
  start({.prefills = 2, .decodes = 2, .retry_window = "10min", .peer_silence = short_timeout});
  auto done = carry(request("r"));
  const auto frozen = moving("decode", &done);
  signal(frozen, SIGSTOP);
  std::this_thread::sleep_for(2s * testing::slowness);
  signal(frozen, SIGCONT);
  const auto outcome = done.get();
  expect_identical(outcome);
  EXPECT_EQ(outcome->prefills, 1u);
  expect_nothing_is_held(outcome->where.prefill.front().name);
}

TEST_F(carried, whose_nodes_are_both_killed_goes_on_at_two_others) {
  start({.prefills = 2, .decodes = 2, .retry_window = "10min"});
  auto done = carry(request("r"));
  const auto decode = moving("decode", &done);
  signal(moving("prefill"), SIGKILL);
  signal(decode, SIGKILL);
  const auto outcome = done.get();
  expect_identical(outcome);
  EXPECT_THAT(outcome->attempts, AnyOf(2u, 3u));
  EXPECT_EQ(outcome->prefills, 2u);
}

TEST_F(carried, ends_once_with_the_reason_when_its_budget_is_used_up) {
  start({.prefills = 2, .retry_budget = 0});
  auto done = carry(request("r"));
  signal(moving("prefill", &done), SIGKILL);
  const auto outcome = done.get();
  ASSERT_FALSE(outcome);
  EXPECT_EQ(outcome.error().code, errc::peer_lost);
  for (const char* part : {"'r#", "1 time", "prefill-", "limits.retry_budget (0)", "failed last"}) {
    EXPECT_THAT(outcome.error().message, HasSubstr(part));
  }
  expect_nothing_is_held("decode-0");
}

TEST_F(carried, ends_though_the_supervisor_is_killed_in_the_middle) {
  start({});
  auto done = carry(request("r"));
  (void)moving("prefill", &done);
  signal("supervisor", SIGKILL);
  const auto outcome = done.get();
  expect_identical(outcome);
  EXPECT_EQ(outcome->attempts, 1u);
}

TEST_F(carried, goes_on_when_the_supervisor_that_died_with_its_prefill_is_back) {
  start({.prefills = 2});
  auto done = carry(request("r"));
  const auto prefill = moving("prefill", &done);
  signal("supervisor", SIGKILL);
  signal(prefill, SIGKILL);
  std::this_thread::sleep_for(500ms);
  nodes.erase("supervisor");
  start_node("supervisor");
  const auto outcome = done.get();
  expect_identical(outcome);
  EXPECT_EQ(outcome->prefills, 2u);
}

TEST_F(carried, ends_at_its_deadline_when_nobody_can_place_it_any_more) {
  start({.prefills = 2});
  auto what = request("r");
  what.deadline = 24s;
  auto done = carry(std::move(what));
  const auto prefill = moving("prefill");
  signal("supervisor", SIGKILL);
  signal(prefill, SIGKILL);
  const auto outcome = done.get();
  ASSERT_FALSE(outcome);
  EXPECT_EQ(outcome.error().code, errc::deadline) << to_string(outcome.error());
}

TEST_F(carried, says_what_was_missing_when_its_time_is_over) {
  start({});
  signal("decode-0", SIGKILL);
  ASSERT_TRUE(comes_true([&] { return is("decode-0", actors::node_state::down); }));
  auto what = request("r");
  what.deadline = 3s * testing::slowness;
  const auto until = std::chrono::steady_clock::now() + what.deadline - 50ms;  // whole milliseconds
  const auto outcome = carry(std::move(what)).get();
  EXPECT_GE(std::chrono::steady_clock::now(), until) << "a node that comes late is as good";
  ASSERT_THAT(outcome, fails_with(errc::deadline, HasSubstr("no replica of stage 'decode' is up")));
}

TEST_F(carried, still_says_what_was_missing_when_the_supervisor_has_answered_no_more) {
  start({});
  signal("decode-0", SIGKILL);
  ASSERT_TRUE(comes_true([&] { return is("decode-0", actors::node_state::down); }));
  auto what = request("r");
  what.deadline = 4s * testing::slowness;
  auto done = carry(std::move(what));
  ASSERT_TRUE(comes_true([&] { return has_logged("supervisor", "event=unplaced"); }));
  std::this_thread::sleep_for(100ms);  // the answer is on its way
  signal("supervisor", SIGSTOP);
  const auto outcome = done.get();
  ASSERT_FALSE(outcome);
  EXPECT_THAT(to_string(outcome.error()), HasSubstr("no replica of stage 'decode' is up"));
}

TEST_F(carried, is_given_up_when_it_is_told_to) {
  start({});
  std::stop_source stop;
  auto what = request("r");
  what.stop = stop.get_token();
  auto done = carry(std::move(what));
  (void)moving("decode");
  stop.request_stop();
  EXPECT_EQ(done.get().error().code, errc::aborted);
  expect_nothing_is_held("prefill-0");
  expect_nothing_is_held("decode-0");
}

TEST_F(carried, whose_decode_freezes_goes_on_elsewhere_and_the_frozen_one_serves_again_later) {
  start({.prefills = 1,
         .decodes = 2,
         .retry_window = "10min",
         .peer_silence = short_timeout,
         .heartbeat_timeout = short_timeout});
  auto done = carry(request("r"));
  const auto frozen = moving("decode", &done);
  signal(frozen, SIGSTOP);
  const auto outcome = done.get();
  signal(frozen, SIGCONT);
  expect_identical(outcome);
  EXPECT_EQ(outcome->attempts, 2u);
  EXPECT_EQ(outcome->prefills, 1u);
  EXPECT_NE(outcome->where.decode.front().name, frozen);
  ASSERT_TRUE(comes_true([&] { return is(frozen, actors::node_state::up); }));
  expect_nothing_is_held(frozen);
  signal(outcome->where.decode.front().name, SIGKILL);
  const auto next = carry(request("next")).get();
  expect_identical(next);
  EXPECT_EQ(next->where.decode.front().name, frozen);
}

/// A node stops in good order in the middle of a request, with and without a retry window.
struct stopped : carried, ::testing::WithParamInterface<std::tuple<const char*, const char*>> {};
INSTANTIATE_TEST_SUITE_P(side, stopped,
                         ::testing::Combine(::testing::Values("prefill", "decode"),
                                            ::testing::Values("0s", "10min")),
                         [](const auto& p) {
                           return std::string{std::get<0>(p.param)} + "_" + std::get<1>(p.param);
                         });

TEST_P(stopped, goes_on_elsewhere) {
  const auto& [stage, window] = GetParam();
  start({.prefills = 2, .decodes = 2, .retry_window = window});
  auto done = carry(request("r"));
  const auto leaves = moving(stage, &done);
  signal(leaves, SIGTERM);
  const auto outcome = done.get();
  ASSERT_TRUE(outcome) << to_string(outcome.error());
  expect_identical(outcome);
  EXPECT_EQ(outcome->attempts, 2u);
  EXPECT_NE(outcome->where.prefill.front().name, leaves);
  EXPECT_NE(outcome->where.decode.front().name, leaves);
  expect_nothing_is_held(outcome->where.prefill.front().name);
  expect_nothing_is_held(outcome->where.decode.front().name);
}

TEST_F(carried, under_an_id_of_before_is_not_told_the_former_outcome) {
  start({});
  expect_identical(carry(request("r")).get());
  // A single chunk: until it is computed, the engine handles no other call.
  auto busy = prefill_of("busy");
  busy.chunk = prompt_tokens;
  auto computing =
      std::async(std::launch::async, [&] { return call("prefill-0", "prefill", to_json(busy)); });
  ASSERT_TRUE(comes_true([&] {
    const auto report = client->report("prefill-0");
    return report && report->pool.blocks_free < report->pool.blocks_total;
  }));
  expect_identical(carry(request("r")).get());
  EXPECT_TRUE(
      comes_true([&] { return call("prefill-0", "abort", abort_to_json("busy")).has_value(); }));
  EXPECT_FALSE(computing.get());
}

TEST_F(carried, whose_call_of_a_prefill_is_lost_on_its_way_calls_it_once_more) {
  start({});
  expect_identical(carry(request("first")).get());  // makes the connections
  auto what = request("r");
  what.prefill = [this](const actors::carried_attempt& now, const actors::node_info&) {
    auto text = to_json(prefill_of(now.source));
    text.resize(actors::max_call_bytes * 3 / 4, ' ');  // more than its socket buffers hold
    return actors::call_request{"prefill", std::move(text), 0};
  };
  const auto port = client->report("prefill-0").value().node.port;
  signal("prefill-0", SIGSTOP);
  auto done = carry(std::move(what));
  std::this_thread::sleep_for(150ms);
  EXPECT_GT(reset_connections(port), 0);
  signal("prefill-0", SIGCONT);
  expect_carried_at_once(done.get());
}

TEST_F(carried, whose_call_of_a_prefill_that_runs_loses_its_connection_goes_on_as_it_was) {
  start({});
  auto what = request("r");
  what.prefill = [this](const actors::carried_attempt& now, const actors::node_info&) {
    auto slow = prefill_of(now.source);
    slow.chunk = 2;
    return actors::call_request{"prefill", to_json(slow), 0};
  };
  auto done = carry(std::move(what));
  const auto port = client->report(moving("prefill")).value().node.port;
  signal("prefill-0", SIGSTOP);
  EXPECT_GT(reset_connections(port), 0);
  std::this_thread::sleep_for(400ms);
  signal("prefill-0", SIGCONT);
  const auto outcome = done.get();
  expect_carried_at_once(outcome);
  ASSERT_TRUE(outcome);
  EXPECT_TRUE(outcome->prefill.front().empty());
}

/// The node that was out of the cluster for a while.
struct outdated : carried, ::testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(since, outdated, ::testing::Values("decode-0", "prefill-0"),
                         [](const auto& p) { return std::string{p.param}.substr(0, 6); });

TEST_P(outdated, placements_are_refused_by_their_epoch_and_new_ones_served) {
  start({.heartbeat_timeout = short_timeout});
  const auto old = client->place({.request = "old", .from = "prefill", .to = "decode"}).value();
  signal(GetParam(), SIGSTOP);
  ASSERT_TRUE(comes_true([&] { return is(GetParam(), actors::node_state::down); }));
  signal(GetParam(), SIGCONT);
  ASSERT_TRUE(comes_true([&] { return is(GetParam(), actors::node_state::up); }));
  // The client closes a connection that was silent for 5 s, perhaps only now.
  ASSERT_TRUE(comes_true([&] { return call(GetParam(), "model", {'{', '}'}).has_value(); }));
  auto prefilling = std::async(
      std::launch::async, [&] { return call("prefill-0", "prefill", to_json(prefill_of("old"))); });
  const auto refused = call("decode-0", "decode", to_json(decode_of("old", old)));
  ASSERT_THAT(refused, fails_with(errc::stale_incarnation, HasSubstr(GetParam())));
  EXPECT_THAT(refused.error().message, HasSubstr("epoch " + std::to_string(old.epoch)));
  auto aborted = [&] { return call("prefill-0", "abort", abort_to_json("old")).has_value(); };
  EXPECT_TRUE(comes_true(aborted));
  EXPECT_FALSE(prefilling.get());
  expect_identical(carry(request("new")).get());
}

}  // namespace
}  // namespace troupe::reference
