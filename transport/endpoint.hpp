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
  /// Longest time for which a progress thread polls after work before it sleeps. It polls for less
  /// where sleeps turn out to be long.
  std::chrono::microseconds spin{250};
  std::uint64_t max_regions{4096};
  /// How long a host may fail to answer, or a peer fail to take what is sent to it, before its
  /// links break; in steps of 1 s, at least 2 s. Enforced by the kernel of this host (tcp).
  std::chrono::milliseconds peer_silence{10'000};
  std::uint32_t max_pending_connections{64};  ///< accepted sockets without a proof so far
  rdma_options rdma{};
  xgmi_options xgmi{};
  /// Called on a progress thread (or in `poll`) after each round that did work, with no lock held.
  /// Lets the owner run, on the same thread, the work that the round's callbacks made runnable.
  std::function<void()> after_progress;
  /// Called when a progress thread ends by an exception, described by `why`: its links make no more
  /// progress. Called on that thread, just before it ends.
  std::function<void(const troupe::error& why)> on_thread_lost;
  /// Called for strangers at the data port (wrong proof, garbage), with at most one sentence a
  /// second that counts the suppressed ones. Called on a progress thread; must not block.
  std::function<void(const std::string& sentence)> notice;
};

struct backend_status {
  backend_kind kind{backend_kind::tcp};
  usability state;
};

/// The backend chosen for one peer, with the reason shown in the log and in `troupe status`.
struct backend_choice {
  backend_kind kind{backend_kind::tcp};
  std::string reason;  ///< "same host and namespaces; xgmi: not built"
};

/// A gate at which a GPU stream waits. Thread-safe. Opened at the latest when its last owner drops
/// it.
class stream_gate {
 public:
  virtual ~stream_gate() = default;
  /// Idempotent; calls no driver.
  virtual void open() noexcept = 0;
};

/// The data plane of one node: its registered memory, its backends, its progress threads.
/// Thread-safe. Destroy it last, after all of its links are closed and the owner's sinks may die.
class endpoint {
 public:
  [[nodiscard]] static result<std::unique_ptr<endpoint>> create(endpoint_options options);
  virtual ~endpoint() = default;

  // -- memory

  /// Allocates zeroed host memory (a memfd, so that `shm` peers can map it and nothing outlives the
  /// process) and registers it. Freed by `deregister`. `invalid_config` (size 0), `pool_exhausted`
  /// (the OS refuses; the sentence says how much was asked for and how much is free).
  [[nodiscard]] virtual result<region_id> allocate(std::uint64_t size, std::string name) = 0;
  /// Allocates a region for each of `sizes` (bytes), all or none, with the page size and the NUMA
  /// node of the options. Their names are `name` and a number from 0; each begins at a page
  /// boundary. Besides the errors above: `invalid_config` (no such NUMA node; the sentence lists
  /// the nodes), `pool_exhausted` (for the sum, before anything is allocated),
  /// `backend_unavailable` (the kernel does not let this process choose the node), `overloaded`
  /// (more regions than `max_regions`).
  [[nodiscard]] virtual result<allocated_regions> allocate(std::span<const std::uint64_t> sizes,
                                                           const std::string& name,
                                                           const host_memory_options& how) = 0;
  /// Allocates one region, not zeroed, in the memory of a GPU (its index among those that the
  /// process sees). `bytes` then returns addresses that only GPUs can access. `no_device`,
  /// `backend_unavailable` (built without GPUs), `pool_exhausted`.
  [[nodiscard]] virtual result<region_id> allocate_on_gpu(std::uint32_t gpu, std::uint64_t size,
                                                          std::string name) = 0;
  /// The GPU whose memory the region is in, as this process counts them; empty for host memory.
  [[nodiscard]] virtual std::optional<std::uint32_t> gpu_of(region_id region) const = 0;
  /// Copies these bytes of a GPU, registered or not, to the host; empty if they are host memory.
  /// Waits for the copy, not for the GPU's computation. `out_of_range` (the bytes exceed their
  /// allocation), `no_device` (the GPU is lost).
  [[nodiscard]] virtual result<std::optional<std::vector<std::byte>>> copy_of_gpu(
      std::span<const std::byte> bytes) const = 0;
  /// Calls `then` once, from a thread that must not be blocked: without an error when the GPU has
  /// reached `point`, else with the reason why it never will. Points of one `line` are reported in
  /// order. The event is no longer needed when this returns. No call is made once `stop` has
  /// returned. `no_device` (also where the build knows no GPUs), `invalid_config` (no event, or an
  /// event of another process that the driver does not open), `overloaded` (too many points wait
  /// for a GPU that does not reach them).
  [[nodiscard]] virtual result<void> after_compute(
      const compute_point& point, std::uint64_t line,
      std::function<void(std::optional<troupe::error>)> then) = 0;
  /// Holds the stream: work launched on it from here on waits, on the GPU, until the gate is
  /// opened. No thread waits. `stop` opens every gate. `no_device` (also where the build knows no
  /// GPUs), `backend_unavailable` (this GPU or its driver cannot do it), `invalid_config` (no such
  /// GPU, or not a stream of it), `overloaded` (too many streams are held), `aborted` (after
  /// `stop`).
  [[nodiscard]] virtual result<std::shared_ptr<stream_gate>> hold(const compute_stream& stream) = 0;
  /// Registers memory that the caller owns and keeps alive until `deregister`: host or GPU memory
  /// (detected), which may be a part of an allocation. `already_exists` when it overlaps a
  /// registered range (naming that region), `invalid_config` (null or empty), `overloaded`.
  [[nodiscard]] virtual result<region_id> register_memory(std::span<std::byte> bytes,
                                                          std::string name) = 0;
  /// Registers memory that was exported as a dma-buf. `rdma` registers the dma-buf where the device
  /// supports that, else the address as for any other memory. `invalid_config` also when the
  /// descriptor is not a dma-buf, the range wraps, or address and offset differ in their place in a
  /// page (4 KiB).
  [[nodiscard]] virtual result<region_id> register_memory(std::span<std::byte> bytes,
                                                          std::string name,
                                                          const exported_memory& as) = 0;
  /// `unknown_region`; `overloaded` while a grant or a batch still uses it (fence first). Waits for
  /// no peer: memory made by `allocate_on_gpu` is freed once each peer that had it open over `xgmi`
  /// has closed it or its link has ended. An owner must end those links before it frees GPU memory
  /// that it registered itself.
  [[nodiscard]] virtual result<void> deregister(region_id region) = 0;
  /// Deregisters a region that peers and batches may be using. New uses are refused from the call
  /// on, and every transfer that uses the region is fenced on every link (`link::users_of`), so its
  /// batches end as `aborted` here and as `grant_revoked` at peers. Returns when nobody can touch
  /// the memory any more; GPU memory that a peer has open over `xgmi` stays mapped there, unused,
  /// as described at `deregister`. Sinks are told of fences that were pending. `deadline` after at
  /// most `wait`: the region stays withdrawn, call again. `unknown_region`. Do not call it from a
  /// sink. Without progress threads the call makes progress itself.
  [[nodiscard]] virtual result<void> withdraw(region_id region, std::chrono::milliseconds wait) = 0;
  [[nodiscard]] virtual result<std::span<std::byte>> bytes(region_id region) const = 0;

  // -- links

  [[nodiscard]] virtual std::vector<backend_status> backends() const = 0;
  [[nodiscard]] virtual host_identity identity() const = 0;
  /// Picks the backend for a peer: only `wanted` if given, else the best of DESIGN.md section 5
  /// that is usable here and reaches the peer. `excluded` are those that failed before (fallback).
  /// `backend_unavailable` with every candidate's reason.
  [[nodiscard]] virtual result<backend_choice> choose(
      const host_identity& peer, std::optional<backend_kind> wanted,
      std::span<const backend_kind> excluded = {}) const = 0;
  [[nodiscard]] virtual result<std::shared_ptr<link>> open(backend_kind kind,
                                                           const link_options& options,
                                                           std::shared_ptr<link_sink> sink) = 0;

  // -- progress

  /// Runs one round over all links on the calling thread. Returns whether it made progress. May be
  /// called beside the progress threads, which step aside for a caller that polls.
  virtual bool poll() = 0;
  /// For a caller that only waits for calls to the sinks: makes progress on its thread, and sleeps
  /// while there is none, until `done` (asked after each round) or `until`. A sleep ends when
  /// `wake_fd` becomes readable; a thread that changes what `done` looks at must make it so.
  /// Returns false at once if the progress threads go on instead: another caller drives already, or
  /// there are several threads.
  virtual bool drive(std::chrono::steady_clock::time_point until, int wake_fd,
                     const std::function<bool()>& done) = 0;
  /// Ends the progress threads. Afterwards only `poll` makes progress and calls sinks. Idempotent;
  /// do not call it from a sink.
  virtual void stop() = 0;
  /// The port that the tcp listener is bound to.
  [[nodiscard]] virtual std::uint16_t data_port() const = 0;
};

/// One line for people for each RDMA device of this machine, used or not. Empty also if the rdma
/// backend is not built.
[[nodiscard]] std::vector<std::string> describe_rdma_devices();

}  // namespace troupe::transport
