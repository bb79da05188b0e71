#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/transport/rdma/options.hpp"
#include "troupe/transport/types.hpp"

#include "memory_reach.hpp"
#include "waiting.hpp"

namespace troupe::transport::contract {

using troupe::testing::have_verbs;
using troupe::testing::wait_limit;

/// A time-out that must not fire: even a busy machine ends a test sooner.
inline const std::chrono::seconds longer_than_any_wait{10 * wait_limit};

/// Which ends of a link have their region in memory of a GPU.
enum class gpu_ends : std::uint8_t { none, both, a, b };

/// One way to run the suite.
struct variant {
  backend_kind kind;
  std::uint32_t lanes;
  std::uint32_t workers;  ///< 0: the test polls
  gpu_ends gpus{gpu_ends::none};
  friend bool operator==(const variant&, const variant&) = default;
};

/// Whether `side` ('a' or 'b') has its region in GPU memory.
inline bool on_gpu(const variant& with, char side) {
  return with.gpus == gpu_ends::both || with.gpus == (side == 'a' ? gpu_ends::a : gpu_ends::b);
}

inline std::string name_of(const ::testing::TestParamInfo<variant>& info) {
  return std::string{to_string(info.param.kind)} + "_lanes" + std::to_string(info.param.lanes) +
         (info.param.workers == 0 ? "_polled" : "_workers" + std::to_string(info.param.workers)) +
         std::array{"", "_gpus", "_gpu_to_host",
                    "_host_to_gpu"}[static_cast<std::size_t>(info.param.gpus)];
}

/// The devices of one side ('a' or 'b') of an rdma link, as `tests/verbs/machine` creates them: one
/// wire joins rxe0a and rxe0b, another rxe1a and rxe1b. A link with many lanes uses both wires.
inline std::string rdma_devices(char side, std::uint32_t lanes) {
  std::string devices = std::string{"rxe0"} + side;
  if (lanes >= 4) devices += std::string{",rxe1"} + side;
  return devices;
}

/// Soft-RoCE under emulation moves 20 to 60 MB/s, so the bytes in flight get the time in which a
/// real wire moves far more. TROUPE_TEST_RDMA=no_windows acts as a NIC without memory windows;
/// =pieces as a NIC that registers only a little memory at once, which puts a border about every 64
/// KiB block. On a busy host the machine stalls for longer than NICs wait for an answer. The
/// needless retransmissions make Soft-RoCE give up a link, and may fill a read with wrong bytes.
inline void suit_emulation(rdma_options& options) {
  options.timeout = 20;
  options.window_bytes = std::uint64_t{512} << 10;
  const char* told = std::getenv("TROUPE_TEST_RDMA");
  const std::string_view wanted = told != nullptr ? told : "";
  options.memory_windows = wanted != "no_windows";
  if (wanted == "pieces") options.max_registration = 100'000;
}

/// Every number of lanes, every way to drive a link and every place of its memory, but not each with each: these reach
/// every line of `transport/` that all combinations reach (gcov), and 6,197 of 6,205 branches.
inline std::vector<variant> all_variants() {
  using enum backend_kind;
  using enum gpu_ends;
  // One device that the test polls, two that threads drive.
  if (have_verbs()) return {{rdma, 1, 0}, {rdma, 4, 2}};
  std::vector<variant> all{{tcp, 1, 1},       {tcp, 1, 0},    {tcp, 8, 1},    {tcp, 4, 2, both},
                           {tcp, 1, 0, a},    {tcp, 1, 1, b}, {shm, 1, 1},    {shm, 1, 0},
                           {shm, 1, 1, both}, {shm, 1, 0, a}, {shm, 1, 1, b}, {xgmi, 1, 1, both},
                           {xgmi, 1, 0, both}};
#if defined(__SANITIZE_THREAD__)
  // A polled link would run on the test's only thread. One lane has no threads that several do not have.
  std::erase_if(all, [](const variant& v) { return v.workers == 0; });
  std::erase(all, variant{tcp, 1, 1});
#elif defined(__SANITIZE_ADDRESS__)
  // A link handles memory alike, whoever drives it.
  for (const variant& one :
       {variant{tcp, 1, 1}, variant{tcp, 1, 0}, variant{shm, 1, 1}, variant{xgmi, 1, 0, both}}) {
    std::erase(all, one);
  }
#endif
  return all;
}

/// Whether the initiator moves the bytes without asking `target` ('a' or 'b'), whose memory it has
/// mapped.
inline bool moves_by_itself(const variant& with, char target) {
  return with.kind == backend_kind::xgmi ||
         (with.kind == backend_kind::shm && !on_gpu(with, target));
}

/// Why memory that the engine allocated does not move on this machine. Empty if it does.
inline std::optional<std::string> why_engine_memory_does_not_move(const variant& with) {
  if (with.kind != backend_kind::shm) return std::nullopt;
  return troupe::testing::why_memory_is_out_of_reach();
}

/// Variants for tests of behaviour that the number of lanes may change.
inline std::vector<variant> lane_variants() {
  auto all = all_variants();
  if (have_verbs()) {
    all.insert(all.end(), {{backend_kind::rdma, 2, 1}, {backend_kind::rdma, 8, 1}});
  }
  return all;
}

}  // namespace troupe::transport::contract
