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

/// What a backend is. This page is the guide to adding one.
///
/// A backend makes *links*. A link joins two nodes (two incarnations) over one kind of wire or
/// memory. Both ends are equal once the link is up: each can initiate writes and reads, and be the
/// target of the other's. A backend is complete when
///   1. `probe` says whether this machine can use it, and in one sentence why not;
///   2. `reaches` proves from two host identities whether it can join them (never guesses);
///   3. `open` makes a link that keeps every promise written at `class link`.
/// Everything else (regions, choice of backend, threads) belongs to `endpoint`. One suite,
/// tests/transport/contract, tests the contract for every backend: add the new backend to its list
/// first.
namespace troupe::transport {

using batch_id = strong_id<struct batch_tag, std::uint64_t>;

/// Segments between one local region and one granted remote region.
struct piece {
  region_id local;
  std::shared_ptr<const remote_grant> remote;
  std::vector<segment> segments;
};

/// One request to move bytes: all of it succeeds, or the completion says which segments did not.
struct batch {
  batch_id id;           ///< chosen by the caller, unique on this link while in flight
  transfer_id transfer;  ///< by which `fence` and logs identify it
  direction dir{direction::write};
  std::vector<piece> pieces;  ///< may be empty: then only `frame` is delivered
  /// A session frame for the target, delivered there after every byte of this batch has landed
  /// (write) or been read (read: after the initiator has the bytes). If empty, the target is not
  /// notified. Not delivered when the batch fails.
  std::vector<std::byte> frame;
};

/// Pieces that are checked once and posted many times by `link::post_prepared`. Immutable.
/// Keeps no region registered: a posting into a region that was deregistered is refused.
class prepared_batch {
 public:
  prepared_batch(direction dir, std::vector<piece> pieces);

  [[nodiscard]] direction dir() const noexcept { return dir_; }
  [[nodiscard]] const std::vector<piece>& pieces() const noexcept { return pieces_; }
  /// How many segments all pieces have together.
  [[nodiscard]] std::uint32_t segments() const noexcept { return ends_.empty() ? 0 : ends_.back(); }
  struct place {
    std::size_t piece{0};
    const segment* what{nullptr};
  };
  /// The segment at `index`, counted over all pieces in order. `index` must be below `segments()`.
  [[nodiscard]] place at(std::uint32_t index) const noexcept;

 private:
  direction dir_;
  std::vector<piece> pieces_;
  std::vector<std::uint32_t> ends_;  ///< number of segments up to the end of each piece
};

/// One posting of a prepared batch.
struct posting {
  batch_id id;
  transfer_id transfer;
  /// Indices, over all pieces, of the segments to move; all segments if empty.
  std::span<const std::uint32_t> which;
  std::span<const std::byte> frame;  ///< as `batch::frame`
  /// The caller waits for this posting to complete: CPU copies of up to 16 MiB may run on its
  /// thread.
  bool caller_waits{false};

  /// How many segments move.
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
  std::optional<troupe::error> failure;     ///< empty if every byte arrived
  std::uint64_t bytes{0};                   ///< moved for certain
  std::vector<std::uint32_t> bad_segments;  ///< of a failed batch: indices over all pieces in order
};

/// Where a link reports to. Called by the thread that makes progress: a progress thread, or the
/// caller of `post`, `send_frame`, `fence` or `poll`, possibly before that call returns. No lock of
/// the link is held during a call, and calls for one link never overlap. A call must neither block
/// nor throw; it may post, send and fence on any link.
class link_sink {
 public:
  virtual ~link_sink() = default;
  /// The handshake with the peer succeeded. At most once.
  virtual void on_up() = 0;
  /// Exactly once per batch that `post` accepted, also when the link breaks or is closed.
  virtual void on_completion(completion done) = 0;
  /// A session frame from the peer. The bytes are valid during the call only.
  virtual void on_frame(std::span<const std::byte> frame) = 0;
  /// Fulfils a `fence` that returned `pending`.
  virtual void on_quiescent(transfer_id transfer) = 0;
  /// The link can no longer be used. Called at most once, and not after `close`. Everything posted
  /// completes with an error before this call. Pending fences are still answered by `on_quiescent`.
  virtual void on_broken(troupe::error why) = 0;
};

enum class fence_state : std::uint8_t {
  quiescent,  ///< the transfer is quiescent when `fence` returns
  pending,    ///< `link_sink::on_quiescent` follows
};

/// One lane of a link whose lanes are queue pairs of a device.
struct lane_stats {
  std::string device;
  std::uint8_t port{0};
  std::uint32_t gid_index{0};
  std::string gid;  ///< address of that index: "::ffff:10.0.0.1"
  std::uint64_t requests_posted{0}, requests_completed{0};
  std::uint64_t bytes{0};         ///< of the completed requests, writes and reads of this end
  bool port_up{true};             ///< as the device last reported
  std::uint32_t port_downs{0};    ///< how often the port went down since this process opened it
  std::uint32_t port_changes{0};  ///< how often its addresses or partition keys changed since then
  /// How often the port has retransmitted since the link was opened, for every lane, link and
  /// process that uses it: no device counts retries per queue pair. Empty if its driver does not
  /// count them.
  std::optional<std::uint64_t> port_retries{};
};

struct link_stats {
  std::uint64_t bytes_out{0}, bytes_in{0};  ///< payload moved, initiated by either end
  std::uint64_t batches_posted{0}, batches_completed{0}, batches_failed{0};
  std::uint64_t frames_out{0}, frames_in{0};
  std::uint64_t refused{0};  ///< operations of the peer that we refused
  std::uint64_t in_flight{0};
  std::uint32_t lanes{0};
  std::vector<lane_stats> by_lane;  ///< empty where lanes are not queue pairs
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
  /// other side waits. `on_up` or `on_broken` (within `link_options::connect_timeout`) follows.
  /// Returns at once `stale_incarnation`, `backend_unavailable`, `invalid_config` (malformed
  /// offer), or what a device refuses (`peer_unreachable`, `internal`), which ends the link.
  /// `on_broken` does not follow an error that is returned.
  [[nodiscard]] virtual result<void> connect(const link_offer& peer) = 0;

  // -- target side: our memory, the peer's operations

  /// Permits the peer to touch these bytes of `region` until `fence(scope.transfer)`.
  /// `unknown_region`, `out_of_range` (bytes outside the region, no range, too many ranges),
  /// `overloaded`.
  [[nodiscard]] virtual result<remote_grant> grant(region_id region, byte_set permitted,
                                                   access rights, grant_scope scope) = 0;
  /// Revokes a standing grant: a `fence` of this grant alone. Operations of the peer that use the
  /// grant, those in flight included, end as `grant_revoked`. `on_quiescent` names the grant's own
  /// transfer.
  fence_state revoke(const remote_grant& given) { return fence(given.transfer); }
  /// The transfers to fence before the region is at rest: those of grants given over it, and those
  /// of this end's batches in flight from or into it.
  [[nodiscard]] virtual std::vector<transfer_id> users_of(region_id region) const = 0;

  // -- initiator side

  /// Starts a batch. Errors that need no wire are returned at once, and nothing was started then:
  /// `unknown_region`, `out_of_range` (naming piece and segment; checked against the local region
  /// and the grant), `unauthorized`, `stale_incarnation`, `grant_revoked` (this transfer was fenced
  /// here), `link_broken` (not up), `overloaded` (`link_options::max_batches` in flight).
  [[nodiscard]] virtual result<void> post(batch work) = 0;
  /// Checks pieces that are to be posted often, as `post` does. `unauthorized` if a grant is not a
  /// standing one.
  [[nodiscard]] virtual result<std::shared_ptr<const prepared_batch>> prepare(
      direction dir, std::vector<piece> pieces) = 0;
  /// As `post` of a batch of these segments, in this order; `completion::bad_segments` counts in
  /// it. `what` must come from `prepare` of this link, and may be posted again while it is in
  /// flight. `tcp` and `shm` (host memory) allocate no memory for up to 64 segments of 256 KiB in
  /// total, once a similar posting has been made before.
  [[nodiscard]] virtual result<void> post_prepared(const prepared_batch& what, const posting& how);
  /// Sends one session frame, at most `max_frame` bytes, in order with other frames of
  /// `send_frame`. `overloaded` when the bounded queue is full because the peer takes frames too
  /// slowly.
  [[nodiscard]] virtual result<void> send_frame(std::span<const std::byte> frame) = 0;
  /// As `send_frame`, in the same order, for a frame that nobody waits for: it may be held until
  /// the next frame or batch, or the next round of progress, and be sent together with that. (A
  /// caller that polls must make that round; a progress thread makes it within some 100 us.) A
  /// backend whose frames cost no system call sends at once.
  [[nodiscard]] virtual result<void> send_soon(std::span<const std::byte> frame) {
    return send_frame(frame);
  }

  // -- both

  /// Makes a transfer quiescent on this link: revokes every grant given for it, cancels its batches
  /// that are in flight here (they complete with `aborted`), refuses later posts for it. Once it is
  /// answered (`quiescent`, or later by `on_quiescent`) no byte of the transfer can be read from or
  /// land in local memory any more, whatever the peer does. Idempotent; also works on a broken or
  /// closed link.
  virtual fence_state fence(transfer_id transfer) = 0;

  /// Drives this link's progress from the calling thread, for callers that poll. Returns whether it
  /// made progress.
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
  incarnation peer;        ///< the only peer that is accepted
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
  /// If not usable: the cause and, after the first ';', the remedy.
  std::string reason;
};

/// One kind of transport within one endpoint. Thread-safe.
class backend {
 public:
  virtual ~backend() = default;
  [[nodiscard]] virtual backend_kind kind() const noexcept = 0;
  /// Called at start, for each link and for `troupe info`, since a device may fail in between.
  [[nodiscard]] virtual usability probe() const = 0;
  /// Whether it can join this process with the one at `peer`.
  [[nodiscard]] virtual usability reaches(const host_identity& peer) const = 0;
  /// A new link, not yet connected. The sink lives at least as long as the link.
  [[nodiscard]] virtual result<std::shared_ptr<link>> open(const link_options& options,
                                                           std::shared_ptr<link_sink> sink) = 0;
};

}  // namespace troupe::transport
