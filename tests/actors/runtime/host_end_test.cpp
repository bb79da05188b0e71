// The actor system of a process ends, whatever its peers do and whichever code used it.

#include <future>
#include <memory>
#include <string>
#include <thread>

#include <caf/send.hpp>
#include <gtest/gtest.h>

#include "troupe/actors/runtime/system.hpp"
#include "troupe/actors/supervisor/supervisor.hpp"

#include "cluster_peer.hpp"
#include "held_loop.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {
namespace {

using namespace std::chrono_literals;
using troupe::testing::wait_limit;

TEST(host_end, comes_though_a_peer_takes_nothing_more) {
  actor_host there;
  auto here = std::make_unique<actor_host>();
  const auto port = there.publish(spawn_supervisor(there.system(), three_nodes()), "127.0.0.1", 0);
  ASSERT_TRUE(port) << to_string(port.error());
  auto frozen = [&] {
    const auto boss = here->connect<supervisor_actor>("127.0.0.1", *port, wait_limit);
    EXPECT_TRUE(boss) << to_string(boss.error());
    auto stands = std::make_unique<one_turn>(there.system());
    for (int i = 0; boss && i < 32; ++i) {
      caf::anon_send(caf::actor_cast<caf::actor>(*boss), std::string(std::size_t{1} << 20U, 'x'));
    }
    return stands;
  }();
  auto ended = std::async(std::launch::async, [&] { here = nullptr; });
  EXPECT_EQ(ended.wait_for(wait_limit), std::future_status::ready);
  frozen.reset();
}

TEST(host_end, comes_though_threads_that_used_it_live_on) {
  auto here = std::make_unique<actor_host>();
  std::promise<void> used, over;
  std::thread user{[&] {
    EXPECT_FALSE(here->connect<supervisor_actor>("127.0.0.1", 1, 100ms));
    used.set_value();
    over.get_future().wait();
  }};
  used.get_future().wait();
  auto ended = std::async(std::launch::async, [&] { here = nullptr; });
  EXPECT_EQ(ended.wait_for(wait_limit), std::future_status::ready);
  over.set_value();
  user.join();
}

TEST(host_end, comes_though_somebody_holds_an_actor_with_a_thread_of_its_own) {
  auto here = std::make_unique<actor_host>(actor_host_options{.shutdown_timeout = 200ms});
  auto held = here->system().spawn<caf::detached>(
      [](caf::event_based_actor*) -> caf::behavior { return {[](tick_atom) {}}; });
  here->own(held);
  auto ended = std::async(std::launch::async, [&] { here = nullptr; });
  EXPECT_EQ(ended.wait_for(wait_limit), std::future_status::ready);
}

}  // namespace
}  // namespace troupe::actors::testing
