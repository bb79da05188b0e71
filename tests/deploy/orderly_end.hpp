#pragma once

/// How a process must end that was denied something: with a sentence of its own, or when it is told to;
/// by no signal, and with nothing left of it.

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

/// After this a start that neither serves nor has ended is told to stop, as one that serves is: it waits
/// for what it was denied, and says so.
inline constexpr std::chrono::seconds longest_start{20};

/// Waits until it has ended, telling it to once it says `serving`; null: it ends by itself. Returns
/// whether it came so far: it served, or ended with 0. `for_its_start`: how long it is waited for.
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
        [child] { return ::waitpid(child, nullptr, WNOHANG) != 0; });  // it may be ours now
    EXPECT_TRUE(vanishes(child)) << child << ": " << said;
  }
  return began;
}

}  // namespace troupe::testing
