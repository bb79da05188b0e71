// Rows of the `shm` backend: two processes, ours and the rival alternating in one run, medians.
//
// Physical limits, so that a row can be judged without its rival:
// - in cache, one core moves what `memcpy` moves: the rival is the limit;
// - cold, one core moves what bare streaming stores over the same segments move: printed as
// `limit`;
// - latency: a flag needs one cache line to cross between cores, one way. A 4 KiB write needs that
//   and a copy of 64 lines of data.
//
// Prints a JSON array of {name, ours, rival, ratio, unit, wanted, better, limit, of_limit};
// `wanted` is of the ratio, null in a row without a limit.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/shm/copy.hpp"

#include "processes.hpp"

namespace {

using namespace troupe;
using namespace troupe::transport;

constexpr incarnation initiator_life{11};
constexpr incarnation target_life{22};
constexpr transfer_id transfer{1};
constexpr std::uint64_t pool_bytes = std::uint64_t{512} << 20;  // per side: 1 GiB in all
constexpr std::size_t blocks_per_batch = 256;

using troupe::bench::die;
using troupe::bench::median;

template <class T>
T need(result<T> got) {
  if (!got) die(to_string(got.error()));
  return std::move(*got);
}

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// -- the pair of processes

class counting_sink final : public link_sink {
 public:
  std::function<void(std::span<const std::byte>)> frame_handler;
  std::uint64_t frames{0};
  std::uint64_t completions{0};
  bool up{false};
  bool broken{false};

  void on_up() override { up = true; }
  void on_completion(completion done) override {
    if (done.failure) die("a batch failed: " + to_string(*done.failure));
    ++completions;
  }
  void on_frame(std::span<const std::byte> frame) override {
    ++frames;
    if (frame_handler) frame_handler(frame);
  }
  void on_quiescent(transfer_id) override {}
  void on_broken(troupe::error) override { broken = true; }
};

struct node {
  std::unique_ptr<endpoint> place;
  std::shared_ptr<counting_sink> sink = std::make_shared<counting_sink>();
  std::shared_ptr<troupe::transport::link> to_peer;

  node(incarnation self, incarnation peer, link_role role) {
    endpoint_options options;
    options.self = self;
    options.num_workers = 0;
    place = need(endpoint::create(std::move(options)));
    link_options wanted;
    wanted.role = role;
    wanted.peer = peer;
    wanted.connect_timeout = std::chrono::seconds{20};
    to_peer = need(place->open(backend_kind::shm, wanted, sink));
  }
  ~node() {
    to_peer->close();
    to_peer.reset();
  }
};

void send_bytes(int fd, std::span<const std::byte> bytes) {
  const std::uint64_t size = bytes.size();
  if (::write(fd, &size, sizeof size) != sizeof size ||
      ::write(fd, bytes.data(), size) != static_cast<ssize_t>(size)) {
    die("the other process is gone");
  }
}

std::vector<std::byte> receive_bytes(int fd) {
  std::uint64_t size = 0;
  if (::recv(fd, &size, sizeof size, MSG_WAITALL) != sizeof size) die("the other process is gone");
  std::vector<std::byte> bytes(size);
  if (::recv(fd, bytes.data(), size, MSG_WAITALL) != static_cast<ssize_t>(size)) {
    die("the other process is gone");
  }
  return bytes;
}

void join(node& self, incarnation peer, int line) {
  send_bytes(line, self.to_peer->offer().payload);
  const link_offer theirs{.kind = backend_kind::shm, .owner = peer, .payload = receive_bytes(line)};
  if (auto ok = self.to_peer->connect(theirs); !ok) die(to_string(ok.error()));
  while (!self.sink->up) self.place->poll();
}

/// A minimal grant over one whole region.
struct flat_grant {
  std::uint64_t id, owner, region_size;
  std::uint32_t region;
  std::array<std::byte, 16> key;
};

void send_grant(int line, const remote_grant& grant) {
  flat_grant flat{grant.id, grant.owner.value, grant.region_size, grant.region.value, {}};
  std::ranges::copy(grant.key, flat.key.begin());
  send_bytes(line, std::as_bytes(std::span{&flat, 1}));
}

std::shared_ptr<const remote_grant> receive_grant(int line) {
  const auto bytes = receive_bytes(line);
  flat_grant flat{};
  std::memcpy(&flat, bytes.data(), sizeof flat);
  remote_grant grant;
  grant.id = flat.id;
  grant.owner = incarnation{flat.owner};
  grant.region = region_id{flat.region};
  grant.region_size = flat.region_size;
  grant.transfer = transfer;
  grant.rights = access::read_write;
  grant.permitted = {{.offset = 0, .length = flat.region_size}};
  grant.key.assign(flat.key.begin(), flat.key.end());
  return std::make_shared<const remote_grant>(std::move(grant));
}

struct alignas(64) flags {
  alignas(64) std::atomic<std::uint64_t> ping;
  alignas(64) std::atomic<std::uint64_t> pong;
  alignas(64) std::atomic<std::uint32_t> phase;  ///< what the target must do
};

enum phase : std::uint32_t { serve = 0, echo_flags, echo_frames, leave };

void run_target(int line, flags& shared) {
  node self{target_life, initiator_life, link_role::acceptor};
  join(self, initiator_life, line);
  const auto region = need(self.place->allocate(pool_bytes, "target"));
  std::ranges::fill(need(self.place->bytes(region)), std::byte{1});
  send_grant(line, need(self.to_peer->grant(region, {{.offset = 0, .length = pool_bytes}},
                                            access::read_write, transfer)));
  self.sink->frame_handler = [&](std::span<const std::byte> frame) {
    std::uint64_t turn = 0;
    std::memcpy(&turn, frame.data(), sizeof turn);
    shared.pong.store(turn, std::memory_order_release);
  };
  std::uint64_t seen = 0;
  while (true) {
    switch (static_cast<phase>(shared.phase.load(std::memory_order_acquire))) {
      case serve:
        ::usleep(1000);
        self.place->poll();
        break;
      case echo_flags: {
        const auto turn = shared.ping.load(std::memory_order_acquire);
        if (turn != seen) shared.pong.store(seen = turn, std::memory_order_release);
        break;
      }
      case echo_frames: self.to_peer->poll(); break;
      case leave: return;
    }
  }
}

// -- rows

struct row {
  std::string name;
  double ours;
  double rival;
  std::optional<double> wanted;  ///< of ours / rival
  double limit;                  ///< what bare copying of the same segments reaches, or the bare
                                 ///< flag and a copy
  const char* unit;
  const char* better;
};

void print(const std::vector<row>& rows) {
  std::printf("[\n");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto& r = rows[i];
    std::printf(
        "  {\"name\": \"%s\", \"ours\": %.3f, \"rival\": %.3f, \"ratio\": %.3f, \"unit\": \"%s\", "
        "\"wanted\": %s, \"better\": \"%s\", \"limit\": %.3f, \"of_limit\": %.3f}%s\n",
        r.name.c_str(), r.ours, r.rival, r.ours / r.rival, r.unit,
        r.wanted ? std::to_string(*r.wanted).c_str() : "null", r.better, r.limit, r.ours / r.limit,
        i + 1 < rows.size() ? "," : "");
  }
  std::printf("]\n");
}

struct measurement {
  node& self;
  std::shared_ptr<const remote_grant> grant;
  region_id local;
  std::span<std::byte> local_bytes;
  std::span<std::byte> rival_bytes;
  flags& shared;
  std::uint64_t next_batch{1};

  /// Random blocks of a pool of `pool` bytes; `round` walks through it, so that a large one is
  /// cold.
  std::vector<segment> pick(std::uint64_t block, std::uint64_t pool, std::size_t round) {
    const std::size_t blocks = pool / block;
    auto& [from, to] = orders[{block, pool}];
    if (from.empty()) {
      std::mt19937_64 random{block + pool};
      from.resize(blocks);
      for (std::size_t i = 0; i < blocks; ++i) from[i] = i * block;
      to = from;
      std::ranges::shuffle(from, random);
      std::ranges::shuffle(to, random);
    }
    std::vector<segment> segments(blocks_per_batch);
    for (std::size_t i = 0; i < blocks_per_batch; ++i) {
      const auto at = (round * blocks_per_batch + i) % blocks;
      segments[i].local_offset = from[at];
      segments[i].remote_offset = to[at];
      segments[i].length = block;
    }
    return segments;
  }

  double ours(const std::vector<segment>& segments, direction dir) {
    batch work{
        .id = batch_id{next_batch++}, .transfer = transfer, .dir = dir, .pieces = {}, .frame = {}};
    work.pieces.push_back({local, grant, segments});
    const auto before = self.sink->completions;
    const double begin = seconds();
    if (auto ok = self.to_peer->post(std::move(work)); !ok) die(to_string(ok.error()));
    while (self.sink->completions == before) self.place->poll();
    return seconds() - begin;
  }

  double bare_memcpy(const std::vector<segment>& segments, direction dir) {
    const double begin = seconds();
    for (const auto& s : segments) {
      std::byte* here = local_bytes.data() + s.local_offset;
      std::byte* there = rival_bytes.data() + s.remote_offset;
      if (dir == direction::write) {
        std::memcpy(there, here, s.length);
      } else {
        std::memcpy(here, there, s.length);
      }
    }
    return seconds() - begin;
  }

  double bare_kernel(const std::vector<segment>& segments, direction dir, shm::copy_way way) {
    std::vector<shm::copy_run> runs;
    runs.reserve(segments.size());
    for (const auto& s : segments) {
      std::byte* here = local_bytes.data() + s.local_offset;
      std::byte* there = rival_bytes.data() + s.remote_offset;
      runs.push_back(dir == direction::write ? shm::copy_run{there, here, s.length}
                                             : shm::copy_run{here, there, s.length});
    }
    const shm::copier copies;
    const double begin = seconds();
    copies.copy(runs, way);
    return seconds() - begin;
  }

  void bandwidth(const char* name, std::uint64_t block, std::uint64_t pool, direction dir,
                 double wanted) {
    const bool cold = pool == pool_bytes;
    const std::size_t rounds = cold ? 100 : 250;
    std::vector<double> a, b, c;
    const double bytes = static_cast<double>(block * blocks_per_batch);
    std::size_t at = 0;
    for (std::size_t i = 0; i < rounds; ++i) {
      // In cache: each of the three finds its own blocks as the last run of its own left them.
      const auto warm = cold ? 0 : 2;
      const auto timed = [&](const auto& run, std::vector<double>& into) {
        const auto segments = pick(block, pool, at++);
        for (int w = 0; w < warm; ++w) run(segments);
        into.push_back(bytes / run(segments) / 1e9);
      };
      timed([&](const auto& s) { return ours(s, dir); }, a);
      timed([&](const auto& s) { return bare_memcpy(s, dir); }, b);
      timed(
          [&](const auto& s) {
            return bare_kernel(s, dir, cold ? shm::copy_way::streaming : shm::copy_way::cached);
          },
          c);
    }
    const double o = median(a), r = median(b), l = median(c);
    rows.push_back({name, o, r, wanted, l, "GB/s", "higher"});
  }

  void set_phase(phase p) {
    shared.phase.store(p, std::memory_order_release);
    ::usleep(20'000);
  }

  void latency() {
    constexpr int turns = 4000;
    constexpr int passes = 15;
    std::vector<double> flag_times, copy_times, ours_times;
    std::uint64_t turn = 0;
    for (int pass = 0; pass < passes; ++pass) {
      set_phase(echo_flags);
      for (int i = 0; i < turns; ++i) {
        const double begin = seconds();
        shared.ping.store(++turn, std::memory_order_release);
        while (shared.pong.load(std::memory_order_acquire) != turn) {
        }
        flag_times.push_back(seconds() - begin);
      }
      for (int i = 0; i < turns; ++i) {
        const std::uint64_t block = static_cast<std::uint64_t>(i % 64) * 4096;
        const double begin = seconds();
        std::memcpy(rival_bytes.data() + block, local_bytes.data() + block, 4096);
        copy_times.push_back(seconds() - begin);
      }
      set_phase(echo_frames);
      for (int i = 0; i < turns; ++i) {
        const double begin = seconds();
        batch work{.id = batch_id{next_batch++},
                   .transfer = transfer,
                   .dir = direction::write,
                   .pieces = {},
                   .frame = std::vector<std::byte>(8)};
        ++turn;
        std::memcpy(work.frame.data(), &turn, sizeof turn);
        const std::uint64_t block = static_cast<std::uint64_t>(i % 64) * 4096;
        segment s;
        s.local_offset = s.remote_offset = block;
        s.length = 4096;
        work.pieces.push_back({local, grant, {s}});
        if (auto ok = self.to_peer->post(std::move(work)); !ok) die(to_string(ok.error()));
        while (shared.pong.load(std::memory_order_acquire) != turn) {
        }
        ours_times.push_back(seconds() - begin);
      }
    }
    set_phase(serve);
    const double flag = median(flag_times) * 1e6;
    const double copy = median(copy_times) * 1e6;
    // The target answers its notice with a bare flag; what that took is not part of "until the
    // target has its notice".
    const double there_and_back = median(ours_times) * 1e6;
    rows.push_back(
        {"shm 4 KiB write until the target has its notice, against a flag there and back",
         there_and_back - flag / 2, flag, 3.0, flag / 2 + copy, "us", "lower"});
    rows.push_back({"shm 4 KiB write, notice and a flag back, against a flag there and back",
                    there_and_back, flag, std::nullopt, flag + copy, "us", "lower"});
  }

  std::map<std::pair<std::uint64_t, std::uint64_t>,
           std::pair<std::vector<std::uint64_t>, std::vector<std::uint64_t>>>
      orders;
  std::vector<row> rows;
};

void run_initiator(int line, flags& shared, const std::string& only) {
  node self{initiator_life, target_life, link_role::initiator};
  join(self, target_life, line);
  const auto grant = receive_grant(line);
  const auto local = need(self.place->allocate(pool_bytes, "source"));
  const auto rival = need(self.place->allocate(pool_bytes, "rival"));
  measurement b{
      self, grant, local, need(self.place->bytes(local)), need(self.place->bytes(rival)), shared,
      1,    {},    {}};
  // The link enters the peer's pages in the background, once; the rival's are entered by the fill
  // below.
  for (int idle = 0; idle < 1000;) idle = self.place->poll() ? 0 : idle + 1;
  std::ranges::fill(b.local_bytes, std::byte{2});
  std::ranges::fill(b.rival_bytes, std::byte{3});
  const std::uint64_t KiB = 1024;
  const std::uint64_t MiB = 1024 * KiB;
  const auto want = [&](const char* part) { return only.empty() || only == part; };
  if (want("cache")) {
    b.bandwidth("shm write 64 KiB x256, in cache (2 MiB of blocks a side)", 64 * KiB, 2 * MiB,
                direction::write, 0.95);
    b.bandwidth("shm read 64 KiB x256, in cache (2 MiB of blocks a side)", 64 * KiB, 2 * MiB,
                direction::read, 0.95);
    b.bandwidth("shm write 64 KiB x256, every block once, repeated (16 MiB a side)", 64 * KiB,
                16 * MiB, direction::write, 0.95);
    b.bandwidth("shm write 4 KiB x256, in cache", 4 * KiB, 1 * MiB, direction::write, 0.8);
    b.bandwidth("shm read 4 KiB x256, in cache", 4 * KiB, 1 * MiB, direction::read, 0.8);
  }
  if (want("cold")) {
    b.bandwidth("shm write 64 KiB x256, cold (1 GiB)", 64 * KiB, pool_bytes, direction::write, 1.2);
    b.bandwidth("shm read 64 KiB x256, cold (1 GiB)", 64 * KiB, pool_bytes, direction::read, 1.2);
    b.bandwidth("shm write 4 KiB x256, cold (1 GiB)", 4 * KiB, pool_bytes, direction::write, 1.2);
  }
  if (want("latency")) b.latency();
  print(b.rows);
  shared.phase.store(leave, std::memory_order_release);
}

}  // namespace

/// shm_bench [cache|cold|latency]
int main(int argc, char** argv) {
  const std::string only = argc > 1 ? argv[1] : "";
  if (!only.empty() && only != "cache" && only != "cold" && only != "latency") {
    die("usage: shm_bench [cache|cold|latency], found '" + only + "'");
  }
  void* at =
      ::mmap(nullptr, sizeof(flags), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) die("mmap");
  auto& shared = *new (at) flags{};
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) die("socketpair");
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    run_target(ends[1], shared);
    return 0;
  }
  ::close(ends[1]);
  run_initiator(ends[0], shared, only);
  int status = 0;
  ::waitpid(child, &status, 0);
  return status == 0 ? 0 : 1;
}
