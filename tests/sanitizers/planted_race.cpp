// Two actors that count their messages. With an argument they also share a number that nothing
// orders; the thread sanitizer must find this race and nothing else, neither the messages nor the
// actors' own state. Each actor waits in its first turn for the other's: if one had ended before
// the other began, a lock of the scheduler could order even the racing accesses.
// With "handles", threads release the last handles of an actor that ends at once. The actor must be
// destroyed after everything that the other threads did with it.

#include <atomic>
#include <cstdio>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

#include <caf/scoped_actor.hpp>
#include <caf/send.hpp>
#include <caf/stateful_actor.hpp>

#include "troupe/actors/runtime/system.hpp"

namespace {

constexpr int messages = 2000;

/// The point where the two actors meet. Relaxed, so that it orders nothing itself.
std::atomic<int> arrived{0};
std::atomic<int> gone{0};

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

constexpr int holders = 3;
constexpr int generations = 20000;

/// Ends at its first message; later messages find its mailbox closed, and no turn of its own comes
/// after them.
caf::behavior mayfly(caf::stateful_actor<own_state>* self) {
  return {[self](int) { self->quit(); }};
}

/// Each thread sends through its own handle (a call of the actor's virtual function) and releases
/// it at the same moment as the others.
int let_go_at_once(caf::actor_system& system) {
  std::vector<caf::actor> handles(holders);
  std::atomic<int> turn{0};
  const auto hold = [&](std::size_t mine) {
    for (int generation = 0; generation < generations; ++generation) {
      while (turn.load(std::memory_order_acquire) != 2 * generation + 1) std::this_thread::yield();
      caf::anon_send(handles[mine], 0);
      arrived.fetch_add(1, std::memory_order_relaxed);
      while (arrived.load(std::memory_order_relaxed) < holders) std::this_thread::yield();
      handles[mine] = nullptr;
      gone.fetch_add(1, std::memory_order_release);
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < holders; ++i) threads.emplace_back(hold, i);
  for (int generation = 0; generation < generations; ++generation) {
    arrived.store(0, std::memory_order_relaxed);
    gone.store(0, std::memory_order_relaxed);
    auto held = system.spawn(mayfly);
    for (auto& handle : handles) handle = held;
    held = nullptr;
    turn.store(2 * generation + 1, std::memory_order_release);
    while (gone.load(std::memory_order_acquire) < holders) std::this_thread::yield();
  }
  for (auto& thread : threads) thread.join();
  return generations;
}

}  // namespace

int main(int argc, char** argv) {
  troupe::actors::actor_host host;
  if (argc > 1 && std::string_view{argv[1]} == "handles") {
    std::printf("%d actors are gone\n", let_go_at_once(host.system()));
    return 0;
  }
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
