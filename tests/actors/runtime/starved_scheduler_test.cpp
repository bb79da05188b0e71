// An actor that has a message is scheduled, whatever allocation of the sender fails.

#include <cstdint>
#include <future>

#include <caf/event_based_actor.hpp>
#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>
#include <gtest/gtest.h>

#include "troupe/actors/runtime/inline_executor.hpp"
#include "troupe/actors/runtime/system.hpp"

#include "starving.hpp"
#include "waiting.hpp"

namespace troupe::actors {
namespace {

using troupe::testing::starve;
using troupe::testing::wait_limit;

TEST(scheduler_without_memory, schedules_an_actor_that_has_a_message) {
  actor_host host;
  caf::scoped_actor self{host.system()};
  const auto echo = host.system().spawn<caf::hidden>([](caf::event_based_actor*) {
    return caf::behavior{[](std::uint64_t number) { return number; }};
  });
  const auto answers = [&] {
    bool answered = false;
    self->request(echo, wait_limit, std::uint64_t{2})
        .receive([&](std::uint64_t) { answered = true; }, [](const caf::error&) {});
    return answered;
  };
  // The actor may still be busy with the last message, and is then not scheduled for the next one.
  for (int round = 0; round < 20; ++round) {
    starve([&] { caf::anon_send(echo, std::uint64_t{1}); }, [&] { ASSERT_TRUE(answers()); });
    ASSERT_TRUE(answers());
  }
  caf::anon_send_exit(echo, caf::exit_reason::user_shutdown);
}

TEST(scheduler_without_memory, needs_none_for_a_ready_message) {
  actor_host host;
  for (std::uint64_t round = 0; round < 20; ++round) {
    std::promise<std::uint64_t> told;
    const auto listener = host.system().spawn<caf::hidden>([&told](caf::event_based_actor* self) {
      return caf::behavior{[&told, self](std::uint64_t number) {
        told.set_value(number);
        self->quit();
      }};
    });
    ready_message<std::uint64_t> news{0};
    news.content() = round;
    troupe::testing::allocations.left = 0;
    EXPECT_NO_THROW(news.tell_to(listener));
    troupe::testing::allocations.left.reset();
    auto came = told.get_future();
    ASSERT_EQ(came.wait_for(wait_limit), std::future_status::ready);
    EXPECT_EQ(came.get(), round);
  }
}

}  // namespace
}  // namespace troupe::actors
