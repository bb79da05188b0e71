// An exception of a call is returned as an error.

#include "troupe/kvcache/or_error.hpp"

#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace troupe {
namespace {

using ::testing::HasSubstr;

TEST(or_error_test, what_a_call_returns_is_returned) {
  EXPECT_EQ(*or_error("counting", [] { return result<int>{7}; }), 7);
  const auto failed =
      or_error("counting", []() -> result<int> { return fail(errc::deadline, "too late"); });
  EXPECT_EQ(failed.error(), (error{errc::deadline, "too late"}));
}

TEST(or_error_test, a_call_without_an_answer_is_done_or_failed) {
  EXPECT_TRUE(or_error("nothing", [] {}));
  const auto failed = or_error("nothing", [] { throw std::bad_alloc{}; });
  EXPECT_EQ(failed.error().code, errc::pool_exhausted);
}

TEST(or_error_test, memory_that_is_not_to_be_had_is_said) {
  const auto failed =
      or_error("the node cannot start", []() -> result<int> { throw std::bad_alloc{}; });
  EXPECT_EQ(failed.error().code, errc::pool_exhausted);
  EXPECT_THAT(failed.error().message, HasSubstr("the node cannot start: "));
  EXPECT_THAT(failed.error().message, HasSubstr("give it more"));
}

TEST(or_error_test, a_limit_of_the_system_is_told_from_a_defect) {
  const auto limited = or_error("a thread", []() -> result<void> {
    throw std::system_error{std::make_error_code(std::errc::resource_unavailable_try_again)};
  });
  EXPECT_EQ(limited.error().code, errc::overloaded);
  EXPECT_THAT(limited.error().message, HasSubstr("raise the limits"));
  const auto other = or_error("a thread", []() -> result<void> {
    throw std::system_error{std::make_error_code(std::errc::bad_file_descriptor)};
  });
  EXPECT_EQ(other.error().code, errc::internal);
}

TEST(or_error_test, a_defect_is_told_in_its_own_words) {
  const auto defect =
      or_error("x", []() -> result<int> { throw std::logic_error{"no such state"}; });
  EXPECT_EQ(defect.error(), (error{errc::internal, "x: no such state"}));
  const auto unknown = or_error("x", []() -> result<int> { throw 7; });
  EXPECT_EQ(unknown.error(), (error{errc::internal, "x: an exception of an unknown kind"}));
}

}  // namespace
}  // namespace troupe
