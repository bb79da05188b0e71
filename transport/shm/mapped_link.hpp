#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/backend_context.hpp"
#include "troupe/transport/link_check.hpp"
#include "troupe/transport/link_ledger.hpp"
#include "troupe/transport/progress_engine.hpp"
#include "troupe/transport/shm/control_memory.hpp"
#include "troupe/transport/shm/grant_slots.hpp"
#include "troupe/transport/shm/mapped_job.hpp"
#include "troupe/transport/shm/peer_process.hpp"
#include "troupe/transport/shm/ring.hpp"
#include "troupe/transport/shm/shm_listener.hpp"
#include "troupe/transport/shm/thread_order.hpp"
#include "troupe/transport/sink_queue.hpp"

namespace troupe::transport::shm {

/// One end of a link between two processes of one host that copy into each other's memory. The leaf
/// moves the bytes (`shm_link`: by the CPU; `xgmi_link`: by GPUs). Session frames, grants, fences
/// and the ways in which a link begins and ends are shared here.
///
/// | state      | on                                        | becomes    |
/// | ---------- | ----------------------------------------- | ---------- |
/// | opened     | connect                                   | connecting |
/// | connecting | welcome (dialer), ready (acceptor)        | up         |
/// | connecting | deadline, refusal, wrong proof            | broken     |
/// | up         | peer dies, says bye, or writes nonsense   | broken     |
/// | any        | close                                     | closed     |
///
/// A broken or closed end revokes all its grants. Once none of its own copies runs and the peer is
/// in none of its slots (`retired_`), it closes its descriptors, which tells the peer that it will
/// never touch the peer's memory again.
///
/// Locks: `control_mutex_` (held to read the socket) before `mutex_` (all other state). Neither is
/// held while a sink is called, nor while bytes are copied, except `mutex_` in `post_small`.
class mapped_link : public link,
                    public pollable,
                    public dial_in_target,
                    public std::enable_shared_from_this<mapped_link> {
 public:
  mapped_link(backend_kind kind, const backend_context& context,
              std::shared_ptr<shm_listener> listener, const link_options& options,
              std::shared_ptr<link_sink> sink);

  /// Makes the listener take this end's dialer. Called once, right after construction.
  void expect_dialer();
  /// One of our regions was deregistered: the peer must unmap it.
  void region_removed(region_id region);

  // -- link
  [[nodiscard]] backend_kind kind() const noexcept final { return kind_; }
  [[nodiscard]] link_offer offer() const final;
  [[nodiscard]] result<void> connect(const link_offer& peer) final;
  [[nodiscard]] result<void> send_frame(std::span<const std::byte> frame) final;
  [[nodiscard]] std::vector<transfer_id> users_of(region_id region) const final;
  fence_state fence(transfer_id transfer) final;
  bool poll() final;
  void close() final;
  [[nodiscard]] link_stats stats() const final;

  // -- pollable
  bool on_ready(std::uint64_t key, std::uint32_t events) final;
  void on_timer(std::uint64_t key, steady_time now) final;
  bool on_poll(steady_time now) final;
  bool before_sleep() final;
  void after_sleep() final;

  // -- dial_in_target
  void accept(dial_in caller) final;

 protected:
  // -- what the leaf adds; under the lock where the comment says so

  /// The control page was created or mapped; under both locks.
  virtual void on_control() {}
  /// The peer shared memory with us; under the control lock.
  [[nodiscard]] virtual result<void> on_shared(received in) = 0;
  /// The peer deregistered a region; under the control lock.
  virtual void on_gone(region_id region) = 0;
  /// The peer has closed a region that we deregistered; under the control lock.
  [[nodiscard]] virtual result<void> on_closed(region_id region);
  /// Moves bytes of batches, or checks their progress. Called while `in_work_` is not 0. Returns
  /// whether it made progress.
  virtual bool advance() = 0;
  /// Does a part of the one-time background work on memory. Returns whether more is left.
  virtual bool prepare_memory() { return false; }
  [[nodiscard]] virtual bool memory_to_prepare() const { return false; }
  /// Called while batches are in flight. Arms the wake-up at the end of a batch; returns false if
  /// this end must not sleep.
  virtual bool may_sleep_in_work() { return false; }
  /// Called when this end is about to sleep and has announced it to the peer. Returns whether the
  /// peer has sent anything meanwhile that is in no ring.
  virtual bool heard_something() { return false; }
  /// The doorbell was rung: the wake-up of `may_sleep_in_work` may have fired.
  virtual void on_doorbell() {}
  /// The `leaf_timer` has expired. The leaf clears `watched_`.
  virtual void on_leaf_timer() {}
  /// The batch completes now; under the lock.
  virtual void on_finished(mapped_job& job) = 0;
  /// Both sides are quiescent for ever: releases the peer's memory; under both locks.
  virtual void forget_peer_memory() = 0;
  /// Revokes the leaf's own grants, those without a slot, of one transfer or all; under the lock.
  virtual void revoke(transfer_id transfer) { static_cast<void>(transfer); }
  virtual void revoke_all() {}
  /// Adds the transfers of the leaf's own grants over the region; under the lock.
  virtual void add_users_of(region_id region, std::set<transfer_id>& to) const {
    static_cast<void>(region);
    static_cast<void>(to);
  }
  /// Whether the leaf itself still touches memory under its own grants, of one transfer or of any;
  /// under the lock.
  [[nodiscard]] virtual bool touches(transfer_id transfer) {
    static_cast<void>(transfer);
    return false;
  }
  [[nodiscard]] virtual bool touches_any() { return false; }
  /// Whether the peer can no longer touch our memory once its socket ends without a message. If
  /// false, that holds only once its process is gone.
  [[nodiscard]] virtual bool socket_end_is_death() const { return true; }

  /// Why the link must end. `peer_is_dead`: nobody can be inside our slots any more.
  struct ending {
    troupe::error why;
    bool peer_is_dead{false};
  };
  enum watch_key : std::uint64_t { socket_key = 1, doorbell_key, death_key };
  enum timer_key : std::uint64_t {
    deadline_timer = 1,
    dial_timer,
    retire_timer,
    leaf_timer,
    gone_timer
  };

  // -- establishment (mapped_link_establish.cpp)
  void dial();
  [[nodiscard]] result<void> try_dial();
  [[nodiscard]] result<void> answer_dialer(dial_in& caller);
  [[nodiscard]] result<void> check_credentials(const peer_credentials& from) const;
  [[nodiscard]] result<void> watch_socket(owned_fd socket);
  [[nodiscard]] result<void> on_welcome(received& in);
  [[nodiscard]] result<void> on_ready_message(const ready_message& in);
  [[nodiscard]] result<void> become_up();
  /// Lets the peer access our memory; called before the peer probes it.
  void show_memory_to(const peer_credentials& peer);
  /// As `show_memory_to`, for memory that the engine registered later; under the lock. Returns
  /// false if naming the peer would change nothing.
  [[nodiscard]] bool show_memory_late();
  /// Whether each end can access the engine memory of the other.
  [[nodiscard]] result<void> check_reach() const;
  void use_control(control_mapping control);
  /// Reads messages from the socket, some hundreds at most; `more`: it may hold others. Returns why
  /// the link must end, if it must.
  [[nodiscard]] std::optional<ending> read_socket(bool& more);
  [[nodiscard]] result<void> on_message(received in);
  /// More than a socket holds, so what was in it before the call has been read after it.
  static constexpr int turns_for_all = 128;
  /// Reads what the socket holds, in at most so many turns of the lock: a peer may send messages as
  /// fast as they are read.
  void drain_control(int turns = turns_for_all);

  // -- batches (mapped_link_batches.cpp)
  /// Checks, for a new batch, that the link is up; without the lock.
  [[nodiscard]] result<void> need_up();
  /// The error for a batch that failed its checks, which began while the link was up; without the
  /// lock. The cause may be that the link ended meanwhile.
  [[nodiscard]] unexpected refused(troupe::error why) const;
  [[nodiscard]] result<void> admit(transfer_id transfer, std::size_t frame_bytes);
  [[nodiscard]] result<void> take_in(const std::shared_ptr<mapped_job>& job);
  void finish(const std::shared_ptr<mapped_job>& job);
  void conclude(direction dir, std::span<const std::byte> frame, const completion& done);

  // -- frames (mapped_link_frames.cpp)
  [[nodiscard]] result<void> check_frame_room(std::size_t bytes) const;
  void put_frame(std::span<const std::byte> frame);
  void flush_frames();
  bool drain_frames();
  void ring_peer() noexcept;

  // -- ending (mapped_link.cpp)
  void break_link(troupe::error why, bool peer_is_dead);
  bool cancel_jobs(const troupe::error& why, std::optional<transfer_id> transfer = {});
  void end_everything(const troupe::error& why);
  void collect_quiescent();
  void retire_when_quiescent();
  void let_go();
  void say_bye();
  /// Ends the link once the peer's last frames are delivered; at once if it is not up.
  void end_after_frames(troupe::error why, bool peer_is_dead);
  bool attend();
  /// Tells the peer of a region, before it can receive a grant to it; under the lock.
  [[nodiscard]] result<void> share(const message& what, std::span<const int> fds = {});
  /// Sets the `leaf_timer` unless it is set: a lost GPU rings no bell.
  void watch_over();
  void tell_gone_regions() noexcept;
  void send_gone_regions();
  /// "the shm peer"
  [[nodiscard]] std::string peer_name() const;

  const backend_kind kind_;
  const link_options options_;
  const incarnation self_;
  const std::uint32_t our_uid_;
  region_table& regions_;
  progress_engine& engine_;
  const std::shared_ptr<shm_listener> listener_;
  sink_queue sink_;
  token secret_{};
  std::uint64_t probe_value_{0};  ///< read by the peer to prove that it can reach our memory

  std::mutex control_mutex_;

  mutable std::mutex mutex_;
  link_phase state_{link_phase::opened};
  std::optional<troupe::error> why_broken_;
  bool broken_event_due_{false};  ///< `on_broken` waits for running copies
  bool retired_{false};
  bool retire_timer_set_{false};
  bool gone_timer_set_{false};
  std::optional<shm_offer> peer_offer_;
  std::optional<dial_in> parked_;  ///< a dialer that arrived before our `connect`
  bool we_reach_peer_memory_{false};
  bool peer_reaches_our_memory_{false};
  bool we_own_memory_{false};  ///< engine memory, as announced to the peer
  bool peer_owns_memory_{false};

  owned_fd socket_;
  owned_fd our_doorbell_;
  owned_fd peer_doorbell_;
  peer_process peer_process_;
  std::optional<watch_id> socket_watch_;
  std::optional<watch_id> doorbell_watch_;
  std::optional<watch_id> death_watch_;
  std::optional<timer_id> deadline_;
  bool polled_{false};

  control_mapping control_;
  direction_memory* outgoing_{nullptr};  ///< the direction that we initiate
  direction_memory* incoming_{nullptr};
  std::optional<slot_owner> slots_;
  std::optional<thread_order> our_copies_;  ///< orders our copies before leaving the peer's slots
  std::optional<ring_producer> producer_;

  std::set<region_id> shared_regions_;
  std::set<region_id> gone_regions_;  ///< the peer must still be told

  std::vector<std::shared_ptr<mapped_job>> active_;  ///< posted, not completed
  std::uint32_t running_{0};                         ///< active jobs whose bytes may be moving
  std::set<transfer_id> pending_fences_;
  link_ledger ledger_;

  std::deque<std::vector<std::byte>> waiting_frames_;
  std::size_t front_done_{0};  ///< bytes of the first waiting frame that are in the ring
  std::uint64_t waiting_bytes_{0};
  std::uint64_t reserved_bytes_{0};  ///< frames of batches in flight

  std::optional<ring_consumer> consumer_;  ///< used with `frame_` by the holder of `reading_`
  std::vector<std::byte> frame_;
  std::atomic<bool> reading_{false};
  std::atomic<bool> preparing_{false};
  std::atomic<bool> watched_{false};  ///< the `leaf_timer` is set
  std::atomic<bool> up_{false};
  std::atomic<std::uint32_t> idle_polls_{0};
  std::atomic<std::int64_t> next_round_ns_{0};  ///< when `poll` next enters the kernel
  std::atomic<std::uint32_t> in_work_{0};       ///< batches that need `advance`
  /// A rare event needs a round: pending fences, frames without room, a lost peer.
  std::atomic<bool> attention_{false};
  std::optional<ending> ending_;  ///< waits for the peer's last frames
};

}  // namespace troupe::transport::shm
