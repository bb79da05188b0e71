// Keyed values between real processes: a value comes back byte for byte, whatever its size, and a
// view keeps it.

#include <cstring>
#include <string>

#include <sys/mman.h>

#include "hidden_memory.hpp"
#include "noise.hpp"
#include "ways.hpp"

namespace troupe::testing {
namespace {

bool equal(const value_view& view, std::span<const std::byte> value) {
  return view.bytes.size() == value.size() &&
         (value.empty() || std::memcmp(view.bytes.data(), value.data(), value.size()) == 0);
}

class value : public ::testing::TestWithParam<std::string> {
 protected:
  std::unique_ptr<cluster> c;
  std::unique_ptr<forked> store;
  std::unique_ptr<engine> node;
  std::unique_ptr<listener> events;
  cluster_options options{unhurried()};

  void SetUp() override {
    options.backend = GetParam();
    c = std::make_unique<cluster>(options);
    store = c->spawn("store-0", bystander);
    cluster::quiet("prefill-0");
    node = c->start("prefill-0");
    ASSERT_TRUE(node);
    events = std::make_unique<listener>(*node);
    ASSERT_EQ(store->channel().hear().value_or("silence"), "up");
  }
  void TearDown() override {
    events.reset();
    node.reset();
  }
  told& ended(const result<operation_id>& id) {
    static told nothing;
    if (!id) {
      ADD_FAILURE() << to_string(id.error());
      return nothing;
    }
    EXPECT_TRUE(events->outcome(*id)) << "no outcome";
    return events->of(*id);
  }
  told& put(const std::string& peer, const std::string& key, const std::vector<std::byte>& bytes,
            std::chrono::milliseconds ttl = {}) {
    return ended(node->put(peer, key, bytes, ttl));
  }
  told& get(const std::string& peer, const std::string& key) { return ended(node->get(peer, key)); }
  /// Waits until the store has room for it.
  void expect_room(const std::string& key, const std::vector<std::byte>& bytes,
                   std::chrono::milliseconds ttl = {}) {
    troupe::error why;
    EXPECT_TRUE(comes_true(
        [&] {
          const auto& t = put("store-0", key, bytes, ttl);
          why = t.why;
          return t.done == 1 || why.code != errc::pool_exhausted;
        },
        10ms));
    EXPECT_TRUE(why.message.empty()) << to_string(why);
  }
};

TEST_P(value, of_every_size_comes_back_from_a_peer_and_from_oneself) {
  for (const std::string peer : {"store-0", "prefill-0"}) {
    std::uint64_t seed = 1;
    for (const std::size_t size :
         {std::size_t{0}, std::size_t{1}, std::size_t{3305}, std::size_t{32} << 10,
          (std::size_t{32} << 10) + 1, std::size_t{1'600'000}}) {
      SCOPED_TRACE(peer + " " + std::to_string(size));
      const auto key = "k" + std::to_string(size);
      const auto bytes = noise_of(size, ++seed);
      ASSERT_EQ(put(peer, key, bytes).done, 1);
      auto& asked = ended(node->query(peer, key));
      EXPECT_EQ(asked.done, 1) << to_string(asked.why);
      EXPECT_EQ(asked.size, size);
      auto& got = get(peer, key);
      ASSERT_EQ(got.done, 1) << to_string(got.why);
      EXPECT_TRUE(equal(got.value, bytes));
      got.value = {};
      EXPECT_EQ(ended(node->remove(peer, key)).done, 1);
      EXPECT_EQ(get(peer, key).why.code, errc::not_found);
      EXPECT_EQ(ended(node->query(peer, key)).why.code, errc::not_found);
      EXPECT_EQ(ended(node->remove(peer, key)).why.code, errc::not_found);
    }
  }
}

TEST_P(value, under_a_key_that_exists_is_refused_and_changes_nothing) {
  for (const std::string peer : {"store-0", "prefill-0"}) {
    for (const std::size_t size : {std::size_t{100}, std::size_t{100'000}}) {
      SCOPED_TRACE(peer + " " + std::to_string(size));
      const auto key = "k" + std::to_string(size);
      const auto first = noise_of(size, 1);
      ASSERT_EQ(put(peer, key, first).done, 1);
      EXPECT_EQ(put(peer, key, noise_of(size, 2)).why.code, errc::already_exists);
      EXPECT_TRUE(equal(get(peer, key).value, first));
    }
  }
}

TEST_P(value, larger_than_the_store_is_refused) {
  const auto large = noise_of((16u << 20) + 1, 1);
  const auto& t = put("store-0", "large", large);
  EXPECT_EQ(t.failed, 1);
  EXPECT_EQ(t.why.code, errc::pool_exhausted) << to_string(t.why);
  // Nothing of it is left behind: a value that just fits is accepted.
  const auto fits = noise_of(15u << 20, 2);
  EXPECT_EQ(put("store-0", "fits", fits).done, 1);
  EXPECT_TRUE(equal(get("store-0", "fits").value, fits));
}

TEST_P(value, with_a_time_to_live_goes_when_it_is_over) {
  const auto bytes = noise_of(200'000, 1);
  const std::chrono::milliseconds life = 300ms * slowness;
  const auto began = std::chrono::steady_clock::now();
  ASSERT_EQ(put("store-0", "short", bytes, life).done, 1);
  ASSERT_EQ(put("store-0", "small", noise_of(10, 2), life).done, 1);
  ASSERT_EQ(put("store-0", "kept", bytes).done, 1);
  const bool there = ended(node->query("store-0", "short")).done == 1;
  EXPECT_TRUE(there || std::chrono::steady_clock::now() - began >= life) << "before its time";
  events->listen_for(2 * life);
  EXPECT_EQ(get("store-0", "short").why.code, errc::not_found);
  EXPECT_EQ(get("store-0", "small").why.code, errc::not_found);
  EXPECT_EQ(get("store-0", "kept").done, 1);
  // The memory of expired values is free as well: the store has 16 MiB.
  const auto large = noise_of(12u << 20, 3);
  for (int i = 0; i < 4; ++i) expect_room("passing" + std::to_string(i), large, 50ms);
}

TEST_P(value, in_a_view_stays_as_it_was_while_its_key_is_removed_and_replaced) {
  for (const std::string peer : {"store-0", "prefill-0"}) {
    for (const std::size_t size : {std::size_t{100}, std::size_t{100'000}}) {
      SCOPED_TRACE(peer + " " + std::to_string(size));
      const auto first = noise_of(size, 1);
      const auto second = noise_of(size, 2);
      const auto key = "v" + std::to_string(size);
      ASSERT_EQ(put(peer, key, first).done, 1);
      auto view = get(peer, key).value;
      ASSERT_EQ(ended(node->remove(peer, key)).done, 1);
      ASSERT_EQ(put(peer, key, second).done, 1);
      for (int i = 0; i < 20; ++i) {
        const auto other = "other" + std::to_string(size) + std::to_string(i);
        ASSERT_EQ(put(peer, other, second).done, 1);
      }
      EXPECT_TRUE(equal(view, first));
      EXPECT_TRUE(equal(get(peer, key).value, second));
    }
  }
}

TEST_P(value, of_many_keys_at_once_are_not_mixed_up) {
  constexpr int count = 200;
  std::vector<std::vector<std::byte>> values;
  std::vector<operation_id> puts, gets;
  for (int i = 0; i < count; ++i) {
    values.push_back(
        noise_of(i % 3 == 0 ? 40'000u + static_cast<unsigned>(i) : 100u + static_cast<unsigned>(i),
                 static_cast<std::uint64_t>(i)));
  }
  for (int i = 0; i < count; ++i) {
    auto id = node->put("store-0", "m" + std::to_string(i), values[static_cast<std::size_t>(i)]);
    ASSERT_TRUE(id);
    puts.push_back(*id);
  }
  for (const auto id : puts) {
    ASSERT_TRUE(events->outcome(id));
    EXPECT_EQ(events->of(id).done, 1) << to_string(events->of(id).why);
  }
  for (int i = 0; i < count; ++i) {
    auto id = node->get("store-0", "m" + std::to_string(i));
    ASSERT_TRUE(id);
    gets.push_back(*id);
  }
  for (int i = 0; i < count; ++i) {
    const auto id = gets[static_cast<std::size_t>(i)];
    ASSERT_TRUE(events->outcome(id));
    EXPECT_EQ(events->of(id).done, 1) << to_string(events->of(id).why);
    EXPECT_TRUE(equal(events->of(id).value, values[static_cast<std::size_t>(i)])) << i;
  }
}

TEST_P(value, being_put_by_two_at_once_is_taken_from_one_of_them) {
  const auto one = noise_of(500'000, 1);
  const auto two = noise_of(500'000, 2);
  auto first = node->put("store-0", "same", one);
  auto second = node->put("store-0", "same", two);
  const auto& a = ended(first);
  const auto& b = ended(second);
  EXPECT_EQ(a.done + b.done, 1);
  EXPECT_EQ((a.done == 1 ? b : a).why.code, errc::already_exists);
  EXPECT_TRUE(equal(get("store-0", "same").value, a.done == 1 ? one : two));
}

TEST_P(value, of_a_peer_killed_in_the_middle_fails_once_since_its_process_is_gone) {
  const auto large = noise_of(12u << 20, 1);
  const auto small = noise_of(100'000, 2);
  ASSERT_EQ(put("store-0", "there", small).done, 1);
  std::vector<operation_id> live;
  for (int i = 0; i < 8; ++i) {
    auto get = node->get("store-0", "there");
    ASSERT_TRUE(get);
    live.push_back(*get);
  }
  auto put = node->put("store-0", "large", large);
  ASSERT_TRUE(put);
  live.push_back(*put);
  auto query = node->query("store-0", "there");
  ASSERT_TRUE(query);
  live.push_back(*query);
  std::this_thread::sleep_for(500us);
  store->end(SIGKILL);
  for (const auto id : live) ASSERT_TRUE(events->outcome(id)) << "no outcome";
  events->listen_for(200ms);
  for (const auto id : live) {
    const auto& t = events->of(id);
    EXPECT_EQ(t.done + t.failed, 1);
    if (t.failed == 1) {
      EXPECT_EQ(t.why.code, errc::peer_lost) << to_string(t.why);
      EXPECT_EQ(t.why.message.find("silent for "), std::string::npos) << to_string(t.why);
    }
    if (!t.value.bytes.empty()) {
      EXPECT_TRUE(equal(t.value, small));
    }
  }
  // Later operations fail as well, and do not hang.
  const auto& after = ended(node->get("store-0", "there"));
  EXPECT_EQ(after.why.code, errc::peer_lost) << to_string(after.why);
}

TEST_P(value, whose_reader_gives_up_is_not_held_for_it) {
  const auto large = noise_of(12u << 20, 1);
  ASSERT_EQ(put("store-0", "large", large).done, 1);
  for (int i = 0; i < 100; ++i) {
    auto asked = node->get("store-0", "large");
    ASSERT_TRUE(asked);
    std::this_thread::sleep_for(std::chrono::microseconds{i % 5 * 100});
    (void)node->abort(*asked, "changed my mind");
    ASSERT_TRUE(events->outcome(*asked));
    events->of(*asked).value = {};
  }
  // The store has 16 MiB: the next value fits only if the first is neither kept nor pinned.
  ASSERT_EQ(ended(node->remove("store-0", "large")).done, 1);
  expect_room("next", large);
}

TEST_P(value, whose_writer_gives_up_is_whole_or_not_there) {
  const auto large = noise_of(12u << 20, 1);               // the store has 16 MiB: one at a time
  const int rounds = have_verbs() || sanitized ? 20 : 60;  // each moment once, or three times
  for (int i = 0; i < rounds; ++i) {
    SCOPED_TRACE(i);
    const auto key = "k" + std::to_string(i);
    auto asked = node->put("store-0", key, large);
    ASSERT_TRUE(asked);
    std::this_thread::sleep_for(std::chrono::microseconds{i % 20 * 200});
    (void)node->abort(*asked, "changed my mind");
    ASSERT_TRUE(events->outcome(*asked));
    events->listen_for(5ms);  // until the store has received the abort
    auto& found = get("store-0", key);
    if (found.done == 0) {
      EXPECT_TRUE(found.why.code == errc::not_found || found.why.code == errc::pool_exhausted)
          << to_string(found.why);
      continue;
    }
    EXPECT_TRUE(equal(found.value, large)) << "a part of a value is served as the value";
    found.value = {};
    ASSERT_EQ(ended(node->remove("store-0", key)).done, 1);
    // Overwrites the store's memory, so that leftovers cannot be taken for the next value.
    const auto other = noise_of(15u << 20, 2);
    const auto wiped = "w" + std::to_string(i);
    if (put("store-0", wiped, other).done == 1) {
      ASSERT_EQ(ended(node->remove("store-0", wiped)).done, 1);
    }
  }
}

// The outcome returns the memory to the caller: later contents never reach the store, and a put
// that is reported as failed is not stored at all.
TEST_P(value, whose_writer_gives_up_and_writes_something_else_is_stored_as_it_was_or_not_at_all) {
  for (const std::size_t size : {std::size_t{3000}, std::size_t{1} << 20}) {
    const auto given = noise_of(size, 1);
    const auto later = noise_of(size, 2);
    auto memory = given;
    const int rounds = have_verbs() || sanitized ? 60 : 300;
    int stored = 0;
    for (int i = 0; i < rounds; ++i) {
      SCOPED_TRACE(std::to_string(size) + " bytes, round " + std::to_string(i));
      const auto key = std::to_string(size) + "." + std::to_string(i);
      std::memcpy(memory.data(), given.data(), size);
      const auto asked = node->put("store-0", key, memory);
      ASSERT_TRUE(asked);
      std::this_thread::sleep_for(std::chrono::microseconds{i % 60 * 15});
      (void)node->abort(*asked, "changed my mind");
      const auto told = ended(asked);
      std::memcpy(memory.data(), later.data(), size);
      // A query is handled after every message before it.
      ASSERT_EQ(ended(node->query("store-0", "another")).failed, 1);
      auto& found = get("store-0", key);
      ASSERT_EQ(found.done, told.done) << to_string(told.why) << "; " << to_string(found.why);
      if (told.failed == 1) {
        ASSERT_EQ(told.why.code, errc::aborted) << to_string(told.why);
        ASSERT_EQ(found.why.code, errc::not_found) << to_string(found.why);
        continue;
      }
      ++stored;
      ASSERT_TRUE(equal(found.value, given)) << "what is stored is not what was put";
      found.value = {};
      ASSERT_EQ(ended(node->remove("store-0", key)).done, 1);
    }
    std::cout << size << " bytes: " << stored << " of " << rounds << " stored\n";
  }
}

/// A value that is put from blocks of the node's pool.
class value_in_blocks : public value {
 protected:
  static constexpr std::uint32_t count = 128;
  kvcache::allocation blocks;

  /// Allocates consecutive blocks, and fills their first layer.
  std::span<std::byte> allocate(std::uint32_t how_many, const std::vector<std::byte>& bytes) {
    auto got = node->allocate_blocks(how_many);
    EXPECT_TRUE(got) << to_string(got.error());
    blocks = got.value_or(kvcache::allocation{});
    const auto& plane = node->layout().layers.front().planes.front();
    const auto all = node->region(plane.region).value();
    const auto room =
        all.subspan(plane.offset_of(blocks.blocks.front(), 0, 0), how_many * plane.block_stride);
    std::ranges::copy(std::span{bytes}.first(room.size()), room.begin());
    return room;
  }
  void free() { ASSERT_TRUE(node->free_blocks(blocks.owner, blocks.blocks)); }
  std::uint64_t quarantined() { return node->report().pool.blocks_quarantined; }
  void expect_all_free() {
    actors::pool_report pool;
    EXPECT_TRUE(comes_true([&] {
      pool = node->report().pool;
      return pool.blocks_free == pool.blocks_total && pool.blocks_quarantined == 0;
    })) << pool.blocks_free
        << " of " << pool.blocks_total << " blocks are free, " << pool.blocks_quarantined
        << " in quarantine";
  }
};

TEST_P(value_in_blocks, is_stored_as_it_was_though_the_blocks_are_freed_and_used_again) {
  const auto given = noise_of(8u << 20, 1);
  const auto later = noise_of(8u << 20, 2);
  for (const std::uint32_t size : {1u, count}) {
    SCOPED_TRACE(size);
    const auto key = std::to_string(size);
    const auto memory = allocate(size, given);
    store->stop();  // so that it reads only after all of this
    const auto asked = node->put("store-0", key, memory);
    ASSERT_TRUE(asked) << to_string(asked.error());
    free();
    EXPECT_EQ(quarantined(), size);
    (void)allocate(static_cast<std::uint32_t>(node->report().pool.blocks_free), later);
    store->signal(SIGCONT);
    ASSERT_EQ(ended(asked).done, 1) << to_string(ended(asked).why);
    EXPECT_TRUE(equal(get("store-0", key).value, std::span{given}.first(memory.size())));
    free();
    expect_all_free();
  }
}

TEST_P(value_in_blocks, keeps_them_pinned_to_its_end_however_it_ends) {
  const auto given = noise_of(8u << 20, 1);
  const auto put = [&](const std::string& peer, const std::string& key, std::uint32_t size) {
    auto asked = node->put(peer, key, allocate(size, given));
    EXPECT_TRUE(asked) << to_string(asked.error());
    free();
    return asked;
  };
  for (const std::uint32_t size : {1u, count}) {
    SCOPED_TRACE(size);
    const auto key = std::to_string(size);
    EXPECT_EQ(ended(put("prefill-0", key, size)).done, 1);
    EXPECT_EQ(ended(put("prefill-0", key, size)).why.code, errc::already_exists);
    EXPECT_EQ(ended(put("store-0", key, size)).done, 1);
    EXPECT_EQ(ended(put("store-0", key, size)).why.code, errc::already_exists);
    expect_all_free();
    for (const std::string peer : {"store-0", "decode-0"}) {  // decode-0 never came up
      store->stop();
      const auto asked = put(peer, "given up" + key, size);
      EXPECT_EQ(quarantined(), size);
      ASSERT_TRUE(node->abort(*asked, "changed my mind"));
      EXPECT_EQ(ended(asked).why.code, errc::aborted) << to_string(ended(asked).why);
      store->signal(SIGCONT);
      expect_all_free();
    }
  }
}

TEST_P(value_in_blocks, that_nobody_has_allocated_is_refused) {
  const auto memory = allocate(2, noise_of(1u << 20, 1));
  free();
  const auto asked = node->put("store-0", "k", memory);
  ASSERT_FALSE(asked);
  EXPECT_EQ(asked.error().code, errc::not_found) << to_string(asked.error());
}

TEST_P(value, of_one_buffer_can_be_put_twice_at_once) {
  const auto large = noise_of(4u << 20, 3);
  const auto first = node->put("store-0", "first", large);
  const auto second = node->put("store-0", "second", large);
  const auto part = node->put("store-0", "part", std::span{large}.subspan(1u << 20, 1u << 20));
  EXPECT_EQ(ended(first).done, 1) << to_string(ended(first).why);
  EXPECT_EQ(ended(second).done, 1) << to_string(ended(second).why);
  EXPECT_EQ(ended(part).done, 1) << to_string(ended(part).why);
  EXPECT_TRUE(equal(get("store-0", "second").value, large));
  EXPECT_EQ(put("store-0", "later", large).done, 1);
}

TEST_P(value, may_be_kept_for_as_long_as_the_type_can_say) {
  const auto bytes = noise_of(100, 4);
  for (const std::string peer : {"prefill-0", "store-0"}) {
    EXPECT_EQ(put(peer, "long", bytes, std::chrono::milliseconds::max()).done, 1) << peer;
    EXPECT_TRUE(equal(get(peer, "long").value, bytes)) << peer;
  }
}

TEST(value_of_a_hidden_process, is_stored_over_shm_from_memory_that_the_store_may_not_reach) {
  forked trial{[](line_channel& channel) {
    if (!channel.order()) return 0;
    channel.say(give_up_rights() && !reaches_parent() ? "yes" : "no");
    return 0;
  }};
  auto options = unhurried();
  options.backend = "shm";
  const cluster c{options};
  forked store{[&](line_channel& channel) {
    if (!channel.order() || !give_up_rights()) return 1;
    cluster::quiet("store-0");
    const auto node = c.start("store-0");
    return node ? bystander(*node, channel) : 2;
  }};
  const hidden_memory no_longer_reached;
  trial.channel().say("try");
  if (trial.channel().hear() != "yes")
    GTEST_SKIP() << "this process cannot hide its memory from another one";
  store.channel().say("go");
  cluster::quiet("prefill-0");
  const auto node = c.start("prefill-0");
  ASSERT_TRUE(node);
  ASSERT_EQ(store.channel().hear().value_or("silence"), "up");
  listener events{*node};
  for (const std::size_t size : {std::size_t{32} << 10, std::size_t{1'600'000}}) {
    const auto bytes = noise_of(size, size);
    const auto key = std::to_string(size);
    const auto put = node->put("store-0", key, bytes);
    ASSERT_TRUE(put && events.outcome(*put));
    EXPECT_EQ(events.of(*put).done, 1) << to_string(events.of(*put).why);
    const auto got = node->get("store-0", key);
    ASSERT_TRUE(got && events.outcome(*got));
    EXPECT_TRUE(equal(events.of(*got).value, bytes)) << to_string(events.of(*got).why);
  }
  ASSERT_EQ(node->report().links.size(), 1U);
  EXPECT_EQ(node->report().links.front().backend, "shm");
}

/// Values with a short deadline.
class impatient_value : public value {
 protected:
  // Emulated devices move some MiB a second, and every attempt that misses the deadline is lost.
  // There a put to a frozen store ends once the store is shut out.
  impatient_value() {
    const bool emulated = GetParam() == "rdma";
    options.deadline = emulated ? "6s" : "1500ms";
    if (emulated) options.transport_more = ", rdma: {timeout: 19, fence_patience: 6s}";
  }

  // Repeats an operation that a busy machine did not finish in time.
  told& get_in_time(const std::string& key) {
    result<operation_id> asked = node->get("store-0", key);
    (void)comes_true([&] {
      if (ended(asked).why.code != errc::deadline) return true;
      asked = node->get("store-0", key);
      return false;
    });
    return ended(asked);
  }
  bool is_removed(const std::string& key) {
    return comes_true([&] {
      const auto& t = ended(node->remove("store-0", key));
      return t.done == 1 || t.why.code == errc::not_found;
    });
  }
  void expect_stored(result<operation_id> asked, std::string key,
                     std::span<const std::byte> bytes) {
    (void)comes_true([&] {
      // The store may hold an expired value for a moment longer.
      const auto late = [](errc code) {
        return code == errc::deadline || code == errc::pool_exhausted;
      };
      if (!asked || ended(asked).done == 1 || !late(ended(asked).why.code)) return true;
      (void)is_removed(key);
      asked = node->put("store-0", key += "'", bytes);
      return false;
    });
    ASSERT_EQ(ended(asked).done, 1) << to_string(ended(asked).why);
    auto& found = get_in_time(key);
    EXPECT_TRUE(equal(found.value, bytes)) << to_string(found.why);
    found.value = {};
    EXPECT_TRUE(is_removed(key));
  }
};

TEST_P(impatient_value, of_a_node_that_never_came_ends_at_its_deadline) {
  const auto& t = ended(node->get("decode-0", "key"));
  EXPECT_EQ(t.failed, 1);
  EXPECT_EQ(t.why.code, errc::deadline) << to_string(t.why);
}

TEST_P(impatient_value, of_a_peer_that_stands_still_ends_at_its_deadline) {
  const auto large = noise_of(GetParam() == "rdma" ? 2u << 20 : 8u << 20, 1);
  std::string there = "there";
  ASSERT_TRUE(comes_true([&] { return put("store-0", there += "'", large).done == 1; }));
  const auto reading = node->put("store-0", "read by a frozen peer", large);
  store->stop();
  const auto asked = node->get("store-0", there);
  for (const auto& operation : {reading, asked}) {
    const auto& t = ended(operation);
    EXPECT_EQ(t.done + t.failed, 1);
    if (t.failed == 1) {
      EXPECT_EQ(t.why.code, errc::deadline) << to_string(t.why);
    }
  }
  store->signal(SIGCONT);
}

/// Memory pages that can be replaced.
class page_memory {
 public:
  explicit page_memory(std::size_t size)
      : bytes{static_cast<std::byte*>(::mmap(nullptr, size, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
              size} {}
  ~page_memory() { ::munmap(bytes.data(), bytes.size()); }
  page_memory(const page_memory&) = delete;
  page_memory& operator=(const page_memory&) = delete;
  /// Maps other pages at the same address.
  void replace() const {
    ::munmap(bytes.data(), bytes.size());
    ::mmap(bytes.data(), bytes.size(), PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  }

  const std::span<std::byte> bytes;
};

// After the outcome the memory is the caller's, whatever the store does when it wakes.
TEST_P(impatient_value, that_expired_leaves_its_memory_to_the_next_one) {
  constexpr std::size_t size = 6u << 20;
  const auto given = noise_of(size, 1);
  const auto later = noise_of(size, 2);
  const page_memory memory{size};
  int stopped_inside = 0;
  const bool maps = GetParam() == "shm";
  ASSERT_TRUE(is_removed("what is not there"));  // so that the link is up
  // Over shared memory only the store knows whether it is inside a copy. It is not if it was
  // stopped after it had stored the value, or before it began: each round comes nearer to the
  // moment between.
  std::chrono::microseconds lives = 800us * slowness;
  std::chrono::microseconds step = lives / 2;
  bool was_too_long = false;
  const auto last_round = std::chrono::steady_clock::now() + wait_limit / 2;
  for (int i = 0; i < (maps ? 40 : 3) && stopped_inside == 0; ++i) {
    if (std::chrono::steady_clock::now() > last_round) break;
    SCOPED_TRACE(i);
    const auto key = "k" + std::to_string(i);
    std::ranges::copy(given, memory.bytes.begin());
    store->stop();
    const auto first = node->put("store-0", key, memory.bytes);
    std::this_thread::sleep_for(50ms);  // all of its work is queued by then
    store->signal(SIGCONT);
    std::this_thread::sleep_for(lives);
    store->stop();
    const auto told = ended(first);
    const bool too_long = told.done == 1;
    const bool again = i > 0 && too_long == was_too_long;
    step = again ? step * 2 : std::max<std::chrono::microseconds>(step / 2, 100us);
    lives += too_long ? -std::min(step, lives) : step;
    was_too_long = too_long;
    memory.replace();
    std::ranges::copy(later, memory.bytes.begin());
    std::this_thread::sleep_for(20ms);  // copies that no process is inside of have ended by then
    for (const auto& one : node->report().transfers)
      stopped_inside += told.failed == 1 && one.request == key ? 1 : 0;
    const auto begin_inside =
        node->put("store-0", key + ".inside", memory.bytes.subspan(1, 1u << 20));
    const auto begin_all = node->put("store-0", key + ".all", memory.bytes);
    store->signal(SIGCONT);
    expect_stored(begin_inside, key + ".inside", memory.bytes.subspan(1, 1u << 20));
    expect_stored(begin_all, key + ".all", memory.bytes);
    auto& found = get_in_time(key);
    if (told.done == 1) {
      EXPECT_EQ(found.done, 1) << to_string(found.why);
    } else {
      EXPECT_EQ(told.why.code, errc::deadline) << to_string(told.why);
      if (told.why.message.find("not known") == std::string::npos) {
        EXPECT_EQ(found.why.code, errc::not_found) << to_string(found.why);
      }
    }
    if (found.done == 1) {
      EXPECT_TRUE(equal(found.value, given));
      found.value = {};
      EXPECT_TRUE(is_removed(key));
    }
  }
  if (maps && stopped_inside == 0) {
    GTEST_SKIP() << "the store was stopped inside a copy in no round: this machine is too uneven";
  }
}

TEST_P(value, and_placements_that_wait_end_when_the_node_stops) {
  const auto placed = node->place({"r", "prefill", "decode", 3'600'000});
  ASSERT_TRUE(placed);
  const auto asked = node->get("decode-0", "key");  // decode-0 never came up
  ASSERT_TRUE(asked);
  events->listen_for(50ms);
  node->stop();
  for (const auto& operation : {placed, asked}) {
    const auto& t = ended(operation);
    EXPECT_EQ(t.failed, 1);
    EXPECT_EQ(t.why.code, errc::aborted) << to_string(t.why);
  }
}

TEST_P(value, calls_with_senseless_arguments_are_refused_at_once) {
  const auto bytes = noise_of(10, 1);
  EXPECT_EQ(node->put("nobody", "k", bytes).error().code, errc::not_found);
  EXPECT_FALSE(node->get("store-0", ""));
  EXPECT_FALSE(node->get("store-0", std::string(513, 'k')));
  EXPECT_FALSE(node->put("store-0", "k", bytes, -1ms));
  EXPECT_EQ(put("store-0", std::string(512, 'k'), bytes).done, 1);
}

const auto backends = ::testing::ValuesIn(every_backend());
const auto backend_name = [](const ::testing::TestParamInfo<std::string>& which) {
  return which.param;
};
INSTANTIATE_TEST_SUITE_P(every_backend, value, backends, backend_name);
INSTANTIATE_TEST_SUITE_P(every_backend, value_in_blocks, backends, backend_name);
INSTANTIATE_TEST_SUITE_P(every_backend, impatient_value, backends, backend_name);

}  // namespace
}  // namespace troupe::testing
