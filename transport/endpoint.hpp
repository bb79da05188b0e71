#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/host_memory.hpp"
#include "troupe/transport/rdma/options.hpp"
#include "troupe/transport/xgmi/options.hpp"

namespace troupe::transport {

struct endpoint_options {
  incarnation self;               ///< must not be 0
  std::string host{"127.0.0.1"};  ///< address that tcp listens on and offers to peers
  std::uint16_t data_port{0};     ///< of the tcp listener; 0: the OS chooses
  std::uint32_t num_workers{1};   ///< progress threads; 0: none, the owner calls `poll`
  /// How long a progress thread polls after work before it sleeps, at most: less where sleeps turn
  /// out to be long.
  std::chrono::microseconds spin{250};
  std::uint64_t max_regions{4096};
  /// How long a host may not answer, or a peer not take what is sent to it, until its links break;
  /// in steps of 1 s, at least 2 s. Watched by the kernel of this host (tcp).
  std::chrono::milliseconds peer_silence{10'000};
  std::uint32_t max_pending_connections{64};  ///< accepted sockets that have proved nothing yet
  rdma_options rdma{};
  xgmi_options xgmi{};
  /// Called on a progress thread (or in `poll`) after each round that did work, with no lock held.
  /// Lets the owner run what the round's callbacks made runnable on the same thread.
  std::function<void()> after_progress;
  /// A progress thread has ended by an exception, which `why` tells: its links stand still for ever.
  /// Called on that thread, which ends then.
  std::function<void(const troupe::error& why)> on_thread_lost;
  /// Told about strangers at the data port (wrong proof, garbage), at most one sentence a second
  /// with the number of those that were left out. Called on a progress thread; must not block.
  std::function<void(const std::string& sentence)> notice;
};

struct backend_status {
  backend_kind kind{backend_kind::tcp};
  usability state;
};

/// The choice of a backend for one peer, with what is said about it in the log and in `troupe
/// status`.
struct backend_choice {
  backend_kind kind{backend_kind::tcp};
  std::string reason;  ///< "same host and namespaces; xgmi: not built"
};

/// What a stream of a GPU waits at. Thread-safe. Opened at the latest by its last owner's end.
class stream_gate {
 public:
  virtual ~stream_gate() = default;
  /// Idempotent; calls no driver.
  virtual void open() noexcept = 0;
};

/// Everything of one node that moves bytes: its registered memory, its backends, its progress
/// threads. Thread-safe. Destroyed last: after every link of it is closed and its owner's sinks may
/// die.
class endpoint {
 public:
  [[nodiscard]] static result<std::unique_ptr<endpoint>> create(endpoint_options options);
  virtual ~endpoint() = default;

  // -- memory

  /// Allocates zeroed host memory (a memfd, so that `shm` peers can map it and nothing outlives the
  /// process) and registers it. Freed by `deregister`. `invalid_config` (size 0), `pool_exhausted`
  /// (the OS refuses; the sentence says how much was asked and is free).
  [[nodiscard]] virtual result<region_id> allocate(std::uint64_t size, std::string name) = 0;
  /// A region for each of `sizes` (bytes), all or none; their names are `name` and a number from 0. As
  /// `allocate`, of pages and on a NUMA node as the options say. Each begins with a page. Besides
  /// `invalid_config` (the NUMA node is not there; those there are are named), `pool_exhausted` (said of
  /// the sum before anything is allocated), `backend_unavailable` (the kernel does not let this process
  /// choose the node), `overloaded` (more regions than `max_regions`).
  [[nodiscard]] virtual result<allocated_regions> allocate(std::span<const std::uint64_t> sizes,
                                                           const std::string& name,
                                                           const host_memory_options& how) = 0;
  /// One region in memory of a GPU of this process (its place among those that the process sees), not
  /// zeroed. What `bytes` answers of it are addresses that only GPUs follow. `no_device`,
  /// `backend_unavailable` (built without GPUs), `pool_exhausted`.
  [[nodiscard]] virtual result<region_id> allocate_on_gpu(std::uint32_t gpu, std::uint64_t size,
                                                          std::string name) = 0;
  /// The GPU whose memory the region is in, as this process counts them; empty: the host's.
  [[nodiscard]] virtual std::optional<std::uint32_t> gpu_of(region_id region) const = 0;
  /// What stands in these bytes of a GPU, registered or not; empty: they are the host's. Waits for the
  /// copy, not for what the GPU computes. `out_of_range` (they go beyond their allocation), `no_device`
  /// (the GPU is lost).
  [[nodiscard]] virtual result<std::optional<std::vector<std::byte>>> copy_of_gpu(
      std::span<const std::byte> bytes) const = 0;
  /// Calls `then` once, from a thread that must not be held up: empty when the GPU has come to
  /// `point`, else why it never will. Points of one `line` are told in their order. The event is done
  /// with when this returns; nobody is called once `stop` has returned. `no_device`
  /// (also where the build knows no GPUs), `invalid_config` (no event, or one of another process
  /// that the driver does not open), `overloaded` (too many wait for a GPU that does not come).
  [[nodiscard]] virtual result<void> after_compute(
      const compute_point& point, std::uint64_t line,
      std::function<void(std::optional<troupe::error>)> then) = 0;
  /// What the stream is given from here on waits, on the GPU, until the gate is opened. No thread
  /// waits for it. `stop` opens every gate. `no_device` (also where the build knows no GPUs),
  /// `backend_unavailable`: this GPU or its driver cannot; `invalid_config` (no such GPU, or the
  /// stream is none of it), `overloaded` (too many streams are held), `aborted` (after `stop`).
  [[nodiscard]] virtual result<std::shared_ptr<stream_gate>> hold(const compute_stream& stream) = 0;
  /// Registers memory that the caller owns and keeps alive until `deregister`: of the host or of a
  /// GPU, which is found out; also a part of an allocation. `already_exists`
  /// when it overlaps a registered range (naming that region), `invalid_config` (null or empty),
  /// `overloaded`.
  [[nodiscard]] virtual result<region_id> register_memory(std::span<std::byte> bytes,
                                                          std::string name) = 0;
  /// The same for memory that was exported as a dma-buf. `rdma` registers it as such where the device
  /// takes it, else by its address as any other memory. `invalid_config` also when the descriptor is
  /// none, the range wraps, or the address and the offset differ in their place in a page (4 KiB).
  [[nodiscard]] virtual result<region_id> register_memory(std::span<std::byte> bytes,
                                                          std::string name,
                                                          const exported_memory& as) = 0;
  /// `unknown_region`; `overloaded` while a grant or a batch still uses it (fence first). Waits for no
  /// peer: what `allocate_on_gpu` made is freed when each peer that had it open over `xgmi` has closed
  /// it or its link has ended, and who frees memory of a GPU of its own first ends those links.
  [[nodiscard]] virtual result<void> deregister(region_id region) = 0;
  /// Deregisters a region that peers and batches may be using. From the call on nothing begins to use
  /// the region; every transfer of every link that does is fenced (`link::users_of`), so its batches
  /// end as `aborted` here and as `grant_revoked` at peers. Returns when nobody can touch the memory
  /// any more; memory of a GPU that a peer has open over `xgmi` stays mapped there, unused, as
  /// `deregister` says. Sinks are told of fences that were pending. Waits `wait` at most, then
  /// `deadline`: the region stays withdrawn, call again. `unknown_region`. Not from a sink; where there
  /// are no progress threads the call makes progress itself.
  [[nodiscard]] virtual result<void> withdraw(region_id region, std::chrono::milliseconds wait) = 0;
  [[nodiscard]] virtual result<std::span<std::byte>> bytes(region_id region) const = 0;

  // -- links

  [[nodiscard]] virtual std::vector<backend_status> backends() const = 0;
  [[nodiscard]] virtual host_identity identity() const = 0;
  /// Picks for a peer: the `wanted` backend only, or (no value) the best of DESIGN.md section 5
  /// that is usable here and reaches it. `excluded` are those that failed before (fallback).
  /// `backend_unavailable` with every candidate's reason.
  [[nodiscard]] virtual result<backend_choice> choose(
      const host_identity& peer, std::optional<backend_kind> wanted,
      std::span<const backend_kind> excluded = {}) const = 0;
  [[nodiscard]] virtual result<std::shared_ptr<link>> open(backend_kind kind,
                                                           const link_options& options,
                                                           std::shared_ptr<link_sink> sink) = 0;

  // -- progress

  /// One round over all links from the calling thread. True: something was done. May be called
  /// beside the progress threads (they step aside for a caller that polls).
  virtual bool poll() = 0;
  /// For a caller that has nothing to do but wait for what the sinks are told: makes progress on
  /// its thread, sleeping while there is none, until `done` (asked after each round) or `until`.
  /// `wake_fd` becoming readable ends a sleep: whatever `done` looks at and another thread may
  /// change makes it so. False at once where the progress threads go on instead: another caller
  /// drives already, or there are several threads.
  virtual bool drive(std::chrono::steady_clock::time_point until, int wake_fd,
                     const std::function<bool()>& done) = 0;
  /// Ends the progress threads. Afterwards nothing moves but by `poll`, and no sink is told
  /// anything else. Idempotent; not from a sink.
  virtual void stop() = 0;
  /// The port that the tcp listener was really given.
  [[nodiscard]] virtual std::uint16_t data_port() const = 0;
};

/// One line for each RDMA device of this machine, used or not; for people. Empty also where the
/// rdma backend is not built.
[[nodiscard]] std::vector<std::string> describe_rdma_devices();

}  // namespace troupe::transport
