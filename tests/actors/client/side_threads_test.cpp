// Threads at the side of a request: if another one cannot be started, those that have ended must
// not end the process.

#include <atomic>
#include <chrono>
#include <system_error>
#include <thread>

#include <gtest/gtest.h>
#include <pthread.h>

#include "troupe/actors/client/request_watch.hpp"

#include "waiting.hpp"

namespace {

using troupe::actors::side_threads;
using troupe::testing::comes_true;

/// While it exists, no thread can be started: the default stack is too large for the address space.
class no_more_threads {
 public:
  no_more_threads() {
    ::pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    ::pthread_attr_init(&huge);
    ::pthread_attr_setstacksize(&huge, std::size_t{1} << 60);
    ::pthread_setattr_default_np(&huge);
    ::pthread_attr_destroy(&huge);
  }
  ~no_more_threads() {
    ::pthread_setattr_default_np(&before_);
    ::pthread_attr_destroy(&before_);
  }
  no_more_threads(const no_more_threads&) = delete;
  no_more_threads& operator=(const no_more_threads&) = delete;

 private:
  pthread_attr_t before_{};
};

TEST(side_threads_test, one_that_cannot_be_had_is_thrown_beside_those_that_have_ended) {
  side_threads threads;
  std::atomic<int> ran{0};
  threads.run([&] { ++ran; });
  ASSERT_TRUE(comes_true([&] { return ran == 1; }));
  std::this_thread::sleep_for(std::chrono::milliseconds{50});  // so that it has usually ended
  {
    const no_more_threads now;
    EXPECT_THROW(threads.run([&] { ++ran; }), std::system_error);
  }
  threads.run([&] { ++ran; });
  EXPECT_TRUE(comes_true([&] { return ran == 2; })) << "the next one runs";
}

}  // namespace
