// An end of the process that the command did not cause is reported in a line.

#include "troupe/deploy/cli/last_words.hpp"

#include <cerrno>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <thread>

#include <gtest/gtest.h>

namespace {

using ::testing::ExitedWithCode;
using troupe::deploy::cli::last_words;

class last_words_test : public ::testing::Test {
 protected:
  last_words_test() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

/// Runs `body` on a thread of its own, as a library does, while the command waits.
template <class Body>
void run_on_a_thread(Body body) {
  const last_words words;
  std::thread{body}.join();
}

TEST_F(last_words_test, a_thread_of_nobody_that_finds_no_memory_is_told) {
  EXPECT_EXIT(run_on_a_thread([] { throw std::bad_alloc{}; }), ExitedWithCode(1),
              "troupe: internal: a thread ended by an exception.*too little memory");
}

TEST_F(last_words_test, a_defect_is_told_by_its_name) {
  EXPECT_EXIT(run_on_a_thread([] { throw std::logic_error{"no such state"}; }), ExitedWithCode(1),
              "troupe: internal: a thread ended by an exception.*no such state");
}

TEST_F(last_words_test, a_thread_that_is_never_joined_is_told) {
  EXPECT_EXIT(
      {
        const last_words words;
        const std::thread lost{[] {}};
        // Its destruction terminates the process.
      },
      ExitedWithCode(1), "std::terminate was called");
}

TEST_F(last_words_test, a_library_that_calls_exit_is_told) {
  EXPECT_EXIT(run_on_a_thread([] { std::exit(EMFILE); }), ExitedWithCode(1),
              "a library ended this process: exit code 24 .Too many open files");
}

TEST_F(last_words_test, an_end_in_good_order_needs_no_words) {
  EXPECT_EXIT(
      {
        { const last_words words; }
        std::exit(3);
      },
      ExitedWithCode(3), "^$");
}

}  // namespace
