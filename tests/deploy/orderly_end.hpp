#pragma once

/// How a process that was denied a resource must end: with a sentence of its own, or on an order,
/// never by a signal, and leaving nothing behind.

#include <chrono>
#include <csignal>
#include <set>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include "command.hpp"
#include "process_tree.hpp"
#include "waiting.hpp"

namespace troupe::testing {

/// After this time a start that neither serves nor has ended is told to stop, like one that serves:
/// it is waiting for the denied resource, and must say so.
inline constexpr std::chrono::seconds longest_start{20};

/// Waits for the end, after telling it to stop once it says `serving` (null if it ends by itself).
/// `for_its_start` is how long to wait for `serving`. Returns whether it served, or ended with 0.
inline bool expect_orderly_end(command& process, const char* serving,
                               std::chrono::seconds for_its_start = longest_start) {
  using ::testing::AnyOf;
  using ::testing::HasSubstr;
  using ::testing::Not;
  std::set<pid_t> children;
  const auto look = [&] {
    for (const auto child : children_of(process.pid())) children.insert(child);
    return false;
  };
  bool began = serving != nullptr && process.says_within(for_its_start, serving);
  (void)look();
  if (serving != nullptr) {
    process.signal(SIGTERM);
  } else {
    (void)process.reads_until(look);
  }
  const int code = process.wait();
  began = began || (serving == nullptr && code == 0);
  const auto said = process.out() + process.err();
  EXPECT_NE(code, -1) << "it hangs: " << said;
  EXPECT_LT(code, 128) << "a signal ended it: " << said;
  if (code != 0) {
    EXPECT_NE(process.err(), "") << "it ended with " << code << " and no sentence";
  } else if (!began) {
    EXPECT_NE(process.err(), "") << "it has not served, and did not say why";
  }
  EXPECT_THAT(said, Not(AnyOf(HasSubstr("signal 6"), HasSubstr("signal 11"),
                              HasSubstr("terminate called"))));
  for (const auto child : children) {
    (void)comes_true(
        [child] { return ::waitpid(child, nullptr, WNOHANG) != 0; });  // perhaps inherited
    EXPECT_TRUE(vanishes(child)) << child << ": " << said;
  }
  return began;
}

}  // namespace troupe::testing
