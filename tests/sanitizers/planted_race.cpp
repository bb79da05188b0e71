// Two actors that count what they are sent; with an argument they also share a number that nothing
// orders. The thread sanitizer must find that, and nothing else: neither the messages nor the
// actors' own state. Each waits in its first turn for the other's: if one had ended before the
// other began, a lock of the scheduler could have ordered even what races.

#include <atomic>
#include <cstdio>
#include <memory>
#include <thread>

#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>
#include <caf/stateful_actor.hpp>

#include "troupe/actors/system.hpp"

namespace {

constexpr int messages = 2000;

/// Where the two meet. Relaxed, so that it orders nothing itself.
std::atomic<int> arrived{0};

void meet() {
  arrived.fetch_add(1, std::memory_order_relaxed);
  while (arrived.load(std::memory_order_relaxed) < 2) std::this_thread::yield();
}

struct own_state {
  int count{0};
};

caf::behavior counter(caf::stateful_actor<own_state>* self, std::shared_ptr<int> shared) {
  return {[self, shared](int n) {
    if (self->state.count == 0 && n > 0) meet();
    if (shared) *shared += n;
    return self->state.count += n;
  }};
}

int asked(caf::scoped_actor& self, const caf::actor& whom) {
  int count = 0;
  self->request(whom, caf::infinite, 0).receive([&](int n) { count = n; }, [](caf::error&) {});
  return count;
}

}  // namespace

int main(int argc, char**) {
  troupe::actors::actor_host host;
  const auto shared = argc > 1 ? std::make_shared<int>(0) : nullptr;
  const auto one = host.system().spawn(counter, shared);
  const auto other = host.system().spawn(counter, shared);
  std::thread second{[&] {
    for (int i = 0; i < messages; ++i) caf::anon_send(other, 1);
  }};
  for (int i = 0; i < messages; ++i) caf::anon_send(one, 1);
  second.join();
  caf::scoped_actor self{host.system()};
  std::printf("%d and %d\n", asked(self, one), asked(self, other));
  caf::anon_send_exit(one, caf::exit_reason::user_shutdown);
  caf::anon_send_exit(other, caf::exit_reason::user_shutdown);
  return 0;
}
