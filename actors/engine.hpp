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
  /// The engine's own cache instead of one made from the deployment's `model` and pool: the layout,
  /// which says the rank that the deployment makes of the node, by its tensor-parallel rank and, where it is a
  /// part of a model, by its layers. Its memory is either `regions` or
  /// `allocate`. There is no pool: the engine names the blocks in `send` and `receive`.
  std::optional<kvcache::cache_layout> layout;
  /// Memory of the engine for the layout's regions, in the layout's order, each at least as large as
  /// `kvcache::region_sizes` says; of the host, of GPUs, or some of both (not over `xgmi`). Kept alive until `stop`.
  std::vector<std::span<std::byte>> regions;
  /// Troupe allocates the layout's regions: memory of the host, zeroed, that `shm` peers map without
  /// the right to trace this process. `engine::region` gives them. All of it is reserved at once:
  /// `pool_exhausted` where it cannot be had, before anything is taken.
  std::optional<transport::host_memory_options> allocate;
  /// Called on a thread of Troupe for each call of a frontend; must not block. Empty: calls are
  /// refused.
  std::function<void(call)> on_call;
  /// Cores that the node's threads run on, and whose memory they fill first. Empty: those of the thread
  /// that calls `start`. `invalid_config` naming one that the process may not use.
  std::vector<unsigned> cores{};
  /// The node joins an open stage, as `STAGE.REPLICA.RANK`; `start` is given no name then. An engine
  /// that has a cache brings its own `layout`; placements join it with replicas of equal layouts.
  std::optional<announcement> join{};
  /// True: no progress thread; the engine calls `poll` often. For engines that own their core.
  bool polling{false};
  /// `event_member` for each other node of the cluster that comes, changes or goes. Those that are there
  /// already are told first, as soon as the supervisor has taken this node in. None comes after `stop`.
  bool watch{false};
};

/// One node, embedded into the process of an inference engine: the programmatic actor API. Every
/// function is thread-safe, returns at once and never throws; what takes time ends as an event.
/// Errors that need no network come back directly and then no event follows.
///
/// Every operation that began has exactly one outcome, which is never dropped. What bounds the
/// events is the bound on operations: one is open until its last event is taken (`event_unpinned` of
/// a send or a receive, else the outcome), and at `limits.max_operations` open ones a further one is
/// refused with `overloaded`. An engine that is told so takes events with `wait` or `take`. Of a member
/// (`event_member`) two wait at most.
///
/// Every event is taken once, in one of two ways. `wait(operation)` takes all events of that one
/// operation, and tells its end: the short way, a thread for each request. `take` and `wait(timeout)`
/// take the events of all operations in one line, and those of members before them: for loops that serve
/// many requests, and for those who want each layer as it lands. Both go together: while a thread waits for
/// an operation, the events of that one are kept for it, and neither `take` nor `event_fd` shows them.
class engine {
 public:
  /// Starts node `name` of the deployment: binds its port (a taken port fails), allocates or adopts
  /// the cache, registers with the supervisor in the background. `not_found`: no such node;
  /// `invalid_config` (also options that contradict each other, a layout that is none, a NUMA node that
  /// is not there), `layout_mismatch`, `out_of_range` (a region too small for its layout),
  /// `pool_exhausted` (not enough memory), `already_exists` (port), `backend_unavailable` (the kernel does
  /// not let this process choose a NUMA node), `peer_unreachable` (the node's host
  /// is `auto`, and no route leads to the supervisor). With `supervisor.begin` it finds the supervisor, and
  /// begins one where none lives, before it does anything else; what that fails with is said in
  /// supervisor_begin.hpp. A process that was started for a stage finds its
  /// name by `slot_claim.hpp`; one that no file names gives none, and says who it is in `options.join`.
  [[nodiscard]] static result<std::unique_ptr<engine>> start(const config::deployment& deployment,
                                                             std::string_view name,
                                                             engine_options options = {});
  /// `stop` and waits.
  virtual ~engine() = default;
  /// Leaves the cluster: live operations fail with `aborted` at both sides, links close. Other
  /// threads may be in calls meanwhile: what they begin is refused or ends with `aborted`. Views of
  /// values stay readable. A peer
  /// that stands still in the middle of a copy over `shm` may go on with it when it wakes: memory
  /// of the engine's own that it was granted is safe to reuse only once that peer is gone.
  /// Idempotent.
  virtual void stop() = 0;
  /// Waits until the supervisor has taken the node in; also if that supervisor was lost again before
  /// this call, but after the last one that succeeded. `deadline` naming the last reason: the node
  /// goes on asking. `stale_incarnation`, at once and from then on: another process has this node's
  /// name now, this one is never taken in again; stop it. May be called at any time to see that.
  [[nodiscard]] virtual result<void> wait_registered(std::chrono::milliseconds timeout) = 0;

  // -- the cache

  [[nodiscard]] virtual const kvcache::cache_layout& layout() const = 0;
  /// Memory of the layout's region `index`. What Troupe allocated begins with a page, has exactly the
  /// bytes that the layout needs (`kvcache::region_sizes`) and stays Troupe's: to be read and written
  /// from any thread until this engine is destroyed, also after `stop`. `out_of_range`.
  [[nodiscard]] virtual result<std::span<std::byte>> region(std::size_t index) const = 0;
  /// Blocks of the node's pool, for engines that leave allocation to it. `pool_exhausted`;
  /// `invalid_config` where the layout is the engine's own.
  [[nodiscard]] virtual result<kvcache::allocation> allocate_blocks(std::uint32_t count) = 0;
  /// Gives blocks of one allocation back; those a transfer still pins go to quarantine first.
  /// `not_found` (foreign or double free: nothing is freed).
  virtual result<void> free_blocks(kvcache::block_owner owner,
                                   std::span<const block_id> blocks) = 0;

  // -- transfers

  /// `already_exists` (the request is live here), `out_of_range` (a block outside the cache),
  /// `not_found` (a node of `held_for` that does not exist), `overloaded`.
  [[nodiscard]] virtual result<operation_id> send(send_spec spec) = 0;
  /// The blocks of the tokens behind those that `send` and earlier calls have named, of a send that
  /// grows. Layers are ready, and the request sealed, only as far as its blocks reach. `not_found`
  /// (ended; a block that the node's pool has not given out), `already_exists` (sealed), `invalid_config`
  /// (it does not grow), `out_of_range` (a block outside the cache, a group that is not there; none is added).
  virtual result<void> add_blocks(operation_id send, std::vector<block_id> blocks,
                                  std::uint32_t group = 0) = 0;
  /// Layers [layer_begin, layer_end) of the layout are computed up to token `token_end` (exclusive) and
  /// will not be written again. Call it as often as chunks come. `not_found` (ended), `out_of_range`.
  virtual result<void> layers_ready(operation_id send, std::uint32_t layer_begin,
                                    std::uint32_t layer_end, std::uint32_t token_end) = 0;
  /// The same for what a GPU still computes: the layers are ready once it has come to `computed`,
  /// an event that the engine recorded behind their kernels. Nobody waits for it here, and the
  /// engine may record the event again or destroy it when this returns. What is said of the send
  /// afterwards, `seal` too, counts from then on at the earliest. A GPU that is lost meanwhile fails
  /// the send. Besides: `no_device`, `invalid_config` (no event).
  virtual result<void> layers_ready(operation_id send, std::uint32_t layer_begin,
                                    std::uint32_t layer_end, std::uint32_t token_end,
                                    transport::compute_point computed) = 0;
  /// No more will come: the request has `tokens` tokens, every layer is ready up to there. `aux`:
  /// at most 64 KiB for the decode engine.
  virtual result<void> seal(operation_id send, std::uint32_t tokens,
                            std::vector<std::byte> aux = {}) = 0;
  /// `overloaded`, `pool_exhausted`, `out_of_range`, `not_found` (a source that is no node),
  /// `invalid_config` (the sources are not the ranks of one replica, each once; not a life for each; a
  /// block is named twice).
  [[nodiscard]] virtual result<operation_id> receive(receive_spec spec) = 0;
  /// Decode side: nobody wants the request any more. Gives its sources back without a receive; costs no
  /// block, may come before they are sent, and may be said twice. Outcome: done, once each source has
  /// ended (its engine is told `aborted`) or had before; where the request was never sent, its next send
  /// ends so, and receives until then. `already_exists`, as an outcome: the source goes on, since another
  /// node takes it, waits for it, or is whom it is held for.
  /// `lives` as in `receive_spec`; a source in another life fails it with `stale_incarnation`.
  /// `invalid_config`, `not_found` (a source that is no node).
  [[nodiscard]] virtual result<operation_id> release(std::string request,
                                                     std::vector<std::string> sources,
                                                     std::vector<std::uint64_t> lives = {}) = 0;
  /// Decode side: the request waits in the engine's own queue. Keeps its sources from running out of
  /// their lease. Outcome: done, once a receive of the request has asked all of them, or where it was
  /// delivered meanwhile; that of the first source that failed, or of `abort`. `not_found`, as an
  /// outcome: a source does not offer it. Ends with the life of either node. Errors as of `release`;
  /// `already_exists` (it is held by this node).
  [[nodiscard]] virtual result<operation_id> hold(std::string request,
                                                  std::vector<std::string> sources,
                                                  std::vector<std::uint64_t> lives = {}) = 0;
  /// Decode side, for engines that compute on a GPU: what `stream` is given from here on waits, on
  /// the GPU, until layers [layer_begin, layer_end) are complete up to `token_end` from every rank
  /// (tokens of the prefix are); no thread of the engine does. The stream goes on with the receive's
  /// outcome at the latest; where that is a failure, what was computed behind this is worth nothing.
  /// While it waits, calls that wait for the whole GPU wait too: `cudaFree`, `cudaFreeHost`,
  /// `cudaDeviceSynchronize`, the first launch of a kernel (unless CUDA_MODULE_LOADING=EAGER): a
  /// thread that drives this node by `poll` must make none of them. So does a launch behind some
  /// thousand others that wait: a driver's queue is finite. Of a receive that is done nothing waits. Errors: that
  /// of a receive that failed; `not_found` (no receive, or one that ended 4096 receives ago), `out_of_range`,
  /// `no_device`, `invalid_config` (no such GPU, or no stream of it), `backend_unavailable` (no such wait in its
  /// driver), `overloaded` (copies might find no queue: half of CUDA_DEVICE_MAX_CONNECTIONS wait, 4 as a rule).
  virtual result<void> await_layers(operation_id receive, std::uint32_t layer_begin,
                                    std::uint32_t layer_end, std::uint32_t token_end,
                                    transport::compute_stream stream) = 0;
  /// Gives an operation up. Its one outcome is `aborted` (of a transfer at both sides), or the one
  /// that was on its way already; of a placement always `aborted`. A put to this node itself that is
  /// being copied, or one that its node holds whole and stores now, ends as if it had not been aborted.
  /// `not_found`: already ended.
  virtual result<void> abort(operation_id operation, std::string reason) = 0;

  // -- keyed values: of this node, of others of its stage, and of those that an edge joins it with.
  // `not_found` (no such node), `invalid_config` (the deployment has no edge that joins the two).

  /// Stores a copy of `value` under `key` at node `peer` (which may be this node). `value` must
  /// stay unchanged until the outcome, and is the caller's again with it: nobody reads it any more,
  /// whatever the peer does. What is larger than a frame (32 KiB) is copied, or over a wire read by the
  /// peer, while the caller goes on; what is in memory of a GPU is copied before this returns, and the
  /// GPU must have computed it. Blocks of the node's pool are read where they lie; they may be freed at
  /// once, and stay in quarantine until the peer cannot read them. ttl 0: until removed. Outcome: done,
  /// `already_exists`, `pool_exhausted` (at the peer, or here for the copy). What failed is not stored
  /// and never will be, whoever gave it up, unless the reason says that this is not known: the last word
  /// of the put had been said, and no answer came before the link was lost or the deadline. That
  /// deadline is `limits.transfer_deadline`; a value that is read over `rdma` has its outcome when the
  /// peer is shut out, at most twice `rdma.fence_patience` later. `not_found` also where `value` lies in
  /// a block of the node's pool that is not allocated.
  [[nodiscard]] virtual result<operation_id> put(std::string peer, std::string key,
                                                 std::span<const std::byte> value,
                                                 std::chrono::milliseconds ttl = {}) = 0;
  [[nodiscard]] virtual result<operation_id> get(std::string peer, std::string key) = 0;
  [[nodiscard]] virtual result<operation_id> query(std::string peer, std::string key) = 0;
  [[nodiscard]] virtual result<operation_id> remove(std::string peer, std::string key) = 0;

  // -- the cluster

  /// Of this life of the node, never 0: what `receive_spec::lives` of others means.
  [[nodiscard]] virtual std::uint64_t incarnation() const = 0;
  /// Of the supervisor that has taken the node in last: what `placed_by` and `placed_at` refer to. 0:
  /// none yet.
  [[nodiscard]] virtual std::uint64_t supervisor_incarnation() const = 0;
  [[nodiscard]] virtual result<operation_id> place(actors::placement_request request) = 0;
  /// A placed request ended, however: its place in the queue is free.
  virtual void placed_request_ended(std::string request) = 0;
  /// What the engine reports with each heartbeat: requests waiting or running in it.
  virtual void set_queue_length(std::uint32_t requests) = 0;
  /// Whether an operator drains this node (`troupe drain`). Ask now and then, at least once a second.
  [[nodiscard]] virtual drain_standing draining() const = 0;
  /// The engine can serve nobody (its GPU is lost, say): the node is `down` for the cluster, with
  /// `why` as the reason, and stays so whatever its heartbeats say, until `recover`.
  virtual void report_failure(std::string why) = 0;
  /// What was reported is mended: the node registers again.
  virtual void recover() = 0;
  [[nodiscard]] virtual actors::node_report report() const = 0;

  // -- events

  /// Readable while events wait; for poll/epoll. Owned by the engine.
  [[nodiscard]] virtual int event_fd() const = 0;
  /// Up to `max` events, oldest first; empty when there are none. Events of one operation come in
  /// order. Those of members come before those of operations, in an order of their own.
  [[nodiscard]] virtual std::vector<event> take(std::size_t max = 64) = 0;
  /// `take`, waiting up to `timeout` for the first one.
  [[nodiscard]] virtual std::vector<event> wait(std::chrono::milliseconds timeout,
                                                std::size_t max = 64) = 0;
  /// Waits until the operation has ended and, of a send or a receive, until the network can touch its
  /// blocks no more (`event_unpinned`). When it returns nothing of the operation is left: its blocks,
  /// if the engine's own, and its state slot may be reused, whether it succeeded or failed. A receive
  /// that failed gives blocks that the pool gave it back by itself, unless their `event_allocated` was
  /// taken before. Any number of threads may wait, each for another operation; each drives the links
  /// itself, as `wait(timeout)` does, where no other thread does.
  ///
  /// It takes as long as the operation: to its deadline, and from there on until a peer that stands
  /// still in the middle of a copy is shut out or gone. Who wants to go on with a failure before that
  /// takes events instead. Errors: that of the operation; `not_found` (never begun, or `take` had its
  /// outcome), `already_exists` (another thread waits for it), `aborted` or `internal` where the node
  /// was stopped or crashed and the end will not come: its blocks may yet be touched.
  [[nodiscard]] virtual result<outcome> wait(operation_id operation) = 0;
  /// The same for at most `timeout`. Empty: it goes on, and none of its events was taken.
  [[nodiscard]] virtual std::optional<result<outcome>> wait(operation_id operation,
                                                            std::chrono::milliseconds timeout) = 0;
  /// Makes progress on the calling thread; true: something was done. See `engine_options::polling`.
  virtual bool poll() = 0;
};

namespace actors {

class claimed_slot;

/// `engine::start` of the node that was claimed, in the life that it was claimed for.
[[nodiscard]] result<std::unique_ptr<engine>> start_claimed(const config::deployment& deployment,
                                                            const claimed_slot& slot,
                                                            engine_options options = {});

}  // namespace actors

}  // namespace troupe
