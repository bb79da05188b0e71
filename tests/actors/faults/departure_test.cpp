// A node leaves, or is replaced while it is frozen: its earlier messages count, and its actions
// after waking up do no harm.

#include <algorithm>
#include <map>
#include <string>

#include "cluster_fixture.hpp"

namespace troupe::testing {
namespace {

struct way {
  std::string backend;
  std::string mode;
};

std::string name_of(const ::testing::TestParamInfo<way>& info) {
  return info.param.backend + "_" + info.param.mode;
}

actors::transfer_mode mode_of(const way& w) {
  return transfer_mode_of(w.mode).value();
}

cluster_options options_of(const std::string& backend, const std::string& mode = "write") {
  cluster_options options;
  options.backend = backend;
  options.mode = mode;
  options.deadline = "1h";  // must not end a transfer here
  return options;
}

std::unique_ptr<forked> later(const cluster& c, const std::string& name,
                              std::function<int(engine&, line_channel&)> body,
                              bool polling = false) {
  return std::make_unique<forked>(
      [&c, name, body = std::move(body), polling](line_channel& channel) {
        cluster::quiet(name);
        if (!channel.order()) return 0;
        engine_options options;
        options.polling = polling;
        auto node = c.start(name, std::move(options));
        return node ? body(*node, channel) : 1;
      });
}

void begin(forked& child) {
  child.channel().say("start");
  ASSERT_EQ(child.channel().hear().value_or("silence"), "up");
}

/// Few enough for everything to fit into the sockets between two processes.
constexpr std::uint32_t tokens = 16;
constexpr int requests = 6;

std::string request(int number) {
  return "r" + std::to_string(number);
}

// -- the last messages of a decode node that leaves

/// Receives every request, but makes no progress between "asked" and "go". Leaves as soon as all
/// have their outcome, and reports how many are done.
int leaving_decode(const way& w, engine& node, line_channel& channel) {
  listener events{node};
  const auto receive = [&](const std::string& id) {
    return node.receive({id, {"prefill-0"}, mode_of(w), tokens});
  };
  channel.say("up");
  const auto first = receive("first");  // makes the link
  if (!first || !events.outcome(*first)) return 1;
  std::vector<operation_id> asked;
  for (int i = 0; i < requests; ++i) {
    auto id = receive(request(i));
    if (!id) return 2;
    asked.push_back(*id);
  }
  // Receives that waited for blocks are requested on another thread.
  std::this_thread::sleep_for(100ms);
  channel.say("asked");
  if (channel.order().value_or("") != "go") return 3;
  int done = 0;
  for (const auto id : asked) {
    if (!events.outcome(id)) return 4;
    done += events.of(id).done;
  }
  channel.say(std::to_string(done));
  node.stop();
  return 0;
}

class departure : public ::testing::TestWithParam<way> {};

TEST_P(departure, of_a_decode_loses_no_release_even_if_the_prefill_reads_it_late) {
  cluster c{options_of(GetParam().backend, GetParam().mode)};
  auto decode = later(
      c, "decode-0", [](engine& e, line_channel& l) { return leaving_decode(GetParam(), e, l); },
      true);
  cluster::quiet("prefill-0");
  engine_options options;
  options.polling = true;
  auto node = c.start("prefill-0", std::move(options));
  ASSERT_TRUE(node);
  listener events{*node};
  auto blocks = node->allocate_blocks((tokens + 15) / 16);
  ASSERT_TRUE(blocks);
  const auto offer = [&](const std::string& id) {
    auto send = node->send({id, blocks->blocks});
    EXPECT_TRUE(send && node->seal(*send, tokens));
    return send.value_or(operation_id{});
  };
  const auto first = offer("first");
  std::vector<operation_id> sends;
  for (int i = 0; i < requests; ++i) sends.push_back(offer(request(i)));
  begin(*decode);
  ASSERT_TRUE(events.outcome(first));
  ASSERT_TRUE(events.moving(requests));
  ASSERT_EQ(decode->channel().hear().value_or("silence"), "asked");
  events.listen_for(200ms);
  for (const auto send : sends) {
    ASSERT_EQ(events.of(send).done + events.of(send).failed, 0) << "it was to be later";
  }
  // All bytes and messages of this side are in flight. The decode node takes them and leaves, and
  // its answers stay unread for longer than the link to a departed peer is usually kept.
  decode->channel().say("go");
  ASSERT_EQ(decode->channel().hear().value_or("silence"), std::to_string(requests));
  ASSERT_EQ(decode->join(), 0);
  std::this_thread::sleep_for(800ms);
  for (const auto send : sends) {
    ASSERT_TRUE(events.unpinned(send));
    EXPECT_EQ(events.of(send).done, 1) << to_string(events.of(send).why);
    EXPECT_EQ(events.of(send).failed, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(every_way, departure,
                         ::testing::Values(way{"tcp", "write"}, way{"shm", "write"},
                                           way{"shm", "read"}),
                         name_of);

// -- a prefill that leaves in the middle

/// Offers every request, leaves after that many microseconds, and reports each outcome.
int leaving_prefill(engine& node, line_channel& channel) {
  cache_bytes cache{node};
  auto blocks = node.allocate_blocks((tokens + 15) / 16);
  if (!blocks) return 1;
  const auto layers = static_cast<std::uint32_t>(node.layout().layers.size());
  cache.fill(blocks->blocks, 0, layers, 0, tokens, 7);
  listener events{node};
  channel.say("up");
  const auto pause = channel.order();
  std::vector<operation_id> sends;
  for (int i = 0; i < requests; ++i) {
    auto send = node.send({request(i), blocks->blocks});
    if (!send || !node.seal(*send, tokens)) return 2;
    sends.push_back(*send);
  }
  std::this_thread::sleep_for(std::chrono::microseconds{std::stoi(pause.value_or("0"))});
  node.stop();
  std::string said;
  for (const auto send : sends) {
    if (!events.outcome(send)) return 3;
    const auto& t = events.of(send);
    if (t.done + t.failed != 1) return 4;
    said += t.done == 1 ? 'd' : 'f';
  }
  channel.say(said);
  return 0;
}

class leaving : public ::testing::TestWithParam<way> {};

TEST_P(leaving, in_the_middle_gives_each_transfer_one_outcome_at_both_sides_that_agree) {
  cluster c{options_of(GetParam().backend, GetParam().mode)};
  std::vector<std::unique_ptr<forked>> prefills;
  for (int i = 0; i < 5; ++i) prefills.push_back(later(c, "prefill-0", leaving_prefill));
  cluster::quiet("decode-0");
  auto node = c.start("decode-0");
  ASSERT_TRUE(node);
  cache_bytes cache{*node};
  int pause = 0;
  for (auto& prefill : prefills) {
    SCOPED_TRACE(pause);
    begin(*prefill);
    listener events{*node};
    std::vector<operation_id> receives;
    for (int i = 0; i < requests; ++i) {
      auto id = node->receive({request(i), {"prefill-0"}, mode_of(GetParam()), tokens});
      ASSERT_TRUE(id) << to_string(id.error());
      receives.push_back(*id);
    }
    ASSERT_TRUE(events.moving(requests));
    prefill->channel().say(std::to_string(pause));
    const auto said = prefill->channel().hear();
    for (const auto id : receives) ASSERT_TRUE(events.unpinned(id));
    ASSERT_EQ(prefill->join(), 0);
    ASSERT_TRUE(said);
    ASSERT_EQ(said->size(), receives.size());
    events.listen_for(50ms);
    for (std::size_t i = 0; i < receives.size(); ++i) {
      auto& t = events.of(receives[i]);
      EXPECT_EQ(t.done + t.failed, 1);
      if (t.done == 1) {
        EXPECT_EQ(cache.differing(t.allocated->blocks, 0, tokens, 7), 0u);
      } else {
        EXPECT_EQ((*said)[i], 'f') << "the prefill side was told that it had arrived";
        EXPECT_TRUE(t.why.code == errc::aborted || t.why.code == errc::peer_lost)
            << to_string(t.why);
      }
      if (t.allocated) {
        ASSERT_TRUE(node->free_blocks(t.allocated->owner, t.allocated->blocks));
      }
    }
    pause = pause == 0 ? 100 : pause * 3;
  }
}

INSTANTIATE_TEST_SUITE_P(every_way, leaving,
                         ::testing::Values(way{"tcp", "write"}, way{"tcp", "read"},
                                           way{"shm", "write"}, way{"shm", "read"}),
                         name_of);

// -- a former life wakes up

/// Queries prefill-0 for the key in each line and answers with the outcome.
int asking_store(engine& node, line_channel& channel) {
  listener events{node};
  channel.say("up");
  while (auto line = channel.order()) {
    const auto asked = node.query("prefill-0", *line);
    if (!asked || !events.outcome(*asked)) {
      channel.say("no outcome");
    } else {
      const auto& t = events.of(*asked);
      channel.say(t.done == 1 ? "done" : to_string(t.why));
    }
  }
  return 0;
}

class former_life : public ::testing::TestWithParam<std::string> {};

TEST_P(former_life, that_wakes_up_neither_gets_a_link_nor_ends_those_of_its_successor) {
  cluster c{options_of(GetParam())};
  auto first = later(c, "store-0", asking_store);
  auto second = later(c, "store-0", asking_store);
  cluster::quiet("prefill-0");
  auto node = c.start("prefill-0");
  ASSERT_TRUE(node);
  listener events{*node};
  const std::vector<std::byte> value(100'000, std::byte{5});
  const auto put = [&](const std::string& peer, const std::string& key) {
    const auto id = node->put(peer, key, value);
    EXPECT_TRUE(id && events.outcome(*id));
    return id ? to_string(events.of(*id).why) : to_string(id.error());
  };
  put("prefill-0", "here");
  begin(*first);
  // The store knows this node and has no link with it yet. It is frozen until it is replaced.
  std::this_thread::sleep_for(500ms);
  first->stop();
  first->channel().say("here");
  std::this_thread::sleep_for(3s);
  begin(*second);
  second->channel().say("here");
  ASSERT_EQ(second->channel().hear().value_or("silence"), "done");
  const auto life = [&] {
    std::vector<std::uint64_t> lives;
    for (const auto& link : node->report().links) {
      if (link.peer == "store-0" && link.state == "up") lives.push_back(link.peer_incarnation);
    }
    return lives;
  };
  const auto successor = life();
  ASSERT_EQ(successor.size(), 1u);
  // Meanwhile, work with the successor continues.
  first->signal(SIGCONT);
  const auto until = std::chrono::steady_clock::now() + 1500ms;
  int puts = 0;
  while (std::chrono::steady_clock::now() < until) {
    const auto id = node->put("store-0", "k" + std::to_string(++puts), value, 50ms);
    ASSERT_TRUE(id && events.outcome(*id));
    ASSERT_EQ(events.of(*id).done, 1) << to_string(events.of(*id).why);
    std::this_thread::sleep_for(5ms);
  }
  EXPECT_EQ(life(), successor);
  const auto said = first->channel().hear().value_or("silence");
  EXPECT_NE(said.find("stale_incarnation"), std::string::npos) << said;
}

INSTANTIATE_TEST_SUITE_P(every_backend, former_life, ::testing::Values("tcp", "shm"),
                         [](const auto& which) { return which.param; });

}  // namespace
}  // namespace troupe::testing
