// A request for an address is answered, whatever error the process's dialler meets.

#include "troupe/actors/runtime/network_dialler.hpp"

#include <atomic>
#include <cstdint>
#include <functional>
#include <new>
#include <optional>

#include <caf/event_based_actor.hpp>
#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>
#include <gtest/gtest.h>

#include "troupe/actors/runtime/system.hpp"

#include "waiting.hpp"

namespace troupe::actors {
namespace {

using namespace std::chrono_literals;
using troupe::testing::wait_limit;

class network_dialler_without_memory : public ::testing::Test {
 protected:
  actor_host host;
  caf::scoped_actor self{host.system()};
  const caf::actor broker = host.system().spawn<caf::hidden>(
      [](caf::event_based_actor*) { return caf::behavior{[](std::uint64_t) {}}; });
  std::atomic<int> dials{0};

  void TearDown() override { caf::anon_send_exit(broker, caf::exit_reason::user_shutdown); }

  network_actor spawn(dial_function dial) {
    return host.system().spawn<caf::hidden>(network_dialler, broker, nullptr, std::move(dial));
  }

  /// Returns the answer, or nothing if none came. `meanwhile` is called once it has asked.
  std::optional<reached> ask(
      const network_actor& dialler, const std::function<void()>& meanwhile = [] {}) {
    std::optional<reached> said;
    auto asked =
        self->request(dialler, wait_limit, caf::connect_atom::value, std::string{"127.0.0.1"},
                      std::uint16_t{1}, std::set<std::string>{}, caf::timespan{1h});
    meanwhile();
    asked.receive([&](reached& answer) { said = std::move(answer); }, [](const caf::error&) {});
    return said;
  }
};

TEST_F(network_dialler_without_memory, answers_and_tries_again_when_it_is_asked_again) {
  const auto dialler = spawn([this](auto&&...) -> std::optional<troupe::error> {
    if (++dials == 1) throw std::bad_alloc{};
    return troupe::error{errc::peer_unreachable, "nobody is there"};
  });
  const auto first = ask(dialler);
  ASSERT_TRUE(first && first->failed);
  EXPECT_EQ(first->failed->code, errc::internal);
  const auto second = ask(dialler);
  ASSERT_TRUE(second && second->failed);
  EXPECT_EQ(second->failed->code, errc::peer_unreachable);
  caf::anon_send_exit(dialler, caf::exit_reason::user_shutdown);
}

TEST_F(network_dialler_without_memory, that_ends_by_what_nobody_expects_leaves_nobody_waiting) {
  const auto dialler = spawn([](auto&&...) -> std::optional<troupe::error> { throw 7; });
  const auto first = ask(dialler);
  ASSERT_TRUE(first && first->failed);
  EXPECT_EQ(first->failed->code, errc::internal);
}

TEST_F(network_dialler_without_memory, that_loses_cafs_broker_says_so_to_who_waits_and_who_comes) {
  const auto dialler = spawn([](auto&&...) { return std::optional<troupe::error>{}; });
  const auto expect_said = [](const std::optional<reached>& answer) {
    ASSERT_TRUE(answer && answer->failed);
    EXPECT_EQ(answer->failed->code, errc::internal);
    EXPECT_NE(answer->failed->message.find("network of this process has crashed"),
              std::string::npos)
        << answer->failed->message;
  };
  expect_said(
      ask(dialler, [&] { caf::anon_send_exit(broker, caf::exit_reason::unhandled_exception); }));
  expect_said(ask(dialler));
  caf::anon_send_exit(dialler, caf::exit_reason::user_shutdown);
}

}  // namespace
}  // namespace troupe::actors
