#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/actors/door_security.hpp"
#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/kvcache/segment.hpp"
#include "troupe/transport/types.hpp"

/// One-sided agents: for programs that bring a protocol of their own and want memory moved. An agent
/// registers memory, describes it in bytes that the program carries to its peers, and reads and
/// writes what peers have described. No cluster, no actors.
///
///     auto mine = io::agent::create({.name = "prefill"}).value();
///     auto kv = mine->register_memory(bytes, "kv", transport::access::read_write).value();
///     send_to_peer(mine->describe().value());                       // by the program's own means
///     auto peer = mine->add_peer(descriptor_of_peer).value();
///     auto way = mine->session(kv, peer, memory_of_peer).value();
///     auto moved = mine->move(transport::direction::write, way, {{0, 0, 65'536}}, notice).value();
///     mine->wait({&moved, 1}, io::wait_for::all, 1s);
namespace troupe::io {

/// One registration of memory at this agent. The number is random: a peer cannot guess the number
/// of a memory that was not described to it.
using memory_id = strong_id<struct agent_memory_tag, std::uint64_t>;
/// One life of another agent, or of this agent itself.
using peer_id = strong_id<struct agent_peer_tag, std::uint64_t>;
/// A checked list of places in memory.
using plan_id = strong_id<struct agent_plan_tag, std::uint64_t>;
using transfer_handle = strong_id<struct agent_transfer_tag, std::uint64_t>;

struct agent_options {
  std::string name;  ///< 1 to 256 bytes; peers see the name in notices
  /// The address that peers dial, and that `tcp` listens on. Not a wildcard address, which no peer
  /// can dial. An address beyond loopback needs `security.how` tls.
  std::string host{"127.0.0.1"};
  std::uint16_t port{0};  ///< the port that peers dial; 0: the OS chooses
  actors::door_security security{};
  /// The backends that links may use, preferred first. Empty: the best backend that reaches the
  /// peer.
  std::vector<transport::backend_kind> backends{};
  std::uint32_t threads{1};  ///< progress threads; 0: `poll` and `wait` make progress
  std::uint32_t lanes{4};    ///< sockets or queue pairs of a link
  /// A peer that is silent for this long is lost.
  std::chrono::milliseconds peer_silence{3000};
  /// The time limit of a greeting, and of making a link.
  std::chrono::milliseconds connect_timeout{2000};
  /// How long a peer may leave the oldest question for its memory unanswered. Generous, because it
  /// may register that memory with a device first.
  std::chrono::milliseconds grant_timeout{30'000};
  std::size_t max_peers{4096};
  std::size_t max_transfers{65'536};
  /// Unread notices of one peer, and likewise notices that wait for a link to it. All peers
  /// together have 16 times as much. Where that is full, notices of peers that have left are dropped
  /// (`agent_report::notices_dropped`); a peer that sends more while all others live loses its link.
  std::size_t max_notices{65'536};
  std::size_t max_notice_bytes{std::size_t{16} << 20};  ///< bytes of these notices
};

/// A range of a memory of this agent, repeated `count` times; `stride` is the distance between
/// beginnings. All in bytes.
struct piece {
  memory_id of;
  std::uint64_t offset{0}, length{0}, stride{0};
  std::uint32_t count{1};
};

/// Like `piece`, but by the address in the owner's process.
struct entry {
  std::uint64_t address{0}, length{0}, stride{0};
  std::uint32_t count{1};
};

enum class state : std::uint8_t {
  prepared,   ///< not posted yet
  active,     ///< bytes may move
  done,       ///< every byte is where it belongs
  failed,     ///< see `status::why`; the destination's bytes are undefined
  cancelled,  ///< by `cancel`; the destination's bytes are undefined
};

[[nodiscard]] std::string_view to_string(state now) noexcept;

struct status {
  state now{state::prepared};
  /// Why the transfer failed: `peer_unreachable`, `peer_lost`, `link_broken`, `stale_incarnation`,
  /// `grant_revoked`, `unauthorized`, `out_of_range`, `deadline`, `aborted`, `backend_unavailable`,
  /// `overloaded` (the link is full at the moment; post again).
  std::optional<troupe::error> why{};
  std::uint64_t bytes{0};                    ///< known to have moved
  std::vector<std::uint32_t> bad_entries{};  ///< may not have arrived; empty unless it failed
};

struct notice {
  std::string from;  ///< the sender's name
  peer_id life;
  std::vector<std::byte> bytes;
};

enum class event_kind : std::uint8_t {
  transfer_ended,
  peer_lost,
  notices_wait,  ///< `take_notices` has some; not repeated until it has none left
  /// A link ended before the peer confirmed the notices that `notify` sent over it: some may be
  /// lost. The peer lives. After `peer_lost`, too, unconfirmed notices may be lost.
  notices_lost,
};

struct event {
  event_kind what{event_kind::transfer_ended};
  transfer_handle which{};             ///< `transfer_ended`
  peer_id who{};                       ///< `peer_lost`, `notices_lost`
  std::optional<troupe::error> why{};  ///< `peer_lost`
};

enum class wait_for : std::uint8_t { all, any };
enum class merge_entries : std::uint8_t { yes, no };
/// What the caller does after posting. With `waits`, the calling thread itself copies up to 16 MiB
/// over `shm` from the transfer's second posting on a link onwards, which saves waking another
/// thread.
enum class then : std::uint8_t { goes_on, waits };

struct peer_report {
  peer_id who;
  std::string name;
  incarnation life;
  std::optional<transport::backend_kind> backend{};  ///< of the link, while it is up
  std::string reason{};                              ///< why that backend was chosen
  std::optional<troupe::error> lost{};               ///< the reason of the last loss
  std::uint32_t links{0};                            ///< made to the peer so far
  std::uint64_t notices_unread{0};                   ///< sent by the peer, not taken here
  std::size_t grants{0};                             ///< to its memory, held or asked for
};

struct backend_report {
  transport::backend_kind kind;
  bool usable{false};
  std::string reason;  ///< why it is unusable, or what it runs on
};

struct agent_report {
  std::string name;
  incarnation life;
  std::string host;
  std::uint16_t port{0}, data_port{0};
  std::size_t memories{0}, plans{0}, transfers{0}, active{0};
  std::size_t events{0};                 ///< not yet returned by `take`
  std::uint64_t notices_dropped{0};      ///< unread ones of peers that had left, to make room
  std::vector<backend_report> backends;  ///< on this machine
  std::vector<peer_report> peers;
};

/// Thread-safe. Only `wait`, `wait_for_notices`, `deregister`, `connect` and the destructor wait
/// for a peer, each for a stated time at most. The agent never calls the program back. Ids are
/// values and never reused; a call with an unknown id fails with `not_found`. A call that would
/// exceed a limit fails with `overloaded`. Arguments are copied before a call returns; registered
/// memory is not.
class agent {
 public:
  /// `invalid_config`, `already_exists` (the port is taken), and the errors of
  /// `transport::endpoint::create` and `actors::door::create`.
  [[nodiscard]] static result<std::unique_ptr<agent>> create(agent_options options);
  /// Withdraws all memory first. Waits for peers in the middle of a copy, 5 s at most.
  virtual ~agent() = default;

  // -- memory

  /// Registers memory of the host or of a GPU for peers with these rights. The caller owns the
  /// memory and keeps it until `deregister` succeeds. Registrations may overlap or be equal: each
  /// is a separate memory with its own rights. `invalid_config`, `overloaded`.
  [[nodiscard]] virtual result<memory_id> register_memory(std::span<std::byte> bytes,
                                                          std::string name,
                                                          transport::access rights) = 0;
  /// Allocates zeroed memory of the host, which peers of this host can map. Freed by `deregister`.
  [[nodiscard]] virtual result<memory_id> allocate(std::uint64_t size, std::string name,
                                                   transport::access rights) = 0;
  [[nodiscard]] virtual result<std::span<std::byte>> bytes(memory_id of) const = 0;
  /// Withdraws the memory: no new transfer may use it; this agent's transfers that use it fail with
  /// `aborted`, peers' transfers with `grant_revoked`. On success no peer and no transfer touches
  /// the memory any more. `deadline`: a peer or a transfer may still touch it; the memory stays
  /// withdrawn, call again. GPU memory that a peer has open over `xgmi` stays mapped there until
  /// the peer closes it or the link ends: success means that it is unused, not that the driver has
  /// released it. A program that frees such memory, rather than keeping it in a pool, removes those
  /// peers first.
  [[nodiscard]] virtual result<void> deregister(memory_id of, std::chrono::milliseconds wait) = 0;

  // -- descriptors

  /// Describes this agent and these memories (all of them by default) for a peer, in at most 1 MiB.
  /// A descriptor is valid for this life of the agent, and secret: its holder may use the memories
  /// that it names, and greet others as this agent.
  [[nodiscard]] virtual result<std::vector<std::byte>> describe(
      std::span<const memory_id> only = {}) const = 0;
  /// Adds the agent that made the descriptor. Another descriptor of the same life adds its memories
  /// and returns the same id. Sends nothing. `invalid_config` (not a descriptor),
  /// `version_mismatch`, `unauthorized` (a forged token of a known life), `overloaded`.
  [[nodiscard]] virtual result<peer_id> add_peer(std::span<const std::byte> descriptor) = 0;
  /// Forgets the peer and its unread notices. Its transfers fail with `aborted`.
  [[nodiscard]] virtual result<void> remove_peer(peer_id who) = 0;
  /// Makes the link now rather than at the first transfer, and waits for it.
  [[nodiscard]] virtual result<transport::backend_kind> connect(peer_id who,
                                                                std::chrono::milliseconds wait) = 0;

  // -- plans

  /// A list of places in memory of this agent. `out_of_range`, `not_found`.
  [[nodiscard]] virtual result<plan_id> prepare(std::span<const piece> local) = 0;
  /// A list of places by address. If several memories hold an entry, the newest serves it.
  /// `unknown_region`: no memory holds all of an entry.
  [[nodiscard]] virtual result<plan_id> prepare(std::span<const entry> local) = 0;
  /// A list of places in memory of the peer. If several memories hold an entry, the one described
  /// last serves it. `unknown_region`: no memory in the peer's descriptors holds all of an entry.
  [[nodiscard]] virtual result<plan_id> prepare(peer_id who, std::span<const entry> remote) = 0;
  /// A memory of this agent and one of the peer, for `move`. `remote` is a number of
  /// `remote_memories`.
  [[nodiscard]] virtual result<plan_id> session(memory_id local, peer_id who,
                                                std::uint64_t remote) = 0;
  struct remote_memory {
    std::uint64_t number{0};  ///< the value of its owner's `memory_id`
    std::uint64_t address{0}, length{0};
    transport::access rights{transport::access::read};
  };
  /// The peer's memories in the order of description, without those it is known to have
  /// deregistered.
  [[nodiscard]] virtual result<std::vector<remote_memory>> remote_memories(peer_id who) const = 0;
  /// Transfers made from the plan continue.
  [[nodiscard]] virtual result<void> release(plan_id which) = 0;

  // -- transfers

  /// A transfer between entry `local_index[i]` of one plan and entry `remote_index[i]` of the other;
  /// without indices, between entries of equal number. The entries of a pair have equally many bytes.
  /// `merge_entries::yes` merges neighbours that are contiguous on both sides. `out_of_range`,
  /// `unauthorized` (the rights of a remote memory do not allow the direction).
  [[nodiscard]] virtual result<transfer_handle> make(transport::direction dir, plan_id local,
                                                     std::span<const std::uint32_t> local_index,
                                                     plan_id remote,
                                                     std::span<const std::uint32_t> remote_index,
                                                     merge_entries merge) = 0;
  /// Starts the transfer; may be called again after its end. The peer gets the notice (at most 64
  /// KiB; empty: none) when every byte is where it belongs. It gets no notice of a failed transfer,
  /// unless the failure is `aborted`, `deadline`, `link_broken` or `peer_lost`: then the bytes and
  /// the notice may have arrived, and only the answer is lost. A `deadline` of 0 means none.
  /// `overloaded`: the transfer is active, or the peer has too many unread notices. `aborted`: a
  /// local memory was deregistered. `status_of` reports all other failures.
  [[nodiscard]] result<void> post(transfer_handle which, std::span<const std::byte> notice,
                                  std::chrono::milliseconds deadline) {
    return post(which, notice, deadline, then::goes_on);
  }
  /// As above; `caller` says what the calling thread does next.
  [[nodiscard]] virtual result<void> post(transfer_handle which, std::span<const std::byte> notice,
                                          std::chrono::milliseconds deadline, then caller) = 0;
  /// `make` and `post` in one, over a `session`. Offsets count from the beginning of each memory.
  [[nodiscard]] virtual result<transfer_handle> move(transport::direction dir, plan_id over,
                                                     std::span<const segment> segments,
                                                     std::span<const std::byte> notice,
                                                     std::chrono::milliseconds deadline) = 0;
  [[nodiscard]] virtual result<status> status_of(transfer_handle which) const = 0;
  /// Waits for all of the transfers, or for any. Returns how many have ended; unknown ones count.
  virtual std::size_t wait(std::span<const transfer_handle> which, wait_for how_many,
                           std::chrono::milliseconds limit) = 0;
  /// Ends the transfer as `cancelled`, unless it ends otherwise first. After its end none of its
  /// bytes move in memory of this agent.
  [[nodiscard]] virtual result<void> cancel(transfer_handle which) = 0;
  /// `overloaded`: the transfer is active.
  [[nodiscard]] virtual result<void> release(transfer_handle which) = 0;

  // -- notices and events

  /// Sends a notice without a transfer, in order with other calls of `notify` for that peer. The
  /// notice waits for the link, which the call makes if there is none. The event `peer_lost` means
  /// that waiting notices were dropped; it is also raised if no backend reaches the peer. Success
  /// does not mean that the notice has arrived: notices in flight when the link breaks are lost
  /// (`notices_lost`). `overloaded` (the peer has too many unread), `out_of_range` (more than 64
  /// KiB), `stale_incarnation` and `unauthorized` (the peer answered an earlier greeting so).
  [[nodiscard]] virtual result<void> notify(peer_id who, std::span<const std::byte> bytes) = 0;
  [[nodiscard]] virtual std::vector<notice> take_notices(std::size_t max) = 0;
  /// Waits until `take_notices` has notices. Returns whether it has. Takes no event.
  virtual bool wait_for_notices(std::chrono::milliseconds limit) = 0;
  [[nodiscard]] virtual std::vector<event> take(std::size_t max) = 0;
  /// A file descriptor that is readable while `take` has events. The agent owns it.
  [[nodiscard]] virtual int event_fd() const = 0;

  /// Makes progress on the calling thread. Returns whether there was any.
  virtual bool poll() = 0;
  [[nodiscard]] virtual agent_report report() const = 0;

  static constexpr std::size_t max_notice_size = std::size_t{64} << 10;
  static constexpr std::size_t max_descriptor_size = std::size_t{1} << 20;
};

}  // namespace troupe::io
