// Rows of the tcp backend: each measures ours and a bare socket pair that does the same work, in
// turns, in the same two processes. Prints a JSON array of {name, ours, rival, ratio, unit, wanted,
// better}; `wanted` is null in a row without a limit.
//
// The rival's processes hold the same scattered blocks and move them with nothing but writev and
// readv (256 blocks a call), one acknowledgement per batch and as many batches in flight as we
// have.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "troupe/transport/endpoint.hpp"

namespace {

using namespace troupe;
using namespace troupe::transport;
using clock_type = std::chrono::steady_clock;

constexpr std::uint64_t region_size = std::uint64_t{256} << 20;
constexpr std::size_t blocks_per_batch = 256;
constexpr std::size_t batches_in_flight = 4;
int rounds = 7;
int latency_rounds = 1000;
constexpr auto round_time = std::chrono::milliseconds{250};

[[noreturn]] void die(const std::string& what) {
  std::fprintf(stderr, "tcp_bench: %s\n", what.c_str());
  std::_Exit(1);
}

double seconds_since(clock_type::time_point start) {
  return std::chrono::duration<double>(clock_type::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// A pipe in each direction: commands, offers, answers.
struct control {
  int fd{-1};
  void put(const void* data, std::size_t size) const {
    if (::write(fd, data, size) != static_cast<ssize_t>(size)) die("control write");
  }
  void get(void* data, std::size_t size) const {
    auto* at = static_cast<char*>(data);
    while (size > 0) {
      const auto got = ::read(fd, at, size);
      if (got <= 0) std::_Exit(0);
      at += got;
      size -= static_cast<std::size_t>(got);
    }
  }
  template <class T>
  void put(const T& value) const {
    put(&value, sizeof value);
  }
  template <class T>
  T get() const {
    T value;
    get(&value, sizeof value);
    return value;
  }
  [[nodiscard]] bool readable() const {
    char c;
    return ::recv(fd, &c, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
  }
};

// The order in which the blocks of a region are used: no two neighbours follow each other.
std::vector<std::uint64_t> scattered(std::size_t block) {
  std::vector<std::uint64_t> offsets(region_size / block);
  for (std::size_t i = 0; i < offsets.size(); ++i) offsets[i] = i * block;
  std::shuffle(offsets.begin(), offsets.end(), std::mt19937_64{7});
  return offsets;
}

// -- ours

struct sink final : link_sink {
  void on_up() override { up = true; }
  void on_completion(completion done) override {
    if (done.failure) die("a batch failed: " + to_string(*done.failure));
    if (when_completed) when_completed();
  }
  void on_frame(std::span<const std::byte> frame) override {
    ++frames;
    if (when_frame) when_frame(frame);
  }
  void on_quiescent(transfer_id) override {}
  void on_broken(troupe::error why) override {
    if (is_child) std::_Exit(0);  // the measuring process has ended
    die("the link broke: " + to_string(why));
  }
  bool is_child{false};
  std::atomic<bool> up{false};
  std::uint64_t frames{0};
  std::function<void()> when_completed;
  std::function<void(std::span<const std::byte>)> when_frame;
};

struct node {
  incarnation self;
  std::unique_ptr<endpoint> place;
  std::shared_ptr<sink> said{std::make_shared<sink>()};
  std::shared_ptr<transport::link> wire;
  region_id region;
  std::span<std::byte> memory;
  remote_grant peer_grant;  // to all of the peer's region
};

void put_bytes(const control& to, const std::vector<std::byte>& bytes) {
  to.put(static_cast<std::uint32_t>(bytes.size()));
  to.put(bytes.data(), bytes.size());
}

std::vector<std::byte> get_bytes(const control& from) {
  std::vector<std::byte> bytes(from.get<std::uint32_t>());
  from.get(bytes.data(), bytes.size());
  return bytes;
}

node make_node(const control& peer, bool dials, std::uint32_t lanes, std::uint32_t workers) {
  node n;
  n.self = incarnation{dials ? 1U : 2U};
  n.said->is_child = !dials;
  endpoint_options options;
  options.self = n.self;
  options.num_workers = workers;
  auto place = endpoint::create(std::move(options));
  if (!place) die(to_string(place.error()));
  n.place = std::move(*place);
  n.region = n.place->allocate(region_size, "bench").value();
  n.memory = n.place->bytes(n.region).value();
  std::memset(n.memory.data(), dials ? 1 : 2, n.memory.size());
  n.wire = n.place
               ->open(backend_kind::tcp,
                      {.role = dials ? link_role::initiator : link_role::acceptor,
                       .peer = incarnation{dials ? 2U : 1U},
                       .lanes = lanes},
                      n.said)
               .value();
  const auto grant =
      n.wire->grant(n.region, {{0, region_size, 0, 1}}, access::read_write, transfer_id{1}).value();
  const auto offer = n.wire->offer();
  put_bytes(peer, offer.payload);
  peer.put(grant.id);
  peer.put(grant.region);
  const link_offer theirs{
      .kind = backend_kind::tcp, .owner = incarnation{dials ? 2U : 1U}, .payload = get_bytes(peer)};
  n.peer_grant = grant;
  n.peer_grant.owner = theirs.owner;
  n.peer_grant.id = peer.get<std::uint64_t>();
  n.peer_grant.region = peer.get<region_id>();
  if (auto ok = n.wire->connect(theirs); !ok) die(to_string(ok.error()));
  while (!n.said->up) {
    workers == 0 ? static_cast<void>(n.place->poll()) : std::this_thread::yield();
  }
  return n;
}

batch new_batch(batch_id id, transfer_id transfer, direction dir) {
  batch work;
  work.id = id;
  work.transfer = transfer;
  work.dir = dir;
  return work;
}

// Event-driven like the rival: the progress thread posts the next batch when one completes, and
// sleeps when there is nothing to do.
double our_throughput(node& n, direction dir, std::size_t block) {
  static std::uint64_t next_batch = 0;
  const auto order = scattered(block);
  const auto grant = std::make_shared<const remote_grant>(n.peer_grant);
  std::size_t next = 0;
  std::size_t in_flight = 0;
  std::uint64_t done = 0;
  std::mutex mutex;
  std::condition_variable ended;
  const auto start = clock_type::now();
  const auto post = [&] {
    auto work = new_batch(batch_id{++next_batch}, transfer_id{1}, dir);
    std::vector<segment> segments;
    segments.reserve(blocks_per_batch);
    for (std::size_t i = 0; i < blocks_per_batch; ++i, ++next) {
      segments.push_back(
          {order[next % order.size()], order[(next * 7 + 3) % order.size()], block, 0, 0, 1});
    }
    work.pieces.push_back({n.region, grant, std::move(segments)});
    ++in_flight;
    if (auto ok = n.wire->post(std::move(work)); !ok) die(to_string(ok.error()));
  };
  n.said->when_completed = [&] {
    const std::lock_guard lock{mutex};
    --in_flight;
    ++done;
    if (clock_type::now() - start < round_time) post();
    if (in_flight == 0) ended.notify_one();
  };
  {
    const std::lock_guard lock{mutex};
    for (std::size_t i = 0; i < batches_in_flight; ++i) post();
  }
  std::unique_lock lock{mutex};
  ended.wait(lock, [&] { return in_flight == 0; });
  return static_cast<double>(done) * static_cast<double>(blocks_per_batch * block) /
         seconds_since(start) / 1e9;
}

// Half of a round trip of 4 KiB writes with a frame, microseconds, p50.
double our_latency(node& n, int count) {
  const auto grant = std::make_shared<const remote_grant>(n.peer_grant);
  std::vector<double> times;
  for (int i = 0; i < count; ++i) {
    const auto before = n.said->frames;
    const auto start = clock_type::now();
    auto work = new_batch(batch_id{(std::uint64_t{1} << 40) + static_cast<std::uint64_t>(i)},
                          transfer_id{1}, direction::write);
    work.pieces.push_back({n.region, grant, {{0, 0, 4096, 0, 0, 1}}});
    work.frame.assign(8, std::byte{1});
    if (auto ok = n.wire->post(std::move(work)); !ok) die(to_string(ok.error()));
    while (n.said->frames == before) n.wire->poll();
    times.push_back(seconds_since(start) * 1e6 / 2);
  }
  return median(std::move(times));
}

[[noreturn]] void our_child(const control& parent, std::uint32_t lanes) {
  // One node sleeps when it has nothing to do, the other is polled by us.
  const auto busy = make_node(parent, false, lanes, 1);
  auto n = make_node(parent, false, lanes, 0);
  const auto grant = std::make_shared<const remote_grant>(n.peer_grant);
  std::uint64_t answers = 0;
  n.said->when_frame = [&](std::span<const std::byte>) {
    auto work = new_batch(batch_id{++answers}, transfer_id{1}, direction::write);
    work.pieces.push_back({n.region, grant, {{0, 0, 4096, 0, 0, 1}}});
    work.frame.assign(8, std::byte{2});
    if (auto ok = n.wire->post(std::move(work)); !ok) die(to_string(ok.error()));
  };
  while (true) {
    parent.get<char>();  // start of a round: poll until its end
    while (!parent.readable()) {
      for (int i = 0; i < 64; ++i) n.wire->poll();
    }
    parent.get<char>();
    parent.put('k');
  }
}

// -- the bare socket pair

std::pair<int, int> connected_sockets() {
  const int door = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  if (::bind(door, reinterpret_cast<sockaddr*>(&at), size) != 0 || ::listen(door, 1) != 0)
    die("bind");
  ::getsockname(door, reinterpret_cast<sockaddr*>(&at), &size);
  const int a = ::socket(AF_INET, SOCK_STREAM, 0);
  if (::connect(a, reinterpret_cast<sockaddr*>(&at), size) != 0) die("connect");
  const int b = ::accept(door, nullptr, nullptr);
  const int on = 1;
  for (const int fd : {a, b}) ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::close(door);
  return {a, b};
}

std::byte* bare_memory() {
  auto* at =
      ::mmap(nullptr, region_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) die("mmap");
  std::memset(at, 3, region_size);
  return static_cast<std::byte*>(at);
}

// Moves a whole vector with as few calls as the socket allows; blocks.
template <class Call>
void move_all(Call call, int fd, std::vector<iovec> pieces) {
  std::size_t first = 0;
  while (first < pieces.size()) {
    auto moved = call(fd, pieces.data() + first,
                      static_cast<int>(std::min<std::size_t>(pieces.size() - first, 1024)));
    if (moved <= 0) die("bare socket");
    while (moved > 0) {
      const auto step =
          std::min<std::size_t>(static_cast<std::size_t>(moved), pieces[first].iov_len);
      pieces[first].iov_base = static_cast<char*>(pieces[first].iov_base) + step;
      pieces[first].iov_len -= step;
      moved -= static_cast<ssize_t>(step);
      if (pieces[first].iov_len == 0) ++first;
    }
  }
}

struct bare {
  int fd;
  std::byte* memory;
  std::vector<std::uint64_t> order;
  std::size_t next{0};
  std::vector<iovec> pieces(std::size_t block) {
    std::vector<iovec> out;
    for (std::size_t i = 0; i < blocks_per_batch; ++i, ++next) {
      out.push_back({memory + order[next % order.size()], block});
    }
    return out;
  }
};

void take(int fd, void* data, std::size_t size) {
  move_all(::readv, fd, {iovec{data, size}});
}
void give(int fd, const void* data, std::size_t size) {
  move_all(::writev, fd, {iovec{const_cast<void*>(data), size}});
}

// Commands to the bare child: 'w' block n: read n batches and acknowledge each; 'r': answer each
// request byte with a batch; 'l': answer n messages of 4 KiB.
struct bare_command {
  char what;
  std::uint64_t block;
};

void spin_read(int fd, char* at, std::size_t size) {
  while (size > 0) {
    const auto got = ::recv(fd, at, size, MSG_DONTWAIT);
    if (got > 0) {
      at += got;
      size -= static_cast<std::size_t>(got);
    } else if (got == 0 || errno != EAGAIN) {
      std::_Exit(0);
    }
  }
}

[[noreturn]] void bare_child(const control& parent, int fd) {
  bare b{fd, bare_memory(), {}, 0};
  std::vector<char> message(4096);
  while (true) {
    const auto command = parent.get<bare_command>();
    if (command.what == 'l') {
      for (std::uint64_t i = 0; i < command.block; ++i) {
        spin_read(fd, message.data(), message.size());
        give(fd, message.data(), message.size());
      }
      continue;
    }
    b.order = scattered(command.block);
    while (true) {
      char more;
      take(fd, &more, 1);
      if (more == 0) break;
      if (command.what == 'w') {
        move_all(::readv, fd, b.pieces(command.block));
        give(fd, &more, 1);
      } else {
        move_all(::writev, fd, b.pieces(command.block));
      }
    }
  }
}

double bare_throughput(bare& b, const control& child, direction dir, std::size_t block) {
  child.put(bare_command{dir == direction::write ? 'w' : 'r', block});
  b.order = scattered(block);
  const char more = 1;
  std::uint64_t started = 0;
  std::uint64_t done = 0;
  const auto start = clock_type::now();
  while (true) {
    const bool time_left = clock_type::now() - start < round_time;
    if (!time_left && done == started) break;
    if (time_left && started - done < batches_in_flight) {
      if (dir == direction::write) {
        auto pieces = b.pieces(block);
        pieces.insert(pieces.begin(), {const_cast<char*>(&more), 1});
        move_all(::writev, b.fd, std::move(pieces));
      } else {
        give(b.fd, &more, 1);
      }
      ++started;
      continue;
    }
    if (dir == direction::write) {
      char ack;
      take(b.fd, &ack, 1);
    } else {
      move_all(::readv, b.fd, b.pieces(block));
    }
    ++done;
  }
  const auto rate = static_cast<double>(done) * static_cast<double>(blocks_per_batch * block) /
                    seconds_since(start) / 1e9;
  const char end = 0;
  give(b.fd, &end, 1);
  return rate;
}

double bare_latency(bare& b, const control& child, int count) {
  child.put(bare_command{'l', static_cast<std::uint64_t>(count)});
  std::vector<char> message(4096);
  std::vector<double> times;
  for (int i = 0; i < count; ++i) {
    const auto start = clock_type::now();
    give(b.fd, message.data(), message.size());
    spin_read(b.fd, message.data(), message.size());
    times.push_back(seconds_since(start) * 1e6 / 2);
  }
  return median(std::move(times));
}

// -- rows

struct row {
  std::string name;
  double ours;
  double rival;
  std::optional<double> wanted;  // of ours / rival; none: a row without a limit
  const char* unit;
  bool lower_is_better;
};

void print(const std::vector<row>& rows) {
  std::printf("[\n");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto& r = rows[i];
    std::printf(
        "  {\"name\": \"%s\", \"ours\": %.3f, \"rival\": %.3f, \"ratio\": %.3f, \"unit\": \"%s\", "
        "\"wanted\": %s, \"better\": \"%s\"}%s\n",
        r.name.c_str(), r.ours, r.rival, r.ours / r.rival, r.unit,
        r.wanted ? std::to_string(*r.wanted).c_str() : "null",
        r.lower_is_better ? "lower" : "higher", i + 1 < rows.size() ? "," : "");
  }
  std::printf("]\n");
}

control fork_child(const std::function<void(const control&)>& body) {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM, 0, fds) != 0) die("socketpair");
  const auto pid = ::fork();
  if (pid < 0) die("fork");
  if (pid == 0) {
    ::close(fds[0]);
    body(control{fds[1]});
    std::_Exit(0);
  }
  ::close(fds[1]);
  return control{fds[0]};
}

}  // namespace

int main(int argc, char** argv) {
  std::uint32_t lanes = 1;
  std::string_view only;  // write or read: ours alone, for a rival that another program runs
  std::vector<std::size_t> blocks{65'536, 16'384, 4'096};
  for (int i = 1; i < argc; ++i) {
    if (std::string_view{argv[i]} == "--lanes" && i + 1 < argc) {
      lanes = static_cast<std::uint32_t>(std::strtoul(argv[++i], nullptr, 10));
    } else if (std::string_view{argv[i]} == "--only" && i + 2 < argc) {
      only = argv[++i];
      blocks = {std::strtoul(argv[++i], nullptr, 10)};
    } else if (std::string_view{argv[i]} == "--latency") {
      blocks.clear();
    } else if (std::string_view{argv[i]} == "--quick") {
      rounds = 3;
      latency_rounds = 200;
    } else {
      std::fprintf(
          stderr, "usage: tcp_bench [--lanes N] [--quick] [--latency] [--only write|read BLOCK]\n");
      return 2;
    }
  }
  const auto our_peer = fork_child([&](const control& c) { our_child(c, lanes); });
  const auto [mine, theirs] = connected_sockets();
  const auto bare_peer = fork_child([&, fd = theirs](const control& c) { bare_child(c, fd); });
  ::close(theirs);
  auto n = make_node(our_peer, true, lanes, 1);
  auto polled = make_node(our_peer, true, lanes, 0);
  bare b{mine, bare_memory(), {}, 0};

  const auto ours = [&](const std::function<double()>& measure) {
    our_peer.put('s');
    const auto value = measure();
    our_peer.put('e');
    our_peer.get<char>();
    return value;
  };

  std::vector<row> rows;
  if (!only.empty()) {
    const auto dir = only == "write" ? direction::write : direction::read;
    our_throughput(n, dir, blocks[0]);  // warms up
    rows.push_back(
        {"tcp " + std::string{only}, our_throughput(n, dir, blocks[0]), 1, 0, "GB/s", false});
    print(rows);
    std::fflush(stdout);
    std::_Exit(0);
  }
  for (const auto block : blocks) {
    std::vector<double> w, r, bw, br;
    for (int i = -1; i < rounds; ++i) {  // the first round warms up
      const auto ow = our_throughput(n, direction::write, block);
      const auto rw = bare_throughput(b, bare_peer, direction::write, block);
      const auto orr = our_throughput(n, direction::read, block);
      const auto rr = bare_throughput(b, bare_peer, direction::read, block);
      if (i < 0) continue;
      w.push_back(ow);
      bw.push_back(rw);
      r.push_back(orr);
      br.push_back(rr);
    }
    const auto size = std::to_string(block / 1024) + " KiB";
    const double wanted = block == 4096 ? 0.8 : 0.95;
    rows.push_back({"tcp write " + size + " x 256 vs bare writev/readv", median(w), median(bw),
                    wanted, "GB/s", false});
    rows.push_back({"tcp read " + size + " x 256 vs bare writev/readv", median(r), median(br),
                    wanted, "GB/s", false});
    rows.push_back({"tcp read vs write " + size, median(r), median(w), 0.9, "GB/s", false});
  }
  std::vector<double> lat, bare_lat;
  for (int i = -1; i < rounds; ++i) {
    const auto o = ours([&] { return our_latency(polled, latency_rounds); });
    const auto l = bare_latency(b, bare_peer, latency_rounds);
    if (i < 0) continue;
    lat.push_back(o);
    bare_lat.push_back(l);
  }
  const auto one_way = median(lat);
  const auto bare_way = median(bare_lat);
  rows.push_back({"tcp 4 KiB write until the target has its notice, vs bare 4 KiB there and back",
                  one_way, 2 * bare_way, 1.3, "us", true});
  rows.push_back({"tcp 4 KiB write with notice there and back, vs bare 4 KiB there and back",
                  2 * one_way, 2 * bare_way, std::nullopt, "us", true});
  print(rows);
  std::fflush(stdout);
  std::_Exit(0);
}
