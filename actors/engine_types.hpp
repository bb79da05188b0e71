#pragma once

/// The types of `engine`: what an engine asks of its node, and the events it gets back.

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

/// An operation that the engine began and whose outcome it will be told. Unique within one
/// `engine`, never 0.
using operation_id = strong_id<struct operation_tag, std::uint64_t>;

/// The blocks that a request has in one group of its layout's layers (`cache_layout::groups`).
struct group_blocks {
  /// The first token of its first block: a multiple of the group's `block_tokens`. Earlier tokens
  /// are not held (a window has moved past them), and nothing of them moves for these layers.
  std::uint32_t first_token{0};
  std::vector<block_id> blocks{};
};

/// Prefill side: offers the KV cache of one request to whichever decode ranks ask for it.
struct send_spec {
  /// The id both engines know, 1 to 256 bytes, unique while live. When an id is used again, the new
  /// `send` must come before the new `receive`: until then a receive is told how the former request
  /// ended.
  std::string request;
  std::vector<block_id> blocks{};         ///< for tokens 0, 1, ...: `block_tokens` tokens each
  std::uint32_t state_slot{0};            ///< of the request, if the layout has state tensors
  std::chrono::milliseconds deadline{0};  ///< 0: the deployment's default
  /// How many decode ranks will take it before it is done; 0: all ranks, of all parts, of the
  /// replica whose rank asks first.
  std::uint32_t consumers{0};
  /// Decode nodes it is meant for (`placement::decode`): while they live, their waiting in line
  /// does not end it. Empty: for any node; the source's lease then runs from the seal until a node
  /// asks.
  std::vector<std::string> held_for{};
  /// `blocks` is only the beginning; `add_blocks` names the rest as it is allocated.
  bool grows{false};
  /// Send an `event_wanted` for each decode rank that asks.
  bool tell_wanted{false};
  /// If the layout has groups: one entry for each, in their order, and `blocks` is empty. A decode
  /// rank that keeps tokens of a group which are not held here is refused. A group may be left
  /// empty if this part of the model has none of its layers.
  std::vector<group_blocks> groups{};
};

/// Decode side: takes the KV cache of one request from the ranks of one prefill replica; from each,
/// the layers and heads that it holds and this node wants. `of` makes it from a placement, complete
/// for all checks.
struct receive_spec {
  std::string request;
  /// Node names of every rank of the prefill replica, each once (`placement`): of every part of a
  /// pipeline, including those that hold none of this node's layers.
  std::vector<std::string> sources{};
  transfer_mode mode{transfer_mode::write};
  std::uint32_t tokens{0};  ///< of the prompt; at most what `blocks` hold
  /// How many of the first tokens are already in `blocks`. If they end inside a block of an opaque
  /// layer, that block is written whole.
  std::uint32_t prefix_tokens{0};
  /// Destination of tokens 0, 1, ...; empty: the node's pool allocates, and `event_allocated` names
  /// the blocks. Blocks that hold only the prefix are neither opened to the sources nor pinned:
  /// `free_blocks` frees them at once.
  std::vector<block_id> blocks{};
  std::uint32_t state_slot{0};            ///< of the request, if the layout has state tensors
  std::chrono::milliseconds deadline{0};  ///< 0: the deployment's default
  bool fail_when_full{false};  ///< pool full: `pool_exhausted` at once instead of waiting in line
  /// From its placement (`placement::supervisor_incarnation`, `epoch`). Refused with
  /// `stale_incarnation` if one of the placed nodes has been out of the cluster since. 0: not
  /// placed.
  std::uint64_t placed_by{0}, placed_at{0};
  /// Incarnation of each source as the caller knows it, in the order of `sources`; 0: any. A source
  /// in another life has lost the cache: the receive fails with `stale_incarnation` as soon as it
  /// answers.
  std::vector<std::uint64_t> lives{};
  /// How long a source that does not know the request yet keeps the receive; after that
  /// `not_found`. 0: not at all. Empty: until the deadline.
  std::optional<std::chrono::milliseconds> park{};
  /// What the sealed `aux` of each source must begin with, at most 64 bytes: a hash of the prompt,
  /// say. Otherwise `layout_mismatch`, in read mode before a byte moves; the source goes on for
  /// other nodes.
  std::vector<std::byte> expect{};
  /// The request was received before and is sent once more: an earlier delivery does not answer
  /// this receive. An earlier `send` of it that failed still does.
  bool again{false};
  /// If the layout has groups: one entry for each, in their order, and `blocks` is empty. Tokens
  /// before a group's first token are not wanted. Groups that lie over the same bytes must name
  /// different blocks.
  std::vector<group_blocks> groups{};

  /// The receive of a placed request: its id, every rank of the prefill replica, the edge's mode,
  /// and who placed it and when.
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

/// decode: the blocks that the pool gave to a `receive` that named none. They belong to the engine,
/// which gives them back with `free_blocks`.
struct event_allocated {
  kvcache::allocation blocks;
};
/// decode: these layers (numbered as this node's own) are complete up to `slice.token_end` from
/// every rank that holds them, and may be read.
struct event_layers {
  actors::cache_slice slice;
};
/// How the bytes of a send or a receive moved, for the engine's own metrics.
struct movement {
  std::chrono::microseconds waited{0};  ///< from the operation's start to the first byte
  std::chrono::microseconds moving{0};  ///< from then until the last byte moved
  std::uint64_t segments{
      0};               ///< at the side that plans them: send in write mode, receive in read mode
  std::string backend;  ///< of the link to the first rank
};

/// The one outcome of a send, a receive, a put, a query, a remove or a placement that succeeded.
struct event_done {
  /// receive: the `aux` that the prefill engine sealed with: the first rank's, or another's if that
  /// is empty.
  std::vector<std::byte> aux;
  std::uint64_t bytes{0};  ///< moved
  movement how{};          ///< send, receive
};
/// The one outcome of any operation that failed.
struct event_failed {
  troupe::error why;
};
/// Comes after the outcome of a send or receive: the network can no longer touch its blocks. An
/// engine that allocates blocks itself may reuse them only from here on. (The pool's own blocks
/// wait in quarantine until then.)
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

/// prefill, with `send_spec::tell_wanted`: a decode rank asks for the request.
struct event_wanted {
  std::string node;
  std::uint32_t rank{0}, ranks{1};  ///< of the decode replica
  std::uint32_t expected{0};        ///< decode ranks that this send will serve in all
  std::uint32_t token_begin{0};     ///< the tokens before it are already at the decode side
  std::uint32_t token_end{0};
};

/// The state of a cluster member as engines see it: the states of `actors::node_state` with the
/// same numbers, and the end of a life.
enum class member_state : std::uint8_t {
  joining = 1,  ///< not heard of since it registered, or a restarted supervisor waits for it
  up,
  suspect,  ///< some of its heartbeats are missing
  down,     ///< it reports a failure of its own: it serves no requests, but its process lives
  leaving,  ///< it shuts down in good order, or is drained
  gone,     ///< it has left, was lost, or another life has its name
};
[[nodiscard]] std::string_view to_string(member_state state) noexcept;

/// With `engine_options::watch`; belongs to no operation. Another node of the cluster came, changed
/// its state, or is gone, as the supervisor sees it. Not sent for the supervisor or for the node
/// itself.
///
/// Events follow lives: the first event of a life says that it is there, in whichever state, and
/// the last one that it is `gone`. The end of a life is told exactly once, before the next life of
/// the same name. While the engine takes no events, only the end result is kept: a life that came
/// and went meanwhile is not told at all. The cluster may take a node for dead that it could merely
/// not hear, and admit the same life again: that life is then told once more, after its `gone`.
struct event_member {
  std::string node;
  std::string stage;
  std::uint32_t replica{0};  ///< number in the stage; in an open one, specific to the supervisor
  std::uint32_t rank{0};     ///< within the replica
  std::uint64_t incarnation{0};
  member_state state{member_state::joining};
  std::vector<actors::node_label> labels{};  ///< of its announcement; empty for a node of the file
  std::string reason{};                      ///< why it is in that state
};

struct event {
  operation_id operation;  ///< 0: no operation
  std::variant<event_allocated, event_layers, event_done, event_failed, event_unpinned, event_value,
               event_info, event_placed, event_wanted, event_member>
      what;
};

/// How an operation that succeeded ended, as `engine::wait` returns it. Fields that do not apply
/// are empty.
struct outcome {
  std::vector<std::byte> aux;        ///< receive: as `event_done::aux`
  std::uint64_t bytes{0};            ///< moved; receive, and send in write mode
  movement how{};                    ///< send, receive
  kvcache::allocation blocks;        ///< receive that named none: the blocks of `event_allocated`
  value_view value;                  ///< get
  std::uint64_t size{0};             ///< query: bytes
  std::chrono::milliseconds ttl{0};  ///< query; 0: no end
  actors::placement where;           ///< place
};

/// A call of a frontend, to be answered exactly once, from any thread. If it is dropped unanswered,
/// the caller gets `aborted`.
struct call {
  std::string method;
  std::vector<std::uint8_t> payload;
  /// After this the caller no longer waits for the answer.
  std::chrono::steady_clock::time_point deadline{std::chrono::steady_clock::time_point::max()};
  std::function<void(result<std::vector<std::uint8_t>>)> reply;
};

/// What a node that no file names says about itself to join an open stage of the deployment.
struct announcement {
  std::string stage;
  std::string replica;  ///< the engine's own id, 1 to 64 of a-z 0-9 _ -; the same for all ranks
  /// Within the replica. A pipeline of P parts of T tensor-parallel ranks has P * T ranks, and
  /// tensor-parallel rank t of part p is p * T + t; the layout must agree by its layers.
  std::uint32_t rank{0}, ranks{1};
  std::vector<actors::node_label> labels{};  ///< at most 16; keys of 1 to 64 bytes, values of 256
};

/// What the cluster wants of a node: see `engine::draining`.
enum class drain_standing : std::uint8_t {
  serving,   ///< also after an operator has cancelled the drain
  draining,  ///< an operator drains it: no new requests are placed here, present ones go on
  drained,   ///< they have ended, or the drain's deadline passed: `stop` and end the process
};

}  // namespace troupe
