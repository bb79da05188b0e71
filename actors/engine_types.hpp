#pragma once

/// What an engine asks of its node, and what it is told: the words of `engine`.

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

#include "troupe/actors/cache_slice.hpp"
#include "troupe/actors/node_info.hpp"
#include "troupe/actors/placement.hpp"
#include "troupe/config/transfer_mode.hpp"
#include "troupe/kvcache/block_pool.hpp"
#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"

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
  /// Nobody waits for the answer after it.
  std::chrono::steady_clock::time_point deadline{std::chrono::steady_clock::time_point::max()};
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

/// What the cluster wants of a node: see `engine::draining`.
enum class drain_standing : std::uint8_t {
  serving,   ///< again, where an operator has cancelled the drain
  draining,  ///< an operator drains it: no new request is placed here, those that are here go on
  drained,   ///< they have ended, or the drain's deadline passed: `stop` and end the process
};

}  // namespace troupe
