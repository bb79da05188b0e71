// Caches in GPU memory: the engine announces what a GPU will have computed, and it moves as soon as
// it is computed.

#include <algorithm>

#include "gpu_ways.hpp"
#include "slow_kernels.hpp"

namespace troupe::testing {
namespace {

using transport::compute_point;
using transport::xgmi::gpu_double;
using transport::xgmi::gpu_site;
using transport::xgmi::slow_kernels;

constexpr std::uint32_t tokens = 64;
constexpr std::uint32_t layers = 4;

std::string to_text(const transport::event_handle& handle) {
  std::string text;
  for (const auto byte : handle) text += std::to_string(std::to_integer<int>(byte)) + " ";
  return text;
}
transport::event_handle handle_in(std::istringstream& words) {
  transport::event_handle handle{};
  int number = 0;
  for (auto& byte : handle) {
    words >> number;
    byte = static_cast<std::byte>(number);
  }
  return handle;
}

/// A prefill engine that launches and seals everything before anything is computed.
int hasty_prefill(engine& node, line_channel& channel) {
  auto& gpus = dynamic_cast<gpu_double&>(*gpu_site::of_process()->runtime);
  slow_kernels kernels{gpus};
  cache_bytes cache{node};
  listener events{node};
  auto blocks = node.allocate_blocks(4);
  if (!blocks) return 1;
  auto send = node.send({"r", blocks->blocks});
  if (!send) return 2;
  channel.say("up");
  while (auto line = channel.order()) {
    std::istringstream words{*line};
    std::string verb;
    std::uint32_t layer = 0;
    words >> verb >> layer;
    std::string answer = "ok";
    if (verb == "launch") {
      for (std::uint32_t i = 0; i < layers; ++i) {
        kernels.launch();
        const auto event = kernels.mark();
        const auto said =
            node.layers_ready(*send, i, i + 1, tokens, compute_point{event.handle, 0});
        if (!said) answer = to_string(said.error());
        gpus.release_event(event);  // it was used during the call
      }
      if (auto sealed = node.seal(*send, tokens); !sealed) answer = to_string(sealed.error());
    } else if (verb == "compute") {
      cache.fill(blocks->blocks, layer, layer + 1, 0, tokens, 5);
      kernels.finish(layer);
    } else if (verb == "shared") {
      // This process has the bytes, and the handle of an event of the process that computes.
      cache.fill(blocks->blocks, 0, layers, 0, tokens, 5);
      compute_point computed;
      computed.shared = handle_in(words);
      const auto said = node.layers_ready(*send, 0, layers, tokens, computed);
      if (!said) answer = to_string(said.error());
      if (auto sealed = node.seal(*send, tokens); !sealed) answer = to_string(sealed.error());
    } else if (verb == "nothing") {
      answer = to_string(node.layers_ready(*send, 0, 1, tokens, compute_point{}).error());
    } else if (verb == "elsewhere") {
      int event = 0;
      answer = to_string(node.layers_ready(*send, 0, 1, tokens, compute_point{&event, 77}).error());
    } else if (verb == "lose") {
      gpus.lose();
    } else if (verb == "ready") {
      const auto said = node.layers_ready(*send, 0, layers, tokens);
      if (!said) answer = to_string(said.error());
    } else if (verb == "links") {
      answer.clear();
      for (const auto& link : node.report().links) {
        answer += link.backend + " " + link.state + " since " + link.last_break + "; ";
      }
    } else if (verb == "xgmi") {
      for (const auto& way : node.report().backends) {
        if (way.name == verb) answer = (way.usable != 0 ? "usable: " : "not usable: ") + way.reason;
      }
    } else if (verb == "outcome") {
      answer = events.unpinned(*send) ? "done" : "no end";
      if (events.of(*send).failed > 0) answer = to_string(events.of(*send).why);
    } else if (verb == "end") {
      return 0;
    }
    channel.say(answer);
  }
  return 0;
}

class computed_on_gpus : public ::testing::TestWithParam<way> {
 protected:
  explicit computed_on_gpus(cluster_options options = options_of(GetParam()))
      : options_{std::move(options)} {
    options_.prefill_device = "gpu:0";
    options_.decode_device = "gpu:1";
  }

  cluster_options options_;
  std::unique_ptr<cluster> c;
  std::unique_ptr<forked> prefill;
  std::unique_ptr<engine> decode;
  std::unique_ptr<cache_bytes> cache;
  std::unique_ptr<listener> events;
  operation_id taken;

  void SetUp() override {
    c = std::make_unique<cluster>(options_);
    prefill = c->spawn("prefill-0", hasty_prefill);
    cluster::quiet("decode");
    decode = c->start("decode-0");
    ASSERT_TRUE(decode);
    cache = std::make_unique<cache_bytes>(*decode);
    cache->poison();
    events = std::make_unique<listener>(*decode);
    ASSERT_EQ(prefill->channel().hear().value_or("silence"), "up");
    const auto id = decode->receive({"r", {"prefill-0"}, mode_of(GetParam()), tokens});
    ASSERT_TRUE(id) << to_string(id.error());
    taken = *id;
  }
  std::string tell(const std::string& line) {
    prefill->channel().say(line);
    return prefill->channel().hear().value_or("silence");
  }
};

TEST_P(computed_on_gpus, layers_move_when_their_kernels_have_ended_and_not_before) {
  ASSERT_EQ(tell("launch"), "ok");
  events->listen_for(200ms);
  EXPECT_TRUE(events->of(taken).layers.empty()) << "moved before it was computed";
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    EXPECT_EQ(events->of(taken).done, 0);
    ASSERT_EQ(tell("compute " + std::to_string(layer)), "ok");
    if (GetParam().mode != "write") continue;
    EXPECT_TRUE(events->until([&] { return events->of(taken).layers.size() > layer; }))
        << "layer " << layer << " did not come";
  }
  ASSERT_TRUE(events->outcome(taken));
  EXPECT_EQ(events->of(taken).done, 1) << to_string(events->of(taken).why);
  ASSERT_TRUE(events->of(taken).allocated);
  EXPECT_EQ(cache->differing(events->of(taken).allocated->blocks, 0, tokens, 5), 0u);
  EXPECT_EQ(tell("outcome"), "done");
}

TEST_P(computed_on_gpus, a_later_kernel_that_ends_first_waits_for_the_earlier_ones) {
  ASSERT_EQ(tell("launch"), "ok");
  for (const auto layer : {3, 1, 2}) ASSERT_EQ(tell("compute " + std::to_string(layer)), "ok");
  events->listen_for(200ms);
  EXPECT_TRUE(events->of(taken).layers.empty()) << "the stream had not come there";
  ASSERT_EQ(tell("compute 0"), "ok");
  ASSERT_TRUE(events->outcome(taken));
  EXPECT_EQ(cache->differing(events->of(taken).allocated->blocks, 0, tokens, 5), 0u);
}

TEST_P(computed_on_gpus, a_gpu_that_is_lost_while_it_computes_fails_both_sides_with_the_reason) {
  ASSERT_EQ(tell("launch"), "ok");
  ASSERT_EQ(tell("compute 0"), "ok");
  ASSERT_EQ(tell("lose"), "ok");
  ASSERT_TRUE(events->outcome(taken));
  EXPECT_EQ(events->of(taken).failed, 1);
  EXPECT_NE(events->of(taken).why.message.find("GPU"), std::string::npos)
      << to_string(events->of(taken).why);
  EXPECT_NE(tell("outcome").find("GPU"), std::string::npos);
}

TEST_P(computed_on_gpus, layers_move_when_a_worker_in_another_process_has_computed_them) {
  // The worker is this process.
  auto& gpus = dynamic_cast<gpu_double&>(*gpu_site::of_process()->runtime);
  slow_kernels kernels{gpus};
  const auto event = gpus.make_shared_event(0);
  kernels.launch();
  kernels.record(event);
  ASSERT_EQ(tell("shared 0 " + to_text(gpus.export_event(event))), "ok");
  events->listen_for(200ms);
  EXPECT_TRUE(events->of(taken).layers.empty()) << "moved before it was computed";
  EXPECT_EQ(events->of(taken).done, 0);
  kernels.finish(0);
  ASSERT_TRUE(events->outcome(taken));
  EXPECT_EQ(events->of(taken).done, 1) << to_string(events->of(taken).why);
  EXPECT_EQ(cache->differing(events->of(taken).allocated->blocks, 0, tokens, 5), 0u);
  gpus.release_event(event);
}

std::vector<way> gpu_links() {
  auto ways = gpu_ways();
  std::erase_if(ways, [](const way& w) { return w.backend != "xgmi"; });
  return ways;
}
/// The ways in which the prefill node's GPU, the one that is lost, does the copying.
std::vector<way> gpu_pushes() {
  auto ways = gpu_links();
  std::erase_if(ways, [](const way& w) { return w.mode != "write"; });
  return ways;
}

class lost_gpu : public computed_on_gpus {
 protected:
  lost_gpu() : computed_on_gpus{options()} {}
  static cluster_options options() {
    auto options = options_of(GetParam());
    options.transport_more = ", fallback: [tcp]";
    return options;
  }
};

TEST_P(lost_gpu, leaves_what_is_not_on_it_to_the_next_backend_and_is_shown_with_the_reason) {
  const std::vector<std::byte> value(100'000, std::byte{7});
  const auto put = [&](const char* key) {
    const auto id = decode->put("prefill-0", key, value);
    return id && events->outcome(*id) ? to_string(events->of(*id).why) : "no outcome";
  };
  const auto healthy = put("before");
  ASSERT_EQ(decode->report().links.front().backend, "xgmi");
  EXPECT_EQ(tell("xgmi").find("usable: "), 0u);
  ASSERT_EQ(tell("lose"), "ok");
  ASSERT_EQ(tell("ready"), "ok");
  ASSERT_TRUE(events->outcome(taken));
  EXPECT_EQ(events->of(taken).failed, 1);

  EXPECT_EQ(put("after"), healthy);
  // A cache on the lost GPU fails with that reason, whatever link joins the nodes.
  EXPECT_NE(tell("outcome").find("GPU"), std::string::npos);
  const auto seen = decode->report().links.front();
  EXPECT_EQ(seen.backend, "tcp");
  EXPECT_NE(seen.reason.find("xgmi failed: "), std::string::npos) << seen.reason;
  EXPECT_NE(seen.reason.find("GPU"), std::string::npos) << seen.reason;
  const auto theirs = tell("links");
  const auto backend = tell("xgmi");
  EXPECT_EQ(backend.find("not usable: "), 0u) << backend;
  EXPECT_NE(backend.find("GPU"), std::string::npos) << backend;
  EXPECT_EQ(theirs.find("tcp up since "), 0u) << theirs;
  EXPECT_NE(theirs.find("GPU"), std::string::npos) << theirs;
}

TEST_P(computed_on_gpus, a_point_that_is_none_is_refused_and_the_send_goes_on) {
  EXPECT_NE(tell("nothing").find("invalid_config"), std::string::npos);
  EXPECT_NE(tell("elsewhere").find("no_device"), std::string::npos);
  ASSERT_EQ(tell("launch"), "ok");
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    ASSERT_EQ(tell("compute " + std::to_string(layer)), "ok");
  }
  ASSERT_TRUE(events->outcome(taken));
  EXPECT_EQ(events->of(taken).done, 1) << to_string(events->of(taken).why);
}

TEST_P(computed_on_gpus, a_value_in_memory_of_one_is_put_by_any_way) {
  const auto memory = decode->region(0).value();
  for (const std::size_t size : {1'000U, 100'000U}) {  // in a frame, and read by the peer
    const auto value = memory.first(size);
    for (std::size_t i = 0; i < size; ++i) value[i] = static_cast<std::byte>(i * 7 + size);
    const std::vector<std::byte> meant(value.begin(), value.end());
    const auto key = std::to_string(size);
    const auto put = decode->put("prefill-0", key, value);
    ASSERT_TRUE(put) << to_string(put.error());
    std::ranges::fill(value, std::byte{0});
    ASSERT_TRUE(events->outcome(*put));
    ASSERT_EQ(events->of(*put).done, 1) << to_string(events->of(*put).why);
    const auto get = decode->get("prefill-0", key);
    ASSERT_TRUE(get) << to_string(get.error());
    ASSERT_TRUE(events->outcome(*get));
    ASSERT_EQ(events->of(*get).done, 1) << to_string(events->of(*get).why);
    EXPECT_TRUE(std::ranges::equal(events->of(*get).value.bytes, meant));
  }
  prefill->channel().say("end");
}

INSTANTIATE_TEST_SUITE_P(over_gpus, computed_on_gpus, ::testing::ValuesIn(gpu_ways()), name_of);
INSTANTIATE_TEST_SUITE_P(over_nics, computed_on_gpus, ::testing::ValuesIn(nic_ways()), name_of);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(lost_gpu);
INSTANTIATE_TEST_SUITE_P(over_gpus, lost_gpu, ::testing::ValuesIn(gpu_pushes()), name_of);

// -- which backend joins which nodes

std::string backend_between(const cluster_options& options, std::string* device = nullptr) {
  if (have_verbs()) return "no doubles here";
  const cluster c{options};
  const auto decode = c.spawn("decode-0", bystander);
  cluster::quiet("prefill-0");
  const auto prefill = c.start("prefill-0");
  if (!prefill || decode->channel().hear() != "up") return "not up";
  listener events{*prefill};
  const std::vector<std::byte> value(100'000, std::byte{7});
  const auto put = prefill->put("decode-0", "key", value);
  if (!put || !events.outcome(*put)) return "no outcome";
  if (events.of(*put).done != 1) return to_string(events.of(*put).why);
  const auto report = prefill->report();
  if (device != nullptr) *device = report.pool.device;
  return report.links.empty() ? "no link" : report.links.front().backend;
}

TEST(cache_on_a_gpu, is_joined_with_another_one_by_xgmi_where_nothing_else_is_asked_for) {
  if (have_verbs()) GTEST_SKIP() << "the doubles are for machines without devices";
  cluster_options options;
  options.prefill_device = "gpu:1";
  options.decode_device = "gpu:0";
  std::string device;
  EXPECT_EQ(backend_between(options, &device), "xgmi");
  EXPECT_EQ(device, "gpu:1");
}

TEST(cache_on_a_gpu, is_joined_by_shm_with_a_node_whose_cache_is_on_the_host) {
  if (have_verbs()) GTEST_SKIP() << "the doubles are for machines without devices";
  cluster_options options;
  options.prefill_device = "gpu:0";
  EXPECT_EQ(backend_between(options), "shm");
  std::swap(options.prefill_device, options.decode_device);
  EXPECT_EQ(backend_between(options), "shm");
}

/// A process looks for its GPUs once, so a test that decides which ones it sees runs alone.
class half_seen : public ::testing::Test {
 protected:
  cluster_options options;
  std::unique_ptr<cluster> c;
  std::unique_ptr<forked> decode;
  std::unique_ptr<engine> prefill;
  std::unique_ptr<listener> events;

  void SetUp() override {
    if (have_verbs()) GTEST_SKIP() << "the doubles are for machines without devices";
    if (::testing::UnitTest::GetInstance()->test_to_run_count() != 1) {
      GTEST_SKIP() << "a process looks for its GPUs once: run this test alone";
    }
    options.prefill_device = "gpu:0";
    options.decode_device = "gpu:0";
    options.connect_timeout = "10min";  // must not end anything here
  }
  /// `here`: both GPUs are visible to this process and only the first to the other nodes. Otherwise
  /// the reverse.
  static void show_second(bool here) {
    gpu_site::set_maker([here, test = ::getpid()] {
      std::vector<std::string> seen{"0000:0a:00.0"};
      if ((::getpid() == test) == here) seen.emplace_back("0000:0b:00.0");
      return std::make_shared<gpu_site>(std::make_unique<gpu_double>(seen));
    });
  }
  /// Dials from here. Returns how the put ended.
  std::string put() {
    c = std::make_unique<cluster>(options);
    decode = c->spawn("decode-0", [](engine& node, line_channel& channel) {
      channel.say("up");
      while (channel.order()) {
        std::string all;
        for (const auto& link : node.report().links) all += link.backend + " " + link.state + "; ";
        channel.say(all);
      }
      return 0;
    });
    cluster::quiet("prefill-0");
    prefill = c->start("prefill-0");
    if (!prefill || decode->channel().hear() != "up") return "not up";
    events = std::make_unique<listener>(*prefill);
    static const std::vector<std::byte> value(100'000, std::byte{7});
    const auto put = prefill->put("decode-0", "key", value);
    if (!put || !events->outcome(*put)) return "no outcome";
    return events->of(*put).done == 1 ? "done" : to_string(events->of(*put).why);
  }
  std::string links_there() {
    decode->channel().say("links");
    return decode->channel().hear().value_or("silence");
  }
  void expect_apart();
};

TEST_F(half_seen, by_the_peer_are_joined_by_the_next_backend) {
  show_second(true);
  options.prefill_device = "gpu:1";
  EXPECT_EQ(put(), "done");
  EXPECT_EQ(prefill->report().links.front().backend, "shm");
}

TEST_F(half_seen, by_the_peer_are_joined_by_the_fallback_of_a_configured_backend) {
  show_second(true);
  options.backend = "xgmi";
  options.transport_more += ", fallback: [tcp]";
  options.prefill_device = "gpu:1";
  EXPECT_EQ(put(), "done");
  const auto link = prefill->report().links.front();
  EXPECT_EQ(link.backend, "tcp");
  EXPECT_NE(link.reason.find("xgmi failed: backend_unavailable: "), std::string::npos)
      << link.reason;
  EXPECT_NE(link.reason.find("does not see the peer's GPU 0000:0b:00.0"), std::string::npos)
      << link.reason;
}

TEST_F(half_seen, by_the_dialler_are_joined_by_the_next_backend_and_the_first_is_not_waited_for) {
  show_second(false);
  options.decode_device = "gpu:1";
  EXPECT_EQ(put(), "done");
  const auto link = prefill->report().links.front();
  EXPECT_EQ(link.backend, "shm");
  const auto seen =
      "xgmi failed: backend_unavailable: no backend can join this node with the peer: "
      "xgmi: same host, but this process does not see the peer's GPU 0000:0b:00.0";
  EXPECT_EQ(link.reason.find("best that both sides can use; "), 0u) << link.reason;
  EXPECT_NE(link.reason.find(seen), std::string::npos) << link.reason;
  std::string there;
  EXPECT_TRUE(events->until([&] { return (there = links_there()) == "shm up; "; })) << there;
}

/// Whichever side finds out, the error is the same and no link is left.
void half_seen::expect_apart() {
  options.backend = "xgmi";
  const auto why = put();
  EXPECT_EQ(why.find("peer_unreachable: no backend joins this node with decode-0; xgmi failed: "),
            0u)
      << why;
  EXPECT_NE(why.find("does not see the peer's GPU 0000:0b:00.0"), std::string::npos) << why;
  std::string there;
  EXPECT_TRUE(events->until([&] { return (there = links_there()).empty(); })) << there;
}

TEST_F(half_seen, by_the_peer_are_said_to_be_apart_where_only_xgmi_may_join_them) {
  show_second(true);
  options.prefill_device = "gpu:1";
  expect_apart();
}

TEST_F(half_seen, by_the_dialler_are_said_to_be_apart_where_only_xgmi_may_join_them) {
  show_second(false);
  options.decode_device = "gpu:1";
  expect_apart();
}

/// Like servers that are started with one GPU each, by a CUDA_VISIBLE_DEVICES of their own.
class own_gpu_only : public computed_on_gpus {
 protected:
  void SetUp() override {
    if (::testing::UnitTest::GetInstance()->test_to_run_count() != 1) {
      GTEST_SKIP() << "a process looks for its GPUs once: run this test alone";
    }
    gpu_site::set_maker([test = ::getpid()] {
      const std::vector<std::string> first{"0000:0a:00.0"}, second{"0000:0b:00.0"};
      const bool here = ::getpid() == test;
      auto gpus = std::make_unique<gpu_double>(here ? first : second);
      gpus->reach(here ? second : first);
      return std::make_shared<gpu_site>(std::move(gpus));
    });
    options_.decode_device = "gpu:0";
    computed_on_gpus::SetUp();
  }
};

TEST_P(own_gpu_only, is_seen_by_each_process_and_the_cache_moves_from_one_to_the_other) {
  ASSERT_EQ(tell("launch"), "ok");
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    ASSERT_EQ(tell("compute " + std::to_string(layer)), "ok");
  }
  ASSERT_TRUE(events->outcome(taken));
  ASSERT_EQ(events->of(taken).done, 1) << to_string(events->of(taken).why);
  EXPECT_EQ(cache->differing(events->of(taken).allocated->blocks, 0, tokens, 5), 0u);
  EXPECT_EQ(tell("outcome"), "done");
  EXPECT_EQ(decode->report().links.front().backend, "xgmi");
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(own_gpu_only);
INSTANTIATE_TEST_SUITE_P(over_gpus, own_gpu_only, ::testing::ValuesIn(gpu_links()), name_of);

TEST(cache_on_the_host, is_never_joined_by_xgmi_although_its_process_sees_gpus) {
  if (have_verbs()) GTEST_SKIP() << "the doubles are for machines without devices";
  EXPECT_EQ(backend_between({}), "shm");
}

}  // namespace
}  // namespace troupe::testing
