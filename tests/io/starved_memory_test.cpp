// Memory of an agent in a process whose allocations fail: it is registered completely, or nothing
// changes.

#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/io/agent.hpp"

#include "starving.hpp"
#include "waiting.hpp"

namespace troupe::io {
namespace {

using transport::access;
using troupe::testing::starve;

/// The number of mapped memory files.
std::size_t files_mapped() {
  std::ifstream maps{"/proc/self/maps"};
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("/memfd:") != std::string::npos ? 1U : 0U;
  }
  return count;
}

class starved_agent : public ::testing::Test {
 protected:
  const std::unique_ptr<agent> self = [] {
    agent_options options;
    options.name = "starved";
    return agent::create(std::move(options)).value();
  }();

  /// The result of `call` once none of its allocations fails.
  template <class Call>
  result<memory_id> unless_starved(Call&& call) {
    std::optional<result<memory_id>> got;
    starve(
        [&] {
          got.emplace(call());
          if (!*got && got->error().code == errc::pool_exhausted) throw std::bad_alloc{};
        },
        [] {});
    return *got;
  }
};

TEST_F(starved_agent, registers_memory_that_it_could_not_register_before) {
  std::vector<std::byte> memory(4096);
  const auto added = unless_starved([&] {
    return self->register_memory(memory, "memory whose name is no short string", access::read);
  });
  ASSERT_TRUE(added) << to_string(added.error());
  EXPECT_TRUE(self->deregister(*added, std::chrono::seconds{1}));
  EXPECT_TRUE(self->register_memory(memory, "once more", access::read));
}

TEST_F(starved_agent, allocates_memory_that_it_gives_back) {
  const auto before = files_mapped();
  const auto added = unless_starved(
      [&] { return self->allocate(4096, "memory whose name is no short string", access::read); });
  ASSERT_TRUE(added) << to_string(added.error());
  EXPECT_TRUE(self->deregister(*added, std::chrono::seconds{1}));
  EXPECT_EQ(files_mapped(), before) << "what was allocated for a try that failed";
}

/// What a call returned, or bad_alloc if it, or the transfer that it began, found no memory.
template <class T>
T fed(result<T> what) {
  if (!what && what.error().code == errc::pool_exhausted) throw std::bad_alloc{};
  EXPECT_TRUE(what) << (what ? "" : to_string(what.error()));
  if constexpr (!std::is_void_v<T>) return std::move(*what);
}

class starved_sender : public starved_agent {
 protected:
  starved_sender() { EXPECT_TRUE(self->connect(peer, testing::wait_limit)); }
  /// Whether the transfer ended well.
  bool ends(transfer_handle which) {
    EXPECT_EQ(self->wait({&which, 1}, wait_for::all, testing::wait_limit), 1U) << "it never ends";
    return self->status_of(which).value().now == state::done;
  }

  const std::unique_ptr<agent> other = [] {
    agent_options options;
    options.name = "other";
    return agent::create(std::move(options)).value();
  }();
  const memory_id own = self->allocate(4096, "own", access::read_write).value();
  const memory_id lent = other->allocate(4096, "lent", access::read_write).value();
  const peer_id peer = self->add_peer(other->describe().value()).value();
};

TEST_F(starved_sender, posts_a_transfer_that_it_could_not_post_before) {
  const auto over = self->session(own, peer, lent.value).value();
  const std::vector<segment> some{{0, 0, 64}};
  // Made, and ended, without a post that was starved.
  const auto out = self->move(transport::direction::write, over, some, {}, {}).value();
  ASSERT_TRUE(ends(out));
  const std::vector<std::byte> words(100);
  for (int posting = 0; posting < 3; ++posting) {
    bool posted = false;
    starve(
        [&] {
          posted = false;
          fed(self->post(out, words, std::chrono::hours{1}));
          posted = true;
        },
        [&] { EXPECT_NE(self->status_of(out).value().now, state::active) << "not begun"; });
    ASSERT_TRUE(posted);
    static_cast<void>(ends(out));  // a link may have refused it for want of memory
  }
  ASSERT_TRUE(self->post(out, words, {}));
  EXPECT_TRUE(ends(out));
}

TEST_F(starved_sender, sends_every_notice_that_it_took) {
  const std::vector<std::byte> words(100);
  for (int turn = 0; turn < 3; ++turn) {
    starve([&] { fed(self->notify(peer, words)); }, [] {});
  }
  ASSERT_TRUE(self->notify(peer, std::vector<std::byte>(7)));
  EXPECT_TRUE(testing::comes_true([&] {
    const auto came = other->take_notices(100);
    return !came.empty() && came.back().bytes.size() == 7;
  })) << "the last one";
}

TEST_F(starved_agent, has_a_notice_to_itself_wholly_or_not_at_all) {
  const auto me = self->add_peer(self->describe().value()).value();
  const auto unread = [&] { return self->report().peers.at(0).notices_unread; };
  const std::vector<std::byte> words(100);
  starve([&] { fed(self->notify(me, words)); },
         [&] {
           EXPECT_EQ(unread(), 0U);
           EXPECT_EQ(self->report().events, 0U);
           EXPECT_FALSE(self->wait_for_notices({}));
         });
  EXPECT_EQ(unread(), 1U);
  const auto events = self->take(9);
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].what, event_kind::notices_wait);
  EXPECT_EQ(self->take_notices(9).size(), 1U);
  EXPECT_EQ(unread(), 0U);
}

TEST_F(starved_sender, takes_every_notice_in_a_later_call) {
  const auto back = other->add_peer(self->describe().value()).value();
  const std::vector<std::byte> words(100);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(other->notify(back, words));
  ASSERT_TRUE(testing::comes_true([&] {
    std::uint64_t unread = 0;
    for (const auto& one : self->report().peers) unread += one.notices_unread;
    return unread == 3;
  }));
  std::vector<notice> taken;
  taken.reserve(3);
  starve(
      [&] {
        for (auto& one : self->take_notices(3)) taken.push_back(std::move(one));
      },
      [] {});
  ASSERT_EQ(taken.size(), 3U);
  for (const auto& one : taken) EXPECT_EQ(one.bytes, words);
}

TEST_F(starved_sender, takes_every_event_in_a_later_call) {
  agent_options options;
  options.name = "an agent whose name is no short string";
  auto leaving = agent::create(std::move(options)).value();
  const auto memory = leaving->allocate(4096, "lent", access::read_write).value();
  const auto who = self->add_peer(leaving->describe().value()).value();
  const auto over = self->session(own, who, memory.value).value();
  const std::vector<segment> some{{0, 0, 64}};
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(ends(self->move(transport::direction::write, over, some, {}, {}).value()));
  }
  leaving.reset();
  ASSERT_TRUE(testing::comes_true([&] { return self->report().events == 4; }));
  std::vector<event> taken;
  taken.reserve(4);
  starve(
      [&] {
        for (auto& one : self->take(4)) taken.push_back(std::move(one));
      },
      [] {});
  ASSERT_EQ(taken.size(), 4U);
  EXPECT_EQ(taken.back().what, event_kind::peer_lost);
  EXPECT_EQ(taken.back().who, who);
  EXPECT_TRUE(taken.back().why);
}

}  // namespace
}  // namespace troupe::io
