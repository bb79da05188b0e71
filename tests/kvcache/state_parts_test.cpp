// States whose parts are each spread over the ranks in their own way, like the convolution of a
// hybrid model.

#include <cstring>
#include <vector>

#include <gmock/gmock.h>

#include "troupe/kvcache/layout.hpp"
#include "troupe/kvcache/layout_fingerprint.hpp"
#include "troupe/kvcache/plan.hpp"

#include "fails_with.hpp"
#include "random_layouts.hpp"
#include "sanitized.hpp"

namespace troupe::kvcache {
namespace {

using testing::dice;
using ::testing::HasSubstr;
using troupe::testing::fails_with;

constexpr std::uint32_t slots = 5;
/// Bytes of the whole model: x, B, C.
constexpr std::uint64_t whole[] = {48, 10, 16};
constexpr state_sharding spread[] = {state_sharding::sliced, state_sharding::replicated,
                                     state_sharding::sliced};

cache_layout convolution(std::uint32_t rank, std::uint32_t ranks, std::uint64_t gap = 0) {
  cache_shape shape;
  shape.layers = {{layer_kind::recurrent, 0, 0}};
  shape.blocks = 1;
  shape.tp_rank = rank;
  shape.tp_size = ranks;
  auto layout = make_layout(shape, {}).value();
  state_tensor state;
  state.name = "conv";
  state.slots = slots;
  state.base = gap;
  for (std::size_t p = 0; p < 3; ++p) {
    const auto bytes = whole[p] / (spread[p] == state_sharding::sliced ? ranks : 1);
    state.parts.push_back({bytes, spread[p]});
    state.slot_bytes += bytes;
  }
  state.slot_stride = state.slot_bytes + gap;
  layout.states.push_back(state);
  return layout;
}

/// Visits each byte of a rank's slot, with its place in the model.
template <class Each>
void each_byte(const cache_layout& layout, std::uint32_t slot, Each&& each) {
  const auto& state = layout.states.front();
  auto at = state.base + slot * state.slot_stride;
  for (std::size_t p = 0; p < state.parts.size(); ++p) {
    const bool sliced = state.parts[p].sharding == state_sharding::sliced;
    const auto first = sliced ? layout.tp_rank * state.parts[p].bytes : 0;
    for (std::uint64_t i = 0; i < state.parts[p].bytes; ++i)
      each(at++, static_cast<std::byte>(1 + p * 80 + first + i));
  }
}

TEST(state_parts, arrive_at_every_rank_each_as_it_is_spread) {
  for (std::uint64_t seed = 1; seed <= troupe::testing::tries(200U); ++seed) {
    dice d{seed};
    const std::uint32_t sources = 1U << d.roll(0, 3);
    const std::uint32_t targets = 1U << d.roll(0, 3);
    const auto from = d.roll(0, slots - 1);
    const auto to = d.roll(0, slots - 1);
    for (std::uint32_t target = 0; target < targets; ++target) {
      const auto remote = convolution(target, targets, d.roll(0, 3));
      std::vector<std::byte> there(region_sizes(remote).front());
      std::uint64_t moved = 0;
      const auto asked = sources_for(remote, sources, targets, target);
      for (std::uint32_t source = 0; source < sources; ++source) {
        const auto local = convolution(source, sources, d.roll(0, 3));
        std::vector<std::byte> here(region_sizes(local).front());
        each_byte(local, from, [&](std::uint64_t at, std::byte value) { here[at] = value; });
        const auto geometry =
            transfer_geometry::create(local, remote, data_flow::to_remote).value();
        const auto plan = geometry.plan_state(from, to).value();
        EXPECT_EQ(std::ranges::find(asked, source) != asked.end(), plan.bytes != 0);
        moved += plan.bytes;
        for (const auto& piece : plan.pieces) {
          for (const auto& s : piece.segments) {
            for (std::uint32_t i = 0; i < s.count; ++i) {
              std::memcpy(there.data() + s.remote_offset + i * s.remote_stride,
                          here.data() + s.local_offset + i * s.local_stride, s.length);
            }
          }
        }
      }
      std::vector<std::byte> expected(there.size());
      each_byte(remote, to, [&](std::uint64_t at, std::byte value) { expected[at] = value; });
      ASSERT_EQ(there, expected) << "seed " << seed;
      EXPECT_EQ(moved, remote.states.front().slot_bytes) << "seed " << seed;
    }
  }
}

TEST(state_parts, of_equal_ranks_are_one_copy) {
  const auto layout = convolution(1, 2);
  const auto geometry = transfer_geometry::create(layout, layout, data_flow::to_local).value();
  EXPECT_EQ(geometry.plan_state(0, 3).value().segments_after, 1U);
}

TEST(state_parts, are_compared_and_travel) {
  const auto layout = convolution(1, 2, 3);
  EXPECT_EQ(decode(encode(layout)).value(), layout);
  EXPECT_TRUE(check_compatible(layout, convolution(0, 1)));
  EXPECT_EQ(fingerprint_of(layout), fingerprint_of(convolution(3, 4)));
  const auto mismatch = [&](auto change, const char* word) {
    auto other = layout;
    change(other.states.front());
    const auto ok = check_compatible(layout, other);
    ASSERT_THAT(ok, fails_with(errc::layout_mismatch, HasSubstr(word))) << word;
    EXPECT_NE(fingerprint_of(layout), fingerprint_of(other)) << word;
  };
  mismatch([](auto& s) { s.parts.clear(); }, "state 0 parts is 3 here and 1");
  mismatch([](auto& s) { s.parts[1].sharding = state_sharding::sliced; },
           "state 0 part 1 sharding is replicated here and sliced");
  mismatch([](auto& s) { std::swap(s.parts[0], s.parts[2]); },
           "state 0 part 0 bytes per request is 48 here and 16");
}

TEST(state_parts, that_do_not_make_up_the_slot_are_refused_by_name) {
  const auto refused = [](auto change, const char* word) {
    auto layout = convolution(0, 1);
    change(layout.states.front());
    const auto ok = check(layout);
    ASSERT_THAT(ok, fails_with(errc::invalid_config, HasSubstr(word))) << word;
  };
  refused([](auto& s) { s.parts.pop_back(); },
          "slot_bytes is 74, expected the sum of its parts, 58");
  refused([](auto& s) { s.parts[1].bytes = 0; }, "part 1 bytes");
  refused([](auto& s) { s.parts[1].bytes = 1000; }, "part 1 bytes");
  refused([](auto& s) { s.parts[2].sharding = state_sharding{3}; }, "part 2 sharding");
  refused([](auto& s) { s.parts.resize(max_state_parts + 1, {1}); }, "parts");
}

}  // namespace
}  // namespace troupe::kvcache
