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

/// A time-out that is not to be waited for, and that no busy machine lets pass within a test.
inline const std::chrono::seconds longer_than_any_wait{10 * wait_limit};

/// Which ends of a link have their region in memory of a GPU.
enum class gpu_ends : std::uint8_t { none, both, a, b };

/// One way to run the suite.
struct variant {
  backend_kind kind;
  std::uint32_t lanes;
  std::uint32_t workers;  ///< 0: the test polls
  gpu_ends gpus{gpu_ends::none};
};

/// Whether `side` ('a' or 'b') has its region there.
inline bool on_gpu(const variant& with, char side) {
  return with.gpus == gpu_ends::both || with.gpus == (side == 'a' ? gpu_ends::a : gpu_ends::b);
}

inline std::string name_of(const ::testing::TestParamInfo<variant>& info) {
  return std::string{to_string(info.param.kind)} + "_lanes" + std::to_string(info.param.lanes) +
         (info.param.workers == 0 ? "_polled" : "_workers" + std::to_string(info.param.workers)) +
         std::array{"", "_gpus", "_gpu_to_host",
                    "_host_to_gpu"}[static_cast<std::size_t>(info.param.gpus)];
}

/// The devices of one side ('a' or 'b') of an rdma link, as `tests/verbs/machine` makes them: a wire
/// joins rxe0a and rxe0b, another one rxe1a and rxe1b. With many lanes over both wires.
inline std::string rdma_devices(char side, std::uint32_t lanes) {
  std::string devices = std::string{"rxe0"} + side;
  if (lanes >= 4) devices += std::string{",rxe1"} + side;
  return devices;
}

/// Soft-RoCE under emulation moves 20 to 60 MB/s: what is under way must be answered within the time
/// that a real wire has for far more. TROUPE_TEST_RDMA=no_windows: as with a NIC that has none; =pieces:
/// as with one that takes only little memory at once, so that every 64 KiB block or so has a border.
/// On a busy host the machine stands still for longer than wires are given to answer: what is then
/// sent again for nothing makes Soft-RoCE give up a link, and may fill a read with wrong bytes.
inline void suit_emulation(rdma_options& options) {
  options.timeout = 20;
  options.window_bytes = std::uint64_t{512} << 10;
  const char* told = std::getenv("TROUPE_TEST_RDMA");
  const std::string_view wanted = told != nullptr ? told : "";
  options.memory_windows = wanted != "no_windows";
  if (wanted == "pieces") options.max_registration = 100'000;
}

inline std::vector<variant> all_variants() {
  std::vector<variant> all{{backend_kind::tcp, 1, 1},
                           {backend_kind::tcp, 1, 0},
                           {backend_kind::tcp, 4, 2},
                           {backend_kind::tcp, 8, 1},
                           {backend_kind::shm, 1, 1},
                           {backend_kind::shm, 1, 0},
                           {backend_kind::xgmi, 1, 1, gpu_ends::both},
                           {backend_kind::xgmi, 1, 0, gpu_ends::both},
                           {backend_kind::tcp, 1, 1, gpu_ends::both},
                           {backend_kind::tcp, 1, 0, gpu_ends::a},
                           {backend_kind::tcp, 1, 1, gpu_ends::b},
                           {backend_kind::tcp, 4, 2, gpu_ends::both},
                           {backend_kind::shm, 1, 1, gpu_ends::both},
                           {backend_kind::shm, 1, 0, gpu_ends::both},
                           {backend_kind::shm, 1, 1, gpu_ends::a},
                           {backend_kind::shm, 1, 0, gpu_ends::a},
                           {backend_kind::shm, 1, 1, gpu_ends::b},
                           {backend_kind::shm, 1, 0, gpu_ends::b}};
  // One device that is polled, two that threads drive.
  if (have_verbs()) all = {{backend_kind::rdma, 1, 0}, {backend_kind::rdma, 4, 2}};
#if defined(__SANITIZE_THREAD__)
  // A link that the test polls has the test's one thread.
  std::erase_if(all, [](const variant& v) { return v.workers == 0; });
#endif
  return all;
}

/// Whether the initiator moves the bytes without asking `target` ('a' or 'b'): it has its memory mapped.
inline bool moves_by_itself(const variant& with, char target) {
  return with.kind == backend_kind::xgmi ||
         (with.kind == backend_kind::shm && !on_gpu(with, target));
}

/// Why memory that the engine allocated does not move on this machine; nothing: it does.
inline std::optional<std::string> why_engine_memory_does_not_move(const variant& with) {
  if (with.kind != backend_kind::shm) return std::nullopt;
  return troupe::testing::why_memory_is_out_of_reach();
}

/// For what lanes might change.
inline std::vector<variant> lane_variants() {
  auto all = all_variants();
  if (have_verbs()) {
    all.insert(all.end(), {{backend_kind::rdma, 2, 1}, {backend_kind::rdma, 8, 1}});
  }
  return all;
}

}  // namespace troupe::transport::contract
