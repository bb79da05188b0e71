// A node that stops in good order is not a broken link: its peers report that it left, and rebuild
// nothing.

#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include "cluster_fixture.hpp"
#include "scratch_folder.hpp"
#include "text_of.hpp"
#include "ways.hpp"

namespace troupe::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::uint32_t tokens = 64;
constexpr int requests = 8;
constexpr int rounds = 5;

/// One side of a handful of transfers, whichever side leaves.
class half {
 public:
  half(const way& w, engine& node, bool sends) : way_{w}, node_{node}, sends_{sends} {}

  /// Starts the requests with half of their layers ready.
  [[nodiscard]] bool begin(const std::string& round) {
    for (int i = 0; i < requests; ++i) {
      const auto request = round + "-" + std::to_string(i);
      const auto operation = sends_ ? offer(request) : ask(request);
      if (!operation) return false;
      live_.push_back(*operation);
    }
    return true;
  }
  /// Provides the other half. Only the sending side has anything to do.
  void go_on() {
    if (!sends_) return;
    for (const auto id : live_) (void)node_.seal(id, tokens);
  }
  [[nodiscard]] bool has_begun() { return events_.moving(requests); }
  /// Waits for all of them. Returns how many ended as done.
  [[nodiscard]] int outcome() {
    int done = 0;
    for (const auto id : std::exchange(live_, {})) {
      if (!events_.unpinned(id)) return -1;
      const auto& t = events_.of(id);
      EXPECT_EQ(t.done + t.failed, 1) << to_string(t.why);
      done += t.done;
    }
    return done;
  }

 private:
  result<operation_id> offer(const std::string& request) {
    const auto blocks = node_.allocate_blocks(tokens / node_.layout().block_tokens);
    if (!blocks) return fail(blocks.error());
    auto sent = node_.send({request, blocks->blocks});
    if (!sent) return sent;
    if (auto ready = node_.layers_ready(*sent, 0, 2, tokens); !ready) return fail(ready.error());
    return sent;
  }
  result<operation_id> ask(const std::string& request) {
    return node_.receive({request, {"prefill-0"}, mode_of(way_), tokens});
  }

  const way& way_;
  engine& node_;
  const bool sends_;
  listener events_{node_};
  std::vector<operation_id> live_;
};

void log_to(const std::string& file, const std::string& name) {
  actors::log_options log;
  log.level = "info";
  log.node = name;
  log.file = file;
  EXPECT_TRUE(actors::init_logging(log));
}

int count(const std::string& text, const std::string& what) {
  int found = 0;
  for (auto at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

/// Follows the test's orders, and leaves.
int leaver(const way& w, bool sends, engine& node, line_channel& channel) {
  channel.say("up");
  half part{w, node, sends};
  while (const auto order = channel.order()) {
    if (*order == "leave") return 0;  // the return stops the node
    if (*order == "go on") {
      part.go_on();
    } else if (*order == "outcome") {
      channel.say(std::to_string(part.outcome()));
    } else {
      channel.say(part.begin(*order) ? "begun" : "failed");
    }
  }
  return 1;
}

struct farewell {
  std::string backend;
  std::string mode;
  std::string leaver;  ///< the decode side has dialled
  bool busy{false};    ///< its transfers are in flight
};

class orderly_stop : public ::testing::TestWithParam<farewell> {
 protected:
  std::unique_ptr<forked> later(const std::string& name, const std::string& file) {
    return std::make_unique<forked>([this, name, file](line_channel& channel) {
      log_to(file, name);
      if (!channel.order()) return 0;
      const auto node = c.start(name);
      return node ? leaver(way_, name == "prefill-0", *node, channel) : 1;
    });
  }

  static cluster_options options() {
    cluster_options made;
    made.backend = GetParam().backend;
    made.mode = GetParam().mode;
    return unhurried(made);
  }

  const way way_{GetParam().backend, GetParam().mode};
  cluster c{options()};
  const scratch_folder logs;
};

TEST_P(orderly_stop, of_a_peer_is_no_broken_link) {
  const auto leaving = GetParam().leaver;
  const std::string staying = leaving == "prefill-0" ? "decode-0" : "prefill-0";
  const auto log_of = [&](const std::string& who) { return logs.path() + "/" + who + ".log"; };
  std::vector<std::unique_ptr<forked>> lives;
  for (int i = 0; i < rounds; ++i)
    lives.push_back(later(leaving, log_of(leaving + "." + std::to_string(i))));
  log_to(log_of(staying), staying);
  auto node = c.start(staying);
  ASSERT_TRUE(node);
  half part{way_, *node, staying == "prefill-0"};
  for (int i = 0; i < rounds; ++i) {
    SCOPED_TRACE(i);
    auto& life = *lives[static_cast<std::size_t>(i)];
    auto& channel = life.channel();
    channel.say("start");
    ASSERT_EQ(channel.hear().value_or("silence"), "up");
    const auto round = "r" + std::to_string(i);
    channel.say(round);
    ASSERT_EQ(channel.hear().value_or("silence"), "begun");
    ASSERT_TRUE(part.begin(round));
    ASSERT_TRUE(part.has_begun());
    channel.say("go on");
    part.go_on();
    if (GetParam().busy) {
      channel.say("leave");
      EXPECT_GE(part.outcome(), 0);
    } else {
      channel.say("outcome");
      EXPECT_EQ(part.outcome(), requests);
      EXPECT_EQ(channel.hear().value_or("silence"), std::to_string(requests));
      channel.say("leave");
    }
    EXPECT_EQ(life.join(), 0);
    EXPECT_TRUE(comes_true([&] { return node->report().links.empty(); }));
  }
  node->stop();
  cluster::quiet(staying);
  const auto left = "link to " + leaving + " (";
  EXPECT_EQ(count(text_of(log_of(staying)), left), 2 * rounds)
      << "each link comes up once and ends once: " << text_of(log_of(staying));
  for (const auto& file : std::filesystem::directory_iterator{logs.path()}) {
    const auto log = text_of(file.path());
    EXPECT_THAT(log, Not(HasSubstr("link_broken"))) << file.path();
    EXPECT_THAT(log, Not(HasSubstr("making it again"))) << file.path();
  }
}

TEST_P(orderly_stop, of_both_sides_at_once_is_none_either) {
  // A peer that stops at the same time cannot answer any more, and must not be waited for.
  const auto leaving = GetParam().leaver;
  const std::string staying = leaving == "prefill-0" ? "decode-0" : "prefill-0";
  const auto there = logs.path() + "/" + leaving + ".log";
  const auto here = logs.path() + "/" + staying + ".log";
  auto life = later(leaving, there);
  log_to(here, staying);
  auto node = c.start(staying);
  ASSERT_TRUE(node);
  half part{way_, *node, staying == "prefill-0"};
  life->channel().say("start");
  ASSERT_EQ(life->channel().hear().value_or("silence"), "up");
  life->channel().say("both");
  ASSERT_EQ(life->channel().hear().value_or("silence"), "begun");
  ASSERT_TRUE(part.begin("both"));
  ASSERT_TRUE(part.has_begun());
  life->channel().say("leave");
  node->stop();
  EXPECT_EQ(life->join(), 0);
  cluster::quiet(staying);
  for (const auto& log : {text_of(here), text_of(there)}) {
    EXPECT_THAT(log, Not(HasSubstr("link_broken")));
    EXPECT_THAT(log, Not(HasSubstr("making it again")));
    EXPECT_THAT(log, Not(HasSubstr("did not end in time")));
  }
}

INSTANTIATE_TEST_SUITE_P(every_way, orderly_stop,
                         ::testing::Values(farewell{"tcp", "write", "prefill-0", false},
                                           farewell{"tcp", "write", "decode-0", false},
                                           farewell{"tcp", "write", "prefill-0", true},
                                           farewell{"tcp", "read", "decode-0", true},
                                           farewell{"shm", "write", "prefill-0", false},
                                           farewell{"shm", "read", "decode-0", false},
                                           farewell{"shm", "write", "decode-0", true},
                                           farewell{"shm", "read", "prefill-0", true}),
                         [](const auto& tested) {
                           const auto& p = tested.param;
                           return p.backend + "_" + p.mode + "_" +
                                  p.leaver.substr(0, p.leaver.find('-')) +
                                  (p.busy ? "_busy" : "_idle");
                         });

}  // namespace
}  // namespace troupe::testing
