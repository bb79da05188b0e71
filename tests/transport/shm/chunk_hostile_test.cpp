#include <atomic>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "troupe/transport/shm/chunk_memory.hpp"
#include "troupe/transport/shm/control_memory.hpp"
#include "troupe/transport/shm/copy_job.hpp"
#include "troupe/transport/shm/wire.hpp"

#include "two_ends.hpp"

// What a peer may write into chunks, as initiator and as target. The peer is made by hand; it has
// the offer, so it gets as far as a real one.
namespace troupe::transport::shm {
namespace {

using contract::end;
using contract::t1;
using ::testing::HasSubstr;

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr incarnation by_hand{77};

/// A real node with a GPU, and the peer.
struct played {
  played() : nodes{0} {
    auto owned = std::make_unique<xgmi::gpu_double>();
    gpus = owned.get();
    nodes.make(node, incarnation{2}, {.site = std::make_shared<xgmi::gpu_site>(std::move(owned))});
    node.region = node.place->allocate_on_gpu(0, 4 * mib, "gpu").value();
    node.memory = node.place->bytes(node.region).value();
    std::memset(node.memory.data(), 0x77, node.memory.size());
    link_options with{.role = link_role::acceptor, .peer = by_hand};
    with.connect_timeout = contract::longer_than_any_wait;
    node.wire = node.place->open(backend_kind::shm, with, node.sink).value();
    join();
  }
  ~played() { node.wire->close(); }

  bool until(const std::function<bool()>& done) const {
    for (const auto last = testing::end_of_wait(); !done(); node.place->poll()) {
      if (contract::clock::now() > last) return false;
    }
    return true;
  }
  void join() {
    shm_offer self;
    self.pid = static_cast<std::uint32_t>(::getpid());
    self.address[0] = 'x';
    EXPECT_TRUE(node.wire->connect({backend_kind::shm, by_hand, self.encode()}));
    const auto offer = shm_offer::decode(node.wire->offer().payload).value();
    socket = connect_to(offer.address.data()).value();
    hello_message hello;
    hello.acceptor_token = offer.secret;
    hello.dialer = by_hand.value;
    hello.acceptor = node.self.value;
    EXPECT_TRUE(send_message(socket.get(), hello));
    EXPECT_TRUE(until([&] {
      auto in = receive_message(socket.get(), fds_allowed::yes);
      auto* const said = in ? std::get_if<received>(&*in) : nullptr;
      if (said == nullptr) return false;
      control = control_mapping::map(std::move(said->fds[0])).value();
      return true;
    }));
    EXPECT_TRUE(send_message(socket.get(), ready_message{}));
    EXPECT_TRUE(until([&] { return node.sink->ups == 1; }));
  }
  /// Creates the peer's chunks, as it would share them before its first request.
  void share() {
    area = chunk_area::create().value();
    const int fd = area->fd();
    EXPECT_TRUE(send_message(socket.get(), chunks_shared_message{sizeof(chunk_memory)}, {&fd, 1}));
  }
  [[nodiscard]] remote_grant grant(access rights = access::read_write,
                                   byte_set permitted = {{mib, mib, 0, 1}}) const {
    return node.wire->grant(node.region, std::move(permitted), rights, t1).value();
  }
  void ask(std::size_t chunk, chunk_request what, const std::vector<chunk_run>& runs) const {
    auto& state = area->state(chunk);
    std::copy(runs.begin(), runs.end(), state.runs.begin());
    state.request = what;
    state.asked.fetch_add(1);
  }
  [[nodiscard]] bool answered(std::size_t chunk) const {
    return area->state(chunk).answered.load() == area->state(chunk).asked.load();
  }
  [[nodiscard]] bool untouched() const { return contract::all_are(node.memory, std::byte{0x77}); }

  contract::two_ends nodes;
  xgmi::gpu_double* gpus{nullptr};
  end node;
  owned_fd socket;
  control_mapping control;
  std::shared_ptr<chunk_area> area;
};

chunk_request request_of(const remote_grant& grant, direction dir, std::uint32_t runs) {
  return {grant.id, grant.transfer.value, static_cast<std::uint32_t>(dir), runs};
}

}  // namespace

TEST(shm_chunks, an_honest_request_by_hand_is_carried_out_both_ways) {
  played p;
  const auto given = p.grant();
  p.share();
  std::memset(p.area->bytes(3), 0x11, chunk_size);
  p.ask(3, request_of(given, direction::write, 2),
        {{mib, 1000, 2000, 5, 0}, {2 * mib - 100, 100, 0, 1, 0}});
  ASSERT_TRUE(p.until([&] { return p.answered(3); }));
  EXPECT_EQ(p.area->state(3).answer.status, 0U);
  EXPECT_EQ(p.node.memory[mib + 8000], std::byte{0x11});
  EXPECT_EQ(p.node.memory[mib + 1500], std::byte{0x77});
  EXPECT_EQ(p.node.memory[2 * mib - 1], std::byte{0x11});
  EXPECT_EQ(p.node.memory[2 * mib], std::byte{0x77});
  p.ask(7, request_of(given, direction::read, 1), {{mib, mib, 0, 1, 0}});
  ASSERT_TRUE(p.until([&] { return p.answered(7); }));
  EXPECT_EQ(p.area->state(7).answer.status, 0U);
  EXPECT_EQ(std::memcmp(p.area->bytes(7), p.node.memory.data() + mib, mib), 0);
  EXPECT_FALSE(p.node.sink->is_broken());
}

TEST(shm_chunks, a_flood_of_messages_takes_many_turns_and_none_is_lost) {
  played p;
  const int bytes = 16 << 20;
  if (::setsockopt(p.socket.get(), SOL_SOCKET, SO_SNDBUFFORCE, &bytes, sizeof bytes) != 0) {
    GTEST_SKIP() << "this user cannot make a socket hold so many messages";
  }
  for (std::uint32_t i = 0; i < 5000; ++i) {
    ASSERT_TRUE(send_message(p.socket.get(), region_gone_message{1000 + i})) << i;
  }
  const auto unread = [&] {
    int left = 0;
    EXPECT_EQ(::ioctl(p.socket.get(), SIOCOUTQ, &left), 0);
    return left;
  };
  constexpr int none = 1;
  const auto all = unread();
  ASSERT_GT(all, none);
  ASSERT_TRUE(p.until([&] { return unread() < all; }));
  EXPECT_GT(unread(), all / 2) << "the peer held the thread until its messages were read";
  EXPECT_TRUE(p.until([&] { return unread() <= none; }));
  EXPECT_FALSE(p.node.sink->is_broken());
}

TEST(shm_chunks, what_the_grant_does_not_permit_is_refused_and_nothing_is_touched) {
  played p;
  const auto given = p.grant(access::write);
  p.share();
  const auto refused = [&](chunk_request what, const std::vector<chunk_run>& runs) {
    std::memset(p.area->bytes(0), 0x11, chunk_size);
    p.ask(0, what, runs);
    EXPECT_TRUE(p.until([&] { return p.answered(0) || p.node.sink->is_broken(); }));
    EXPECT_FALSE(p.node.sink->is_broken());
    EXPECT_TRUE(p.untouched());
    EXPECT_TRUE(contract::all_are({p.area->bytes(0), chunk_size}, std::byte{0x11}));
    return static_cast<errc>(p.area->state(0).answer.status);
  };
  const chunk_run good{mib, 100, 0, 1, 0};
  auto what = request_of(given, direction::write, 1);
  for (const chunk_run bad : {chunk_run{mib - 1, 100, 0, 1, 0},
                              {2 * mib - 99, 100, 0, 1, 0},
                              {0, 100, 0, 1, 0},
                              {4 * mib, 1, 0, 1, 0},
                              {UINT64_MAX - 10, 100, 0, 1, 0},
                              {mib, 100, UINT64_MAX / 2, 3, 0},
                              {mib, 100, mib, 2, 0},
                              {mib, 100, 50, 2, 0}}) {
    EXPECT_EQ(refused(what, {bad}), errc::out_of_range) << bad.offset;
    auto two = what;
    two.runs = 2;
    EXPECT_EQ(refused(two, {good, bad}), errc::out_of_range) << bad.offset;
  }
  EXPECT_EQ(refused(request_of(given, direction::read, 1), {good}), errc::unauthorized);
  what.transfer ^= 1;
  EXPECT_EQ(refused(what, {good}), errc::unauthorized);
  what = request_of(given, direction::write, 1);
  what.grant ^= 1;
  EXPECT_EQ(refused(what, {good}), errc::grant_revoked);
  EXPECT_EQ(p.node.wire->fence(t1), fence_state::quiescent);
  EXPECT_EQ(refused(request_of(given, direction::write, 1), {good}), errc::grant_revoked);
}

TEST(shm_chunks, what_no_initiator_asks_ends_the_link_and_nothing_is_touched) {
  constexpr auto huge = std::numeric_limits<std::uint64_t>::max();
  const chunk_run good{mib, 100, 0, 1, 0};
  const std::vector<std::function<void(played&, const remote_grant&)>> lies{
      [&](played& p, const auto& g) { p.ask(0, request_of(g, direction::write, 0), {}); },
      [&](played& p, const auto& g) {
        p.ask(0, request_of(g, direction::write, max_chunk_runs + 1), {good});
      },
      [&](played& p, const auto& g) { p.ask(0, request_of(g, direction::write, UINT32_MAX), {}); },
      [&](played& p, const auto& g) { p.ask(0, request_of(g, direction{0}, 1), {good}); },
      [&](played& p, const auto& g) { p.ask(0, request_of(g, direction{3}, 1), {good}); },
      [&](played& p, const auto& g) {
        p.ask(0, request_of(g, direction::write, 1), {{mib, 0, 0, 1, 0}});
      },
      [&](played& p, const auto& g) {
        p.ask(0, request_of(g, direction::write, 1), {{mib, 8, 8, 0, 0}});
      },
      [&](played& p, const auto& g) {
        p.ask(0, request_of(g, direction::read, 1), {{mib, mib + 1, 0, 1, 0}});
      },
      [&](played& p, const auto& g) {
        p.ask(0, request_of(g, direction::read, 1), {{mib, huge, 0, 1, 0}});
      },
      [&](played& p, const auto& g) {
        p.ask(0, request_of(g, direction::read, 1), {{mib, huge / 2 + 1, 0, 2, 0}});
      },
      [&](played& p, const auto& g) {
        p.ask(0, request_of(g, direction::read, 2), {{mib, mib, 0, 1, 0}, {mib, 1, 0, 1, 0}});
      },
      [&](played& p, const auto&) { p.area->state(5).asked.store(2); },
      [&](played& p, const auto&) { p.area->state(5).asked.store(huge); },
      [&](played& p, const auto& g) {  // asks a second time before the answer
        p.gpus->hold(true);
        p.ask(1, request_of(g, direction::read, 1), {good});
        EXPECT_TRUE(p.until([&] { return p.gpus->launches() + p.gpus->engine_copies() > 0; }));
        p.area->state(1).asked.store(9);
        p.gpus->hold(false);
      },
      [&](played& p, const auto&) { p.share(); },
      [&](played& p, const auto&) {
        const int fd = p.area->fd();
        EXPECT_TRUE(send_message(p.socket.get(), chunks_shared_message{4096}, {&fd, 1}));
      },
      [&](played& p, const auto&) {
        EXPECT_TRUE(send_message(p.socket.get(), chunks_shared_message{sizeof(chunk_memory)}));
      },
  };
  for (std::size_t i = 0; i < lies.size(); ++i) {
    SCOPED_TRACE("lie " + std::to_string(i));
    played p;
    const auto given = p.grant();
    p.share();
    lies[i](p, given);
    ASSERT_TRUE(p.until([&] { return p.node.sink->is_broken(); }));
    EXPECT_EQ(p.node.sink->broken->code, errc::unauthorized) << to_string(*p.node.sink->broken);
    EXPECT_TRUE(p.untouched());
    EXPECT_TRUE(p.node.wire->fence(t1) == fence_state::quiescent ||
                p.until([&] { return p.node.sink->is_quiescent(t1); }));
    EXPECT_TRUE(p.node.place->deregister(p.node.region));
  }
}

TEST(shm_chunks, a_file_that_could_be_cut_off_is_not_mapped) {
  played p;
  const owned_fd unsealed{::memfd_create("chunks", MFD_CLOEXEC)};
  ASSERT_EQ(::ftruncate(unsealed.get(), sizeof(chunk_memory)), 0);
  const int fd = unsealed.get();
  ASSERT_TRUE(send_message(p.socket.get(), chunks_shared_message{sizeof(chunk_memory)}, {&fd, 1}));
  ASSERT_TRUE(p.until([&] { return p.node.sink->is_broken(); }));
  EXPECT_EQ(p.node.sink->broken->code, errc::unauthorized);
  EXPECT_THAT(p.node.sink->broken->message, HasSubstr("sealed"));
}

TEST(shm_chunks, requests_of_random_numbers_touch_nothing_outside_the_grant) {
  std::mt19937_64 random{20261122};
  const auto pick = [&](std::initializer_list<std::uint64_t> some) {
    return *(some.begin() + random() % some.size());
  };
  for (int links = 0; links < 20; ++links) {
    played p;
    const auto given = p.grant();
    p.share();
    for (std::size_t i = 0; i < chunk_count; ++i) std::memset(p.area->bytes(i), 0x11, chunk_size);
    for (int i = 0; i < 300 && !p.node.sink->is_broken(); ++i) {
      const auto chunk = random() % chunk_count;
      if (!p.answered(chunk)) continue;
      std::vector<chunk_run> runs(1 + random() % 4);
      for (auto& run : runs) {
        run = {pick({0, mib, mib - 1, 2 * mib - 4096, 3 * mib, random(), mib + random() % mib}),
               pick({1, 64, 4096, 100'000, mib / 4, 1 + random() % mib}),
               pick({0, 64, 4096, 8192, mib, random()}),
               static_cast<std::uint32_t>(pick({1, 1, 2, 16})), 0};
      }
      auto what = request_of(given, random() % 2 == 0 ? direction::write : direction::read,
                             static_cast<std::uint32_t>(runs.size()));
      if (random() % 50 == 0) what.grant = random();
      p.ask(chunk, what, runs);
      p.node.place->poll();
    }
    EXPECT_TRUE(p.node.wire->fence(t1) == fence_state::quiescent ||
                p.until([&] { return p.node.sink->is_quiescent(t1); }));
    EXPECT_TRUE(contract::all_are(p.node.memory.first(mib), std::byte{0x77}));
    EXPECT_TRUE(contract::all_are(p.node.memory.subspan(2 * mib), std::byte{0x77}));
  }
}

namespace {

/// Rewrites the numbers of its request between asking and the answer.
class rewriter {
 public:
  rewriter(chunk_state& of, const remote_grant& given)
      : thread_{[this, &of, id = given.id] { run(of, id); }} {
    began_.wait(false);
  }
  rewriter(const rewriter&) = delete;
  rewriter& operator=(const rewriter&) = delete;
  ~rewriter() {
    ending_ = true;
    thread_.join();
  }

 private:
  template <class Number>
  static void put(Number& at, std::uint64_t value) {
    std::atomic_ref{at}.store(static_cast<Number>(value), std::memory_order_relaxed);
  }
  /// Rarely writes what ends the link at once, so that many requests get further.
  void run(chunk_state& of, std::uint64_t grant) {
    std::mt19937_64 random{20261123};
    const auto pick = [&](std::initializer_list<std::uint64_t> often, std::uint64_t rarely) {
      return began_ && random() % 200 == 0 ? rarely : *(often.begin() + random() % often.size());
    };
    while (!ending_) {
      put(of.request.runs, pick({1, 2, 3}, max_chunk_runs + 1));
      put(of.request.dir, pick({1, 2}, 7));
      put(of.request.grant, pick({grant}, grant + 1));
      for (std::size_t i = 0; i < 3; ++i) {
        auto& run = of.runs[i];
        put(run.offset, pick({mib, mib + 4096, mib, mib, 2 * mib}, UINT64_MAX - 100));
        put(run.length, pick({100, 4096, 65'536}, UINT64_MAX / 2 + 1));
        put(run.stride, pick({65'536, 65'536, 65'536, mib}, UINT64_MAX / 2));
        put(run.count, pick({1, 2, 3}, UINT32_MAX));
      }
      if (!began_.exchange(true)) began_.notify_one();
    }
  }

  std::atomic<bool> began_{false};
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

}  // namespace

TEST(shm_chunks,
     a_request_that_is_rewritten_while_it_is_checked_touches_nothing_outside_the_grant) {
  int carried_out = 0;
  int refused = 0;
  for (int links = 0; links < 12; ++links) {
    played p;
    const auto given = p.grant();
    p.share();
    for (std::size_t i = 0; i < chunk_count; ++i) std::memset(p.area->bytes(i), 0x11, chunk_size);
    auto& state = p.area->state(0);
    state.request.transfer = given.transfer.value;
    {
      const rewriter peer{state, given};
      for (int i = 0; i < 200 && !p.node.sink->is_broken(); ++i) {
        state.asked.fetch_add(1);
        ASSERT_TRUE(p.until([&] { return p.answered(0) || p.node.sink->is_broken(); }));
        if (!p.answered(0)) continue;
        const auto status = state.answer.status;
        (status == 0 ? carried_out : refused) += 1;
        EXPECT_TRUE(status <= UINT8_MAX &&
                    (status == 0 || is_errc(static_cast<std::uint8_t>(status))));
      }
    }
    if (p.node.sink->is_broken()) {
      EXPECT_EQ(p.node.sink->broken->code, errc::unauthorized) << to_string(*p.node.sink->broken);
    }
    EXPECT_TRUE(p.node.wire->fence(t1) == fence_state::quiescent ||
                p.until([&] { return p.node.sink->is_quiescent(t1); }));
    EXPECT_TRUE(contract::all_are(p.node.memory.first(mib), std::byte{0x77}));
    EXPECT_TRUE(contract::all_are(p.node.memory.subspan(2 * mib), std::byte{0x77}));
    EXPECT_TRUE(contract::all_are({p.area->bytes(1), chunk_size}, std::byte{0x11}))
        << "a read went on behind its chunk";
  }
  EXPECT_GT(carried_out + refused, 0) << "the peer got nowhere";
}

// -- the peer as target

namespace {

/// A batch that uses a grant which the peer never gave.
batch to_the_peer(played& p, direction dir,
                  std::vector<segment> segments = {{0, 0, 2 * mib, 0, 0, 1}}) {
  grant_key key;
  key.how = grant_key::memory::asked;
  auto grant = std::make_shared<remote_grant>();
  grant->id = 5;
  grant->region = region_id{1};
  grant->owner = by_hand;
  grant->transfer = t1;
  grant->rights = access::read_write;
  grant->region_size = 4 * mib;
  grant->permitted = {{0, 4 * mib, 0, 1}};
  grant->key = key.encode();
  return p.nodes.work(dir, {{p.node.region, std::move(grant), std::move(segments)}});
}

/// The node's own chunks, once it has shared them.
std::shared_ptr<chunk_area> chunks_of_node(played& p) {
  std::shared_ptr<chunk_area> found;
  EXPECT_TRUE(p.until([&] {
    auto in = receive_message(p.socket.get(), fds_allowed::yes);
    auto* const said = in ? std::get_if<received>(&*in) : nullptr;
    const auto* shared = said ? std::get_if<chunks_shared_message>(&said->body) : nullptr;
    if (shared == nullptr) return false;
    found = chunk_area::map(std::move(said->fds[0]), shared->size).value();
    return true;
  }));
  return found;
}

}  // namespace

TEST(shm_chunks, an_answer_to_what_was_not_asked_ends_the_link) {
  for (const auto dir : {direction::write, direction::read}) {
    played p;
    ASSERT_TRUE(p.node.wire->post(to_the_peer(p, dir)));
    const auto area = chunks_of_node(p);
    ASSERT_TRUE(p.until([&] { return area->state(0).asked.load() == 1; }));
    area->state(0).answered.store(7);
    ASSERT_TRUE(p.until([&] { return p.node.sink->is_broken(); }));
    EXPECT_EQ(p.node.sink->broken->code, errc::unauthorized);
    ASSERT_EQ(p.node.sink->completed(), 1U);
    EXPECT_TRUE(p.node.sink->completions[0].failure);
    EXPECT_TRUE(p.untouched());
  }
}

TEST(shm_chunks, a_refusal_of_any_number_and_without_an_end_is_an_error_in_words) {
  for (const std::uint32_t status : {1U, 255U, 256U, UINT32_MAX}) {
    played p;
    ASSERT_TRUE(p.node.wire->post(to_the_peer(p, direction::read)));
    const auto area = chunks_of_node(p);
    for (std::size_t i = 0; i < 2; ++i) {
      auto& state = area->state(i);
      ASSERT_TRUE(p.until([&] { return state.asked.load() == 1; }));
      state.answer.status = status;
      state.answer.sentence.fill(status == 255U ? '\n' : 'x');
      state.answered.store(1);
    }
    ASSERT_TRUE(p.until([&] { return p.node.sink->completed() == 1; }));
    const auto& done = p.node.sink->completions[0];
    ASSERT_TRUE(done.failure);
    EXPECT_TRUE(is_errc(static_cast<std::uint8_t>(done.failure->code)));
    EXPECT_LT(done.failure->message.size(), 300U);
    EXPECT_EQ(done.failure->message.find('\n'), std::string::npos) << "it goes into logs";
    EXPECT_TRUE(p.untouched());
    EXPECT_FALSE(p.node.sink->is_broken());
  }
}

TEST(shm_chunks, a_batch_of_which_a_chunk_is_refused_names_what_did_not_arrive_and_nothing_else) {
  // The second segment is in both chunks; the third lies outside.
  const std::vector<segment> segments{{0, 0, mib / 2, 0, 0, 1},
                                      {mib / 2, mib / 2, mib, 0, 0, 1},
                                      {0, 0, 0, 0, 0, 1},
                                      {3 * mib / 2, 3 * mib / 2, 1000, 2000, 2000, 262}};
  for (const auto dir : {direction::write, direction::read}) {
    for (const std::size_t good : {0U, 1U}) {
      played p;
      ASSERT_TRUE(p.node.wire->post(to_the_peer(p, dir, segments)));
      const auto area = chunks_of_node(p);
      for (std::size_t i = 0; i < 2; ++i) {
        ASSERT_TRUE(p.until([&] { return area->state(i).asked.load() == 1; }));
      }
      area->state(good).answered.store(1);
      area->state(1 - good).answer.status = static_cast<std::uint32_t>(errc::out_of_range);
      area->state(1 - good).answered.store(1);
      ASSERT_TRUE(p.until([&] { return p.node.sink->completed() == 1; }));
      const auto& done = p.node.sink->completions[0];
      ASSERT_TRUE(done.failure);
      EXPECT_EQ(done.bad_segments, good == 0 ? std::vector({1U, 3U}) : std::vector({0U, 1U}));
    }
  }
}

TEST(shm_chunks, a_batch_whose_peer_is_gone_names_what_it_did_not_answer) {
  played p;
  ASSERT_TRUE(p.node.wire->post(
      to_the_peer(p, direction::write, {{0, 0, mib, 0, 0, 1}, {mib, mib, mib, 0, 0, 1}})));
  const auto area = chunks_of_node(p);
  ASSERT_TRUE(p.until([&] { return area->state(1).asked.load() == 1; }));
  area->state(1).answered.store(1);
  p.node.place->poll();
  p.socket = {};
  ASSERT_TRUE(p.until([&] { return p.node.sink->is_broken(); }));
  ASSERT_EQ(p.node.sink->completed(), 1U);
  EXPECT_EQ(p.node.sink->completions[0].bad_segments, std::vector({0U}));
}

TEST(shm_chunks, a_read_that_was_fenced_is_not_copied_when_its_answer_comes_late) {
  played p;
  ASSERT_TRUE(p.node.wire->post(to_the_peer(p, direction::read)));
  const auto area = chunks_of_node(p);
  ASSERT_TRUE(p.until([&] { return area->state(1).asked.load() == 1; }));
  EXPECT_EQ(p.node.wire->fence(t1), fence_state::quiescent) << "only the peer has something to do";
  EXPECT_EQ(p.node.sink->completed(), 1U);
  std::memset(area->bytes(0), 0x11, chunk_size);
  area->state(0).answered.store(1);
  area->state(1).answered.store(1);
  for (int i = 0; i < 1000; ++i) p.node.place->poll();
  EXPECT_TRUE(p.untouched());
  EXPECT_EQ(p.gpus->launches() + p.gpus->engine_copies(), 0U);
  EXPECT_FALSE(p.node.sink->is_broken());
}

}  // namespace troupe::transport::shm
