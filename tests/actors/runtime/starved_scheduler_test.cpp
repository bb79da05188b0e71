// An actor that has a message is scheduled, whatever allocation of the sender fails.

#include <cstdint>

#include <caf/event_based_actor.hpp>
#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>
#include <gtest/gtest.h>

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

}  // namespace
}  // namespace troupe::actors
