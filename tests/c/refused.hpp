#pragma once

#include <string>

#include <gmock/gmock.h>

#include "troupe/troupe.h"

/// Expects the call to fail with that code and an error sentence that contains `word`.
#define EXPECT_REFUSED(call, wanted, word)                                                      \
  do {                                                                                          \
    const troupe_status refused_ = (call);                                                      \
    EXPECT_EQ(refused_, wanted) << troupe_status_name(refused_) << ": " << troupe_last_error(); \
    EXPECT_THAT(std::string{troupe_last_error()}, ::testing::HasSubstr(word));                  \
  } while (false)
#define ASSERT_DONE(call) ASSERT_EQ((call), TROUPE_OK) << troupe_last_error()
