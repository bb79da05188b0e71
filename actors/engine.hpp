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
#include <variant>
#include <vector>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/actors/session_messages.hpp"
#include "troupe/config/deployment.hpp"
#include "troupe/config/transfer_mode.hpp"
#include "troupe/kvcache/block_pool.hpp"
#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/layout.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/transport/host_memory.hpp"
#include "troupe/transport/types.hpp"

namespace troupe {

/// What an engine started and will hear the end of. Unique within one `engine`, never 0.
using operation_id = strong_id<struct operation_tag, std::uint64_t>;

/// The blocks that a request has of one group of its layout's layers (`cache_layout::groups`).
struct group_blocks {
  /// Of its first block, the first token: a multiple of the group's `block_tokens`. Those before it are not
  /// held, as where a window has moved on, and nothing of them moves for these layers.
  std::uint32_t first_token{0};
  std::vector<block_id> blocks{};
};

/// Prefill side: offers the KV cache of one request to whichever decode ranks ask for it.
struct send_spec {
  /// The id both engines know, 1 to 256 bytes, unique while live. Used again, the new `send` comes
  /// before the new `receive`: until then a receive is told how the former request ended.
  std::string request;
  std::vector<block_id> blocks{};         ///< of tokens 0, 1, ...: `block_tokens` tokens each
  std::uint32_t state_slot{0};            ///< of the request, if the layout has state tensors
  std::chrono::milliseconds deadline{0};  ///< 0: the deployment's default
  /// How many decode ranks will take it before it is done; 0: as many as the replica of the first one
  /// has, of all its parts.
  std::uint32_t consumers{0};
  /// Decode nodes that it is for (`placement::decode`): while they live, their waiting in line ends
  /// nothing. Empty: whoever asks; the source's lease then runs from the seal on until one does.
  std::vector<std::string> held_for{};
  /// `blocks` is only the beginning: `add_blocks` names the rest as it is allocated.
  bool grows{false};
  /// `event_wanted` for each decode rank that asks.
  bool tell_wanted{false};
  /// Where the layout has groups: one for each, in their order, and `blocks` is empty. A decode rank that keeps
  /// tokens of a group which are not held here is refused. Of a group of which this part of a model has no
  /// layer none need be named.
  std::vector<group_blocks> groups{};
};

/// Decode side: takes the KV cache of one request from the ranks of one prefill replica, of each the layers
/// and heads that it holds and this node wants. `of` makes it of a placement, and leaves out nothing that a
/// check needs.
struct receive_spec {
  std::string request;
  /// Node names of every rank of the prefill replica, each once (`placement`): of every part of a pipeline,
  /// also of those that hold none of this node's layers.
  std::vector<std::string> sources{};
  transfer_mode mode{transfer_mode::write};
  std::uint32_t tokens{0};  ///< of the prompt; at most what `blocks` hold
  /// The first so many are already in `blocks`. Of an opaque layer a block that they end in is written whole.
  std::uint32_t prefix_tokens{0};
  /// Destination of tokens 0, 1, ...; empty: the node's pool allocates and `event_allocated` tells
  /// which. Those that hold only the prefix are neither opened to the sources nor pinned: whoever frees
  /// them frees them at once.
  std::vector<block_id> blocks{};
  std::uint32_t state_slot{0};            ///< of the request, if the layout has state tensors
  std::chrono::milliseconds deadline{0};  ///< 0: the deployment's default
  bool fail_when_full{false};  ///< pool full: `pool_exhausted` at once instead of waiting in line
  /// Of the placement that it follows (`placement::supervisor_incarnation`, `epoch`). Refused with
  /// `stale_incarnation` where a node of it has been out of the cluster since. 0: not placed.
  std::uint64_t placed_by{0}, placed_at{0};
  /// Incarnation of each source as the caller knows it, in the order of `sources`; 0: whichever lives. A
  /// source in another life has lost the cache: `stale_incarnation` as soon as it answers.
  std::vector<std::uint64_t> lives{};
  /// How long a source keeps the receive that does not know the request yet; then `not_found`. 0: not at
  /// all. Empty: until the deadline.
  std::optional<std::chrono::milliseconds> park{};
  /// What the sealed `aux` of each source must begin with, at most 64 bytes: a hash of the prompt, say.
  /// Else `layout_mismatch`, in read mode before a byte moves, and the source goes on for others.
  std::vector<std::byte> expect{};
  /// The request was received before, and is sent once more: its earlier delivery is no answer. How an
  /// earlier `send` of it failed still is.
  bool again{false};
  /// Where the layout has groups: one for each, in their order, and `blocks` is empty. What lies before the
  /// first token of one is not wanted. Blocks of groups that lie over the same bytes are different ones.
  std::vector<group_blocks> groups{};

  /// The receive of a placed request: its id, every rank of the prefill replica, the edge's mode, and
  /// by whom and when it was placed.
  [[nodiscard]] static receive_spec of(const actors::placement& where, std::uint32_t tokens,
                                       std::vector<block_id> blocks = {});
};

/// A value of a keyed store, mapped where it lies (no copy). Unpins the value when the last copy of
/// the view dies. May outlive the operation, not the `engine`.
struct value_view {
  std::span<const std::byte> bytes;
  std::shared_ptr<const void> pin;
};

// -- events

/// decode: the pool gave these blocks to a `receive` that named none. They belong to the engine,
/// which gives them back with `free_blocks`.
struct event_allocated {
  kvcache::allocation blocks;
};
/// decode: these layers (of this node's own) are complete up to `slice.token_end` from every rank that holds
/// them, and may be read.
struct event_layers {
  actors::cache_slice slice;
};
/// How the bytes of a send or a receive moved, for the engine's own metrics.
struct movement {
  std::chrono::microseconds waited{0};  ///< since the engine began it, until the first byte moved
  std::chrono::microseconds moving{0};  ///< from then on, until the last one had
  std::uint64_t segments{
      0};               ///< at the side that plans them: send in write mode, receive in read mode
  std::string backend;  ///< of the link with the first rank
};

/// The one outcome of a send, a receive, a put, a query, a remove or a placement that succeeded.
struct event_done {
  /// receive: what the prefill engine sealed with: the first rank's, or where that one had
  /// nothing to say, another's.
  std::vector<std::byte> aux;
  std::uint64_t bytes{0};  ///< moved
  movement how{};          ///< send, receive
};
/// The one outcome of anything that failed.
struct event_failed {
  troupe::error why;
};
/// After the outcome of a send or receive: the network can touch its blocks no more. An engine that
/// allocates blocks itself may reuse them from here on, not before. (The pool's own wait in
/// quarantine for this by themselves.)
struct event_unpinned {};
struct event_value {
  value_view value;  ///< outcome of a get
};
struct event_info {
  std::uint64_t size{0};             ///< bytes; outcome of a query
  std::chrono::milliseconds ttl{0};  ///< 0: no end
};
struct event_placed {
  actors::placement where;  ///< outcome of a place
};

/// prefill, where `send_spec::tell_wanted`: a decode rank asks for it.
struct event_wanted {
  std::string node;
  std::uint32_t rank{0}, ranks{1};  ///< of the decode replica
  std::uint32_t expected{0};        ///< decode ranks that this send will serve in all
  std::uint32_t token_begin{0};     ///< the prefix before it is at the decode side already
  std::uint32_t token_end{0};
};

/// How a member of the cluster is, as engines are told: the states of `actors::node_state`, by the same
/// numbers, and the end of a life.
enum class member_state : std::uint8_t {
  joining = 1,  ///< not heard of since it registered, or a restarted supervisor waits for it
  up,
  suspect,  ///< some heartbeats of it are missing
  down,     ///< it reports a failure of its own: it serves nobody, and its process lives
  leaving,  ///< it stops in good order, or is drained
  gone,     ///< it has left, was lost, or another life has its name
};
[[nodiscard]] std::string_view to_string(member_state state) noexcept;

/// With `engine_options::watch`, and of no operation: another node of the cluster has come, is in another
/// state, or is gone. What the supervisor says counts; nothing is told of the supervisor or of the node itself.
///
/// Told life by life: the first event of a life tells that it is there, in whichever state, the last one
/// that it is `gone`. A life that is there has its end told exactly once, and before the next life of the
/// name is told. What changes while nobody takes events is told as it ended: a life that came and went
/// meanwhile not at all. The cluster may take a node for dead that only could not be heard, and take the same
/// life in again: that is told as there once more, after its `gone`.
struct event_member {
  std::string node;
  std::string stage;
  std::uint32_t replica{0};  ///< its number in the stage; of an open one each supervisor's own
  std::uint32_t rank{0};     ///< within the replica
  std::uint64_t incarnation{0};
  member_state state{member_state::joining};
  std::vector<actors::node_label> labels{};  ///< of its announcement; none of a node of the file
  std::string reason{};                      ///< why it is in that state
};

struct event {
  operation_id operation;  ///< 0: of none
  std::variant<event_allocated, event_layers, event_done, event_failed, event_unpinned, event_value,
               event_info, event_placed, event_wanted, event_member>
      what;
};

/// How an operation that succeeded ended, as `engine::wait` tells it. What it has not is empty.
struct outcome {
  std::vector<std::byte> aux;        ///< receive: as `event_done::aux`
  std::uint64_t bytes{0};            ///< receive, and send in write mode: moved
  movement how{};                    ///< send, receive
  kvcache::allocation blocks;        ///< receive that named none: those of `event_allocated`
  value_view value;                  ///< get
  std::uint64_t size{0};             ///< query: bytes
  std::chrono::milliseconds ttl{0};  ///< query: 0: no end
  actors::placement where;           ///< place
};

/// A call of a frontend, to be answered exactly once, from any thread. Dropped unanswered: the
/// caller gets `aborted`.
struct call {
  std::string method;
  std::vector<std::uint8_t> payload;
  std::function<void(result<std::vector<std::uint8_t>>)> reply;
};

/// A node that no file names: what it says of itself to join an open stage of the deployment.
struct announcement {
  std::string stage;
  std::string replica;  ///< the engine's own id, 1 to 64 of a-z 0-9 _ -; all ranks say it
  /// Of the replica. Where it is a pipeline of P parts of T tensor-parallel ranks, it has P * T ranks, and
  /// tensor-parallel rank t of part p is p * T + t; the layout says the same by its layers.
  std::uint32_t rank{0}, ranks{1};
  std::vector<actors::node_label> labels{};  ///< at most 16, of 1 to 64 bytes, values of 256
};

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

/// What the cluster wants of a node: see `engine::draining`.
enum class drain_standing : std::uint8_t {
  serving,   ///< again, where an operator has cancelled the drain
  draining,  ///< an operator drains it: no new request is placed here, those that are here go on
  drained,   ///< they have ended, or the drain's deadline passed: `stop` and end the process
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
  /// ends so. `already_exists`, as an outcome: the source goes on, since another node takes it, waits for
  /// it, or is whom it is held for.
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
  /// What was reported is mended: the node registers anew.
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

}  // namespace troupe
