#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/actors/operations/value_store.hpp"

#include "starving.hpp"

// Values of a node whose allocations fail: each operation is done whole or not at all, and none
// waits for ever.

namespace troupe::actors {
namespace {

using namespace std::chrono_literals;
using troupe::testing::starve;

class starved_values : public ::testing::Test {
 protected:
  std::unique_ptr<transport::endpoint> endpoint = [] {
    transport::endpoint_options options;
    options.self = incarnation{7};
    return transport::endpoint::create(options).value();
  }();
  const std::shared_ptr<value_store> values = value_store::on_demand(*endpoint, 4096);
  const std::vector<std::byte> bytes = std::vector<std::byte>(4096, std::byte{7});
  const std::string key = std::string(100, 'k');

  /// True only if no earlier value is still held.
  bool has_all_its_room() {
    return values->remove(key) && values->put("other", bytes, 0ms) && values->remove("other");
  }
};

TEST_F(starved_values, a_get_that_finds_no_memory_holds_nothing) {
  ASSERT_TRUE(values->put(key, bytes, 0ms));
  std::optional<result<value_store::pinned>> got;
  starve([&] { got = values->get(key); }, [&] { EXPECT_TRUE(values->query(key)); });
  ASSERT_TRUE(got && *got);
  EXPECT_TRUE(std::ranges::equal((*got)->bytes, bytes));
  got.reset();
  EXPECT_TRUE(has_all_its_room());
}

TEST_F(starved_values, a_put_that_finds_no_memory_can_be_made_again) {
  std::optional<result<void>> put;
  starve([&] { put = values->put(key, bytes, 1h); },
         [&] { EXPECT_EQ(values->query(key).error().code, errc::not_found); });
  ASSERT_TRUE(put);
  EXPECT_TRUE(*put) << to_string(put->error());
  EXPECT_TRUE(has_all_its_room());
}

TEST_F(starved_values, a_copy_that_is_committed_without_memory_is_gone) {
  std::optional<result<std::shared_ptr<const void>>> pin;
  starve(
      [&] {
        auto room = values->reserve(key, bytes.size(), 0ms);
        ASSERT_TRUE(room) << to_string(room.error());
        pin = room->commit_pinned(key);
      },
      [&] { EXPECT_EQ(values->query(key).error().code, errc::not_found); });
  ASSERT_TRUE(pin);
  ASSERT_TRUE(*pin) << to_string(pin->error());
  pin.reset();
  EXPECT_TRUE(has_all_its_room());
}

}  // namespace
}  // namespace troupe::actors
