#include "troupe/transport/rdma/memory_keys.hpp"

#include <cerrno>
#include <fstream>
#include <string>
#include <thread>
#include <tuple>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "exported.hpp"
#include "hostile_peer.hpp"
#include "open_device.hpp"

// Registering memory with real devices: whole, in pieces, and not at all. In the machine of
// tests/verbs.
namespace troupe::transport::rdma {

namespace {

constexpr std::uint64_t piece = 64 << 10;

/// KiB that this process has pinned for devices.
long pinned() {
  std::ifstream status{"/proc/self/status"};
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmPin:")) return std::stol(line.substr(6));
  }
  ADD_FAILURE() << "no VmPin in /proc/self/status";
  return -1;
}

/// Memory whose second half can be taken away.
struct mapping {
  static constexpr std::uint64_t size = std::uint64_t{1} << 20;
  mapping() {
    auto* at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(at, MAP_FAILED);
    bytes = {static_cast<std::byte*>(at), size};
  }
  ~mapping() { ::munmap(bytes.data(), size); }
  mapping(const mapping&) = delete;
  mapping& operator=(const mapping&) = delete;
  void forbid_second_half(bool forbidden) const {
    ASSERT_EQ(::mprotect(bytes.data() + size / 2, size / 2,
                         forbidden ? PROT_NONE : PROT_READ | PROT_WRITE),
              0);
  }
  std::span<std::byte> bytes;
};

struct fixture : ::testing::Test {
  mapping memory;
  region_table regions{16};
  std::shared_ptr<device> a{open_device("rxe0a")};
  std::shared_ptr<device> b{open_device("rxe0b")};
};
using rdma_memory_keys = fixture;

}  // namespace

TEST_F(rdma_memory_keys, a_large_region_is_registered_in_pieces_with_every_rail) {
  memory_keys keys{{a, b}, {.max_piece = piece + 1000}};  // rounded down
  const auto odd = memory.bytes.subspan(100, 10 * piece + 1);
  const auto region = regions.add(odd, "odd").value();
  const auto use = regions.use(region).value();
  const auto* made = keys.of(*use, reach::windows).value();
  EXPECT_EQ(made->piece_bytes(), piece);
  ASSERT_EQ(made->pieces(), 11U);
  EXPECT_EQ(made->address(), reinterpret_cast<std::uintptr_t>(odd.data()));
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < made->pieces(); ++i) {
    for (std::size_t rail = 0; rail < 2; ++rail) {
      EXPECT_EQ(made->memory(i, rail)->addr, odd.data() + i * piece);
      EXPECT_EQ(made->local_key(i, rail), made->memory(i, rail)->lkey);
    }
    total += made->memory(i, 0)->length;
  }
  EXPECT_EQ(total, odd.size());
  EXPECT_EQ(made->piece_at(piece - 1), 0U);
  EXPECT_EQ(made->piece_at(piece), 1U);
  EXPECT_EQ(keys.of(*use, reach::windows).value(), made) << "it is registered once";
  EXPECT_NE(keys.of(*use, reach::key).value(), made);
}

TEST_F(rdma_memory_keys, a_registration_that_fails_half_way_leaves_nothing_and_may_be_tried_again) {
  memory_keys keys{{a, b}, {.max_piece = piece}};
  const auto region = regions.add(memory.bytes, "half").value();
  const auto use = regions.use(region).value();
  const auto before = pinned();
  memory.forbid_second_half(true);
  const auto refused = keys.of(*use, reach::windows);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::pool_exhausted) << to_string(refused.error());
  EXPECT_NE(refused.error().message.find("'half'"), std::string::npos) << refused.error().message;
  EXPECT_EQ(pinned(), before);
  EXPECT_EQ(keys.size(), 0U);
  memory.forbid_second_half(false);
  EXPECT_EQ(keys.of(*use, reach::windows).value()->pieces(), 16U);
  EXPECT_GT(pinned(), before);
}

TEST_F(rdma_memory_keys, a_region_that_is_too_large_for_its_pieces_is_refused) {
  memory_keys keys{{a}, {.max_piece = 4096}};
  constexpr std::uint64_t large = std::uint64_t{4097} * 4096;
  auto* at = ::mmap(nullptr, large, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(at, MAP_FAILED);
  {
    const auto region = regions.add({static_cast<std::byte*>(at), large}, "large").value();
    const auto use = regions.use(region).value();
    const auto refused = keys.of(*use, reach::key);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, errc::out_of_range) << to_string(refused.error());
    EXPECT_EQ(keys.size(), 0U);
  }
  ::munmap(at, large);
}

TEST_F(rdma_memory_keys, what_is_forgotten_is_not_pinned_any_more) {
  memory_keys keys{{a, b}, {.max_piece = piece}};
  const auto before = pinned();
  const auto region = regions.add(memory.bytes, "pool").value();
  {
    const auto use = regions.use(region).value();
    ASSERT_TRUE(keys.of(*use, reach::windows));
    ASSERT_TRUE(keys.of(*use, reach::key));
  }
  EXPECT_GT(pinned(), before);
  keys.forget(region);
  EXPECT_EQ(pinned(), before);
  EXPECT_EQ(keys.size(), 0U);
  keys.forget(region);
  keys.forget(region_id{99});
}

TEST_F(rdma_memory_keys, threads_that_ask_at_once_get_the_same_registration_or_none_is_left) {
  memory_keys keys{{a}, {.max_piece = piece}};
  const auto before = pinned();
  const auto region = regions.add(memory.bytes, "pool").value();
  for (int round = 0; round < 10; ++round) {
    const bool good = round % 2 == 0;
    memory.forbid_second_half(!good);
    std::array<const registered_region*, 4> found{};
    {
      std::vector<std::jthread> threads;
      for (auto& mine : found) {
        threads.emplace_back([&] {
          const auto use = regions.use(region).value();
          auto made = keys.of(*use, reach::windows);
          mine = made ? *made : nullptr;
        });
      }
    }
    for (const auto* one : found) EXPECT_EQ(one, found[0]);
    EXPECT_EQ(found[0] != nullptr, good);
    EXPECT_EQ(keys.size(), good ? 1U : 0U);
    keys.forget(region);
    EXPECT_EQ(pinned(), before);
  }
}

/// 64 GiB of addresses. No machine here has the memory: the call to the device is intercepted, and
/// one page registered instead.
TEST_F(rdma_memory_keys, sixty_four_gib_are_registered_in_pieces_without_a_gap) {
  constexpr auto gib = std::uint64_t{1} << 30;
  constexpr auto all = 64 * gib;
  auto* at = ::mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(at, MAP_FAILED);
  const std::span bytes{static_cast<std::byte*>(at), all};
  for (const auto& [by, most, each] :
       {std::tuple{reach::windows, std::uint64_t{0}, gib},  // more than a window may span
        std::tuple{reach::key, 16 * gib, 16 * gib},
        std::tuple{reach::key, std::uint64_t{16} << 20, std::uint64_t{16} << 20}}) {
    const auto* next = bytes.data();
    std::uint64_t calls = 0;
    registration_options options;
    options.max_piece = most;
    options.relaxed_ordering = false;
    options.calls.by_address = [&](ibv_pd* domain, void* from, std::size_t size, int rights) {
      EXPECT_EQ(from, next);
      EXPECT_EQ(size, each);
      next += size;
      ++calls;
      return ::ibv_reg_mr(domain, memory.bytes.data(), 4096, rights);
    };
    memory_keys keys{{a}, options};
    const auto region = regions.add(bytes, "large").value();
    {
      const auto use = regions.use(region).value();
      const auto made = keys.of(*use, by);
      ASSERT_TRUE(made) << to_string(made.error());
      EXPECT_EQ(calls, all / each);
      EXPECT_EQ(next, bytes.data() + all);
      EXPECT_EQ((*made)->piece_at(all - 1), all / each - 1);
    }
    EXPECT_TRUE(regions.remove(region));
  }
  ::munmap(at, all);
}

// -- relaxed ordering

TEST_F(rdma_memory_keys, relaxed_ordering_is_asked_of_a_device_that_takes_it) {
  std::vector<int> asked;
  registration_options options;
  options.notice = [](const std::string& sentence) { ADD_FAILURE() << sentence; };
  options.calls.by_address = [&](ibv_pd* domain, void* at, std::size_t bytes, int rights) {
    asked.push_back(rights);
    return ::ibv_reg_mr(domain, at, bytes, rights);
  };
  memory_keys keys{{a, b}, options};
  EXPECT_EQ(keys.ordering(), "relaxed ordering");
  const auto region = regions.add(memory.bytes, "pool").value();
  const auto use = regions.use(region).value();
  ASSERT_TRUE(keys.of(*use, reach::windows));
  ASSERT_TRUE(keys.of(*use, reach::key));
  EXPECT_EQ(asked.size(), 6U);
  for (const int rights : asked) EXPECT_NE(rights & IBV_ACCESS_RELAXED_ORDERING, 0);
}

TEST_F(rdma_memory_keys, where_it_is_off_nobody_is_asked) {
  registration_options options;
  options.relaxed_ordering = false;
  options.calls.by_address = [&](ibv_pd* domain, void* at, std::size_t bytes, int rights) {
    EXPECT_EQ(rights & IBV_ACCESS_RELAXED_ORDERING, 0);
    return ::ibv_reg_mr(domain, at, bytes, rights);
  };
  memory_keys keys{{a}, options};
  EXPECT_EQ(keys.ordering(), "strict ordering (relaxed_ordering: off)");
  const auto region = regions.add(memory.bytes, "pool").value();
  const auto use = regions.use(region).value();
  EXPECT_TRUE(keys.of(*use, reach::windows));
}

TEST_F(rdma_memory_keys, a_device_that_refuses_relaxed_ordering_does_without_and_is_told_of_once) {
  int asked_b = 0;
  std::vector<std::string> said;
  registration_options options;
  options.max_piece = piece;
  options.notice = [&](const std::string& sentence) { said.push_back(sentence); };
  options.calls.by_address = [&](ibv_pd* domain, void* at, std::size_t bytes,
                                 int rights) -> ibv_mr* {
    if (domain == b->domain() && (rights & IBV_ACCESS_RELAXED_ORDERING) != 0) {
      ++asked_b;
      errno = EOPNOTSUPP;
      return nullptr;
    }
    return ::ibv_reg_mr(domain, at, bytes, rights);
  };
  memory_keys keys{{a, b}, options};
  const auto region = regions.add(memory.bytes, "pool").value();
  const auto use = regions.use(region).value();
  const auto made = keys.of(*use, reach::windows);
  ASSERT_TRUE(made) << to_string(made.error());
  EXPECT_EQ((*made)->pieces(), 16U);
  EXPECT_EQ(asked_b, 1);
  ASSERT_EQ(said.size(), 1U);
  EXPECT_NE(said[0].find("rxe0b refused"), std::string::npos) << said[0];
  EXPECT_NE(keys.ordering().find("relaxed was refused by rxe0b"), std::string::npos)
      << keys.ordering();
}

// -- memory that was exported as a dma-buf

/// A queue pair of one device, joined with that of a peer that needs no permission.
struct joined_pair {
  explicit joined_pair(const std::shared_ptr<device>& on)
      : here{completion_queue::create(on, 64).value()},
        pair{queue_pair::create(on, *here, {.sends = 8, .receives = 8}).value()} {
    const auto offer = offer_body::decode(peer.offer().payload).value();
    EXPECT_TRUE(pair->reset({}));
    EXPECT_TRUE(pair->join({offer.rail[0], offer.lane[0], 1}, {}));
    peer.join_lane(0, {offer_of(*on), pair->offer(), 1});
  }

  const std::unique_ptr<completion_queue> here;
  const std::unique_ptr<queue_pair> pair;
  hostile_peer peer{"rxe0b", incarnation{0xbad}};
};

/// Expects a peer to write to the first and the last byte, with the registration's own key.
void expect_a_peer_reaches(const std::shared_ptr<device>& on, const registered_region& made) {
  joined_pair to{on};
  const auto last = made.size() - 4096;
  for (const auto offset : {std::uint64_t{0}, last}) {
    EXPECT_EQ(to.peer.run(IBV_WR_RDMA_WRITE, 0, made.address() + offset,
                          made.memory(made.piece_at(offset), 0)->rkey, 4096),
              IBV_WC_SUCCESS);
  }
}

/// Soft-RoCE of this kernel supports no dma-buf, like NICs without such a driver: then memory is
/// registered by its address.
TEST_F(rdma_memory_keys, exported_memory_that_a_device_does_not_take_as_such_goes_by_its_address) {
  const exported memory_of_device;
  std::vector<int> refused;
  registration_options options;
  options.max_piece = piece;
  options.calls.by_dmabuf = [&](ibv_pd* domain, std::uint64_t offset, std::size_t bytes,
                                std::uint64_t address, int dmabuf, int rights) {
    auto* made = ::ibv_reg_dmabuf_mr(domain, offset, bytes, address, dmabuf, rights);
    if (made == nullptr) refused.push_back(errno);
    return made;
  };
  memory_keys keys{{a}, options};
  // The descriptor is a dma-buf, while the bytes are host memory, which shows which of the two was
  // registered.
  const auto region =
      regions.add(memory.bytes, "pool", {.dmabuf = memory_of_device.fd, .kind = memory_kind::host});
  ASSERT_TRUE(region) << to_string(region.error());
  const auto use = regions.use(*region).value();
  const auto made = keys.of(*use, reach::key);
  ASSERT_TRUE(made) << to_string(made.error());
  EXPECT_GE(refused.size(), 16U) << "it was not asked first";
  expect_a_peer_reaches(a, **made);
  EXPECT_EQ(memory.bytes.front(), std::byte{0xbb});
  EXPECT_EQ(memory.bytes.back(), std::byte{0xbb});
}

/// The kernel pins no pages of a graphics device by their address, so both ways fail here.
TEST_F(rdma_memory_keys, where_both_ways_fail_the_error_says_why_each_did_and_nothing_is_left) {
  const exported memory_of_device;
  memory_keys keys{{a}, {.max_piece = piece}};
  const auto before = pinned();
  const auto region =
      regions.add(memory_of_device.bytes(), "gpu", {.dmabuf = memory_of_device.fd}).value();
  for (const auto by : {reach::windows, reach::key}) {
    const auto use = regions.use(region).value();
    const auto made = keys.of(*use, by);
    ASSERT_FALSE(made);
    EXPECT_EQ(made.error().code, errc::pool_exhausted);
    const auto& said = made.error().message;
    EXPECT_NE(said.find("as a dma-buf: Operation not supported"), std::string::npos) << said;
    EXPECT_NE(said.find("by its address: Bad address"), std::string::npos) << said;
    EXPECT_EQ(said.find("memory_windows") != std::string::npos, by == reach::windows) << said;
  }
  EXPECT_EQ(keys.size(), 0U);
  EXPECT_EQ(pinned(), before);
}

/// No device here supports dma-bufs. Only the library call is replaced: it registers the same bytes
/// by their address, so the test can check the arguments and that bytes move.
TEST_F(rdma_memory_keys, a_device_that_takes_dma_bufs_is_given_each_piece_at_its_offset) {
  constexpr std::uint64_t begin = 8192;
  const exported memory_of_device;
  std::vector<std::uint64_t> offsets;
  int own = -1;
  registration_options options;
  options.max_piece = piece;
  options.relaxed_ordering = false;
  options.calls.by_dmabuf = [&](ibv_pd* domain, std::uint64_t offset, std::size_t bytes,
                                std::uint64_t address, int dmabuf, int rights) {
    offsets.push_back(offset);
    own = dmabuf;
    EXPECT_EQ(address, reinterpret_cast<std::uintptr_t>(memory.bytes.data()) + offset - begin);
    return ::ibv_reg_mr(domain, reinterpret_cast<void*>(address), bytes, rights);
  };
  options.calls.by_address = [](ibv_pd*, void*, std::size_t, int) -> ibv_mr* {
    ADD_FAILURE() << "registered by its address";
    return nullptr;
  };
  memory_keys keys{{a}, options};
  const auto region =
      regions.add(memory.bytes, "gpu", {.dmabuf = memory_of_device.fd, .offset = begin}).value();
  const registered_region* made = nullptr;
  {
    const auto use = regions.use(region).value();
    made = keys.of(*use, reach::key).value();
    ASSERT_EQ(offsets.size(), 16U);
    for (std::size_t i = 0; i < offsets.size(); ++i) EXPECT_EQ(offsets[i], begin + i * piece);
    EXPECT_NE(own, memory_of_device.fd) << "the caller may close his";
    EXPECT_GE(::fcntl(own, F_GETFD), 0);
    expect_a_peer_reaches(a, *made);
    EXPECT_EQ(memory.bytes.front(), std::byte{0xbb});
    EXPECT_EQ(memory.bytes.back(), std::byte{0xbb});
  }
  keys.forget(region);
  ASSERT_TRUE(regions.remove(region));
  EXPECT_LT(::fcntl(own, F_GETFD), 0) << "left open";
}

/// Two queue pairs of one wire, each driven by its own device.
TEST_F(rdma_memory_keys, the_key_of_a_registration_for_windows_opens_nothing) {
  memory_keys keys{{a}, {}};
  const auto region = regions.add(memory.bytes, "pool").value();
  const auto use = regions.use(region).value();
  for (const auto by : {reach::windows, reach::key}) {
    const auto* made = keys.of(*use, by).value();
    joined_pair to{a};
    EXPECT_EQ(to.peer.run(IBV_WR_RDMA_WRITE, 0, made->address(), made->memory(0, 0)->rkey, 4096),
              by == reach::windows ? IBV_WC_REM_ACCESS_ERR : IBV_WC_SUCCESS);
    EXPECT_EQ(memory.bytes[0], by == reach::windows ? std::byte{0} : std::byte{0xbb});
  }
}

}  // namespace troupe::transport::rdma
