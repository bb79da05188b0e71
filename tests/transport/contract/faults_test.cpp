#include <cstdlib>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include <signal.h>

#include "child_process.hpp"
#include "pair.hpp"
#include "peer_talk.hpp"

// A peer process that is killed or stopped, for every backend.
namespace troupe::transport::contract {

namespace {

using troupe::testing::comes_true;

std::vector<std::string> peer_command(const variant& with, const char* what) {
  const char* binary = std::getenv("TROUPE_TRANSPORT_PEER");
  EXPECT_NE(binary, nullptr) << "set TROUPE_TRANSPORT_PEER to the transport_peer binary";
  return {binary == nullptr ? "" : binary, std::string{to_string(with.kind)},
          std::to_string(with.lanes), on_gpu(with, 'b') ? "gpu" : "host", what};
}

/// Device and inode of the file that this process has mapped there, as the kernel prints them.
std::string file_at(const void* at) {
  std::ostringstream begin;
  begin << std::hex << reinterpret_cast<std::uintptr_t>(at) << '-';
  std::ifstream maps{"/proc/self/maps"};
  for (std::string line; std::getline(maps, line);) {
    if (!line.starts_with(begin.str())) continue;
    std::istringstream in{line};
    std::string range, rights, offset, device, number;
    in >> range >> rights >> offset >> device >> number;
    return device + ' ' + number + ' ';
  }
  return {};
}

/// Returns a function that tells whether the process has mapped the file that lies at our address
/// `at`. The memory of GPU doubles is such a file.
std::function<bool()> maps_of(pid_t process, const void* at) {
  const auto there = "/proc/" + std::to_string(process) + "/maps";
  return [there, file = file_at(at)] {
    std::ifstream maps{there};
    for (std::string line; std::getline(maps, line);) {
      if (!file.empty() && line.find(file) != std::string::npos) return true;
    }
    return false;
  };
}

/// Queue pairs of a dead peer answer nothing: its death shows 2 s later, when the last
/// retransmission has gone unanswered.
constexpr std::uint8_t time_of_a_death = 16;

/// This process, linked to a peer process.
class joined {
 public:
  static constexpr std::uint64_t size = std::uint64_t{4} << 20;

  joined(const variant& with_, const char* what, std::chrono::milliseconds fence_patience = 1s,
         std::uint8_t wire_timeout = 17)
      : peer{peer_command(with_, what)} {
    const auto kind = with_.kind;
    const auto lanes = with_.lanes;
    endpoint_options options;
    options.self = incarnation{0x11fe};
    options.peer_silence = longer_than_any_wait;
    options.rdma.device = rdma_devices('a', lanes);
    suit_emulation(options.rdma);
    options.rdma.fence_patience = fence_patience;
    options.rdma.timeout = wire_timeout;
    if (on_gpu(with_, 'a')) {
      options.xgmi = xgmi::options_under_test();
      gpus = options.xgmi.site;
    }
    place = endpoint::create(std::move(options)).value();
    region = gpus ? place->allocate_on_gpu(0, size, "test").value()
                  : place->allocate(size, "test").value();
    memory = place->bytes(region).value();
    if (gpus) overwrite(std::byte{0});
    link_options with;
    with.role = link_role::acceptor;
    with.peer = incarnation{0xdead};
    with.lanes = lanes;
    with.connect_timeout = longer_than_any_wait;
    wire = place->open(kind, with, sink).value();
    peer.say(line_of(wire->offer()));
    EXPECT_TRUE(wire->connect(offer_of(peer.line())));
    peer.say("joined\n");
    EXPECT_TRUE(comes_true([&] { return sink->ups == 1; }));
    peer.say(line_of(wire->grant(region, {{0, size, 0, 1}}, access::read_write, t1).value()));
    theirs = grant_of(peer.line());
  }
  ~joined() { wire->close(); }

  [[nodiscard]] batch to_peer(std::uint64_t id, direction dir) const {
    batch work;
    work.id = batch_id{id};
    work.transfer = theirs.transfer;
    work.dir = dir;
    work.pieces.push_back(
        {region, std::make_shared<const remote_grant>(theirs), {{0, 0, size, 0, 0, 1}}});
    return work;
  }
  void fence_and_wait(transfer_id transfer) {
    if (wire->fence(transfer) == fence_state::quiescent) return;
    EXPECT_TRUE(comes_true([&] { return sink->is_quiescent(transfer); }));
  }
  // Whether the memory holds the pattern everywhere; GPU memory is read through a copy.
  [[nodiscard]] bool untouched(std::byte pattern) const {
    if (!gpus) return all_are(memory, pattern);
    std::vector<std::byte> seen(size);
    EXPECT_TRUE(gpus->runtime->copy_now(seen.data(), memory.data(), size));
    return all_are(seen, pattern);
  }
  [[nodiscard]] bool peer_wrote() const {
    if (!gpus) return memory[size - 1] == std::byte{0xbb};
    std::byte last{};
    EXPECT_TRUE(gpus->runtime->copy_now(&last, memory.data() + size - 1, 1));
    return last == std::byte{0xbb};
  }
  void overwrite(std::byte pattern) const {
    if (!gpus) {
      std::memset(memory.data(), std::to_integer<int>(pattern), memory.size());
      return;
    }
    const std::vector<std::byte> all(size, pattern);
    EXPECT_TRUE(gpus->runtime->copy_now(memory.data(), all.data(), size));
  }

  troupe::testing::child_process peer;
  std::shared_ptr<xgmi::gpu_site> gpus;
  std::unique_ptr<endpoint> place;
  region_id region;
  std::span<std::byte> memory;
  std::shared_ptr<recorder> sink{std::make_shared<recorder>()};
  std::shared_ptr<link> wire;
  remote_grant theirs;
};

class backend_faults : public ::testing::TestWithParam<variant> {};

std::vector<variant> fault_variants() {
  if (have_verbs()) return {{backend_kind::rdma, 1, 1}, {backend_kind::rdma, 4, 1}};
  return {{backend_kind::tcp, 1, 1},
          {backend_kind::tcp, 4, 1},
          {backend_kind::shm, 1, 1},
          {backend_kind::xgmi, 1, 1, gpu_ends::both},
          {backend_kind::tcp, 1, 1, gpu_ends::both},
          {backend_kind::tcp, 4, 1, gpu_ends::a},
          {backend_kind::shm, 1, 1, gpu_ends::both},
          {backend_kind::shm, 1, 1, gpu_ends::a},
          {backend_kind::shm, 1, 1, gpu_ends::b}};
}

INSTANTIATE_TEST_SUITE_P(every, backend_faults, ::testing::ValuesIn(fault_variants()), name_of);

}  // namespace

TEST_P(backend_faults,
       a_peer_killed_while_it_writes_is_reported_lost_and_no_byte_lands_after_the_fence) {
  joined j{GetParam(), "write", 1s, time_of_a_death};
  ASSERT_TRUE(comes_true([&] { return j.peer_wrote(); })) << "no traffic";
  j.peer.signal(SIGKILL);
  ASSERT_TRUE(comes_true([&] { return j.sink->is_broken(); }));
  EXPECT_EQ(j.sink->broken->code, errc::peer_lost) << to_string(*j.sink->broken);
  j.fence_and_wait(t1);
  j.overwrite(std::byte{0x5c});
  std::this_thread::sleep_for(20ms);
  EXPECT_TRUE(j.untouched(std::byte{0x5c}));
}

TEST_P(backend_faults,
       a_peer_killed_under_our_batches_completes_each_once_and_then_breaks_the_link) {
  for (const auto dir : {direction::write, direction::read}) {
    joined j{GetParam(), "serve", 1s, time_of_a_death};
    j.peer.stop();  // so that the batches are certainly in flight
    std::size_t posted = 0;
    for (std::uint64_t i = 1; i <= 8; ++i) posted += j.wire->post(j.to_peer(i, dir)).has_value();
    j.peer.signal(SIGKILL);
    ASSERT_TRUE(comes_true([&] { return j.sink->is_broken(); }));
    EXPECT_EQ(j.sink->broken->code, errc::peer_lost) << to_string(*j.sink->broken);
    EXPECT_EQ(j.sink->completed(), posted);
    EXPECT_EQ(j.sink->completions_when_broken, posted);
    for (const auto& done : j.sink->completions) {
      EXPECT_TRUE(done.failure.has_value() || GetParam().kind != backend_kind::tcp);
      // Bytes that we put into the peer's memory ourselves may all have landed when the batch ends.
      if (GetParam().kind == backend_kind::shm && done.bad_segments.empty()) continue;
      // Its only segment was in flight, and how much of it landed is unknown.
      const std::vector<std::uint32_t> bad(done.failure ? 1 : 0, 0U);
      EXPECT_EQ(done.bad_segments, bad);
    }
  }
}

TEST_P(backend_faults, what_a_stopped_peer_had_under_way_never_lands_in_reused_memory) {
  // The peer wakes long before anyone gives up on it.
  joined j{GetParam(), "write", longer_than_any_wait};
  ASSERT_TRUE(comes_true([&] { return j.peer_wrote(); })) << "no traffic";
  j.peer.stop();
  // A fence that waited for the frozen peer would never return.
  const bool at_once = j.wire->fence(t1) == fence_state::quiescent;
  if (GetParam().kind == backend_kind::tcp && GetParam().gpus == gpu_ends::none) {
    EXPECT_TRUE(at_once) << "the target refuses by itself";
  } else if (!moves_by_itself(GetParam(), 'a') && GetParam().kind != backend_kind::rdma &&
             !at_once) {
    ASSERT_TRUE(comes_true([&] { return j.sink->is_quiescent(t1); }))
        << "what its GPU had under way ends without the peer";
  } else if (!at_once) {
    // Mapped memory: only an answer of the peer, or its death, makes the transfer quiescent. Until
    // then the blocks stay pinned.
    std::this_thread::sleep_for(50ms);
    EXPECT_FALSE(j.sink->is_quiescent(t1));
    j.peer.signal(SIGCONT);
    ASSERT_TRUE(comes_true([&] { return j.sink->is_quiescent(t1); }));
  }
  j.overwrite(std::byte{0x5c});
  j.peer.signal(SIGCONT);
  // The peer wakes; its writes continue and are refused.
  EXPECT_EQ(j.peer.line(), "refused grant_revoked");
  std::this_thread::sleep_for(50ms);
  EXPECT_TRUE(j.untouched(std::byte{0x5c}));
  EXPECT_FALSE(j.sink->is_broken());
}

TEST_P(backend_faults, a_stopped_peer_is_shut_out_without_its_help) {
  if (moves_by_itself(GetParam(), 'a')) GTEST_SKIP() << "it has our memory mapped";
  joined j{GetParam(), "write"};
  ASSERT_TRUE(comes_true([&] { return j.peer_wrote(); })) << "no traffic";
  j.peer.stop();
  j.fence_and_wait(t1);
  EXPECT_FALSE(j.sink->is_broken()) << to_string(j.sink->broken.value_or(troupe::error{}));
  j.overwrite(std::byte{0x5c});
  std::this_thread::sleep_for(200ms);
  EXPECT_TRUE(j.untouched(std::byte{0x5c})) << "its NIC goes on without it";
  j.peer.signal(SIGCONT);
  // The NIC refuses the writes that the peer posts before it hears of the fence, which breaks the
  // link.
  const auto said = j.peer.line();
  EXPECT_EQ(said.substr(0, 8), "refused ") << said;
  std::this_thread::sleep_for(50ms);
  EXPECT_TRUE(j.untouched(std::byte{0x5c}));
}

TEST_P(backend_faults, memory_of_a_gpu_is_freed_only_when_no_peer_has_it_open) {
  if (GetParam().kind != backend_kind::xgmi) GTEST_SKIP() << "nobody else opens it";
  enum class outcome : std::uint8_t { answers, dies, link_closes };
  for (const auto how : {outcome::answers, outcome::dies, outcome::link_closes}) {
    joined j{GetParam(), "write"};
    ASSERT_TRUE(comes_true([&] { return j.peer_wrote(); })) << "it has it open";
    j.fence_and_wait(t1);
    const auto is_there = [&] { return j.gpus->runtime->find(j.memory.data()).has_value(); };
    const auto open_there = maps_of(j.peer.pid(), j.memory.data());
    EXPECT_TRUE(open_there() || xgmi::on_real_gpus());
    j.peer.stop();
    EXPECT_TRUE(j.place->deregister(j.region)) << "it waits for nobody";
    std::this_thread::sleep_for(20ms);
    EXPECT_TRUE(is_there());
    if (how == outcome::answers) j.peer.signal(SIGCONT);
    if (how == outcome::dies) j.peer.signal(SIGKILL);
    if (how == outcome::link_closes) j.wire->close();
    EXPECT_TRUE(comes_true([&] { return !is_there(); }));
    if (how == outcome::answers) {
      EXPECT_FALSE(open_there());
      EXPECT_FALSE(j.sink->is_broken());
    }
  }
}

TEST_P(backend_faults, a_stopped_peer_does_not_hold_up_the_others) {
  joined frozen{GetParam(), "serve"};
  joined lively{GetParam(), "serve"};
  frozen.peer.stop();
  for (std::uint64_t i = 1; i <= 16; ++i) {
    static_cast<void>(frozen.wire->post(frozen.to_peer(i, direction::write)));
  }
  for (std::uint64_t i = 1; i <= 16; ++i) {
    ASSERT_TRUE(lively.wire->post(lively.to_peer(i, direction::write)));
  }
  ASSERT_TRUE(comes_true([&] { return lively.sink->completed() == 16; }));
  for (const auto& done : lively.sink->completions) {
    EXPECT_FALSE(done.failure) << to_string(done.failure.value_or(troupe::error{}));
  }
  EXPECT_FALSE(frozen.sink->is_broken())
      << to_string(frozen.sink->broken.value_or(troupe::error{}));
}

}  // namespace troupe::transport::contract
