#include "bare.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

#include <sys/socket.h>
#include <unistd.h>

#include "sockets.hpp"

namespace troupe::bench {

using namespace transport;

// -- a bare socket

namespace {

void send_all(int fd, const char* at, std::size_t size, bool polling) {
  while (size > 0) {
    const auto sent = ::send(fd, at, size, MSG_NOSIGNAL | (polling ? MSG_DONTWAIT : 0));
    if (sent < 0 && polling && errno == EAGAIN) continue;
    if (sent <= 0) std::_Exit(0);
    at += sent;
    size -= static_cast<std::size_t>(sent);
  }
}

void receive_all(int fd, char* at, std::size_t size, bool polling) {
  while (size > 0) {
    const auto got = ::recv(fd, at, size, polling ? MSG_DONTWAIT : 0);
    if (got < 0 && polling && errno == EAGAIN) continue;
    if (got <= 0) std::_Exit(0);
    at += got;
    size -= static_cast<std::size_t>(got);
  }
}

}  // namespace

bare_socket::bare_socket(bool polling) : polling_{polling} {
  const auto [mine, theirs] = connected_sockets();
  fd_ = mine;
  peer_ = fork_child([fd = theirs, polling](const control& parent) {
    std::vector<char> buffer;
    for (;;) {
      const auto size = parent.get<std::uint64_t>();
      const auto count = parent.get<std::int32_t>();
      buffer.resize(size);
      parent.put('k');
      for (int i = 0; i < count; ++i) {
        receive_all(fd, buffer.data(), size, polling);
        send_all(fd, buffer.data(), 1, polling);
      }
    }
  });
  ::close(theirs);
}

double bare_socket::exchange(std::size_t size, int count) {
  buffer_.resize(size, 'x');
  peer_.put(std::uint64_t{size});
  peer_.put(std::int32_t{count});
  peer_.get<char>();
  std::vector<double> times;
  for (int i = 0; i < count; ++i) {
    const auto start = clock_type::now();
    send_all(fd_, buffer_.data(), size, polling_);
    char answer = 0;
    receive_all(fd_, &answer, 1, polling_);
    times.push_back(microseconds_since(start));
  }
  return median(std::move(times));
}

// -- a bare link

namespace {

constexpr std::uint64_t region_bytes = 8u << 20;

struct counting_sink final : link_sink {
  void on_up() override { up = true; }
  void on_completion(completion done) override {
    if (done.failure) die("a bare batch failed: " + to_string(*done.failure));
    {
      const std::lock_guard lock{mutex};
      ++completed;
    }
    came.notify_one();
  }
  void on_frame(std::span<const std::byte>) override {}
  void on_quiescent(transfer_id) override {}
  void on_broken(troupe::error) override { std::_Exit(0); }

  std::atomic<bool> up{false};
  std::mutex mutex;
  std::condition_variable came;
  int completed{0};
};

}  // namespace

struct bare_link::side {
  bool polling{false};
  std::shared_ptr<counting_sink> said{std::make_shared<counting_sink>()};
  std::unique_ptr<endpoint> place;
  std::shared_ptr<transport::link> wire;
  region_id region;
  remote_grant peer_grant;
  std::uint64_t next{0};

  side(const control& peer, backend_kind kind, bool polls, bool dials) : polling{polls} {
    const incarnation mine{dials ? 1U : 2U};
    const incarnation theirs{dials ? 2U : 1U};
    endpoint_options options;
    options.self = mine;
    options.num_workers = polls ? 0 : 1;
    place = need(endpoint::create(std::move(options)), "endpoint");
    region = need(place->allocate(region_bytes, "bench"), "memory");
    std::ranges::fill(need(place->bytes(region), "memory"), std::byte{1});
    link_options wanted;
    wanted.role = dials ? link_role::initiator : link_role::acceptor;
    wanted.peer = theirs;
    wire = need(place->open(kind, wanted, said), "link");
    peer.put_list(wire->offer().payload);
    link_offer their_offer;
    their_offer.kind = kind;
    their_offer.owner = theirs;
    their_offer.payload = peer.get_list();
    need(wire->connect(their_offer), "connect");
    while (!said->up) {
      if (polling) {
        (void)place->poll();
      } else {
        std::this_thread::yield();
      }
    }
    // A grant is made over a link that is up.
    const auto grant =
        need(wire->grant(region, {{0, region_bytes, 0, 1}}, access::read_write, transfer_id{1}),
             "grant");
    peer.put(grant.id);
    peer.put(grant.region);
    peer_grant = grant;
    peer_grant.owner = theirs;
    peer_grant.id = peer.get<std::uint64_t>();
    peer_grant.region = peer.get<region_id>();
  }
};

bare_link::bare_link(backend_kind kind, bool polling)
    : peer_{fork_child([=](const control& parent) {
        side target{parent, kind, polling, false};
        for (;;) {
          parent.get<char>();  // a round begins
          while (polling && !parent.readable()) {
            for (int i = 0; i < 64; ++i) (void)target.place->poll();
          }
          parent.get<char>();
          parent.put('k');
        }
      })} {
  side_ = std::make_unique<side>(peer_, kind, polling, true);
}

bare_link::~bare_link() = default;

double bare_link::timed(std::size_t segments, std::size_t bytes, int batches) {
  auto& s = *side_;
  const auto grant = std::make_shared<const remote_grant>(s.peer_grant);
  s.said->completed = 0;
  const auto start = clock_type::now();
  for (int i = 0; i < batches; ++i) {
    batch work;
    work.id = batch_id{++s.next};
    work.transfer = transfer_id{1};
    work.dir = direction::write;
    work.frame.assign(40, std::byte{7});
    std::vector<segment> all;
    for (std::size_t k = 0; k < segments; ++k) {
      const auto at =
          (static_cast<std::size_t>(i) * segments + k) * 2 * bytes % (region_bytes - 2 * bytes);
      all.push_back({at, at, bytes, 0, 0, 1});
    }
    work.pieces.push_back({s.region, grant, std::move(all)});
    need(s.wire->post(std::move(work)), "post");
  }
  if (s.polling) {
    while (s.said->completed < batches) (void)s.wire->poll();
  } else {
    std::unique_lock lock{s.said->mutex};
    s.said->came.wait(lock, [&] { return s.said->completed >= batches; });
  }
  return microseconds_since(start) / batches;
}

double bare_link::post(std::size_t segments, std::size_t bytes, int count) {
  peer_.put('s');
  std::vector<double> times;
  for (int i = 0; i < count; ++i) times.push_back(timed(segments, bytes, 1));
  peer_.put('e');
  peer_.get<char>();
  return median(std::move(times));
}

double bare_link::post_many(std::size_t segments, std::size_t bytes, int batches) {
  peer_.put('s');
  const auto each = timed(segments, bytes, batches);
  peer_.put('e');
  peer_.get<char>();
  return each;
}

}  // namespace troupe::bench
