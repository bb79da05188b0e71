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

/// One end of a link between two processes of one host that copy into each other's memory: all but
/// how the bytes move, which is the leaf's (`shm_link`: by the processor; `xgmi_link`: by GPUs).
/// Session frames, grants, fences and the ways in which such a link begins and ends are the same.
///
/// | state      | on                                        | becomes    |
/// | ---------- | ----------------------------------------- | ---------- |
/// | opened     | connect                                   | connecting |
/// | connecting | welcome (dialer), ready (acceptor)        | up         |
/// | connecting | deadline, refusal, wrong proof            | broken     |
/// | up         | peer dies, says bye, or writes nonsense   | broken     |
/// | any        | close                                     | closed     |
///
/// A broken or closed end takes all its grants back. It lets go of its descriptors, and so tells
/// the peer that it will never touch the peer's memory again, once none of its own copies runs and
/// the peer is in none of its slots (`settled_`).
///
/// Locks: `control_mutex_` (who reads the socket) before `mutex_` (all other state). Neither is
/// held while a sink is called, nor while bytes are copied, but for `mutex_` in `post_small`.
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
  /// A region of ours was deregistered: its mapping at the peer must go.
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
  // -- what the leaf adds; under the lock where it says so

  /// The control page is here; under both locks.
  virtual void on_control() {}
  /// The peer shared memory with us; under the control lock.
  [[nodiscard]] virtual result<void> on_shared(received in) = 0;
  /// The peer deregistered a region; under the control lock.
  virtual void on_gone(region_id region) = 0;
  /// The peer has closed a region that we deregistered; under the control lock.
  [[nodiscard]] virtual result<void> on_closed(region_id region);
  /// Moves bytes of batches, or looks how far they are. Called while `in_work_` is not 0. True:
  /// something was done.
  virtual bool advance() = 0;
  /// A part of what is worth doing once, in the background. True: there is more of it.
  virtual bool prepare_memory() { return false; }
  [[nodiscard]] virtual bool memory_to_prepare() const { return false; }
  /// Batches are under way. Arms what wakes this end when one of them ends; false: do not sleep.
  virtual bool may_sleep_in_work() { return false; }
  /// This end is about to sleep and has said so to the peer: whether that said anything meanwhile that
  /// is in no ring.
  virtual bool heard_something() { return false; }
  /// The doorbell was rung: what `may_sleep_in_work` armed may have gone off.
  virtual void on_doorbell() {}
  /// A `leaf_timer` that the leaf has set.
  virtual void on_leaf_timer() {}
  /// The batch completes now; under the lock.
  virtual void on_finished(mapped_job& job) = 0;
  /// Both sides are quiescent for ever: lets go of the peer's memory; under both locks.
  virtual void forget_peer_memory() = 0;
  /// What the leaf has given to the peer besides slots ends: of one transfer, or all; under the lock.
  virtual void revoke(transfer_id transfer) { static_cast<void>(transfer); }
  virtual void revoke_all() {}
  /// The transfers that the leaf has given grants of its own over the region for; under the lock.
  virtual void add_users_of(region_id region, std::set<transfer_id>& to) const {
    static_cast<void>(region);
    static_cast<void>(to);
  }
  /// Whether the leaf itself still touches memory that was given so, of one transfer or at all; under
  /// the lock.
  [[nodiscard]] virtual bool touches(transfer_id transfer) {
    static_cast<void>(transfer);
    return false;
  }
  [[nodiscard]] virtual bool touches_any() { return false; }
  /// Whether nothing of the peer's can touch our memory any more once its socket ends without a
  /// word. False: only once its process is gone.
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
    settle_timer,
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
  /// Before our memory is probed.
  void show_memory_to(const peer_credentials& peer);
  /// The same for memory that the engine registered after that, under the lock. False: to name the peer
  /// would change nothing.
  [[nodiscard]] bool show_memory_late();
  /// Whether each end reaches what the other has of its engine.
  [[nodiscard]] result<void> check_reach() const;
  void use_control(control_mapping control);
  /// Reads what the socket holds; returns why the link must end, if it must.
  [[nodiscard]] std::optional<ending> read_socket();
  [[nodiscard]] result<void> on_message(received in);
  void drain_control();

  // -- batches (mapped_link_batches.cpp)
  /// Without the lock, as a batch comes in: the link is up, or why not.
  [[nodiscard]] result<void> need_up();
  /// Without the lock: why a batch was refused that was looked at while the link was up. What it looked
  /// for may have gone with the link, meanwhile or because of it.
  [[nodiscard]] unexpected refused(troupe::error why) const;
  [[nodiscard]] result<void> admit(transfer_id transfer, std::size_t frame_bytes);
  void take_in(const std::shared_ptr<mapped_job>& job);
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
  void cancel_jobs(const troupe::error& why);
  void collect_quiescent();
  void settle();
  void let_go();
  void say_bye();
  /// Ends the link when the peer's last frames are delivered; at once when it is not up.
  void end_after_frames(troupe::error why, bool peer_is_dead);
  bool attend();
  /// Under the lock: tells the peer of a region before it can hear of a grant to it.
  [[nodiscard]] result<void> share(const message& what, std::span<const int> fds = {});
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
  bool broken_event_due_{false};  ///< `on_broken` waits for copies that run
  bool settled_{false};
  bool settle_timer_set_{false};
  bool gone_timer_set_{false};
  std::optional<shm_offer> peer_offer_;
  std::optional<dial_in> parked_;  ///< a dialer that came before our `connect`
  bool we_reach_peer_memory_{false};
  bool peer_reaches_our_memory_{false};
  bool we_own_memory_{false};  ///< of the engine, as we have told the peer
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
  direction_memory* outgoing_{nullptr};  ///< where we are the initiator
  direction_memory* incoming_{nullptr};
  std::optional<slot_owner> slots_;
  std::optional<thread_order> our_copies_;  ///< before the peer's slots are left
  std::optional<ring_producer> producer_;

  std::set<region_id> shared_regions_;
  std::set<region_id> gone_regions_;  ///< to be told to the peer

  std::vector<std::shared_ptr<mapped_job>> active_;  ///< posted, not completed
  std::uint32_t running_{0};                         ///< those of them whose bytes may be moving
  std::set<transfer_id> pending_fences_;
  link_ledger ledger_;

  std::deque<std::vector<std::byte>> waiting_frames_;
  std::size_t front_done_{0};  ///< bytes of the first waiting frame that are in the ring
  std::uint64_t waiting_bytes_{0};
  std::uint64_t reserved_bytes_{0};  ///< frames of batches that are on their way

  std::optional<ring_consumer> consumer_;  ///< this and `frame_` belong to whoever holds `reading_`
  std::vector<std::byte> frame_;
  std::atomic<bool> reading_{false};
  std::atomic<bool> preparing_{false};
  std::atomic<bool> up_{false};
  std::atomic<std::uint32_t> idle_polls_{0};
  std::atomic<std::int64_t> next_round_ns_{0};  ///< when `poll` looks at what only the kernel knows
  std::atomic<std::uint32_t> in_work_{0};       ///< batches that want `advance`
  /// Something rare waits for a round: pending fences, frames without room, a lost peer.
  std::atomic<bool> attention_{false};
  std::optional<ending> ending_;  ///< the peer's last frames come first
};

}  // namespace troupe::transport::shm
