#pragma once

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "troupe/transport/endpoint.hpp"

#include "backends.hpp"
#include "gpu_memory.hpp"
#include "noise.hpp"

namespace troupe::transport::contract {

using namespace std::chrono_literals;
using clock = std::chrono::steady_clock;

/// Records what a link reports. Fails the test when calls overlap or come twice.
class recorder final : public link_sink {
 public:
  void on_up() override {
    const inside here{*this};
    ++ups;
  }
  void on_completion(completion done) override {
    const inside here{*this};
    const std::lock_guard lock{mutex_};
    EXPECT_TRUE(seen_.insert(done.id.value).second)
        << "batch " << done.id.value << " completed twice";
    completions.push_back(std::move(done));
  }
  void on_frame(std::span<const std::byte> frame) override {
    const inside here{*this};
    std::string text{reinterpret_cast<const char*>(frame.data()), frame.size()};
    if (when_frame) when_frame(text);
    const std::lock_guard lock{mutex_};
    frames.push_back(std::move(text));
  }
  void on_quiescent(transfer_id transfer) override {
    const inside here{*this};
    const std::lock_guard lock{mutex_};
    quiescent.insert(transfer.value);
  }
  void on_broken(troupe::error why) override {
    const inside here{*this};
    const std::lock_guard lock{mutex_};
    EXPECT_FALSE(broken.has_value()) << "broken twice";
    broken = std::move(why);
    completions_when_broken = completions.size();
  }

  [[nodiscard]] std::size_t completed() const {
    return locked([&] { return completions.size(); });
  }
  [[nodiscard]] std::size_t framed() const {
    return locked([&] { return frames.size(); });
  }
  [[nodiscard]] bool is_broken() const {
    return locked([&] { return broken.has_value(); });
  }
  [[nodiscard]] bool is_quiescent(transfer_id t) const {
    return locked([&] { return quiescent.contains(t.value); });
  }
  [[nodiscard]] bool has(std::uint64_t id) const {
    const std::lock_guard lock{mutex_};
    return seen_.contains(id);
  }
  [[nodiscard]] completion outcome_of(std::uint64_t id) const {
    const std::lock_guard lock{mutex_};
    for (const auto& done : completions) {
      if (done.id.value == id) return done;
    }
    ADD_FAILURE() << "batch " << id << " did not complete";
    return {};
  }

  /// Forgets the reports so far. A batch that completes twice is still noticed.
  void forget() {
    const std::lock_guard lock{mutex_};
    completions.clear();
    frames.clear();
    quiescent.clear();
  }

  std::atomic<int> ups{0};
  std::function<void(const std::string&)> when_frame;  ///< set before traffic
  std::vector<completion> completions;
  std::vector<std::string> frames;
  std::set<std::uint64_t> quiescent;
  std::optional<troupe::error> broken;
  std::size_t completions_when_broken{0};

 private:
  template <class F>
  std::invoke_result_t<F> locked(F&& f) const {
    const std::lock_guard lock{mutex_};
    return f();
  }
  struct inside {
    explicit inside(recorder& r) : who{r} {
      EXPECT_FALSE(who.busy_.exchange(true)) << "two callbacks of one link overlap";
    }
    ~inside() { who.busy_.store(false); }
    recorder& who;
  };
  std::atomic<bool> busy_{false};
  mutable std::mutex mutex_;
  std::set<std::uint64_t> seen_;
};

/// One node: an endpoint with one region and one end of the link.
struct end {
  incarnation self;
  std::shared_ptr<void> pinned;  ///< outlives the endpoint
  std::unique_ptr<endpoint> place;
  std::shared_ptr<recorder> sink{std::make_shared<recorder>()};
  std::shared_ptr<link> wire;
  region_id region;
  std::span<std::byte> memory;
};

/// Connects the dialer last, because it speaks first. Returns before the link is up.
inline void join(const end& initiator, const end& acceptor) {
  const auto dialer = initiator.wire->offer();
  const auto other = acceptor.wire->offer();
  EXPECT_TRUE(acceptor.wire->connect(dialer));
  EXPECT_TRUE(initiator.wire->connect(other));
}

/// Two nodes in this process, joined by a link that is up.
class pair {
 public:
  static constexpr std::uint64_t region_size = std::uint64_t{16} << 20;

  explicit pair(const variant& with, std::function<void(link_options&)> adjust = {},
                std::chrono::milliseconds fence_patience = longer_than_any_wait)
      : with_{with} {
    a.self = incarnation{0xa11ce};
    b.self = incarnation{0xb0b};
    make(a, 'a', fence_patience);
    make(b, 'b', fence_patience);
    open(a, b.self, link_role::initiator, adjust);
    open(b, a.self, link_role::acceptor, adjust);
    join(a, b);
    EXPECT_TRUE(until([&] { return a.sink->ups == 1 && b.sink->ups == 1; })) << "not up";
  }
  ~pair() {
    if (a.wire) a.wire->close();
    if (b.wire) b.wire->close();
  }

  /// Drives both ends until `done` returns true. Returns false if it never does.
  bool until(const std::function<bool()>& done) {
    for (const auto last = testing::end_of_wait(); !done(); drive()) {
      if (clock::now() > last) return false;
    }
    return true;
  }
  void drive_for(std::chrono::milliseconds time) {
    for (const auto last = clock::now() + time; clock::now() < last;) drive();
  }

  /// A grant of `owner`'s region to the other end.
  std::shared_ptr<const remote_grant> grant(end& owner, access rights, grant_scope scope,
                                            byte_set permitted = {{0, region_size, 0, 1}}) {
    auto given = owner.wire->grant(owner.region, std::move(permitted), rights, scope);
    // An exception fails only this test; the other tests of this process still run.
    if (!given) throw std::runtime_error("no grant: " + to_string(given.error()));
    return std::make_shared<const remote_grant>(std::move(*given));
  }

  /// Posts and waits for the outcome.
  completion run(end& from, batch work) {
    const auto id = work.id.value;
    const auto before = from.sink->completed();
    auto ok = from.wire->post(std::move(work));
    EXPECT_TRUE(ok) << (ok ? "" : to_string(ok.error()));
    if (!ok) return {};
    EXPECT_TRUE(until([&] { return from.sink->completed() > before; }));
    return from.sink->outcome_of(id);
  }

  batch make_batch(const end& from, direction dir, std::shared_ptr<const remote_grant> grant,
                   std::vector<segment> segments, std::string_view frame = {}) {
    batch work{.id = batch_id{++last_batch_},
               .transfer = grant->transfer,
               .dir = dir,
               .pieces = {},
               .frame = {}};
    work.pieces.push_back({from.region, std::move(grant), std::move(segments)});
    const auto bytes = std::as_bytes(std::span{frame.data(), frame.size()});
    work.frame.assign(bytes.begin(), bytes.end());
    return work;
  }

  end a;
  end b;

 private:
  void drive() {
    if (with_.workers == 0) {
      a.place->poll();
      b.place->poll();
    } else {
      std::this_thread::sleep_for(50us);
    }
  }
  void make(end& e, char side, std::chrono::milliseconds fence_patience) {
    endpoint_options options;
    options.self = e.self;
    options.num_workers = with_.workers;
    options.peer_silence = longer_than_any_wait;
    options.rdma.device = rdma_devices(side, with_.lanes);
    suit_emulation(options.rdma);
    options.rdma.fence_patience = fence_patience;
    if (with_.gpus != gpu_ends::none) options.xgmi = xgmi::options_under_test();
    auto made = endpoint::create(std::move(options));
    ASSERT_TRUE(made) << to_string(made.error());
    e.place = std::move(*made);
    auto region = on_gpu(with_, side) ? allocate_for_gpu(e, side == 'a' ? 0 : 1)
                                      : e.place->allocate(region_size, "test");
    ASSERT_TRUE(region) << to_string(region.error());
    e.region = *region;
    e.memory = *e.place->bytes(*region);
  }
  /// Memory that both a GPU and this test can access: a double's, or pinned host memory.
  result<region_id> allocate_for_gpu(end& e, std::uint32_t gpu) const {
    if (!xgmi::on_real_gpus()) return e.place->allocate_on_gpu(gpu, region_size, "test");
    const auto site = xgmi::site_under_test();
    gpu = std::min<std::uint32_t>(gpu, static_cast<std::uint32_t>(site->bus_ids().size()) - 1);
    auto made = site->runtime->allocate_pinned(gpu, region_size);
    if (!made) return fail(made.error());
    e.pinned = {made->host,
                [site, pinned = *made](void*) { site->runtime->release_pinned(pinned); }};
    std::memset(made->host, 0, region_size);
    if (with_.kind == backend_kind::xgmi) {
      return e.place->register_memory({made->host, region_size}, "test");
    }
    // Registers the memory as if only the GPU could access it. No NIC looks at the descriptor here.
    const int none = ::memfd_create("no dma-buf", MFD_CLOEXEC);
    auto region = e.place->register_memory({made->host, region_size}, "test", {.dmabuf = none});
    ::close(none);
    return region;
  }
  void open(end& e, incarnation peer, link_role role,
            const std::function<void(link_options&)>& adjust) {
    link_options options{.role = role, .peer = peer, .lanes = with_.lanes};
    options.connect_timeout = longer_than_any_wait;
    if (adjust) adjust(options);
    auto opened = e.place->open(with_.kind, options, e.sink);
    ASSERT_TRUE(opened) << to_string(opened.error());
    e.wire = std::move(*opened);
  }

  const variant with_;
  std::uint64_t last_batch_{0};
};

inline void fill(std::span<std::byte> memory, std::uint32_t seed) {
  troupe::testing::fill_with_noise(memory, seed);
}

inline void expect_moved(std::span<const std::byte> from, std::span<const std::byte> to,
                         std::span<const segment> segments, direction dir) {
  for (const auto& s : segments) {
    for (std::uint32_t i = 0; i < s.count; ++i) {
      const auto local = s.local_offset + i * s.local_stride;
      const auto remote = s.remote_offset + i * s.remote_stride;
      const auto source = dir == direction::write ? local : remote;
      const auto target = dir == direction::write ? remote : local;
      ASSERT_EQ(std::memcmp(from.data() + source, to.data() + target, s.length), 0)
          << "segment of " << s.length << " bytes at " << source << ", repetition " << i;
    }
  }
}

/// For megabytes in an emulated machine, where a comparison byte by byte is too slow.
inline bool all_are(std::span<const std::byte> memory, std::byte value) {
  return memory.empty() || (memory.front() == value &&
                            std::memcmp(memory.data(), memory.data() + 1, memory.size() - 1) == 0);
}
inline bool is_in(std::span<const std::byte> memory, std::byte value) {
  return std::memchr(memory.data(), std::to_integer<int>(value), memory.size()) != nullptr;
}

inline errc code_of(const result<void>& r) {
  return r ? errc{} : r.error().code;
}

class backend_contract : public ::testing::TestWithParam<variant> {};

/// Behaviour that may depend on the number of lanes and on who drives them: bytes, their order,
/// fences.
class any_lanes : public backend_contract {};

inline constexpr transfer_id t1{0x1111};
inline constexpr transfer_id t2{0x2222};

}  // namespace troupe::transport::contract
