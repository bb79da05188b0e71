#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cache_fixture.hpp"

/// The property that everything else serves: an engine that continues from a moved cache says what
/// a single process would have said. Here the plans are carried out by memcpy;
/// engine_transfer_test.cpp moves the bytes between processes.
namespace troupe::reference {
namespace {

constexpr std::uint32_t prompt_tokens = 19;
constexpr std::uint32_t new_tokens = 10;
constexpr std::uint32_t whole = prompt_tokens + new_tokens;
const sampling sampled{1.0f, 5, false};

class a_moved_cache : public ::testing::TestWithParam<model_config> {
 protected:
  std::shared_ptr<const transformer> model_ = transformer::create(GetParam()).value();
  std::vector<token> prompt_ = a_prompt(prompt_tokens);

  generation alone(const std::string& dtype) const {
    return generate_alone(*model_, prompt_, new_tokens, sampled, dtype, block_tokens).value();
  }
  generation continued(generation first, model_cache& cache) const {
    return decode(*model_, prompt_tokens, new_tokens, std::move(first), sampled, cache).value();
  }
};

INSTANTIATE_TEST_SUITE_P(models, a_moved_cache,
                         ::testing::Values(tiny_attention(), tiny_latent(), tiny_hybrid()),
                         name_of_model);

TEST_P(a_moved_cache, continues_alike_from_every_arrangement_to_every_other) {
  for (const auto* dtype : {"bf16"}) {
    const auto expected = alone(dtype);
    for (const auto& source_how : all_arrangements()) {
      const auto source = pool::make(layout_of(GetParam(), source_how, dtype));
      const auto source_place = place::scattered(prompt_tokens, 11);
      auto source_cache = cache_of(source, source_place);
      const auto first = prefill(*model_, prompt_, 0, 7, sampled, source_cache).value();
      for (const auto& how : all_arrangements()) {
        const auto target = pool::make(layout_of(GetParam(), how, dtype));
        const auto target_place = place::scattered(whole, 12);
        move(source, source_place, target, target_place, {0, prompt_tokens});
        auto cache = cache_of(target, target_place);
        EXPECT_EQ(continued(first, cache), expected)
            << dtype << " " << name_of(source_how) << " to " << name_of(how);
      }
    }
  }
}

TEST_P(a_moved_cache, continues_alike_when_moved_chunk_by_chunk_while_it_is_computed) {
  const auto expected = alone("fp16");
  const auto source = pool::make(layout_of(GetParam(), {}, "fp16"));
  const auto target =
      pool::make(layout_of(GetParam(), {.order = kvcache::block_order::block_interleaved}, "fp16"));
  const auto from = place::scattered(prompt_tokens, 21);
  const auto to = place::scattered(whole, 22);
  const auto geometry =
      kvcache::transfer_geometry::create(source.memory->layout(), target.memory->layout(),
                                         kvcache::data_flow::to_remote)
          .value();
  std::vector<std::uint64_t> sent(GetParam().layers.size(), 0);
  auto source_cache = cache_of(source, from);
  const auto tell = [&](std::uint32_t layer, std::uint32_t end) -> result<void> {
    auto plan = geometry.plan({layer, layer + 1}, {sent[layer], end}, from.blocks, to.blocks);
    if (!plan) return fail(plan.error());
    copy(*plan, source, target);
    sent[layer] = end;
    return {};
  };
  const auto first = prefill(*model_, prompt_, 0, 5, sampled, source_cache, tell).value();
  if (geometry.has_state()) copy(geometry.plan_state(from.slot, to.slot).value(), source, target);
  auto cache = cache_of(target, to);
  EXPECT_EQ(continued(first, cache), expected);
}

TEST_P(a_moved_cache, that_lacks_one_layer_of_one_token_is_noticed) {
  const auto expected = alone("fp32");
  const auto source = pool::make(layout_of(GetParam(), {}));
  const auto from = place::scattered(prompt_tokens, 31);
  auto source_cache = cache_of(source, from);
  const auto first = prefill(*model_, prompt_, 0, 0, sampled, source_cache).value();
  const auto target = pool::make(layout_of(GetParam(), {}));
  const auto to = place::scattered(whole, 32);
  move(source, from, target, to, {0, prompt_tokens - 1});
  auto cache = cache_of(target, to);
  EXPECT_NE(continued(first, cache).logits_checksum, expected.logits_checksum);
}

TEST_P(a_moved_cache, gathered_from_all_ranks_of_a_replica_continues_alike) {
  // A rank of the prefill side computes the whole model beside a private cache and keeps its own
  // heads in the pool; a decode replica's ranks together hold every head.
  const auto expected = alone("bf16");
  struct sizes {
    std::uint32_t prefill, decode;
  };
  for (const auto [p, d] : {sizes{1, 1}, sizes{1, 2}, sizes{2, 1}, sizes{2, 2}, sizes{1, 4},
                            sizes{4, 1}, sizes{4, 2}, sizes{2, 4}, sizes{3, 2}}) {
    SCOPED_TRACE(std::to_string(p) + " to " + std::to_string(d) + " ranks");
    std::vector<pool> sources;
    std::vector<place> from;
    generation first;
    for (std::uint32_t rank = 0; rank < p; ++rank) {
      const auto own = pool::make(layout_of(GetParam(), {}, "bf16"));
      sources.push_back(pool::make(layout_of(GetParam(), {}, "bf16", rank, p)));
      from.push_back(place::scattered(prompt_tokens, 40 + rank));
      std::vector<paged_cache> parts{part_of(own, from.back()),
                                     part_of(sources.back(), from.back())};
      auto cache = model_cache::create(std::move(parts)).value();
      first = prefill(*model_, prompt_, 0, 6, sampled, cache).value();
    }
    std::vector<pool> targets;
    std::vector<place> to;
    std::vector<paged_cache> parts;
    for (std::uint32_t rank = 0; rank < d; ++rank) {
      targets.push_back(pool::make(
          layout_of(GetParam(), {.inner = kvcache::block_inner::head_major}, "bf16", rank, d)));
      to.push_back(place::scattered(whole, 50 + rank));
      for (std::uint32_t source = 0; source < p; ++source)
        move(sources[source], from[source], targets.back(), to.back(), {0, prompt_tokens});
      parts.push_back(part_of(targets.back(), to.back()));
    }
    auto cache = model_cache::create(std::move(parts)).value();
    EXPECT_EQ(continued(first, cache), expected);
  }
}

TEST(a_rank_of_a_replica, that_lacks_heads_cannot_continue_alone) {
  const auto p = pool::make(layout_of(tiny_attention(), {}, "bf16", 0, 2));
  std::vector<paged_cache> parts{part_of(p, place::scattered(8, 1))};
  const auto cache = model_cache::create(std::move(parts));
  ASSERT_FALSE(cache);
  EXPECT_EQ(cache.error().code, errc::layout_mismatch);
  EXPECT_THAT(cache.error().message, ::testing::HasSubstr("head 1 of layer 0"));
}

TEST(a_state_sliced_over_ranks, is_gathered_whole) {
  auto model = tiny_hybrid();
  auto shape = cache_shape_of(model, "fp32", block_tokens, pool_blocks, slots);
  const auto sliced = [&](std::uint32_t rank) {
    auto s = cache_shape_of(model, "fp32", block_tokens, pool_blocks, slots, rank, 2);
    for (auto& state : s.states) {
      state.sharding = kvcache::state_sharding::sliced;
      state.bytes /= 2;
    }
    return pool::make(kvcache::make_layout(s, {}).value());
  };
  const auto low = sliced(0);
  const auto high = sliced(1);
  const auto where = place::scattered(16, 1);
  std::vector<paged_cache> half{part_of(low, where)};
  EXPECT_FALSE(model_cache::create(half));
  std::vector<paged_cache> parts{part_of(high, where), part_of(low, where)};
  auto cache = model_cache::create(std::move(parts)).value();
  std::vector<float> state(model.hidden);
  std::iota(state.begin(), state.end(), 1.0f);
  cache.write_state(1, state);  // slot 0 is the input's
  std::vector<float> back(model.hidden);
  cache.read_state(1, back);
  EXPECT_EQ(back, state);
}

class a_reused_prefix : public ::testing::TestWithParam<model_config> {};
INSTANTIATE_TEST_SUITE_P(models, a_reused_prefix,
                         ::testing::Values(tiny_attention(), tiny_latent()));

TEST_P(a_reused_prefix, shortens_prefill_and_transfer_and_changes_no_bit) {
  const auto model = transformer::create(GetParam()).value();
  const auto prompt = a_prompt(prompt_tokens);
  const auto expected =
      generate_alone(*model, prompt, new_tokens, sampled, "bf16", block_tokens).value();
  for (const std::uint32_t prefix : {4u, 8u, 11u, 18u}) {
    // Another request with the same beginning left its blocks at both sides.
    auto other = a_prompt(prompt_tokens, 99);
    std::copy_n(prompt.begin(), prefix, other.begin());
    const auto source = pool::make(layout_of(GetParam(), {}, "bf16"));
    const auto from = place::scattered(prompt_tokens, 61);
    auto source_cache = cache_of(source, from);
    ASSERT_TRUE(prefill(*model, other, 0, 0, sampled, source_cache));
    const auto target =
        pool::make(layout_of(GetParam(), {.order = kvcache::block_order::blocks_first}, "bf16"));
    const auto to = place::scattered(whole, 62);
    move(source, from, target, to, {0, prefix});

    const auto first = prefill(*model, prompt, prefix, 3, sampled, source_cache).value();
    move(source, from, target, to, {prefix, prompt_tokens});
    auto cache = cache_of(target, to);
    EXPECT_EQ(decode(*model, prompt_tokens, new_tokens, first, sampled, cache).value(), expected)
        << "prefix of " << prefix;
  }
}

}  // namespace
}  // namespace troupe::reference
