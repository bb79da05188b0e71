#include "troupe/actors/messages/session_messages.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "troupe/transport/backend.hpp"

#include "allocations.hpp"
#include "fails_with.hpp"
#include "seed.hpp"

namespace troupe::actors {
namespace {

using ::testing::HasSubstr;
using troupe::testing::fails_with;
using frame = std::vector<std::byte>;

class source {
 public:
  explicit source(std::uint64_t seed) : engine_{seed} {}

  template <class T>
  T number() {
    // Small numbers, extremes and everything between.
    switch (engine_() % 4) {
      case 0: return static_cast<T>(engine_() % 10);
      case 1: return std::numeric_limits<T>::max();
      default: return static_cast<T>(engine_());
    }
  }
  bool flag() { return engine_() % 2 == 0; }
  std::size_t size(std::size_t least, std::size_t most) {
    return least + engine_() % (most - least + 1);
  }
  std::string text(std::size_t least, std::size_t most) {
    std::string out(size(least, most), '\0');
    for (auto& c : out) c = static_cast<char>(engine_());
    return out;
  }
  std::vector<std::byte> bytes(std::size_t most) {
    std::vector<std::byte> out(size(0, most));
    for (auto& b : out) b = static_cast<std::byte>(engine_());
    return out;
  }
  template <class T>
  std::vector<T> numbers() {
    std::vector<T> out(size(0, 20));
    for (auto& n : out) n = T{number<std::uint32_t>()};
    return out;
  }
  transport::remote_grant grant() {
    transport::remote_grant g;
    g.id = number<std::uint64_t>();
    g.region = region_id{number<std::uint32_t>()};
    g.owner = incarnation{number<std::uint64_t>()};
    g.transfer = transfer_id{number<std::uint64_t>()};
    g.rights = static_cast<transport::access>(1 + engine_() % 3);
    g.region_size = number<std::uint64_t>();
    g.key = bytes(transport::remote_grant::max_key_size);
    return g;
  }
  std::vector<transport::remote_grant> grants() {
    std::vector<transport::remote_grant> out(size(0, 3));
    for (auto& g : out) g = grant();
    return out;
  }
  std::optional<transport::remote_grant> maybe_grant() {
    if (flag()) return std::nullopt;
    auto g = grant();
    std::vector<extent> listed(size(1, 5));
    for (auto& e : listed) {
      e = {number<std::uint64_t>(), number<std::uint64_t>(), number<std::uint64_t>(),
           number<std::uint32_t>() % 100};
    }
    g.permitted = std::move(listed);
    return g;
  }
  std::vector<kvcache::block_run> blocks() {
    std::vector<kvcache::block_run> runs(size(0, 20));
    for (auto& run : runs) {
      run.begin = {number<std::uint32_t>()};
      const auto most = std::numeric_limits<std::uint32_t>::max() - run.begin.value;
      run.count = flag() ? 1 : static_cast<std::uint32_t>(size(1, std::max(1U, most)));
    }
    return runs;
  }
  std::vector<group_table> groups() {
    std::vector<group_table> out(size(0, 3));
    for (auto& g : out) g = {number<std::uint32_t>(), number<std::uint32_t>(), blocks()};
    return out;
  }
  transfer_id transfer() { return transfer_id{number<std::uint64_t>()}; }
  errc code() {
    return static_cast<errc>(1 + engine_() % static_cast<std::uint8_t>(errc::internal));
  }

  session_message message(std::size_t kind) {
    const auto u32 = [this] { return number<std::uint32_t>(); };
    const auto u64 = [this] { return number<std::uint64_t>(); };
    switch (kind) {
      case 0:
        return transfer_request{
            transfer(),
            text(1, max_request_id),
            flag() ? transfer_mode::write : transfer_mode::read,
            u32(),
            u32(),
            u32(),
            u32(),
            blocks(),
            numbers<std::uint32_t>(),
            grants(),
            u32(),
            flag() ? std::optional{transfer_progress{numbers<std::uint32_t>(), flag()}}
                   : std::nullopt,
            u64(),
            u64(),
            groups(),
            u64(),
            flag() ? std::optional{u32()} : std::nullopt,
            bytes(max_expect),
            flag()};
      case 1:
        return transfer_offer{transfer(), u32(),     blocks(), numbers<std::uint32_t>(),
                              grants(),   bytes(99), groups()};
      case 2:
        return layers_landed{
            transfer(),
            {u32(), u32(), u32(), u32()},
            flag(),
            flag() ? std::optional{seal_notice{u32(), u32(), bytes(99)}} : std::nullopt};
      case 3: return transfer_sealed{transfer(), u32(), u32(), bytes(99)};
      case 4: return transfer_release{transfer()};
      case 5: return transfer_abort{transfer(), code(), text(0, 99), flag()};
      case 6: return transfer_quiescent{transfer()};
      case 7: return store_put{u64(), text(1, max_key), u64(), u64(), bytes(99), maybe_grant()};
      case 8: return store_get{u64(), text(1, max_key), u64()};
      case 9: return store_query{u64(), text(1, max_key)};
      case 10: return store_remove{u64(), text(1, max_key)};
      case 11:
        return store_reply{
            u64(),        flag() ? std::uint8_t{0} : static_cast<std::uint8_t>(code()),
            text(0, 99),  u64(),
            u64(),        bytes(99),
            maybe_grant()};
      case 12: return store_release{u64()};
      case 13: return store_held{u64()};
      case 14: return store_commit{u64()};
      case 15: return transfer_hold{transfer(), text(1, max_request_id), u64()};
      default: return transfer_forget{transfer(), text(1, max_request_id), u64()};
    }
  }

 private:
  std::mt19937_64 engine_;
};

constexpr auto kinds = std::variant_size_v<session_message>;

frame encoded(const session_message& message) {
  auto out = encode(message);
  EXPECT_TRUE(out) << (out ? "" : out.error().message);
  return out ? *std::move(out) : frame{};
}

template <class Number>
void put(frame& f, std::size_t offset, Number value) {
  ASSERT_LE(offset + sizeof value, f.size());
  std::memcpy(f.data() + offset, &value, sizeof value);
}

TEST(session_messages, every_message_comes_back_as_it_was) {
  source from{1};
  for (std::size_t kind = 0; kind < kinds; ++kind) {
    for (int i = 0; i < 500; ++i) {
      const auto message = from.message(kind);
      ASSERT_EQ(message.index(), kind);
      const auto f = encoded(message);
      const auto back = decode(f);
      ASSERT_TRUE(back) << back.error().message;
      ASSERT_TRUE(*back == message) << type_name(message);
      ASSERT_EQ(encoded(*back), f);
    }
  }
}

TEST(session_messages, a_frame_is_what_the_header_says_byte_by_byte) {
  const auto f = encoded(layers_landed{transfer_id{0x0807060504030201u},
                                       {1, 2, 3, 0x04030201u},
                                       true,
                                       seal_notice{5, 6, {std::byte{7}}}});
  const std::vector<unsigned> expected{6, 0, 3, 0,              // version, type
                                       1, 2, 3, 4, 5, 6, 7, 8,  // transfer
                                       1, 0, 0, 0, 2, 0, 0, 0,  // layers
                                       3, 0, 0, 0, 1, 2, 3, 4,  // tokens
                                       1,                       // state
                                       1,                       // with a seal
                                       5, 0, 0, 0, 6, 0, 0, 0,  // tokens, batches
                                       1, 0, 0, 0, 7};          // aux
  ASSERT_EQ(f.size(), expected.size());
  for (std::size_t i = 0; i < f.size(); ++i)
    EXPECT_EQ(std::to_integer<unsigned>(f[i]), expected[i]) << i;

  const auto abort = encoded(transfer_abort{transfer_id{7}, errc::deadline, "no", true});
  const std::vector<unsigned> expected_abort{
      6, 0, 6, 0, 7,   0,   0, 0, 0, 0, 0, 0, static_cast<unsigned>(errc::deadline),
      2, 0, 0, 0, 'n', 'o', 1};
  ASSERT_EQ(abort.size(), expected_abort.size());
  for (std::size_t i = 0; i < abort.size(); ++i) {
    EXPECT_EQ(std::to_integer<unsigned>(abort[i]), expected_abort[i]) << i;
  }

  const auto offer = encoded(transfer_offer{
      transfer_id{7}, 80, {{{3}, 1}, {{2}, 1}, {{100}, 4}, {{104}, 1}}, {9}, {}, {}});
  const std::vector<unsigned> expected_offer{
      6,    0, 2, 0, 7, 0, 0, 0, 0, 0, 0, 0, 80, 0, 0, 0, 4, 0, 0, 0,  // four runs of blocks
      12,                         // run 3 x 1: delta 3 from 0, folded 6
      6,                          // run 2 x 1: 4 expected, delta -2, folded 3
      0x85, 3, 2,                 // run 100 x 4: 3 expected, delta 97, folded 194 (389, two digits)
      0,                          // run 104 x 1: as expected
      1,    0, 0, 0, 9, 0, 0, 0,  // slots
      0,    0, 0, 0, 0, 0, 0, 0,  // no grants, no aux
      0,    0, 0, 0};             // no groups
  ASSERT_EQ(offer.size(), expected_offer.size());
  for (std::size_t i = 0; i < offer.size(); ++i) {
    EXPECT_EQ(std::to_integer<unsigned>(offer[i]), expected_offer[i]) << i;
  }
}

TEST(session_messages, a_frame_cut_off_anywhere_is_refused_with_a_sentence_that_names_the_message) {
  source from{2};
  for (std::size_t kind = 0; kind < kinds; ++kind) {
    for (int i = 0; i < 5; ++i) {
      const auto message = from.message(kind);
      const auto f = encoded(message);
      for (std::size_t size = 0; size < f.size(); ++size) {
        const auto back = decode(std::span{f}.first(size));
        ASSERT_FALSE(back) << type_name(message) << " cut at " << size;
        ASSERT_EQ(back.error().code, errc::out_of_range);
        if (size < 4) continue;
        ASSERT_THAT(back.error().message, HasSubstr(std::string{type_name(message)}));
      }
    }
  }
}

TEST(session_messages, a_byte_behind_the_last_field_is_refused) {
  source from{3};
  for (std::size_t kind = 0; kind < kinds; ++kind) {
    auto f = encoded(from.message(kind));
    f.push_back(std::byte{0});
    const auto back = decode(f);
    ASSERT_THAT(back, fails_with(errc::out_of_range, HasSubstr("ends 1 bytes before its frame")))
        << kind;
  }
}

TEST(session_messages, random_bytes_are_refused_or_are_a_message_that_encodes_to_them) {
  std::mt19937_64 engine{4};
  std::size_t messages = 0;
  for (int i = 0; i < 300'000; ++i) {
    frame f(engine() % (i % 3 == 0 ? 96 : 32));
    // Half of the frames are all noise, half mostly zeros, which more often form valid lengths.
    const auto byte = [&] { return i % 2 == 0 || engine() % 8 == 0 ? engine() % 256 : 0; };
    for (auto& b : f) b = static_cast<std::byte>(byte());
    if (f.size() >= 4) {
      put<std::uint16_t>(f, 0, session_version);
      put<std::uint16_t>(f, 2, static_cast<std::uint16_t>(1 + engine() % kinds));
    }
    const auto back = decode(f);
    if (!back) {
      ASSERT_FALSE(back.error().message.empty());
      continue;
    }
    ++messages;
    ASSERT_EQ(encoded(*back), f);
  }
  EXPECT_GT(messages, 1000u);
}

TEST(session_messages, a_message_with_any_one_byte_changed_is_refused_or_encodes_to_what_came) {
  source from{5};
  std::mt19937_64 engine{6};
  for (std::size_t kind = 0; kind < kinds; ++kind) {
    for (int i = 0; i < 50; ++i) {
      const auto f = encoded(from.message(kind));
      for (int change = 0; change < 40; ++change) {
        auto changed = f;
        changed[engine() % f.size()] = static_cast<std::byte>(engine());
        const auto back = decode(changed);
        if (!back) continue;
        ASSERT_EQ(encoded(*back), changed) << type_name(*back);
      }
    }
  }
}

TEST(session_messages, another_version_is_refused_naming_both) {
  auto f = encoded(transfer_release{transfer_id{1}});
  put<std::uint16_t>(f, 0, 9);
  const auto back = decode(f);
  ASSERT_THAT(back, fails_with(errc::version_mismatch, HasSubstr("9")));
  EXPECT_THAT(back.error().message, HasSubstr(std::to_string(session_version)));
}

TEST(session_messages, an_unknown_type_is_refused) {
  for (const auto type :
       {std::uint16_t{0}, static_cast<std::uint16_t>(kinds + 1), std::uint16_t{65535}}) {
    auto f = encoded(transfer_release{transfer_id{1}});
    put(f, 2, type);
    const auto back = decode(f);
    ASSERT_THAT(back, fails_with(errc::out_of_range, HasSubstr("type " + std::to_string(type))));
  }
}

/// Offsets of the mode, the number of blocks and other fields in this request's frame.
struct request_frame {
  frame bytes;
  std::size_t request{4 + 8}, mode{request + 4 + 1}, blocks{mode + 1 + 16}, slots{blocks + 4},
      grants{slots + 4};
};
request_frame small_request() {
  transfer_request r;
  r.request = std::string{"r"};
  return {encoded(r)};
}

TEST(session_messages, an_enum_out_of_range_is_refused_naming_the_field) {
  for (const int number : {0, 3, 255}) {
    auto r = small_request();
    r.bytes[r.mode] = static_cast<std::byte>(number);
    const auto back = decode(r.bytes);
    ASSERT_THAT(back, fails_with(errc::out_of_range, HasSubstr("transfer_request.mode")));
  }
  auto abort = encoded(transfer_abort{transfer_id{1}, errc::aborted, "x"});
  for (const int number : {0, static_cast<int>(errc::internal) + 1, 255}) {
    abort[12] = static_cast<std::byte>(number);
    const auto back = decode(abort);
    ASSERT_FALSE(back);
    EXPECT_THAT(back.error().message, HasSubstr("transfer_abort.code"));
  }
  abort[12] = static_cast<std::byte>(errc::aborted);
  abort.back() = std::byte{2};
  const auto refusal = decode(abort);
  ASSERT_FALSE(refusal);
  EXPECT_THAT(refusal.error().message, HasSubstr("transfer_abort.refused"));
  auto landed = encoded(layers_landed{});
  landed.back() = std::byte{2};
  const auto back = decode(landed);
  ASSERT_FALSE(back);
  EXPECT_THAT(back.error().message, HasSubstr("layers_landed.seal"));
  landed.back() = std::byte{0};
  landed[landed.size() - 2] = std::byte{2};
  const auto state = decode(landed);
  ASSERT_FALSE(state);
  EXPECT_THAT(state.error().message, HasSubstr("layers_landed.state"));
  // An access right that does not exist.
  transfer_request with_grant;
  with_grant.request = "r";
  with_grant.grants.push_back(source{1}.grant());
  with_grant.grants[0].rights = static_cast<transport::access>(4);
  const auto refused = encode(with_grant);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, HasSubstr("grant.rights"));
}

TEST(session_messages, a_count_that_the_frame_cannot_hold_is_refused_before_anything_is_allocated) {
  const auto r = small_request();
  const std::vector<std::pair<std::size_t, std::string>> counts{
      {r.request, "request"}, {r.blocks, "blocks"}, {r.slots, "state_slots"}, {r.grants, "grants"}};
  for (const auto& [offset, name] : counts) {
    for (const std::uint32_t count : {100u, 1u << 16, 1u << 30, 1u << 31, 0xFFFFFFFFu}) {
      auto changed = r.bytes;
      put(changed, offset, count);
      troupe::testing::allocations.largest = 0;
      const auto back = decode(changed);
      EXPECT_LT(troupe::testing::allocations.largest, 512u)
          << name << " " << count;  // the sentence
      ASSERT_THAT(back, fails_with(errc::out_of_range, HasSubstr("transfer_request." + name)))
          << name << " " << count;
    }
  }
}

TEST(session_messages, what_a_decoded_frame_allocates_is_bounded_by_the_frame) {
  // As many grants as fit into a frame, without keys.
  transfer_request r;
  r.request = std::string{"r"};
  const transport::remote_grant g;
  r.grants.assign((transport::link::max_frame - 100) / 41, g);
  auto f = encoded(r);
  ASSERT_LE(f.size(), transport::link::max_frame);
  auto back = decode(f);
  ASSERT_TRUE(back);
  EXPECT_LE(std::get<transfer_request>(*back).grants.capacity() * sizeof g, 3 * f.size());
  // As many blocks, one byte each; then a few bytes that name four billion blocks.
  r.grants.clear();
  r.blocks.assign(transport::link::max_frame - 100, {{7}, 1});
  f = encoded(r);
  back = decode(f);
  ASSERT_TRUE(back);
  const auto& blocks = std::get<transfer_request>(*back).blocks;
  EXPECT_EQ(blocks, r.blocks);
  EXPECT_LE(blocks.capacity() * sizeof blocks.front(), 8 * f.size());
  r.blocks.assign(1, {{0}, std::numeric_limits<std::uint32_t>::max()});
  f = encoded(r);
  troupe::testing::allocations.largest = 0;
  back = decode(f);
  ASSERT_TRUE(back);
  EXPECT_EQ(std::get<transfer_request>(*back).blocks, r.blocks);
  EXPECT_LT(troupe::testing::allocations.largest, 512U);
}

TEST(session_messages, a_block_of_a_shuffled_pool_takes_three_bytes) {
  std::vector<std::uint32_t> pool(500'000);
  std::iota(pool.begin(), pool.end(), 0U);
  std::shuffle(pool.begin(), pool.end(), std::mt19937_64{troupe::testing::printed_seed()});
  transfer_request r;
  r.request = std::string{"r"};
  const auto without = encoded(r).size();
  for (std::uint32_t i = 0; i < 62'500; ++i) r.blocks.push_back({{pool[i]}, 1});
  EXPECT_LE(encoded(r).size() - without, 62'500U * 3);
  // A million tokens in consecutive blocks.
  r.blocks.assign(1, {{1000}, 62'500});
  EXPECT_LE(encoded(r).size() - without, 8U);
}

TEST(session_messages,
     a_long_prompt_takes_eight_bytes_a_block_to_move_whatever_its_layers_and_regions) {
  // 131,072 tokens in shuffled blocks of 16; 80 layers, each a region of its own for K and for V.
  constexpr std::uint32_t block_count = 8192;
  constexpr std::uint32_t layers = 80;
  std::vector<std::uint32_t> pool(10 * block_count);
  std::iota(pool.begin(), pool.end(), 0U);
  std::shuffle(pool.begin(), pool.end(), std::mt19937_64{troupe::testing::printed_seed()});
  transfer_request r;
  r.request = std::string(max_request_id, 'r');
  for (std::uint32_t i = 0; i < block_count; ++i) r.blocks.push_back({{pool[i]}, 1});
  r.grants.resize(2 * std::size_t{layers});
  for (auto& g : r.grants) g.key.resize(24);
  auto bytes = encoded(r).size();
  // Each layer is a batch of its own.
  bytes += layers * encoded(layers_landed{}).size();
  bytes += encoded(transfer_sealed{}).size() + encoded(transfer_release{}).size();
  EXPECT_LE(bytes, 8U * block_count);
}

TEST(session_messages, blocks_that_are_none_are_refused) {
  transfer_request r;
  r.request = std::string{"r"};
  r.blocks.assign(1, {{0}, 1});
  const auto one = encoded(r);
  const auto at = small_request().blocks + 4;  // the run of block 0, which is encoded as 0
  ASSERT_EQ(one[at], std::byte{0});
  const auto with = [&](std::initializer_list<int> digits) {
    auto changed = one;
    changed.erase(changed.begin() + static_cast<std::ptrdiff_t>(at));
    std::vector<std::byte> bytes;
    for (const auto digit : digits) bytes.push_back(static_cast<std::byte>(digit));
    changed.insert(changed.begin() + static_cast<std::ptrdiff_t>(at), bytes.begin(), bytes.end());
    return decode(changed);
  };
  ASSERT_TRUE(with({8}));
  EXPECT_EQ(std::get<transfer_request>(*with({8})).blocks,
            (std::vector<kvcache::block_run>{{{2}, 1}}));
  for (const auto& bad : {std::initializer_list<int>{2},         // block -1
                          {0xfc, 0xff, 0xff, 0xff, 0x7f},        // after the last block number
                          {0x81, 0x80, 0x80, 0x80, 0x80, 0x01},  // six bytes
                          {0x01, 0xfe, 0xff, 0xff, 0xff, 0x0f},  // as many as there are numbers
                          {0x88, 0x00},                          // 4 encoded in two digits
                          {1, 0xff, 0xff, 0xff, 0xff, 0x0f}}) {  // a run beyond the last number
    const auto back = with(bad);
    ASSERT_THAT(back, fails_with(errc::out_of_range, HasSubstr("transfer_request.blocks")));
  }
}

TEST(session_messages, a_field_beyond_its_bound_is_refused_by_both_sides_naming_it) {
  const auto refused = [](const session_message& m, const char* field) {
    const auto out = encode(m);
    ASSERT_THAT(out, fails_with(errc::out_of_range, HasSubstr(std::string{type_name(m)}))) << field;
    EXPECT_THAT(out.error().message, HasSubstr(field));
  };
  transfer_request r;
  refused(r, "request");
  r.request.assign(max_request_id + 1, 'x');
  refused(r, "request");
  r.request = std::string{"r"};
  r.grants.assign(1, source{1}.grant());
  r.grants[0].key.resize(transport::remote_grant::max_key_size + 1);
  refused(r, "grant.key");
  r.grants.clear();
  r.blocks.resize(transport::link::max_frame + 1);
  refused(r, "blocks");
  r.blocks.resize(transport::link::max_frame);
  refused(r, "frame");
  r.blocks.assign(1, {{5}, 0});
  refused(r, "blocks");
  r.blocks.assign(1, {{0xFFFF'FFFFU}, 2});
  refused(r, "blocks");
  r.blocks.clear();
  r.expect.resize(max_expect + 1);
  refused(r, "expect");
  r.expect.clear();
  r.groups.resize(max_groups + 1);
  refused(r, "groups");
  r.groups.assign(1, {0, 0, {{{5}, 0}}});
  refused(r, "group.blocks");
  refused(transfer_hold{}, "request");
  refused(transfer_forget{{}, std::string(max_request_id + 1, 'x')}, "request");
  transport::remote_grant on_value;
  refused(store_put{1, "k", 0, 0, {}, on_value}, "grant.extents");
  on_value.permitted = std::vector<extent>(transport::remote_grant::max_extents + 1);
  refused(store_put{1, "k", 0, 0, {}, on_value}, "grant.extents");
  refused(transfer_offer{{}, 0, {}, {}, {}, frame(max_aux + 1)}, "aux");
  refused(transfer_sealed{{}, 0, 0, frame(max_aux + 1)}, "aux");
  refused(layers_landed{{}, {}, false, seal_notice{0, 0, frame(max_aux + 1)}}, "seal.aux");
  refused(transfer_abort{{}, errc::aborted, std::string(max_sentence + 1, 'x')}, "reason");
  refused(transfer_abort{{}, static_cast<errc>(0), ""}, "code");
  refused(store_put{1, "", 0, 0, {}, {}}, "key");
  refused(store_put{1, std::string(max_key + 1, 'k'), 0, 0, {}, {}}, "key");
  refused(store_put{1, "k", 0, 0, frame(max_inline + 1), {}}, "value");
  refused(store_get{1, "", 0}, "key");
  refused(store_query{1, std::string(max_key + 1, 'k')}, "key");
  refused(store_remove{1, ""}, "key");
  refused(store_reply{1, 250, "", 0, 0, {}, {}}, "failed");
  refused(store_reply{1, 0, std::string(max_sentence + 1, 'x'), 0, 0, {}, {}}, "sentence");

  // The decoder has the same bound: a hand-made frame with a key one byte too long.
  auto f = encoded(store_query{1, std::string(max_key, 'k')});
  f.push_back(std::byte{'k'});
  put<std::uint32_t>(f, 12, max_key + 1);
  const auto back = decode(f);
  ASSERT_FALSE(back);
  EXPECT_THAT(back.error().message, HasSubstr("store_query.key"));
}

TEST(session_messages, what_is_at_its_bound_is_accepted) {
  for (const session_message& m : std::initializer_list<session_message>{
           store_put{1, std::string(max_key, 'k'), max_inline, 0, frame(max_inline), {}},
           transfer_sealed{{}, 0, 0, frame(max_aux)},
           transfer_abort{{}, errc::internal, std::string(max_sentence, 'x')}}) {
    const auto back = decode(encoded(m));
    ASSERT_TRUE(back) << back.error().message;
    EXPECT_TRUE(*back == m);
  }
  EXPECT_FALSE(decode(frame(transport::link::max_frame + 1)));
}

TEST(session_messages, an_abort_keeps_its_reason_and_cuts_a_long_one_at_a_character) {
  EXPECT_EQ(make_abort(transfer_id{5}, {errc::deadline, "late"}),
            (transfer_abort{transfer_id{5}, errc::deadline, "late"}));
  EXPECT_EQ(make_refusal(transfer_id{5}, {errc::out_of_range, "less"}),
            (transfer_abort{transfer_id{5}, errc::out_of_range, "less", true}));
  std::string text(max_sentence - 1, 'a');
  text += "\xC3\xA9\xC3\xA9";  // two characters of two bytes; the first begins at the last byte
  const auto cut = make_abort(transfer_id{5}, {errc::aborted, text});
  EXPECT_EQ(cut.reason, std::string(max_sentence - 1, 'a'));
  EXPECT_TRUE(encode(cut));
}

TEST(session_messages, every_message_says_its_name_and_its_route) {
  EXPECT_EQ(type_name(transfer_request{}), "transfer_request");
  EXPECT_EQ(type_name(layers_landed{}), "layers_landed");
  EXPECT_EQ(type_name(store_release{}), "store_release");
  EXPECT_EQ(type_name(store_held{}), "store_held");
  EXPECT_EQ(type_name(store_commit{}), "store_commit");
  EXPECT_EQ(type_name(transfer_hold{}), "transfer_hold");
  EXPECT_EQ(type_name(transfer_forget{}), "transfer_forget");
  EXPECT_EQ(route_of(transfer_quiescent{transfer_id{9}}), transfer_id{9});
  EXPECT_EQ(route_of(transfer_offer{transfer_id{9}, 0, {}, {}, {}, {}}), transfer_id{9});
  EXPECT_EQ(route_of(store_put{9, "k", 0, 0, {}, {}}), transfer_id{9}) << "of its operation";
}

}  // namespace
}  // namespace troupe::actors
