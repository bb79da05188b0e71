#pragma once

/// How a process must end that was denied something: with a sentence of its own, or when it is told to;
/// by no signal, and with nothing left of it.

#include <chrono>
#include <csignal>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "command.hpp"
#include "process_tree.hpp"

namespace troupe::testing {

/// After this a start that neither serves nor has ended is told to stop, as one that serves is: it waits
/// for what it was denied, and says so.
inline constexpr std::chrono::seconds longest_start{20};

/// Waits until it has ended, telling it to once it says `serving`; null: it ends by itself. Returns
/// whether it came so far: it served, or ended with 0.
inline bool expect_orderly_end(command& process, const char* serving) {
  using ::testing::AnyOf;
  using ::testing::HasSubstr;
  using ::testing::Not;
  bool began = serving != nullptr && process.says_within(longest_start, serving);
  const auto children = children_of(process.pid());
  if (serving != nullptr) process.signal(SIGTERM);
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
  for (const auto child : children) EXPECT_TRUE(vanishes(child)) << child << ": " << said;
  return began;
}

}  // namespace troupe::testing
