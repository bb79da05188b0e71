// A system whose threads cannot all be started tells its maker so, and ends nothing else.

#include <atomic>
#include <cerrno>
#include <chrono>
#include <system_error>

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

#include "troupe/actors/messages/messages.hpp"
#include "troupe/actors/runtime/system.hpp"

namespace {

std::atomic<int> threads_made{0};
std::atomic<int> failing{0};  // number of the thread that cannot be started, from 1; 0 if each can

}  // namespace

// In place of the C library's. A mock: the limit on threads counts those of all processes of a user.
extern "C" int pthread_create(pthread_t* made, const pthread_attr_t* attributes,
                              void* (*body)(void*), void* argument) noexcept {
  static auto* const real =
      reinterpret_cast<decltype(&pthread_create)>(::dlsym(RTLD_NEXT, "pthread_create"));
  if (++threads_made == failing) return EAGAIN;
  return real(made, attributes, body, argument);
}

namespace {

using namespace std::chrono_literals;
using troupe::actors::actor_host;

TEST(a_system, that_cannot_start_one_of_its_threads_says_so) {
  bool started = false;
  for (int thread = 1; !started; ++thread) {
    SCOPED_TRACE(thread);
    threads_made = 0;
    failing = thread;
    try {
#if defined(__SANITIZE_ADDRESS__)
      // CAF leaks a detached actor whose thread cannot be started.
      const __lsan::ScopedDisabler may_leak;
#endif
      actor_host host;
      started = threads_made < thread;
      failing = 0;
      if (started) continue;
      // Without its door a system has no network, and each use of it says so.
      const auto peer = host.connect<troupe::actors::node_actor>("127.0.0.1", 1, 1s);
      ASSERT_FALSE(peer);
      EXPECT_EQ(peer.error().code, troupe::errc::overloaded) << peer.error().message;
    } catch (const std::system_error& why) {
      EXPECT_EQ(why.code().value(), EAGAIN) << why.what();
    }
    ASSERT_LT(thread, 100);
  }
  EXPECT_GT(threads_made, 3) << "what is failed here starts no threads";
}

}  // namespace
