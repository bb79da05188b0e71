#include "troupe/kvcache/layout_fingerprint.hpp"

#include <gtest/gtest.h>

#include "troupe/kvcache/layout.hpp"

#include "random_layouts.hpp"
#include "sanitized.hpp"

namespace troupe::kvcache {
namespace {

using testing::dice;

/// The fingerprint compares what `model` draws, not what `place` draws.
cache_layout drawn(dice model, dice place) {
  auto shape = testing::random_model(model);
  shape.blocks = place.roll(1, 9);
  shape.tp_size = place.roll(1, 2);
  shape.tp_rank = place.roll(0, shape.tp_size - 1);
  if (model.one_in(2)) {
    const auto sharding = static_cast<state_sharding>(model.roll(1, 2));
    const auto whole = model.roll<std::uint64_t>(1, 2) * 2;
    const bool sliced = sharding == state_sharding::sliced;
    shape.states.push_back({"state", whole / (sliced ? shape.tp_size : 1), sharding});
    shape.state_slots = 1;
  }
  return make_layout(shape, testing::random_arrangement(place)).value();
}

TEST(layout_fingerprint, is_equal_exactly_where_layouts_are_compatible) {
  const auto pairs = troupe::testing::tries(20'000);
  std::uint32_t alike = 0;
  for (std::uint64_t seed = 1; seed <= pairs; ++seed) {
    // Every other pair has the same model.
    const auto local = drawn(dice{seed}, dice{seed + 1});
    const auto remote = drawn(dice{seed % 2 == 0 ? seed : seed * 977}, dice{seed + 2});
    const bool compatible = check_compatible(local, remote).has_value();
    ASSERT_EQ(fingerprint_of(local) == fingerprint_of(remote), compatible) << "seed " << seed;
    alike += compatible ? 1 : 0;
  }
  EXPECT_GE(alike, pairs / 2);
  EXPECT_LT(alike, pairs);
}

/// Fingerprints are compared between machines and releases.
TEST(layout_fingerprint, of_a_known_layout_stays_what_it_is) {
  cache_shape shape;
  shape.layers = attention_layers(2, 4, 8);
  shape.blocks = 10;
  const auto first = fingerprint_of(make_layout(shape, {}).value());
  shape.blocks = 77;
  shape.tp_size = 4;
  shape.tp_rank = 3;
  EXPECT_EQ(fingerprint_of(make_layout(shape, {}).value()), first);
  EXPECT_EQ(first, (layout_fingerprint{0xa7, 0x4c, 0x77, 0x95, 0xd8, 0x49, 0x59, 0x4b, 0x45, 0x93,
                                       0xfc, 0x59, 0x03, 0xfd, 0x4f, 0x6d}));
}

}  // namespace
}  // namespace troupe::kvcache
