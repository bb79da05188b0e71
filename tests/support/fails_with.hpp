#pragma once

#include <gmock/gmock.h>

#include "troupe/kvcache/result.hpp"

namespace troupe::testing {

/// Matches a result that is an error with that code, whose sentence matches `words`.
MATCHER_P2(fails_with, code, words, "") {
  if (arg) {
    *result_listener << "which is no error";
    return false;
  }
  *result_listener << "which is " << to_string(arg.error());
  return arg.error().code == code &&
         ::testing::ExplainMatchResult(words, arg.error().message, result_listener);
}

}  // namespace troupe::testing
