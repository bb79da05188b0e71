#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/actors/engine_types.hpp"
#include "troupe/actors/placement.hpp"
#include "troupe/actors/report.hpp"
#include "troupe/config/deployment.hpp"
#include "troupe/kvcache/block_pool.hpp"
#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/layout.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/transport/host_memory.hpp"
#include "troupe/transport/types.hpp"

namespace troupe {

struct engine_options {
  /// The layout of the engine's own cache, used instead of one made from the deployment's `model`
  /// and pool. It must state the rank that the deployment gives the node: its tensor-parallel rank
  /// and, for a part of a model, its layers. Its memory is either `regions` or `allocate`. There is
  /// no pool: the engine names the blocks in `send` and `receive`.
  std::optional<kvcache::cache_layout> layout;
  /// The engine's memory for the layout's regions, in the layout's order, each at least as large as
  /// `kvcache::region_sizes` says; host memory, GPU memory, or both (not over `xgmi`). Must live
  /// until `stop`.
  std::vector<std::span<std::byte>> regions;
  /// Troupe allocates the layout's regions: zeroed host memory that `shm` peers can map without the
  /// right to trace this process. `engine::region` returns them. All of it is reserved at once:
  /// `pool_exhausted`, before anything is taken, if it cannot be had.
  std::optional<transport::host_memory_options> allocate;
  /// Called on a thread of Troupe for each call of a frontend; must not block. Empty: calls are
  /// refused.
  std::function<void(call)> on_call;
  /// Cores that the node's threads run on, and whose memory they fill first. Empty: those of the
  /// thread that calls `start`. `invalid_config` names a core that the process may not use.
  std::vector<unsigned> cores{};
  /// The node joins an open stage, as `STAGE.REPLICA.RANK`; `start` then gets no name. An engine
  /// that has a cache brings its own `layout`; placements join it with replicas of equal layouts.
  std::optional<announcement> join{};
  /// No progress thread: the engine calls `poll` often. For engines that own their core.
  bool polling{false};
  /// Send an `event_member` for each other node of the cluster that comes, changes or goes. Present
  /// nodes are told first, as soon as the supervisor has admitted this node. None comes after
  /// `stop`.
  bool watch{false};
};

/// One node, embedded into the process of an inference engine: the programmatic actor API. Every
/// function is thread-safe and never throws. All return at once, but for `wait`, `wait_registered`
/// and `stop`; longer work ends with an event.
/// Errors that need no network are returned directly, and no event follows.
///
/// Every operation that began has exactly one outcome, which is never dropped. Events are bounded
/// by the bound on operations: an operation is open until its last event is taken (`event_unpinned`
/// of a send or a receive, else the outcome), and with `limits.max_operations` open a further one
/// is refused with `overloaded`; the engine should then take events with `wait` or `take`. At most
/// two events of a member (`event_member`) wait.
///
/// Every event is taken once, in one of two ways. `wait(operation)` takes all events of one
/// operation and returns its end: the simple way, with a thread for each request. `take` and
/// `wait(timeout)` take the events of all operations in one line, preceded by those of members: for
/// loops that serve many requests, or that need each layer as it lands. Both may be combined: while
/// a thread waits for an operation, its events are kept for that thread, and neither `take` nor
/// `event_fd` shows them.
class engine {
 public:
  /// Starts node `name` of the deployment: binds its port, allocates or adopts the cache, and
  /// registers with the supervisor in the background. Errors: `not_found` (no such node),
  /// `invalid_config` (also contradictory options, an invalid layout, a NUMA node that does not
  /// exist), `layout_mismatch`, `out_of_range` (a region too small for its layout),
  /// `pool_exhausted` (not enough memory), `already_exists` (the port is taken),
  /// `backend_unavailable` (the kernel does not let this process choose a NUMA node),
  /// `peer_unreachable` (the node's host is `auto`, and no route leads to the supervisor). With
  /// `supervisor.begin`, first finds the supervisor, or begins one if none lives; for its errors
  /// see supervisor_begin.hpp. A process that was started for a stage gets its name by
  /// `leased_name.hpp`; one that no file names passes none and says who it is in `options.join`.
  [[nodiscard]] static result<std::unique_ptr<engine>> start(const config::deployment& deployment,
                                                             std::string_view name,
                                                             engine_options options = {});
  /// Calls `stop` and waits.
  virtual ~engine() = default;
  /// Leaves the cluster: live operations fail with `aborted` at both sides, links close. Other
  /// threads may be in calls meanwhile: what they begin is refused or ends with `aborted`. Views of
  /// values stay readable. A peer that is frozen in the middle of a copy over `shm` may finish it
  /// when it wakes: the engine's own memory that was granted to it is safe to reuse only once that
  /// peer is gone. Idempotent.
  virtual void stop() = 0;
  /// Waits until the supervisor has admitted the node; also succeeds if that supervisor was lost
  /// again before this call, but after the last one that succeeded. `deadline`, with the last
  /// reason: the node keeps asking. `stale_incarnation`, at once and from then on: another process
  /// has this node's name now, and this one is never admitted again; stop it. May be called at any
  /// time to check that.
  [[nodiscard]] virtual result<void> wait_registered(std::chrono::milliseconds timeout) = 0;

  // -- the cache

  [[nodiscard]] virtual const kvcache::cache_layout& layout() const = 0;
  /// Memory of the layout's region `index`. Memory that Troupe allocated begins with a page, has
  /// exactly the bytes that the layout needs (`kvcache::region_sizes`) and stays Troupe's: it may
  /// be read and written from any thread until this engine is destroyed, also after `stop`.
  /// `out_of_range`.
  [[nodiscard]] virtual result<std::span<std::byte>> region(std::size_t index) const = 0;
  /// Allocates blocks of the node's pool, for engines that leave allocation to it.
  /// `pool_exhausted`; `invalid_config` if the layout is the engine's own.
  [[nodiscard]] virtual result<kvcache::allocation> allocate_blocks(std::uint32_t count) = 0;
  /// Gives blocks of one allocation back; those that a transfer still pins go to quarantine first.
  /// `not_found` (foreign or double free: nothing is freed).
  virtual result<void> free_blocks(kvcache::block_owner owner,
                                   std::span<const block_id> blocks) = 0;

  // -- transfers

  /// `already_exists` (the request is live here), `out_of_range` (a block outside the cache),
  /// `not_found` (a node of `held_for` that does not exist), `overloaded`.
  [[nodiscard]] virtual result<operation_id> send(send_spec spec) = 0;
  /// For a send that grows: the blocks of the tokens after those that `send` and earlier calls have
  /// named. Layers are ready, and the request sealed, only as far as its blocks reach. `not_found`
  /// (ended; a block that the node's pool has not given out), `already_exists` (sealed),
  /// `invalid_config` (the send does not grow), `out_of_range` (a block outside the cache, no such
  /// group; none is added).
  virtual result<void> add_blocks(operation_id send, std::vector<block_id> blocks,
                                  std::uint32_t group = 0) = 0;
  /// Layers [layer_begin, layer_end) of the layout are computed up to token `token_end` (exclusive)
  /// and will not be written again. Called as often as chunks come. `not_found` (ended),
  /// `out_of_range`.
  virtual result<void> layers_ready(operation_id send, std::uint32_t layer_begin,
                                    std::uint32_t layer_end, std::uint32_t token_end) = 0;
  /// Same, for layers that a GPU still computes: they are ready once the GPU reaches `computed`, an
  /// event that the engine recorded behind their kernels. This call does not wait for it, and the
  /// engine may record the event again or destroy it when this returns. Later calls for this send,
  /// including `seal`, take effect after it at the earliest. A GPU that is lost meanwhile fails the
  /// send. More errors: `no_device`, `invalid_config` (no event).
  virtual result<void> layers_ready(operation_id send, std::uint32_t layer_begin,
                                    std::uint32_t layer_end, std::uint32_t token_end,
                                    transport::compute_point computed) = 0;
  /// Ends the input: the request has `tokens` tokens, and every layer is ready up to there. `aux`:
  /// at most 64 KiB for the decode engine.
  virtual result<void> seal(operation_id send, std::uint32_t tokens,
                            std::vector<std::byte> aux = {}) = 0;
  /// `overloaded`, `pool_exhausted`, `out_of_range`, `not_found` (a source is no known node),
  /// `invalid_config` (the sources are not the ranks of one replica, each once; `lives` does not
  /// have one entry for each; a block is named twice).
  [[nodiscard]] virtual result<operation_id> receive(receive_spec spec) = 0;
  /// Decode side: the request is no longer wanted. Gives its sources back without a receive; costs
  /// no block, may come before they are sent, and may be repeated. Outcome: done, once each source
  /// has ended (its engine is told `aborted`) or had ended before. If the request was never sent,
  /// its next send ends that way, and so do receives until then. `already_exists`, as an outcome:
  /// the source goes on, because another node takes it, waits for it, or it is held for another.
  /// `lives` as in `receive_spec`; a source in another life fails it with `stale_incarnation`.
  /// `invalid_config`, `not_found` (a source is no known node).
  [[nodiscard]] virtual result<operation_id> release(std::string request,
                                                     std::vector<std::string> sources,
                                                     std::vector<std::uint64_t> lives = {}) = 0;
  /// Decode side: the request waits in the engine's own queue. Keeps the leases of its sources from
  /// expiring. Outcome: done, once a receive of the request has asked all of them or it was
  /// delivered meanwhile; the failure of the first source that failed, or of `abort`. `not_found`,
  /// as an outcome: a source does not offer it. Ends with the life of either node. Errors as for
  /// `release`; `already_exists` (this node holds it already).
  [[nodiscard]] virtual result<operation_id> hold(std::string request,
                                                  std::vector<std::string> sources,
                                                  std::vector<std::uint64_t> lives = {}) = 0;
  /// Decode side, for engines that compute on a GPU: work put on `stream` from here on waits, on
  /// the GPU, until layers [layer_begin, layer_end) are complete up to `token_end` from every rank
  /// (the tokens of the prefix are complete); no thread of the engine waits. The stream resumes
  /// with the receive's outcome at the latest; if that is a failure, what was computed behind this
  /// call is invalid. While the stream waits, calls that wait for the whole GPU wait too:
  /// `cudaFree`, `cudaFreeHost`, `cudaDeviceSynchronize`, the first launch of a kernel (unless
  /// CUDA_MODULE_LOADING=EAGER). A thread that drives this node by `poll` must make none of them. A
  /// launch behind some thousand other waiting launches blocks as well: a driver's queue is finite.
  /// For a receive that is done nothing waits. Errors: that of a receive that failed; `not_found`
  /// (no receive, or one that ended 4096 receives ago), `out_of_range`, `no_device`,
  /// `invalid_config` (no such GPU, or `stream` is not one of its streams), `backend_unavailable`
  /// (its driver has no such wait), `overloaded` (copies might find no queue: half of
  /// CUDA_DEVICE_MAX_CONNECTIONS wait, usually 4).
  virtual result<void> await_layers(operation_id receive, std::uint32_t layer_begin,
                                    std::uint32_t layer_end, std::uint32_t token_end,
                                    transport::compute_stream stream) = 0;
  /// Gives an operation up. Its one outcome is `aborted` (for a transfer, at both sides) or an
  /// outcome that was already on its way; for a placement always `aborted`. A put to this node
  /// itself that is being copied, or a put that its node already holds whole and is storing, ends
  /// as if it had not been aborted. `not_found`: already ended.
  virtual result<void> abort(operation_id operation, std::string reason) = 0;

  // -- keyed values: of this node, of other nodes of its stage, and of nodes that an edge joins it
  // with. `not_found` (no such node), `invalid_config` (no edge of the deployment joins the two).

  /// Stores a copy of `value` under `key` at node `peer` (which may be this node). `value` must
  /// stay unchanged until the outcome, and is the caller's again from then on: nothing reads it any
  /// more, whatever the peer does. A value larger than a frame (32 KiB) is copied, or over a wire
  /// read by the peer, while the caller goes on; a value in GPU memory is copied before this
  /// returns, and the GPU must have computed it. Blocks of the node's pool are read in place; they
  /// may be freed at once, and stay in quarantine until the peer cannot read them. ttl 0: until
  /// removed. Outcome: done, `already_exists`, `pool_exhausted` (at the peer, or here for the
  /// copy). A put that failed is not stored and never will be, even if it was aborted, unless the
  /// reason says that this is unknown: the put's last message was sent, and no answer came before
  /// the link was lost or the deadline passed. That deadline is `limits.transfer_deadline`; the
  /// outcome of a value that is read over `rdma` comes when the peer is shut out, at most twice
  /// `rdma.fence_patience` later. `not_found` also if `value` lies in a block of the node's pool
  /// that is not allocated.
  [[nodiscard]] virtual result<operation_id> put(std::string peer, std::string key,
                                                 std::span<const std::byte> value,
                                                 std::chrono::milliseconds ttl = {}) = 0;
  [[nodiscard]] virtual result<operation_id> get(std::string peer, std::string key) = 0;
  [[nodiscard]] virtual result<operation_id> query(std::string peer, std::string key) = 0;
  [[nodiscard]] virtual result<operation_id> remove(std::string peer, std::string key) = 0;

  // -- the cluster

  /// Of this life of the node, never 0: the value that `receive_spec::lives` of other nodes refers
  /// to.
  [[nodiscard]] virtual std::uint64_t incarnation() const = 0;
  /// Of the supervisor that last admitted the node: the one that `placed_by` and `placed_at` refer
  /// to. 0: none yet.
  [[nodiscard]] virtual std::uint64_t supervisor_incarnation() const = 0;
  [[nodiscard]] virtual result<operation_id> place(actors::placement_request request) = 0;
  /// A placed request ended, with whatever outcome: its place in the queue is free.
  virtual void placed_request_ended(std::string request) = 0;
  /// Reported with each heartbeat: the number of requests waiting or running in the engine.
  virtual void set_queue_length(std::uint32_t requests) = 0;
  /// Whether an operator drains this node (`troupe drain`). To be polled at least once a second.
  [[nodiscard]] virtual drain_standing draining() const = 0;
  /// The engine can serve no requests (its GPU is lost, say): the node is `down` for the cluster,
  /// with `why` as the reason, and stays so whatever its heartbeats say, until `recover`.
  virtual void report_failure(std::string why) = 0;
  /// The reported failure is repaired: the node registers again.
  virtual void recover() = 0;
  [[nodiscard]] virtual actors::node_report report() const = 0;

  // -- events

  /// Readable while events wait; for poll/epoll. Owned by the engine.
  [[nodiscard]] virtual int event_fd() const = 0;
  /// Up to `max` events, oldest first; empty if there are none. Events of one operation come in
  /// order. Events of members come before those of operations, in an order of their own.
  [[nodiscard]] virtual std::vector<event> take(std::size_t max = 64) = 0;
  /// `take`, waiting up to `timeout` for the first one.
  [[nodiscard]] virtual std::vector<event> wait(std::chrono::milliseconds timeout,
                                                std::size_t max = 64) = 0;
  /// Waits until the operation has ended and, for a send or a receive, until the network can no
  /// longer touch its blocks (`event_unpinned`). When this returns, nothing of the operation is
  /// left: its blocks, if the engine's own, and its state slot may be reused, whether it succeeded
  /// or failed. Blocks that the pool gave to a receive that failed are given back automatically,
  /// unless their `event_allocated` was taken before. Any number of threads may wait, each for
  /// another operation; each drives the links itself, as `wait(timeout)` does, unless another
  /// thread does.
  ///
  /// Takes as long as the operation: until its deadline, and from there until a peer that is frozen
  /// in the middle of a copy is shut out or gone. An engine that wants to handle a failure before
  /// that takes events instead. Errors: that of the operation; `not_found` (never begun, or `take`
  /// returned its outcome), `already_exists` (another thread waits for it), `aborted` or `internal`
  /// if the node was stopped or crashed and the end will not come: its blocks may still be touched.
  [[nodiscard]] virtual result<outcome> wait(operation_id operation) = 0;
  /// Same, for at most `timeout`. Empty: the operation goes on, and none of its events was taken.
  [[nodiscard]] virtual std::optional<result<outcome>> wait(operation_id operation,
                                                            std::chrono::milliseconds timeout) = 0;
  /// Makes progress on the calling thread; returns whether it did any work. See
  /// `engine_options::polling`.
  virtual bool poll() = 0;
};

namespace actors {

class leased_name;

/// `engine::start` for the claimed node, with the incarnation that it was claimed for.
[[nodiscard]] result<std::unique_ptr<engine>> start_with_name(const config::deployment& deployment,
                                                              const leased_name& slot,
                                                              engine_options options = {});

}  // namespace actors

}  // namespace troupe
