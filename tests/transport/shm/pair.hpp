#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/transport/endpoint.hpp"

#include "waiting.hpp"

namespace troupe::transport::shm_test {

using namespace std::chrono_literals;

/// Records what a link reports.
class recorder final : public link_sink {
 public:
  void on_up() override {
    const std::lock_guard lock{mutex_};
    ups_ += 1;
  }
  void on_completion(completion done) override {
    const std::lock_guard lock{mutex_};
    completions_.push_back(std::move(done));
  }
  void on_frame(std::span<const std::byte> frame) override {
    const std::lock_guard lock{mutex_};
    frames_.emplace_back(reinterpret_cast<const char*>(frame.data()), frame.size());
  }
  void on_quiescent(transfer_id transfer) override {
    {
      const std::lock_guard lock{mutex_};
      quiescent_.push_back(transfer);
    }
    if (when_quiescent) when_quiescent(transfer);
  }
  void on_broken(troupe::error why) override {
    const std::lock_guard lock{mutex_};
    broken_.push_back(std::move(why));
  }

  /// Called from within the callback. Set it before any fence.
  std::function<void(transfer_id)> when_quiescent;

  [[nodiscard]] int ups() const { return get(ups_); }
  [[nodiscard]] std::vector<completion> completions() const { return get(completions_); }
  [[nodiscard]] std::vector<std::string> frames() const { return get(frames_); }
  [[nodiscard]] std::vector<transfer_id> quiescent() const { return get(quiescent_); }
  [[nodiscard]] bool is_quiescent(transfer_id transfer) const {
    const auto all = quiescent();
    return std::ranges::find(all, transfer) != all.end();
  }
  [[nodiscard]] std::vector<troupe::error> broken() const { return get(broken_); }

 private:
  template <class T>
  T get(const T& what) const {
    const std::lock_guard lock{mutex_};
    return what;
  }

  mutable std::mutex mutex_;
  int ups_{0};
  std::vector<completion> completions_;
  std::vector<std::string> frames_;
  std::vector<transfer_id> quiescent_;
  std::vector<troupe::error> broken_;
};

/// Checks more often than other tests do: some of these tests wait thousands of times.
inline bool eventually(const std::function<bool()>& what) {
  const auto look = [&] {
    if (what()) return true;
    std::this_thread::sleep_for(200us);
    return false;
  };
  return testing::comes_true(look, 0ms);
}

inline std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span{text.data(), text.size()});
}

/// One node of a test.
struct node {
  explicit node(std::uint64_t incarnation_number, std::uint32_t workers = 1,
                std::function<void(const std::string&)> notice = {})
      : self{incarnation_number} {
    endpoint_options options;
    options.self = self;
    options.num_workers = workers;
    options.notice = std::move(notice);
    auto made = endpoint::create(std::move(options));
    EXPECT_TRUE(made) << made.error().message;
    place = std::move(*made);
  }

  void open(incarnation peer, link_role role,
            std::chrono::milliseconds timeout = 10 * testing::wait_limit) {
    said = std::make_shared<recorder>();
    link_options options;
    options.role = role;
    options.peer = peer;
    options.connect_timeout = timeout;
    auto made = place->open(backend_kind::shm, options, said);
    ASSERT_TRUE(made) << made.error().message;
    to_peer = std::move(*made);
  }

  region_id allocate(std::uint64_t size) {
    auto made = place->allocate(size, "test");
    EXPECT_TRUE(made) << made.error().message;
    return made ? *made : region_id{};
  }
  [[nodiscard]] std::span<std::byte> memory(region_id region) const {
    return *place->bytes(region);
  }

  ~node() {
    if (to_peer) to_peer->close();
    to_peer.reset();
  }

  incarnation self;
  std::unique_ptr<endpoint> place;
  std::shared_ptr<recorder> said;
  std::shared_ptr<link> to_peer;
};

/// Two nodes in this process with a link that is up.
struct pair {
  node dialer{101};
  node acceptor{202};

  pair() {
    dialer.open(acceptor.self, link_role::initiator);
    acceptor.open(dialer.self, link_role::acceptor);
    EXPECT_TRUE(acceptor.to_peer->connect(dialer.to_peer->offer()));
    EXPECT_TRUE(dialer.to_peer->connect(acceptor.to_peer->offer()));
    EXPECT_TRUE(eventually([&] { return dialer.said->ups() == 1 && acceptor.said->ups() == 1; }));
  }
};

inline batch simple_batch(std::uint64_t id, direction dir, region_id local, remote_grant grant,
                          std::vector<segment> segments, std::string_view frame = {}) {
  batch made{.id = batch_id{id}, .transfer = grant.transfer, .dir = dir, .pieces = {}, .frame = {}};
  made.pieces.push_back(
      {local, std::make_shared<const remote_grant>(std::move(grant)), std::move(segments)});
  const auto bytes = bytes_of(frame);
  made.frame.assign(bytes.begin(), bytes.end());
  return made;
}

}  // namespace troupe::transport::shm_test
