#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "troupe/transport/backend_context.hpp"
#include "troupe/transport/grant_table.hpp"
#include "troupe/transport/link_ledger.hpp"
#include "troupe/transport/sink_queue.hpp"
#include "troupe/transport/tcp/listener.hpp"
#include "troupe/transport/tcp/receiver.hpp"
#include "troupe/transport/tcp/sender.hpp"
#include "troupe/transport/tcp/socket.hpp"
#include "troupe/transport/tcp/tcp_batch.hpp"

namespace troupe::transport::tcp {

class tcp_link;

/// One socket of a link that is up. Created when the handshake is complete, lives as long as the
/// link.
class tcp_lane final : public frame_handler {
 public:
  tcp_lane(tcp_link& owner, std::size_t number, owned_fd fd, watch_id watch);

  [[nodiscard]] result<landing> on_begin(const frame_header& header,
                                         std::span<const std::byte> table) override;
  [[nodiscard]] result<void> on_end(const frame_header& header, std::span<const std::byte> session,
                                    bool landed, const landing& where,
                                    std::uint32_t trailer_status) override;

  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] watch_id watch() const noexcept { return watch_; }
  [[nodiscard]] lane_sender& tx() noexcept { return tx_; }
  [[nodiscard]] lane_receiver& rx() noexcept { return rx_; }
  /// Claims the receiving half; returns false if another thread has it.
  [[nodiscard]] bool take_rx() noexcept {
    return !rx_busy_.exchange(true, std::memory_order_acquire);
  }
  void leave_rx() noexcept { rx_busy_.store(false, std::memory_order_release); }
  /// Ends reading from the lane. Called by the receiving thread.
  void set_ended() noexcept { ended_ = true; }
  [[nodiscard]] bool has_ended() const noexcept { return ended_; }
  /// Whether the peer has closed the link on purpose.
  [[nodiscard]] bool said_goodbye() const noexcept { return said_goodbye_; }
  /// At the end of a receiving turn: whether the frames queued in it must be sent at once. Mere
  /// acknowledgements may wait for one more turn: the receiver of a frame usually answers, and they
  /// travel with the answer.
  [[nodiscard]] bool must_flush() noexcept;
  [[nodiscard]] bool defers() const noexcept { return deferring_; }

  /// Whether so many frame ends wait for copies that the peer should wait.
  [[nodiscard]] bool holds_much() const noexcept { return held_.size() >= max_held; }
  /// Handles, in order, the frame ends that waited for copies that have now ended. Returns whether
  /// there were any.
  [[nodiscard]] result<bool> finish_held_copies();
  /// The stage for a write from GPU memory on this lane.
  [[nodiscard]] std::unique_ptr<outgoing_stage> stage_for_write() const;

 private:
  /// The state of the peer's batch arriving on this lane.
  struct incoming_part {
    std::uint64_t batch{0};
    std::optional<troupe::error> failure;
    std::vector<std::uint32_t> bad;
    bool unnamed{false};                          ///< `bad` does not name all bad segments
    std::shared_ptr<staging::copy_group> copies;  ///< of its data into GPU memory
  };

  [[nodiscard]] result<landing> begin_write(const frame_header& header,
                                            std::span<const std::byte> table);
  /// The peer has answered one of our read requests.
  void make_room_for_read();
  [[nodiscard]] result<landing> begin_read_data(const frame_header& header);
  [[nodiscard]] result<void> serve_read(const frame_header& header,
                                        std::span<const std::byte> table);
  [[nodiscard]] result<void> end_write(const frame_header& header,
                                       std::span<const std::byte> session, bool landed,
                                       std::uint32_t trailer_status);
  [[nodiscard]] result<void> end_completion(const frame_header& header,
                                            std::span<const std::byte> session);
  [[nodiscard]] result<void> acknowledge(const frame_header& about, std::uint8_t flags,
                                         const std::optional<troupe::error>& failure,
                                         const std::vector<std::uint32_t>& bad);
  /// Sets `grant_` to the grant that a frame names, if the frame may use it.
  [[nodiscard]] result<void> find_grant(const frame_header& header, access wanted);

  static constexpr std::size_t max_held = 64;

  tcp_link& owner_;
  const std::size_t number_;
  const owned_fd fd_;
  const watch_id watch_;
  lane_sender tx_;
  lane_receiver rx_;
  std::atomic<bool> rx_busy_{false};
  bool ended_{false}, said_goodbye_{false};
  bool acknowledged_{false};  ///< this turn queued acknowledgements ...
  bool urgent_{false};        ///< ... or frames that must not wait
  bool deferring_{false};     ///< the previous turn left acknowledgements unsent
  incoming_part incoming_;
  /// The effect of a frame's end, delayed until the copies of its data and all earlier frame ends
  /// are done: frames take effect in the order of arrival.
  struct held_end {
    std::shared_ptr<staging::copy_group> until;  ///< null: waits only for earlier ends
    std::function<result<void>()> then;
  };
  void hold(std::shared_ptr<staging::copy_group> until, std::function<result<void>()> then);
  [[nodiscard]] result<void> finish_write(const frame_header& header, incoming_part part,
                                          std::span<const std::byte> session);
  [[nodiscard]] result<void> finish_part(std::uint64_t batch, std::optional<troupe::error> failure,
                                         std::vector<std::uint32_t> bad);

  std::shared_ptr<given_grant> grant_;       ///< the last frame's, and usually the next frame's
  std::vector<staging::memory_run> places_;  ///< destination of the arriving frame's data

  // Memory of GPUs.
  const std::shared_ptr<staging::chunk_quota> write_quota_{
      std::make_shared<staging::chunk_quota>()};
  const std::shared_ptr<staging::chunk_quota> reply_quota_{
      std::make_shared<staging::chunk_quota>()};
  landing_stage stage_;
  std::deque<held_end> held_;
};

/// The tcp backend's link.
///
/// | state            | on                                              | becomes                |
/// | ---------------- | ----------------------------------------------- | ---------------------- |
/// | idle             | connect                                         | connecting             |
/// | idle, connecting | a lane is proved                                | same; up with the last |
/// | connecting       | refusal, timeout                                | broken                 |
/// | up               | lost, or goodbye: lane 0 is read empty first    | broken                 |
/// | up               | bytes against the protocol                      | broken                 |
/// | any              | close                                           | closed                 |
///
/// Data from GPU memory are copied to pinned host memory before they are sent, and data for GPU
/// memory land there first (`outgoing_stage`, `landing_stage`). A fence stays pending while copies
/// of its transfer are in flight.
///
/// Locks, in nesting order: `state_mutex_`, `batch_mutex_`. No callback is called under either. A
/// thread that holds a pin takes neither, so it is safe to wait for a pin under `batch_mutex_`.
class tcp_link final : public link,
                       public pollable,
                       public lane_acceptor,
                       public std::enable_shared_from_this<tcp_link> {
 public:
  tcp_link(backend_context& context, std::shared_ptr<listener> door,
           std::shared_ptr<staging::staging_pool> staging, const link_options& options,
           std::shared_ptr<link_sink> sink);

  // -- link
  [[nodiscard]] backend_kind kind() const noexcept override { return backend_kind::tcp; }
  [[nodiscard]] link_offer offer() const override;
  [[nodiscard]] result<void> connect(const link_offer& peer) override;
  [[nodiscard]] result<remote_grant> grant(region_id region, byte_set permitted, access rights,
                                           grant_scope scope) override;
  [[nodiscard]] std::vector<transfer_id> users_of(region_id region) const override;
  [[nodiscard]] result<void> post(batch work) override;
  [[nodiscard]] result<std::shared_ptr<const prepared_batch>> prepare(
      direction dir, std::vector<piece> pieces) override;
  [[nodiscard]] result<void> post_prepared(const prepared_batch& what, const posting& how) override;
  [[nodiscard]] result<void> send_frame(std::span<const std::byte> frame) override;
  [[nodiscard]] result<void> send_soon(std::span<const std::byte> frame) override;
  fence_state fence(transfer_id transfer) override;
  bool poll() override;
  void close() override;
  [[nodiscard]] link_stats stats() const override;

  // -- pollable
  bool on_ready(std::uint64_t key, std::uint32_t events) override;
  void on_timer(std::uint64_t key, steady_time now) override;
  bool on_poll(steady_time now) override;
  bool before_sleep() override;

  // -- lane_acceptor
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
  [[nodiscard]] std::optional<troupe::error> accept_lane(owned_fd& fd,
                                                         const lane_claim& claim) override;

 private:
  friend class tcp_lane;

  enum class state : std::uint8_t { idle, connecting, up, broken, closed };
  /// | state      | on                                   | becomes    |
  /// | ---------- | ------------------------------------ | ---------- |
  /// | waiting    | dial                                 | connecting |
  /// | waiting    | proofs that are right (acceptor)     | ready      |
  /// | waiting    | an invitation that is right, before  | proving    |
  /// |            | the dialer's offer came (acceptor)   |            |
  /// | connecting | connected: greets                    | greeting   |
  /// | greeting   | challenge: shows its proofs          | proving    |
  /// | proving    | verdict with the acceptor's proof    | ready      |
  /// | proving    | the offer, and the proof is right    | ready      |
  /// | proving    | the offer, and the proof is wrong    | waiting    |
  /// | any        | connection ended (dialer: dials on)  | waiting    |
  enum class dial_state : std::uint8_t { waiting, connecting, greeting, proving, ready };

  /// A lane before the link is up.
  struct half_lane {
    dial_state now{dial_state::waiting};
    owned_fd fd;
    watch_id watch;
    hello_bytes greeting{};  ///< as it was sent
    reply_bytes reply{};     ///< dialer: as received; acceptor: the challenge, then the verdict
    std::size_t got{0};
    /// The proof that makes the lane ready. Dialer: expected of the acceptor; acceptor: as shown by
    /// the dialer.
    lane_proof proof{};
    bool answered{false};  ///< acceptor: the verdict was sent
  };

  // handshake (tcp_link_handshake.cpp); with `state_mutex_` held unless noted otherwise
  using trouble = std::optional<troupe::error>;
  bool handshake_ready(std::uint64_t key);  ///< takes the lock itself
  void after_handshake(trouble why);        ///< without the lock: tells the sink
  [[nodiscard]] trouble dial_lane(std::size_t lane);
  [[nodiscard]] trouble step_lane(std::size_t lane);
  [[nodiscard]] trouble greet(std::size_t lane);
  [[nodiscard]] trouble read_reply(std::size_t lane);
  [[nodiscard]] trouble on_refusal(std::size_t lane, errc why);
  [[nodiscard]] trouble answer_challenge(std::size_t lane);
  [[nodiscard]] trouble on_verdict(std::size_t lane, const lane_proof& shown);
  [[nodiscard]] trouble check_claim(const lane_claim& claim);
  [[nodiscard]] trouble check_held_lanes();
  void prepare_verdict(half_lane& half) const noexcept;
  [[nodiscard]] trouble redial_later(std::size_t lane, std::string why);
  void drop_half(half_lane& half);
  void leave_half(half_lane& half, errc why);
  [[nodiscard]] trouble complete_acceptor();
  [[nodiscard]] trouble go_up();

  // life
  void break_link(troupe::error why);
  bool end(state final_state, const troupe::error& why);
  void fail_all(const troupe::error& why);
  void close_books(batch_in_flight& batch);  ///< under the batch lock: ends all use of its memory

  // lanes
  static constexpr std::uint64_t guard_key = ~std::uint64_t{1};  ///< timer of `watch_over`
  bool receive(tcp_lane& lane);
  bool receive_all();
  void flush(tcp_lane& lane);
  void end_after_frames(troupe::error why, bool said_goodbye);
  void end_now();
  [[nodiscard]] bool heard_out(steady_time now);
  bool look_at_copies();
  void fail_batch(std::uint64_t wire, troupe::error why);
  void release_chunks();
  void watch_over();
  [[nodiscard]] result<void> prepare_copies(const region& memory);
  [[nodiscard]] bool is_up() const noexcept {
    return state_.load(std::memory_order_acquire) == state::up;
  }
  /// Notes traffic, so that the engine's next rounds poll the sockets. Does not read the clock,
  /// since it is called for every message.
  void touch() noexcept { touched_.store(true, std::memory_order_relaxed); }
  std::size_t emptiest_lane() const noexcept;

  // batches (initiator)
  void note_failure(std::uint64_t wire, std::size_t lane,
                    const std::optional<troupe::error>& failure,
                    std::span<const std::uint32_t> bad);
  static void add_failure(batch_in_flight& batch, batch_part& part,
                          const std::optional<troupe::error>& failure,
                          std::span<const std::uint32_t> bad);
  void tell_cancelled(const batch_in_flight& batch);
  /// The peer has ended its part of the batch on the lane. If copies of its data are still in
  /// flight, returns them and does nothing else: call again when they have ended.
  [[nodiscard]] result<std::shared_ptr<staging::copy_group>> part_done(
      std::uint64_t wire, std::size_t lane, const std::optional<troupe::error>& failure,
      std::span<const std::uint32_t> bad);
  /// The copies of a read's data on the lane into GPU memory; null if there are none.
  [[nodiscard]] std::shared_ptr<staging::copy_group> copies_of(std::uint64_t wire,
                                                               std::size_t lane) const;
  using batch_map = std::unordered_map<std::uint64_t, std::shared_ptr<batch_in_flight>>;
  [[nodiscard]] std::shared_ptr<batch_in_flight> take_spare();
  void keep_spare(std::shared_ptr<batch_in_flight> batch);
  /// Both under the batch lock.
  void take_in(std::shared_ptr<batch_in_flight> batch);
  [[nodiscard]] std::shared_ptr<batch_in_flight> take_out(batch_map::iterator at);
  [[nodiscard]] result<void> start(const std::shared_ptr<batch_in_flight>& batch);
  void push_session(std::span<const std::byte> frame);
  [[nodiscard]] result<void> may_send(std::span<const std::byte> frame);
  void queue_session(std::span<const std::byte> frame);
  void flush_soon();

  // batches of the peer that arrive over several lanes
  struct gathering {
    std::uint8_t parts_left{0};
    bool failed{false};
    std::vector<std::byte> frame;
  };
  [[nodiscard]] result<void> gather(const frame_header& header, bool ok,
                                    std::span<const std::byte> session);

  backend_context& context_;
  progress_engine& engine_;
  const std::shared_ptr<listener> door_;
  const link_options options_;
  const std::uint64_t number_;
  token secret_{};
  sink_queue sink_;
  region_table& regions_;
  grant_table grants_;
  staging::staged_copies copies_;

  std::mutex state_mutex_;
  std::atomic<state> state_{state::idle};
  std::vector<half_lane> halves_;
  std::optional<offer_payload> peer_offer_;
  lane_key key_{};  ///< from both offers; set by `connect`
  std::optional<socket_address> peer_address_;
  std::string last_refusal_;
  std::optional<timer_id> connect_timer_;
  std::vector<timer_id> redial_timers_;
  std::vector<std::unique_ptr<tcp_lane>> lanes_;  ///< constant once the state is `up`

  mutable std::mutex batch_mutex_;
  std::atomic<std::uint64_t> last_wire_{0};
  batch_map batches_;
  std::vector<batch_map::node_type> spare_nodes_;  ///< map nodes of ended batches, for reuse
  std::vector<std::shared_ptr<batch_in_flight>> spare_batches_;
  link_ledger ledger_;

  std::mutex gather_mutex_;
  std::unordered_map<std::uint64_t, gathering> gathered_;
  std::size_t gathered_bytes_{0};

  // Used once the peer of a link that is up is gone. The first two are guarded by `state_mutex_`.
  std::optional<troupe::error> why_ending_;
  steady_time ending_until_{};
  enum class ending : std::uint8_t { no, until_empty, until_goodbye };  ///< limit of reading lane 0
  std::atomic<ending> ending_{ending::no};

  std::atomic<bool> told_up_{false};
  std::atomic<bool> announced_{false};  ///< `on_up` was called, so frames may be delivered
  std::atomic<bool> deferred_{false};   ///< a lane has acknowledgements waiting for its next turn
  std::atomic<bool> watched_{false};    ///< a timer checks copies in case no bell rings
  std::atomic<bool> soon_{false};       ///< lane 0 has session frames waiting for the next round
  std::atomic<bool> touched_{false};    ///< traffic since the engine's last round
  std::atomic<std::int64_t> active_ns_{0};
  std::atomic<std::uint32_t> polls_{0};
  std::atomic<std::uint64_t> refused_{0}, bytes_in_{0};
};

}  // namespace troupe::transport::tcp
