// Bounds on what an engine may start at its node: each operation ends once, and nothing accumulates
// for operations that have ended or whose events are not taken.

#include <atomic>
#include <map>
#include <string>

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "troupe/actors/membership/affinity_table.hpp"

#include "cluster_fixture.hpp"
#include "free_port.hpp"
#include "process_memory.hpp"

namespace troupe::testing {
namespace {

using std::chrono::milliseconds;

/// Longer than a test waits for anything, in milliseconds.
constexpr std::uint32_t an_hour = 3'600'000;

std::unique_ptr<forked> later(const cluster& c, const std::string& name) {
  return std::make_unique<forked>([&c, name](line_channel& channel) {
    cluster::quiet(name);
    if (!channel.order()) return 0;
    auto node = c.start(name);
    return node ? bystander(*node, channel) : 1;
  });
}

class bounds : public ::testing::Test {
 protected:
  cluster c;
  std::unique_ptr<engine> node;
  std::unique_ptr<listener> events;
  std::vector<block_id> blocks;  ///< a single block

  void start(const std::string& name, const config::deployment& deployment) {
    cluster::quiet(name);
    auto started = engine::start(deployment, name);
    ASSERT_TRUE(started) << to_string(started.error());
    node = std::move(*started);
    ASSERT_TRUE(node->wait_registered(wait_limit));
    events = std::make_unique<listener>(*node);
    const auto block = node->allocate_blocks(1);
    ASSERT_TRUE(block);
    blocks = block->blocks;
  }
  result<operation_id> receive(const std::string& request, std::chrono::milliseconds deadline) {
    return node->receive(
        {request, {"prefill-0"}, actors::transfer_mode::write, 16, 0, blocks, 0, deadline});
  }
};

// -- events that are not taken

TEST_F(bounds, an_engine_that_takes_no_events_is_refused_further_operations_and_loses_none) {
  constexpr std::uint32_t limit = 16;
  auto deployment = c.deployment();
  deployment.limits.max_operations = limit;
  start("prefill-0", deployment);
  std::map<std::uint64_t, int> outcomes;
  for (std::uint32_t i = 0; i < limit; ++i) {
    auto asked = node->query("prefill-0", "no such key");
    ASSERT_TRUE(asked) << i << ": " << to_string(asked.error());
    outcomes[asked->value] = 0;
  }
  std::this_thread::sleep_for(50ms);
  for (int again = 0; again < 3; ++again) {
    auto refused = node->query("prefill-0", "no such key");
    ASSERT_FALSE(refused) << "events that nobody takes have no bound";
    EXPECT_EQ(refused.error().code, errc::overloaded);
    EXPECT_NE(refused.error().message.find("limits.max_operations"), std::string::npos);
    EXPECT_NE(refused.error().message.find("take events"), std::string::npos);
  }
  EXPECT_EQ(node->report().operations_open, limit);
  const auto some_are_missing = [&] {
    return std::ranges::any_of(outcomes, [](const auto& one) { return one.second == 0; });
  };
  for (;;) {
    const auto taken = node->wait(some_are_missing() ? milliseconds{wait_limit} : 50ms, 3);
    if (taken.empty()) break;
    for (const auto& e : taken) ++outcomes.at(e.operation.value);
  }
  for (const auto& [operation, count] : outcomes) EXPECT_EQ(count, 1);
  EXPECT_TRUE(node->query("prefill-0", "no such key"));
}

TEST_F(bounds, a_receive_counts_until_it_was_heard_that_its_blocks_are_free) {
  auto deployment = c.deployment();
  deployment.limits.max_operations = 1;
  start("decode-0", deployment);
  auto asked = receive("r", 1ms);  // prefill-0 never comes
  ASSERT_TRUE(asked);
  pollfd there{node->event_fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&there, 1, static_cast<int>(milliseconds{wait_limit}.count())), 1);
  std::this_thread::sleep_for(200ms);  // both of its events are queued
  EXPECT_EQ(node->query("decode-0", "key").error().code, errc::overloaded);
  const auto outcome = node->wait(wait_limit, 1);
  ASSERT_EQ(outcome.size(), 1u);
  EXPECT_EQ(node->query("decode-0", "key").error().code, errc::overloaded);
  const auto unpinned = node->wait(wait_limit, 1);
  ASSERT_EQ(unpinned.size(), 1u);
  EXPECT_TRUE(std::holds_alternative<event_unpinned>(unpinned.front().what));
  EXPECT_TRUE(node->query("decode-0", "key"));
}

// -- placements

TEST_F(bounds, a_placement_that_waits_and_is_aborted_ends_once_and_at_once) {
  auto decode = later(c, "decode-0");
  start("prefill-0", c.deployment());
  const auto placed = node->place({"r", "prefill", "decode", an_hour});
  ASSERT_TRUE(placed);
  events->listen_for(50ms);
  ASSERT_TRUE(node->abort(*placed, "changed my mind"));
  ASSERT_TRUE(events->outcome(*placed)) << "it would have waited for an hour";
  EXPECT_EQ(events->of(*placed).why.code, errc::aborted) << to_string(events->of(*placed).why);
  EXPECT_EQ(node->abort(*placed, "again").error().code, errc::not_found);
  // From now on the supervisor can answer the request.
  decode->channel().say("start");
  ASSERT_EQ(decode->channel().hear().value_or("silence"), "up");
  const auto next = node->place({"r", "prefill", "decode", an_hour});
  ASSERT_TRUE(next);
  ASSERT_TRUE(events->outcome(*next));
  EXPECT_EQ(events->of(*next).done, 1) << to_string(events->of(*next).why);
  events->listen_for(300ms);
  EXPECT_EQ(events->of(*placed).failed, 1);
  EXPECT_EQ(events->of(*placed).done, 0);
}

TEST_F(bounds,
       a_placement_aborted_while_its_answer_comes_has_one_outcome_the_one_that_was_promised) {
  auto decode = later(c, "decode-0");
  start("prefill-0", c.deployment());
  decode->channel().say("start");
  ASSERT_EQ(decode->channel().hear().value_or("silence"), "up");
  int aborted = 0, placed = 0;
  for (int i = 0; i < 300; ++i) {
    const auto id = node->place({"r" + std::to_string(i), "prefill", "decode", an_hour});
    ASSERT_TRUE(id);
    // Busy-wait: the answer arrives on other threads.
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds{i % 30 * 20};
    while (std::chrono::steady_clock::now() < until) {
    }
    const bool promised = node->abort(*id, "changed my mind").has_value();
    ASSERT_TRUE(events->outcome(*id));
    const auto& t = events->of(*id);
    EXPECT_EQ(t.done, promised ? 0 : 1);
    EXPECT_EQ(t.failed, promised ? 1 : 0);
    ++(promised ? aborted : placed);
  }
  events->listen_for(200ms);
  for (int i = 1; i <= 300; ++i) {
    const auto& t = events->of(operation_id{static_cast<std::uint64_t>(i)});
    EXPECT_EQ(t.done + t.failed, 1);
  }
  RecordProperty("aborted", aborted);
  RecordProperty("placed", placed);
}

TEST_F(bounds, a_placement_with_an_affinity_that_is_too_long_is_refused_before_it_is_sent) {
  start("prefill-0", c.deployment());
  actors::placement_request request;
  request.request = "r";
  request.affinity.assign(actors::max_affinity + 1, 'x');
  const auto refused = node->place(request);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::invalid_config);
  EXPECT_EQ(refused.error().message,
            "an affinity has at most 256 bytes, this has 257; name a hash of it");
}

TEST(placements, of_one_affinity_come_to_one_node_through_the_engine_too) {
  cluster_options options;
  options.decodes = 2;
  const cluster c{options};
  auto first = later(c, "decode-0");
  auto second = later(c, "decode-1");
  for (auto* decode : {first.get(), second.get()}) {
    decode->channel().say("start");
    ASSERT_EQ(decode->channel().hear().value_or("silence"), "up");
  }
  cluster::quiet("prefill-0");
  auto node = c.start("prefill-0");
  ASSERT_TRUE(node);
  listener events{*node};
  const auto placed = [&](const std::string& affinity) {
    actors::placement_request request;
    request.request = "r";
    request.from = "prefill";
    request.to = "decode";
    request.affinity = affinity;
    request.timeout_ms = an_hour;
    const auto id = node->place(request);
    if (!id || !events.outcome(*id) || events.of(*id).done != 1) return std::string{"nowhere"};
    return events.of(*id).placed->decode.front().name;
  };
  const std::string where = placed("conversation");
  EXPECT_TRUE(where.starts_with("decode-")) << where;
  for (int i = 0; i < 6; ++i) {
    EXPECT_TRUE(events.until([&] { return placed("") != where; })) << "others take turns";
    EXPECT_EQ(placed("conversation"), where);
  }
}

TEST_F(bounds, a_placement_that_waits_ends_when_the_supervisor_is_killed) {
  start("prefill-0", c.deployment());
  const auto placed = node->place({"r", "prefill", "decode", an_hour});
  ASSERT_TRUE(placed);
  events->listen_for(100ms);
  c.supervisor().end(SIGKILL);
  ASSERT_TRUE(events->outcome(*placed)) << "it would have waited for an hour";
  EXPECT_EQ(events->of(*placed).why.code, errc::peer_lost) << to_string(events->of(*placed).why);
}

TEST_F(bounds, placements_leave_nothing_behind_however_long_they_might_have_waited) {
  start("prefill-0", c.deployment());
  const auto refused = [&](int count) {
    for (int i = 0; i < count; ++i) {
      // Answered at once, since there is no such edge.
      const auto id = node->place({"r", "decode", "store", an_hour});
      ASSERT_TRUE(id);
      ASSERT_TRUE(events->outcome(*id));
      ASSERT_EQ(events->of(*id).why.code, errc::not_found) << to_string(events->of(*id).why);
      events->forget(*id);
    }
  };
  refused(500);
  const auto before = resident_bytes();
  refused(1250 / slowness);
  if (!sanitized) {
    EXPECT_LT(resident_bytes(), before + (1u << 20));
  }
}

// -- operations that wait for a link and end

TEST_F(bounds, receives_that_end_while_they_wait_for_a_link_leave_nothing_behind) {
  start("decode-0", c.deployment());
  const auto ends = [&](int number, std::chrono::milliseconds deadline, bool abort) {
    const auto id = receive("r" + std::to_string(number), deadline);
    ASSERT_TRUE(id) << to_string(id.error());
    if (abort) {
      ASSERT_TRUE(node->abort(*id, "changed my mind"));
    }
    ASSERT_TRUE(events->unpinned(*id));
    EXPECT_EQ(events->of(*id).failed, 1);
    events->forget(*id);
  };
  const auto waiting = receive("waiting", 1h);
  ASSERT_TRUE(waiting);
  for (int i = 0; i < 5; ++i) ends(i, 1ms, false);
  for (int i = 0; i < 2000; ++i) ends(i, 1h, true);
  EXPECT_EQ(node->report().waiting_for_link, 1u);
  const auto before = resident_bytes();
  for (int i = 0; i < 5000 / slowness; ++i) ends(i, 1h, true);
  EXPECT_EQ(node->report().waiting_for_link, 1u);
  if (!sanitized) {
    EXPECT_LT(resident_bytes(), before + (1u << 20));
  }
  ASSERT_TRUE(node->abort(*waiting, "enough"));
  ASSERT_TRUE(events->unpinned(*waiting));
  EXPECT_EQ(node->report().waiting_for_link, 0u);
  EXPECT_EQ(node->report().operations_open, 0u);
}

TEST_F(bounds, values_that_were_given_up_while_they_waited_for_a_link_do_not_make_a_second_one) {
  auto store = later(c, "store-0");
  start("prefill-0", c.deployment());
  for (int i = 0; i < 100; ++i) {
    const auto id = node->get("store-0", "key");
    ASSERT_TRUE(id);
    ASSERT_TRUE(node->abort(*id, "changed my mind"));
    ASSERT_TRUE(events->outcome(*id));
  }
  const auto last = node->get("store-0", "key");
  ASSERT_TRUE(last);
  store->channel().say("start");
  ASSERT_TRUE(events->outcome(*last));
  EXPECT_EQ(events->of(*last).why.code, errc::not_found) << to_string(events->of(*last).why);
  events->listen_for(500ms);
  EXPECT_EQ(node->report().links.size(), 1u);
}

// -- puts to the node itself

/// Memory that records which thread read it first.
class watched_memory {
 public:
  explicit watched_memory(std::size_t size) : size_{size} {
    at_ = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    std::memset(at_, 0x5A, size);
    ::mprotect(at_, size, PROT_NONE);
    current_ = this;
    struct sigaction action {};
    action.sa_sigaction = touched;
    action.sa_flags = SA_SIGINFO;
    ::sigaction(SIGSEGV, &action, &before_);
  }
  ~watched_memory() {
    ::sigaction(SIGSEGV, &before_, nullptr);
    ::munmap(at_, size_);
  }
  watched_memory(const watched_memory&) = delete;
  watched_memory& operator=(const watched_memory&) = delete;

  [[nodiscard]] std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(at_), size_};
  }
  [[nodiscard]] pid_t reader() const { return reader_; }

 private:
  static void touched(int number, siginfo_t* info, void* /*context*/) {
    const auto* at = static_cast<const std::byte*>(info->si_addr);
    const auto* first = static_cast<const std::byte*>(current_->at_);
    if (at < first || at >= first + current_->size_) {
      ::signal(number, SIG_DFL);
      return;
    }
    current_->reader_ = static_cast<pid_t>(::syscall(SYS_gettid));
    ::mprotect(current_->at_, current_->size_, PROT_READ);
  }

  static inline watched_memory* current_{nullptr};
  std::size_t size_;
  void* at_{nullptr};
  struct sigaction before_ {};
  std::atomic<pid_t> reader_{0};
};

TEST_F(bounds, a_large_put_to_the_node_itself_is_not_copied_by_the_thread_that_asks) {
  for (const bool polling : {false, true}) {
    SCOPED_TRACE(polling ? "polling" : "event-driven");
    engine_options options;
    options.polling = polling;
    cluster::quiet("prefill-0");
    auto self = c.start("prefill-0", std::move(options));
    ASSERT_TRUE(self);
    listener heard{*self};
    const watched_memory large{1'600'000};
    const auto put = self->put("prefill-0", "large", large.bytes());
    ASSERT_TRUE(put);
    ASSERT_TRUE(heard.outcome(*put));
    EXPECT_EQ(heard.of(*put).done, 1) << to_string(heard.of(*put).why);
    EXPECT_NE(large.reader(), 0);
    EXPECT_NE(large.reader(), static_cast<pid_t>(::syscall(SYS_gettid)));
    const auto got = self->get("prefill-0", "large");
    ASSERT_TRUE(got);
    ASSERT_TRUE(heard.outcome(*got));
    EXPECT_TRUE(std::ranges::equal(heard.of(*got).value.bytes, large.bytes()));
    heard.of(*got).value = {};
  }
}

TEST_F(bounds, puts_to_the_node_itself_end_once_however_they_are_aborted_or_stopped) {
  start("prefill-0", c.deployment());
  auto value = std::make_unique<std::vector<std::byte>>(4u << 20, std::byte{7});
  std::vector<operation_id> puts;
  for (int i = 0; i < 60; ++i) {
    const auto put = node->put("prefill-0", "k" + std::to_string(i % 4), *value, 1ms);
    ASSERT_TRUE(put);
    if (i % 3 == 0) (void)node->abort(*put, "changed my mind");
    puts.push_back(*put);
    if (i % 8 == 7) {
      ASSERT_TRUE(events->outcome(*put));
    }
  }
  node->stop();
  value.reset();  // no thread may read it any more
  for (const auto put : puts) {
    ASSERT_TRUE(events->outcome(put));
  }
  events->listen_for(50ms);
  for (const auto put : puts) {
    EXPECT_EQ(events->of(put).done + events->of(put).failed, 1);
  }
}

/// Starts a node in a process with that resource limit. Returns "started" or the error.
std::string started_with(const cluster& c, __rlimit_resource what, rlim_t most) {
  forked child{[&](line_channel& channel) {
    cluster::quiet("decode-0");
    const auto deployment = c.deployment();
    const rlimit limit{most, most};
    if (::setrlimit(what, &limit) != 0) return 1;
    auto node = engine::start(deployment, "decode-0");
    channel.say(node ? "started" : to_string(node.error()));
    if (node) (*node)->stop();
    return 0;
  }};
  auto said = child.channel().hear().value_or("silence");
  const int code = child.join();
  EXPECT_EQ(code, 0) << most << ": " << said;
  return said;
}

TEST(start, fails_with_a_sentence_where_the_process_may_have_too_few_descriptors) {
  const cluster c{{}};
  std::size_t refused = 0;
  std::string last;
  for (rlim_t most = 6; most <= 126; most += 6) {
    last = started_with(c, RLIMIT_NOFILE, most);
    if (last == "started") continue;
    ++refused;
    EXPECT_NE(last.find("overloaded: this process can have"), std::string::npos) << most << last;
    EXPECT_NE(last.find("ulimit -n"), std::string::npos) << most << last;
  }
  EXPECT_GT(refused, 5U);
  EXPECT_EQ(last, "started");
}

TEST(start, fails_with_a_sentence_where_the_process_may_have_too_few_addresses) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer needs terabytes of addresses";
#endif
  const cluster c{{}};
  std::size_t refused = 0;
  std::string last;
  for (const std::size_t mib : {64, 128, 192, 256, 320, 384, 512, 768, 1024, 2048, 8192}) {
    last = started_with(c, RLIMIT_AS, mib << 20);
    if (last == "started") continue;
    ++refused;
    // Either the start or the pools run out of memory first.
    const bool says_why = last.find("overloaded: this process can") != std::string::npos ||
                          last.find("pool_exhausted: ") != std::string::npos;
    EXPECT_TRUE(says_why) << mib << " MiB: " << last;
  }
  EXPECT_GT(refused, 1U);
  EXPECT_EQ(last, "started");
}

TEST(start, fails_with_a_sentence_where_the_data_port_is_taken) {
  const taken_port taken;
  ASSERT_NE(taken.number(), 0);
  const cluster c{{}};
  cluster::quiet("decode-0");
  auto deployment = c.deployment();
  for (auto& stage : deployment.stages) stage.transport.data_port = taken.number();
  const auto node = engine::start(deployment, "decode-0");
  ASSERT_FALSE(node);
  EXPECT_NE(node.error().message.find(std::to_string(taken.number())), std::string::npos)
      << to_string(node.error());
}

}  // namespace
}  // namespace troupe::testing
