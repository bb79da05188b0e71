#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "troupe/io/agent.hpp"

#include "waiting.hpp"

namespace troupe::io {

using namespace std::chrono_literals;

/// A time-out that must not fire: even a busy machine ends a test sooner.
inline const std::chrono::milliseconds long_time{10 * testing::wait_limit};

inline std::vector<std::byte> bytes_of(std::string_view text) {
  const auto raw = std::as_bytes(std::span{text.data(), text.size()});
  return {raw.begin(), raw.end()};
}
inline std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
template <class T>
errc code_of(const result<T>& what) {
  return what ? errc{} : what.error().code;
}

struct way {
  transport::backend_kind kind{transport::backend_kind::shm};
  std::uint32_t threads{1};
};
inline std::string name_of(const ::testing::TestParamInfo<way>& info) {
  return std::string{to_string(info.param.kind)} +
         (info.param.threads == 0 ? "_polled" : "_threads" + std::to_string(info.param.threads));
}
inline std::vector<way> all_ways() {
  if (testing::have_verbs()) {
    return {{transport::backend_kind::rdma, 1}, {transport::backend_kind::rdma, 2}};
  }
  std::vector<way> all{{transport::backend_kind::shm, 1},
                       {transport::backend_kind::tcp, 1},
                       {transport::backend_kind::tcp, 2}};
#if !defined(__SANITIZE_THREAD__)
  all.push_back({transport::backend_kind::shm, 0});
  all.push_back({transport::backend_kind::tcp, 0});
#endif
  return all;
}

/// One agent with one memory of its own, with a poisoned guard around its bytes.
struct agent_node {
  static constexpr std::size_t size = std::size_t{4} << 20;
  static constexpr std::size_t guard = 4096;

  agent_node(std::string name, const way& how,
             const std::function<void(agent_options&)>& adjust = {}) {
    agent_options options;
    options.name = std::move(name);
    options.backends = {how.kind};
    options.threads = how.threads;
    options.lanes = how.threads > 1 ? 2 : 1;
    options.peer_silence = long_time;
    options.connect_timeout = long_time;
    if (adjust) adjust(options);
    auto made = agent::create(std::move(options));
    EXPECT_TRUE(made) << (made ? "" : to_string(made.error()));
    self = std::move(*made);
    const auto all = self->allocate(size + 2 * guard, "guarded", transport::access::read_write);
    EXPECT_TRUE(all) << (all ? "" : to_string(all.error()));
    whole = *self->bytes(*all);
    std::memset(whole.data(), 0xa5, whole.size());
    memory = whole.subspan(guard, size);
    kv = self->register_memory(memory, "kv", transport::access::read_write).value();
  }
  ~agent_node() {
    for (const auto side : {whole.first(guard), whole.last(guard)}) {
      const auto harmed = std::ranges::count_if(side, [](auto b) { return b != std::byte{0xa5}; });
      EXPECT_EQ(harmed, 0) << "a guard was written";
    }
  }
  agent_node(const agent_node&) = delete;
  agent_node& operator=(const agent_node&) = delete;

  void fill(std::uint32_t seed) const {
    std::uint64_t now = seed * 0x9e3779b97f4a7c15ULL + 1;
    for (std::size_t i = 0; i + 8 <= memory.size(); i += 8) {
      now = now * 6364136223846793005ULL + 1442695040888963407ULL;
      std::memcpy(memory.data() + i, &now, 8);
    }
  }
  [[nodiscard]] std::uint64_t address(std::size_t offset = 0) const {
    return reinterpret_cast<std::uintptr_t>(memory.data() + offset);
  }

  std::unique_ptr<agent> self;
  std::span<std::byte> whole, memory;
  memory_id kv;
};

/// Two agents of this process that know each other's memory.
struct agent_pair {
  explicit agent_pair(const way& with, const std::function<void(agent_options&)>& adjust = {})
      : how{with}, a{"a", how, adjust}, b{"b", how, adjust} {
    b_of_a = a.self->add_peer(b.self->describe().value()).value();
    a_of_b = b.self->add_peer(a.self->describe().value()).value();
  }

  /// Drives both agents until `done` returns true. Returns false if it never does.
  bool until(const std::function<bool()>& done) const {
    for (const auto last = testing::end_of_wait(); !done();) {
      if (std::chrono::steady_clock::now() > last) return false;
      if (how.threads > 0) {
        std::this_thread::sleep_for(100us);
      } else if (!a.self->poll() && !b.self->poll()) {
        std::this_thread::yield();
      }
    }
    return true;
  }
  bool connected() {
    // A polled agent makes progress only when driven, so this drives both.
    return until([&] { return a.self->connect(b_of_a, 0ms).has_value(); });
  }
  status ended(const agent_node& at, transfer_handle which) const {
    EXPECT_TRUE(until([&] {
      const auto now = at.self->status_of(which);
      return !now || now->now != state::active;
    })) << "transfer "
        << which.value << " did not end";
    return at.self->status_of(which).value_or(status{});
  }
  /// A transfer of blocks of one size between the beginnings of `a`'s and `b`'s memory.
  transfer_handle make_blocks(transport::direction dir, std::uint64_t count, std::uint64_t length,
                              merge_entries merge = merge_entries::no) {
    std::vector<piece> local;
    std::vector<entry> remote;
    for (std::uint64_t i = 0; i < count; ++i) {
      local.push_back({a.kv, i * length, length});
      remote.push_back({b.address(i * length), length});
    }
    const auto from = a.self->prepare(local).value();
    const auto to = a.self->prepare(b_of_a, remote).value();
    auto made = a.self->make(dir, from, {}, to, {}, merge).value();
    EXPECT_TRUE(a.self->release(from));
    EXPECT_TRUE(a.self->release(to));
    return made;
  }
  /// All notices that arrive at `at`, until there are `count`.
  std::vector<std::string> notices(const agent_node& at, std::size_t count) const {
    std::vector<std::string> all;
    EXPECT_TRUE(until([&] {
      for (const auto& one : at.self->take_notices(1000)) all.push_back(text_of(one.bytes));
      return all.size() >= count;
    })) << all.size()
        << " notices of " << count;
    return all;
  }

  const way how;
  agent_node a, b;
  peer_id b_of_a, a_of_b;
};

class agents_test : public ::testing::TestWithParam<way> {};

}  // namespace troupe::io
