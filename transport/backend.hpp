#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "troupe/transport/types.hpp"

/// What a backend is. This page is the guide for whoever adds one.
///
/// A backend makes *links*. A link joins two nodes (two incarnations) over one kind of wire or
/// memory; both ends are equal once it is up: each can be the initiator of writes and reads, and
/// the target of the other's. A backend is complete when
///   1. `probe` says whether this machine can use it, and in one sentence why not;
///   2. `reaches` proves from two host identities whether it can join them (never guesses);
///   3. `open` makes a link that keeps every promise written at `class link`.
/// Everything else (regions, choice of backend, threads) is `endpoint`'s. The contract is tested
/// for every backend by one suite, tests/transport/contract: add the new backend to its list first.
namespace troupe::transport {

using batch_id = strong_id<struct batch_tag, std::uint64_t>;

/// Segments between one local region and one granted remote region.
struct piece {
  region_id local;
  std::shared_ptr<const remote_grant> remote;
  std::vector<segment> segments;
};

/// One request to move bytes: all of it succeeds, or the completion says what did not.
struct batch {
  batch_id id;           ///< chosen by the caller, unique on this link while in flight
  transfer_id transfer;  ///< what `fence` and logs know it by
  direction dir{direction::write};
  std::vector<piece> pieces;  ///< may be empty: then only `frame` is delivered
  /// A session frame for the target, delivered there after every byte of this batch has landed
  /// (write) or been read (read: after the initiator has the bytes). Empty: the target is told
  /// nothing. Not delivered when the batch fails.
  std::vector<std::byte> frame;
};

/// Pieces that were checked once and are posted again and again, by `link::post_prepared`. Immutable.
/// Keeps no region registered: what is posted when its region was deregistered is refused.
class prepared_batch {
 public:
  prepared_batch(direction dir, std::vector<piece> pieces);

  [[nodiscard]] direction dir() const noexcept { return dir_; }
  [[nodiscard]] const std::vector<piece>& pieces() const noexcept { return pieces_; }
  /// Of all pieces.
  [[nodiscard]] std::uint32_t segments() const noexcept { return ends_.empty() ? 0 : ends_.back(); }
  struct place {
    std::size_t piece{0};
    const segment* what{nullptr};
  };
  /// Of a segment counted over all pieces in order, which there is.
  [[nodiscard]] place at(std::uint32_t index) const noexcept;

 private:
  direction dir_;
  std::vector<piece> pieces_;
  std::vector<std::uint32_t> ends_;  ///< how many segments there are up to the end of each piece
};

/// One posting of a prepared batch.
struct posting {
  batch_id id;
  transfer_id transfer;
  /// Its segments that move, counted over all pieces; empty: all of them.
  std::span<const std::uint32_t> which;
  std::span<const std::byte> frame;  ///< as `batch::frame`
  /// For the end of this: copies of the processor's may be made on this thread, up to 16 MiB.
  bool caller_waits{false};

  /// How many move.
  [[nodiscard]] std::uint32_t count(const prepared_batch& of) const noexcept {
    return which.empty() ? of.segments() : static_cast<std::uint32_t>(which.size());
  }
  [[nodiscard]] std::uint32_t index(std::uint32_t i) const noexcept {
    return which.empty() ? i : which[i];
  }
};

/// The one outcome of a posted batch, at its initiator.
struct completion {
  batch_id id;
  transfer_id transfer;
  std::optional<troupe::error> failure;     ///< empty: every byte arrived
  std::uint64_t bytes{0};                   ///< moved for certain
  std::vector<std::uint32_t> bad_segments;  ///< indices over all pieces in order; of a failed batch
};

/// Where a link reports to. Calls come from whichever thread makes progress: a progress thread, or
/// the caller of `post`, `send_frame`, `fence` or `poll`, also before that call returns. No lock of
/// the link is held during a call, calls for one link never overlap, and a call must neither block
/// nor throw. It may post, send and fence on any link.
class link_sink {
 public:
  virtual ~link_sink() = default;
  /// The handshake with the peer succeeded. At most once.
  virtual void on_up() = 0;
  /// Exactly once per batch that `post` accepted, also when the link breaks or is closed.
  virtual void on_completion(completion done) = 0;
  /// A session frame of the peer. The bytes are valid during the call only.
  virtual void on_frame(std::span<const std::byte> frame) = 0;
  /// The promise of a `fence` that answered `pending`.
  virtual void on_quiescent(transfer_id transfer) = 0;
  /// The link is of no use any more; at most once, and not after `close`. Everything posted
  /// completes with an error before this call. Fences that are pending are still answered by
  /// `on_quiescent`.
  virtual void on_broken(troupe::error why) = 0;
};

enum class fence_state : std::uint8_t {
  quiescent,  ///< already true as `fence` returns
  pending,    ///< `link_sink::on_quiescent` will say so
};

/// One lane of a link whose lanes are queue pairs of a device.
struct lane_stats {
  std::string device;
  std::uint8_t port{0};
  std::uint32_t gid_index{0};
  std::string gid;  ///< address of that index: "::ffff:10.0.0.1"
  std::uint64_t requests_posted{0}, requests_completed{0};
  std::uint64_t bytes{0};         ///< of the completed requests, writes and reads of this end
  bool port_up{true};             ///< as the device said last
  std::uint32_t port_downs{0};    ///< how often the port went down since this process opened it
  std::uint32_t port_changes{0};  ///< how often its addresses or partition keys changed since then
  /// How often the port has sent again since the link was opened: for every lane, link and process
  /// that goes through it, since no device counts that for one queue pair. Empty: its driver counts
  /// none of it.
  std::optional<std::uint64_t> port_retries{};
};

struct link_stats {
  std::uint64_t bytes_out{0}, bytes_in{0};  ///< payload moved, whoever initiated it
  std::uint64_t batches_posted{0}, batches_completed{0}, batches_failed{0};
  std::uint64_t frames_out{0}, frames_in{0};
  std::uint64_t refused{0};  ///< operations of the peer that we refused
  std::uint64_t in_flight{0};
  std::uint32_t lanes{0};
  std::vector<lane_stats> by_lane;  ///< empty where lanes are no queue pairs
};

/// One end of a connection between two nodes. Thread-safe. Life: `open` -> exchange of offers ->
/// `connect` -> up -> broken or closed. A broken link is never repaired: its owner opens another.
class link {
 public:
  virtual ~link() = default;

  [[nodiscard]] virtual backend_kind kind() const noexcept = 0;

  // -- establishment

  /// To be carried to the peer in a message. Contains this end's unguessable token.
  [[nodiscard]] virtual link_offer offer() const = 0;
  /// Starts to connect to the end that made `peer`. The side with `link_role::initiator` dials, the
  /// other waits for it. `on_up` or `on_broken` (by `link_options::connect_timeout`) follows.
  /// `stale_incarnation`, `backend_unavailable`, `invalid_config` (malformed offer) at once; also what
  /// a device refuses (`peer_unreachable`, `internal`), and then the link has ended. Of an error at
  /// once nothing else is heard: `on_broken` does not follow.
  [[nodiscard]] virtual result<void> connect(const link_offer& peer) = 0;

  // -- target side: our memory, the peer's operations

  /// Permits the peer to touch these bytes of `region` until `fence(scope.transfer)`.
  /// `unknown_region`, `out_of_range` (some outside the region, none listed, too many listed),
  /// `overloaded`.
  [[nodiscard]] virtual result<remote_grant> grant(region_id region, byte_set permitted,
                                                   access rights, grant_scope scope) = 0;
  /// Takes a standing grant back: as `fence`, of the grant alone. What the peer does with it from
  /// then on ends as `grant_revoked`, and so does what it has under way. `on_quiescent` names the
  /// grant's own transfer.
  fence_state revoke(const remote_grant& given) { return fence(given.transfer); }
  /// The transfers that a fence would end and that use the region: those of grants given over it,
  /// and those of batches of this end in flight from or into it.
  [[nodiscard]] virtual std::vector<transfer_id> users_of(region_id region) const = 0;

  // -- initiator side

  /// Starts a batch. Errors that need no wire come back at once and then nothing was started:
  /// `unknown_region`, `out_of_range` (naming piece and segment; checked against the local region
  /// and the grant), `unauthorized`, `stale_incarnation`, `grant_revoked` (this transfer was fenced
  /// here), `link_broken` (not up), `overloaded` (`link_options::max_batches` in flight).
  [[nodiscard]] virtual result<void> post(batch work) = 0;
  /// Checks pieces that are to be posted often, as `post` does. Their grants must stand:
  /// `unauthorized`.
  [[nodiscard]] virtual result<std::shared_ptr<const prepared_batch>> prepare(
      direction dir, std::vector<piece> pieces);
  /// As `post` of a batch of these segments, in this order; `completion::bad_segments` counts them so.
  /// Of what this link has prepared. May be posted again while it is in flight. A backend that says
  /// so allocates no memory for up to 64 segments of 256 KiB together, once it has done the like
  /// before: `tcp`, `shm` (memory of the host).
  [[nodiscard]] virtual result<void> post_prepared(const prepared_batch& what, const posting& how);
  /// Sends one session frame, at most `max_frame` bytes, in order with other frames of
  /// `send_frame`. `overloaded` when the peer does not take frames as fast as we make them (bounded
  /// queue).
  [[nodiscard]] virtual result<void> send_frame(std::span<const std::byte> frame) = 0;
  /// The same, in the same order, for a frame that nobody waits for: it may stay here until the
  /// next frame or batch, or the next round of progress, and travel with that. (Who polls owes that
  /// round; a progress thread makes it within some 100 us.) A backend whose frames cost no system
  /// call sends at once.
  [[nodiscard]] virtual result<void> send_soon(std::span<const std::byte> frame) {
    return send_frame(frame);
  }

  // -- both

  /// Makes a transfer quiescent on this link: revokes every grant given for it, cancels its batches
  /// that are in flight here (they complete with `aborted`), refuses later posts for it. When it is
  /// answered
  /// (`quiescent`, or later by `on_quiescent`) no byte of the transfer can be read from or land in
  /// local memory any more, whatever the peer does. Idempotent; also works on a broken or closed
  /// link.
  virtual fence_state fence(transfer_id transfer) = 0;

  /// Drives this link's progress from the calling thread for callers that poll. True: something was
  /// done.
  virtual bool poll() = 0;

  /// Ends the link: batches in flight complete with `aborted`, the peer sees it as broken.
  /// Idempotent.
  virtual void close() = 0;

  [[nodiscard]] virtual link_stats stats() const = 0;

  static constexpr std::size_t max_frame = std::size_t{1} << 20;
};

enum class link_role : std::uint8_t { initiator, acceptor };

struct link_options {
  link_role role{link_role::initiator};
  incarnation peer;        ///< whom we expect; anyone else is refused
  std::uint32_t lanes{1};  ///< `qp_per_transfer`: sockets or queue pairs
  std::int32_t post_batch_size{
      -1};  ///< segments per system call or doorbell; -1: the backend's best
  std::uint32_t max_batches{4096};                  ///< in flight on this link
  std::uint64_t max_queued_frame_bytes{16u << 20};  ///< session frames waiting to be sent
  std::chrono::milliseconds connect_timeout{2000};
};

/// Whether something can be used here, and the reason either way.
struct usability {
  bool usable{false};
  /// Of what cannot be used: what it is and, after the first ';', what to do about it.
  std::string reason;
};

/// One kind of transport within one endpoint. Thread-safe.
class backend {
 public:
  virtual ~backend() = default;
  [[nodiscard]] virtual backend_kind kind() const noexcept = 0;
  /// Asked at start, for each link and for `troupe info`: a device may fail meanwhile.
  [[nodiscard]] virtual usability probe() const = 0;
  /// Whether it can join this process with one at `peer`.
  [[nodiscard]] virtual usability reaches(const host_identity& peer) const = 0;
  /// A new link, not yet connected. The sink lives at least as long as the link.
  [[nodiscard]] virtual result<std::shared_ptr<link>> open(const link_options& options,
                                                           std::shared_ptr<link_sink> sink) = 0;
};

}  // namespace troupe::transport
