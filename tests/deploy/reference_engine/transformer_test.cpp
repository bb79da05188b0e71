#include "troupe/deploy/reference_engine/transformer.hpp"

#include <cmath>
#include <limits>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cache_fixture.hpp"

namespace troupe::reference {
namespace {

constexpr std::uint32_t new_tokens = 12;
const sampling sampled{1.0f, 5, false};

generation alone(const transformer& model, const std::vector<token>& prompt,
                 const std::string& dtype = "fp32") {
  return generate_alone(model, prompt, new_tokens, sampled, dtype, block_tokens).value();
}

class every_model : public ::testing::TestWithParam<model_config> {
 protected:
  std::shared_ptr<const transformer> model_ = transformer::create(GetParam()).value();
};

INSTANTIATE_TEST_SUITE_P(models, every_model,
                         ::testing::Values(tiny_attention(), tiny_latent(), tiny_hybrid()),
                         name_of_model);

TEST_P(every_model, built_twice_from_one_seed_computes_the_same_bits) {
  const auto twin = transformer::create(GetParam()).value();
  const auto prompt = a_prompt(21);
  EXPECT_EQ(alone(*model_, prompt), alone(*twin, prompt));
}

TEST_P(every_model, of_another_seed_computes_something_else) {
  auto config = GetParam();
  ++config.seed;
  const auto other = transformer::create(config).value();
  const auto prompt = a_prompt(21);
  EXPECT_NE(alone(*model_, prompt).tokens, alone(*other, prompt).tokens);
}

TEST_P(every_model, looks_at_its_whole_prompt) {
  // A change of any token changes everything after it: no part of the cache is unused.
  const auto prompt = a_prompt(21);
  const auto expected = alone(*model_, prompt);
  for (std::size_t i = 0; i < prompt.size(); ++i) {
    auto other = prompt;
    other[i] = (other[i] + 1) % 256;
    EXPECT_NE(alone(*model_, other).logits_checksum, expected.logits_checksum) << "token " << i;
  }
}

TEST_P(every_model, chooses_varied_tokens) {
  const auto text = alone(*model_, a_prompt(21));
  EXPECT_GE(std::set<token>(text.tokens.begin(), text.tokens.end()).size(), 6u);
}

TEST_P(every_model, computes_the_same_bits_in_chunks_as_whole) {
  const auto prompt = a_prompt(23);
  const auto expected = alone(*model_, prompt);
  for (const std::uint32_t chunk : {1u, 2u, 3u, 4u, 7u, 16u, 22u, 23u, 100u}) {
    const auto p = pool::make(layout_of(GetParam(), {}));
    auto cache = cache_of(p, place::scattered(40, chunk));
    auto text = prefill(*model_, prompt, 0, chunk, sampled, cache).value();
    text = decode(*model_, 23, new_tokens, text, sampled, cache).value();
    EXPECT_EQ(text, expected) << "chunks of " << chunk;
  }
}

TEST_P(every_model, computes_the_same_bits_in_every_arrangement_and_type) {
  const auto prompt = a_prompt(19);
  for (const auto* dtype : {"fp32", "bf16", "fp16", "fp8"}) {
    const auto expected = alone(*model_, prompt, dtype);
    for (const auto& how : all_arrangements()) {
      const auto p = pool::make(layout_of(GetParam(), how, dtype));
      auto cache = cache_of(p, place::scattered(31, 3));
      auto text = prefill(*model_, prompt, 0, 5, sampled, cache).value();
      text = decode(*model_, 19, new_tokens, text, sampled, cache).value();
      EXPECT_EQ(text, expected) << dtype << " " << name_of(how);
    }
  }
}

TEST_P(every_model, announces_each_layer_of_each_chunk_once_in_order) {
  const auto p = pool::make(layout_of(GetParam(), {}));
  auto cache = cache_of(p, place::scattered(10, 1));
  std::vector<std::pair<std::uint32_t, std::uint32_t>> told;
  const auto tell = [&](std::uint32_t layer, std::uint32_t end) -> result<void> {
    told.emplace_back(end, layer);
    return {};
  };
  ASSERT_TRUE(prefill(*model_, a_prompt(10), 0, 4, sampled, cache, tell));
  std::vector<std::pair<std::uint32_t, std::uint32_t>> expected;
  for (const std::uint32_t end : {4u, 8u, 10u})
    for (std::uint32_t layer = 0; layer < GetParam().layers.size(); ++layer)
      expected.emplace_back(end, layer);
  EXPECT_EQ(told, expected);
}

TEST_P(every_model, never_touches_an_announced_layer_of_a_chunk_again) {
  // Announced bytes may already be in flight: they must not change until the end of the prompt.
  const auto p = pool::make(layout_of(GetParam(), {}));
  const auto where = place::scattered(10, 1);
  auto cache = cache_of(p, where);
  struct told {
    std::uint32_t layer, end;
    std::vector<float> keys;
  };
  std::vector<told> all;
  const auto keys_of = [&](std::uint32_t layer, std::uint32_t end) {
    const auto& shape = GetParam().layers[layer];
    std::vector<float> keys(std::size_t{end} * shape.head_dim);
    cache.read(layer, 0, 0, end, keys);
    return keys;
  };
  const auto tell = [&](std::uint32_t layer, std::uint32_t end) -> result<void> {
    if (GetParam().layers[layer].kind != kvcache::layer_kind::recurrent)
      all.push_back({layer, end, keys_of(layer, end)});
    return {};
  };
  ASSERT_TRUE(prefill(*model_, a_prompt(10), 0, 3, sampled, cache, tell));
  ASSERT_FALSE(all.empty());
  for (const auto& t : all) EXPECT_EQ(t.keys, keys_of(t.layer, t.end)) << t.layer << " " << t.end;
}

TEST_P(every_model, notices_any_changed_byte_of_its_cache) {
  const auto p = pool::make(layout_of(GetParam(), {}));
  const auto where = place::scattered(20, 2);
  auto cache = cache_of(p, where);
  const auto first = prefill(*model_, a_prompt(9), 0, 0, sampled, cache).value();
  // Use a copy of the pool each time, since decoding advances a recurrence in place.
  const auto decoded_with = [&](std::uint32_t region, std::uint64_t at, std::byte change) {
    auto again = pool::make(p.memory->layout());
    for (std::size_t i = 0; i < p.bytes.size(); ++i)
      std::copy(p.bytes[i].begin(), p.bytes[i].end(), again.bytes[i].begin());
    again.bytes[region][at] ^= change;
    auto copied = cache_of(again, where);
    return decode(*model_, 9, 2, first, sampled, copied).value().logits_checksum;
  };
  const auto good = decoded_with(0, 0, std::byte{0});
  // The sign of the last head's first element, of every token of every plane, and of the states.
  const auto& layout = p.memory->layout();
  for (const auto& layer : layout.layers)
    for (const auto& plane : layer.planes)
      for (std::uint32_t t = 0; t < 9; ++t) {
        const auto at = plane.base + where.blocks[t / block_tokens].value * plane.block_stride +
                        t % block_tokens * plane.token_stride +
                        (plane.heads - 1) * plane.head_stride + 3;
        EXPECT_NE(decoded_with(plane.region, at, std::byte{0x80}), good) << "token " << t;
      }
  for (const auto& state : layout.states)
    EXPECT_NE(decoded_with(state.region, state.base + where.slot * state.slot_stride + 3,
                           std::byte{0x80}),
              good)
        << state.name;
}

TEST_P(every_model, refuses_what_does_not_fit) {
  const auto p = pool::make(layout_of(GetParam(), {}));
  auto cache = cache_of(p, place::scattered(8, 1));
  const auto code = [](const auto& r) { return r ? errc{} : r.error().code; };
  EXPECT_EQ(code(model_->forward(a_prompt(9), 0, cache)), errc::out_of_range);
  EXPECT_EQ(code(model_->forward(a_prompt(1), 8, cache)), errc::out_of_range);
  EXPECT_EQ(code(model_->forward(a_prompt(1), std::numeric_limits<std::uint32_t>::max(), cache)),
            errc::out_of_range);
  EXPECT_EQ(code(model_->forward({}, 0, cache)), errc::invalid_config);
  const std::vector<token> foreign{static_cast<token>(vocabulary)};
  EXPECT_EQ(code(model_->forward(foreign, 0, cache)), errc::invalid_config);
  const auto other = transformer::create(attention_model(5, 2, 8, 1)).value();
  EXPECT_EQ(code(other->forward(a_prompt(1), 0, cache)), errc::layout_mismatch);
}

TEST_P(every_model, stops_when_the_callback_fails) {
  const auto p = pool::make(layout_of(GetParam(), {}));
  auto cache = cache_of(p, place::scattered(8, 1));
  int told = 0;
  const auto stop = [&](std::uint32_t, std::uint32_t) -> result<void> {
    ++told;
    return fail(errc::aborted, "enough");
  };
  const auto text = prefill(*model_, a_prompt(8), 0, 2, sampled, cache, stop);
  ASSERT_FALSE(text);
  EXPECT_EQ(text.error(), (error{errc::aborted, "enough"}));
  EXPECT_EQ(told, 1);
}

TEST_P(every_model, is_known_from_its_layout) {
  const auto config = model_for(layout_of(GetParam(), {}), GetParam().seed).value();
  EXPECT_EQ(config.layers, GetParam().layers);
  if (GetParam().layers.front().kind == kvcache::layer_kind::attention) {
    EXPECT_EQ(config, GetParam());
  }
  EXPECT_TRUE(transformer::create(config));
}

TEST(a_model_config, that_cannot_be_run_is_refused_by_field) {
  const auto message = [](model_config c) {
    const auto r = transformer::create(std::move(c));
    return r ? std::string{} : r.error().message;
  };
  auto config = tiny_attention();
  config.layers[1].kv_heads = 3;
  EXPECT_THAT(message(config), ::testing::HasSubstr("model.layers[1]: kv_heads 3"));
  config = tiny_attention();
  config.layers[2].head_dim = 10;
  EXPECT_THAT(message(config), ::testing::HasSubstr("head_dim 10"));
  config = tiny_attention();
  config.head_dim = 7;
  EXPECT_THAT(message(config), ::testing::HasSubstr("even"));
  config = tiny_attention();
  config.layers.clear();
  EXPECT_THAT(message(config), ::testing::HasSubstr("layers"));
  config = tiny_latent();
  config.layers[0].head_dim = 4;
  EXPECT_THAT(message(config), ::testing::HasSubstr("latent of 4"));
}

TEST(choosing_a_token, is_greedy_at_temperature_zero_and_repeatable_above) {
  std::vector<float> logits(vocabulary, 0.0f);
  logits[42] = 3.0f;
  EXPECT_EQ(choose_token(logits, {}, 0), 42);
  std::set<token> seen;
  for (std::uint32_t position = 0; position < 200; ++position) {
    const sampling how{1.0f, 9, true};
    const token t = choose_token(logits, how, position);
    EXPECT_EQ(t, choose_token(logits, how, position));
    EXPECT_GE(t, 0x20);
    EXPECT_LT(t, 0x7f);
    seen.insert(t);
  }
  EXPECT_GT(seen.size(), 40u);
}

TEST(stored_numbers, are_rounded_to_the_nearest_and_survive_a_second_trip) {
  const auto trip = [](number_format format, float value) {
    std::byte bytes[4]{};
    store_numbers(format, {&value, 1}, bytes);
    float back{};
    load_numbers(format, bytes, {&back, 1});
    return back;
  };
  struct step {
    number_format format;
    float relative;
  };
  for (const auto& [format, relative] :
       {step{number_format::fp32, 0.0f}, step{number_format::bf16, 0x1p-8f},
        step{number_format::fp16, 0x1p-11f}, step{number_format::fp8, 0x1p-4f}}) {
    number_source source{3};
    for (int i = 0; i < 2000; ++i) {
      const float value = (source.uniform() - 0.5f) * 16.0f;
      const float back = trip(format, value);
      const float smallest = format == number_format::fp8 ? 0x1p-6f : 0x1p-14f;
      EXPECT_LE(std::fabs(back - value), relative * std::max(std::fabs(value), smallest));
      EXPECT_EQ(trip(format, back), back);
    }
    EXPECT_EQ(trip(format, 0.0f), 0.0f);
    EXPECT_EQ(trip(format, -1.5f), -1.5f);
  }
  // Ties go to the even neighbour: 1 + half a step down, 1 + one and a half steps up.
  EXPECT_EQ(trip(number_format::fp16, 1.0f + 0x1p-11f), 1.0f);
  EXPECT_EQ(trip(number_format::fp16, 1.0f + 0x3p-11f), 1.0f + 0x1p-9f);
  EXPECT_EQ(trip(number_format::bf16, 1.0f + 0x1p-8f), 1.0f);
  EXPECT_EQ(trip(number_format::fp16, 1e9f), 65504.0f);
  EXPECT_EQ(trip(number_format::fp8, -1e9f), -448.0f);
}

}  // namespace
}  // namespace troupe::reference
