// The number of our instructions to move 64 KiB blocks over rdma, without those of the verbs
// library and the device: both ends of a link in one process, over a fake device (fake_verbs.hpp).
// Run it under callgrind, which writes one file for each part; bench/run does that. The name of a
// part contains its number of blocks.
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <valgrind/callgrind.h>

#include "fake_verbs.hpp"
#include "link_node.hpp"

namespace {

using namespace troupe;
using namespace troupe::bench;
using namespace troupe::transport;

constexpr std::uint64_t block = 64 << 10;
constexpr std::uint64_t blocks_per_batch = 64;
constexpr int batches = 50;
constexpr std::uint64_t region_bytes = 2 * blocks_per_batch * block;

/// One end of a link to the other in the same process.
struct end {
  std::shared_ptr<node_sink> said{std::make_shared<node_sink>()};
  std::unique_ptr<endpoint> place;
  std::shared_ptr<transport::link> wire;
  region_id region;

  end(incarnation self, incarnation peer, link_role role) {
    endpoint_options options;
    options.self = self;
    options.num_workers = 0;
    place = need(endpoint::create(std::move(options)), "endpoint");
    region = need(place->allocate(region_bytes, "bench"), "memory");
    wire = need(place->open(backend_kind::rdma, {.role = role, .peer = peer}, said), "link");
  }
};

class two_ends {
 public:
  two_ends() {
    const auto offer = target_.wire->offer();
    need(target_.wire->connect(initiator_.wire->offer()), "connect");
    need(initiator_.wire->connect(offer), "connect");
    while (!initiator_.said->up || !target_.said->up) round();
    grant_ = std::make_shared<remote_grant>(
        need(target_.wire->grant(target_.region, {{0, region_bytes, 0, 1}}, access::read_write,
                                 transfer_id{1}),
             "grant"));
    initiator_.said->when_completed = [this] { ++completed_; };
    for (int i = 0; i < 16; ++i) round();  // the keys to the grant arrive
  }

  /// Posts `batches` batches with blocks `distance` bytes apart, and waits for each.
  void move(const char* what, direction dir, std::uint64_t distance, bool notify) {
    one(
        dir, distance, notify, [](const auto& work) { work(); }, [](const auto& work) { work(); });
    const auto counted = [](const std::function<void()>& work) {
      collect_instructions(true);
      work();
      collect_instructions(false);
    };
    const auto not_counted = [](const std::function<void()>& work) { work(); };
    for (const bool posting : {true, false}) {
      CALLGRIND_ZERO_STATS;
      for (int i = 0; i < batches; ++i) {
        posting ? one(dir, distance, notify, counted, not_counted)
                : one(dir, distance, notify, not_counted, counted);
      }
      const auto name = std::to_string(batches * blocks_per_batch) +
                        " blocks: " + (posting ? "post" : "complete") + " " + what;
      CALLGRIND_DUMP_STATS_AT(name.c_str());
      std::printf("%s\n", name.c_str());
    }
  }

  /// Posts writes of 8 bytes with a frame, one at a time: measures posting one, and taking one at
  /// the target.
  void small(const char* what) {
    constexpr int count = 1000;
    for (const bool posting : {true, false}) {
      CALLGRIND_ZERO_STATS;
      for (int i = 0; i < count; ++i) {
        auto work = new_batch(batch_id{++last_}, direction::write);
        work.pieces.push_back({initiator_.region, grant_, {{0, 0, 8, 0, 0, 1}}});
        work.frame.assign(8, std::byte{1});
        collect_instructions(posting);
        need(initiator_.wire->post(std::move(work)), "post");
        collect_instructions(!posting);
        target_.wire->poll();
        collect_instructions(false);
        for (int n = 0; n < 4; ++n) round();
      }
      const auto name =
          std::to_string(count) + " messages: " + (posting ? "post" : "complete") + " " + what;
      CALLGRIND_DUMP_STATS_AT(name.c_str());
      std::printf("%s\n", name.c_str());
    }
  }

 private:
  using meter = std::function<void(const std::function<void()>&)>;

  void round() {
    initiator_.wire->poll();
    target_.wire->poll();
  }

  void one(direction dir, std::uint64_t distance, bool notify, const meter& posting,
           const meter& completing) {
    auto work = new_batch(batch_id{++last_}, dir);
    std::vector<segment> segments;
    segments.reserve(blocks_per_batch);
    for (std::uint64_t i = 0; i < blocks_per_batch; ++i) {
      segments.push_back({i * distance, i * distance, block, 0, 0, 1});
    }
    work.pieces.push_back({initiator_.region, grant_, std::move(segments)});
    if (notify) work.frame.assign(48, std::byte{1});
    const auto before = completed_;
    posting([&] { need(initiator_.wire->post(std::move(work)), "post"); });
    completing([&] {
      while (completed_ == before) initiator_.wire->poll();
    });
    for (int i = 0; i < 4; ++i) round();
  }

  end initiator_{incarnation{1}, incarnation{2}, link_role::initiator};
  end target_{incarnation{2}, incarnation{1}, link_role::acceptor};
  std::shared_ptr<const remote_grant> grant_;
  std::uint64_t last_{0};
  std::uint64_t completed_{0};
};

}  // namespace

int main() {
  two_ends ends;
  ends.move("64 KiB x 64, each by itself, write with notice", direction::write, 2 * block, true);
  ends.move("64 KiB x 64, each by itself, read", direction::read, 2 * block, false);
  ends.move("64 KiB x 64, one after the other, write with notice", direction::write, block, true);
  ends.small("8 B, write with notice, at the target");
  std::fflush(stdout);
  std::_Exit(0);
}
