#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/backend_context.hpp"
#include "troupe/transport/link_check.hpp"
#include "troupe/transport/link_ledger.hpp"
#include "troupe/transport/os_error.hpp"
#include "troupe/transport/progress_engine.hpp"
#include "troupe/transport/rdma/batch_in_flight.hpp"
#include "troupe/transport/rdma/memory_keys.hpp"
#include "troupe/transport/rdma/message_channel.hpp"
#include "troupe/transport/rdma/queue_pair.hpp"
#include "troupe/transport/rdma/small_batch.hpp"
#include "troupe/transport/rdma/wire.hpp"
#include "troupe/transport/recent_transfers.hpp"
#include "troupe/transport/sink_queue.hpp"

namespace troupe::transport::rdma {

/// State shared by all links of one endpoint.
struct fabric {
  rdma_options options;
  std::vector<std::shared_ptr<device>> rails;
  std::shared_ptr<memory_keys> keys;
  /// Whether new links grant through memory windows. Permanently false once a device that claims to
  /// have them failed to bind one.
  std::shared_ptr<std::atomic<bool>> windows;
};

/// One end of an `rdma` link: a queue pair for messages (`message_channel`), and one per lane for
/// bytes.
///
/// | state      | on                                            | becomes    |
/// | ---------- | --------------------------------------------- | ---------- |
/// | opened     | connect                                       | connecting |
/// | connecting | the peer's hello with our token               | up         |
/// | connecting | deadline, wrong token, a device's refusal     | broken     |
/// | up         | a failed completion, bye, an unanswered fence | broken     |
/// | any        | close                                         | closed     |
///
/// When a link ends, its lanes' queue pairs are destroyed at once: the peer can no longer write or
/// read our memory, so every fence holds. The message queue pair touches only its own memory; it
/// stays for a moment to say goodbye.
///
/// With memory windows, a grant binds one window per lane over the hull of its extents (from the
/// first byte of the first to the last byte of the last; one window per piece if the region is
/// registered in pieces), with the grant's rights. The NIC enforces it: only this peer, only over
/// this link, only while the windows are bound. The peer's own link refuses accesses to the gaps
/// between the extents, as it refuses everything outside of them. Without windows, a grant opens
/// the whole region to anyone who knows the key, until the link ends. The peer receives the keys
/// (`grant_keys`) once our NIC has bound the windows.
///
/// A fence on a link that is up asks the peer to stop (`revoke`) and waits for the requests in
/// flight, so that a peer that keeps to the protocol has no request refused. Once the peer has
/// confirmed, or `rdma_options::fence_patience` has passed, the windows are invalidated, and then
/// the fence completes: it does not rely on the peer. Without windows, a peer that does not confirm
/// loses the link.
///
/// A completed read may still have a request on the wire: a NIC that missed a packet of the
/// response, or saw it late, repeats the request, and all bytes may arrive before the repeated
/// request does. If the window is invalidated by then, the repeated request breaks the queue pair.
/// An initiator therefore confirms only once an empty write, posted behind its reads on the same
/// queue pair, was answered: a queue pair's requests are served in order.
///
/// A peer that does not stop is refused by the NIC, which ends the queue pair (InfiniBand
/// Architecture, 9.9.3): the link breaks at both ends and with it all its transfers. The regions
/// and all other links, also those to the same peer, are not affected.
///
/// Locks: `reading_` (held while taking completions; a flag, so that it can be tried) before
/// `mutex_` (all other state). The sink is called without `mutex_`, but within `reading_`.
/// Connecting the queue pairs to the peer's may take the devices long; meanwhile `joining_` stands
/// for the lock: nobody else touches the queue pairs or the messages, and nobody takes completions.
class rdma_link final : public link,
                        public pollable,
                        public std::enable_shared_from_this<rdma_link> {
 public:
  /// `overloaded`, `internal`: the device lacks a resource that a link needs.
  [[nodiscard]] static result<std::shared_ptr<rdma_link>> open(const backend_context& context,
                                                               fabric on,
                                                               const link_options& options,
                                                               std::shared_ptr<link_sink> sink);

  // -- link
  [[nodiscard]] backend_kind kind() const noexcept override { return backend_kind::rdma; }
  [[nodiscard]] link_offer offer() const override;
  [[nodiscard]] result<void> connect(const link_offer& peer) override;
  [[nodiscard]] result<remote_grant> grant(region_id region, byte_set permitted, access rights,
                                           grant_scope scope) override;
  [[nodiscard]] std::vector<transfer_id> users_of(region_id region) const override;
  [[nodiscard]] result<void> post(batch work) override;
  [[nodiscard]] result<std::shared_ptr<const prepared_batch>> prepare(
      direction dir, std::vector<piece> pieces) override;
  [[nodiscard]] result<void> send_frame(std::span<const std::byte> frame) override;
  fence_state fence(transfer_id transfer) override;
  bool poll() override;
  void close() override;
  [[nodiscard]] link_stats stats() const override;

  /// Whether this link owns a queue.
  [[nodiscard]] bool owns(queue_owner owner) const noexcept { return owner == number_; }
  /// One of its queues has failed; `what` its device did.
  void queue_failed(const device& which, const std::string& what);
  /// A device has failed, for the reason `why`. Ignored if the link does not use it.
  void device_failed(const device& which, const std::string& why);

  // -- pollable
  bool on_ready(std::uint64_t key, std::uint32_t events) override;
  void on_timer(std::uint64_t key, steady_time now) override;
  bool on_poll(steady_time now) override;
  bool before_sleep() override;

 private:
  enum timer_key : std::uint64_t { deadline_timer = 1, probe_timer, fence_timer, teardown_timer };

  rdma_link(const backend_context& context, fabric on, const link_options& options,
            std::shared_ptr<link_sink> sink);

  // -- life (rdma_link.cpp)
  [[nodiscard]] result<std::uint32_t> depth_of_lanes(std::uint32_t lanes_per_rail) const;
  [[nodiscard]] result<void> set_up();
  [[nodiscard]] result<void> join(std::unique_lock<std::mutex>& lock);
  [[nodiscard]] result<void> join_lanes();
  [[nodiscard]] result<void> begin_again(std::unique_lock<std::mutex>& lock);
  [[nodiscard]] result<void> start_messages();
  [[nodiscard]] result<void> say_hello();
  void become_up();
  void break_link(troupe::error why);
  [[nodiscard]] std::string trouble_of_ports() const;
  void end_lanes(const troupe::error& why);
  void end(link_phase final_state, const troupe::error& why);
  void look_after_peer_at(steady_time when);
  [[nodiscard]] result<void> look_after_peer(steady_time now);
  void tear_down();

  // -- grants (rdma_link_grants.cpp)
  [[nodiscard]] result<void> may_grant(std::uint64_t pieces) const;
  [[nodiscard]] result<void> reserve_windows(std::size_t per_lane,
                                             std::unique_lock<std::mutex>& lock);
  void bind_windows(open_grant& grant, const registered_region& memory);
  void tell_region_keys(open_grant& grant, const registered_region& memory);
  void close_grant(open_grant& grant);
  [[nodiscard]] result<void> post_window_requests();
  [[nodiscard]] result<void> post_window_requests(data_lane& lane, std::uint8_t number);
  void windows_answered(open_grant& grant);
  void tell_keys(open_grant& grant);
  [[nodiscard]] result<void> on_keys(std::span<const std::byte> payload);
  [[nodiscard]] bool find_keys(batch_in_flight& batch) const;
  void start_or_wait(batch_in_flight& batch);
  void start_those_with_keys();
  void give_up_without_keys(steady_time now);

  // -- completions (rdma_link_progress.cpp)
  bool drain();
  bool take_completions(completion_queue& from);
  void take(const ibv_wc& done);
  void take_failure(const ibv_wc& done);
  void take_data(std::size_t lane, std::uint64_t number);
  void take_notice(std::size_t lane, std::uint32_t sequence);
  void take_message(std::uint32_t buffer, std::uint32_t bytes);
  [[nodiscard]] result<arrival> take_header(std::uint32_t buffer, std::uint32_t bytes,
                                            std::optional<completion>& first);
  [[nodiscard]] result<void> act_on(const arrival& message);
  [[nodiscard]] result<void> on_hello(std::span<const std::byte> shown);
  [[nodiscard]] result<void> gather(std::uint32_t sequence);
  [[nodiscard]] message_counts counts() const noexcept { return {taken_, landed_}; }
  [[nodiscard]] result<void> flush();
  [[nodiscard]] result<void> answer();
  void answer_what_is_owed();
  void end_turn();

  // -- batches (rdma_link_post.cpp)
  [[nodiscard]] result<std::unique_ptr<batch_in_flight>> prepare(
      batch work, std::optional<troupe::error>& refused);
  [[nodiscard]] result<placed_piece> place(const batch& work, std::size_t index,
                                           std::optional<troupe::error>& refused);
  [[nodiscard]] result<void> admit(const batch& work, std::optional<troupe::error>& refused);
  [[nodiscard]] result<void> pump();
  [[nodiscard]] result<bool> post_requests(batch_in_flight& batch);
  [[nodiscard]] result<bool> post_notices(batch_in_flight& batch);
  [[nodiscard]] result<std::uint32_t> post_chain(std::size_t lane, batch_in_flight& batch);
  [[nodiscard]] std::optional<std::size_t> lane_with_room() const noexcept;
  [[nodiscard]] bool may_notify() const noexcept;
  void finish(batch_in_flight& batch);

  // -- small batches (rdma_link_small.cpp)
  [[nodiscard]] result<bool> post_small(const batch& work, std::uint32_t bytes);
  [[nodiscard]] result<void> send_small(const small_flight& flight,
                                        std::span<const std::byte> message);
  [[nodiscard]] result<void> send_waiting_small();
  [[nodiscard]] completion conclude(const small_flight& flight, std::optional<troupe::error> why);
  void put_outcome(const small_flight& flight, std::optional<troupe::error> why);
  [[nodiscard]] result<void> take_answers(const arrival& message, std::optional<completion>& first);
  void cancel_small(transfer_id transfer, const troupe::error& why);
  void abandon_small(transfer_id transfer, const troupe::error& why);
  void end_small(const troupe::error& why);
  [[nodiscard]] bool small_under_way(transfer_id transfer) const;
  [[nodiscard]] result<std::span<const std::byte>> take_small(std::span<const std::byte> payload);
  [[nodiscard]] result<void> land(const small_batch& batch);

  // -- fences (rdma_link_fence.cpp)
  struct fence_in_progress {
    bool peer_must_confirm{false};
    steady_time until;
    std::vector<std::unique_ptr<open_grant>> grants;  ///< that the peer may still use
  };
  /// A transfer that the peer has revoked and this end has not confirmed yet.
  struct revocation {
    std::uint64_t read_over{0};  ///< a bit for each lane whose reads may not be over
    std::uint32_t settling{0};   ///< empty writes behind such reads
  };
  void cancel(transfer_id transfer, const troupe::error& why);
  [[nodiscard]] bool under_way(transfer_id transfer) const;
  void finish_drained(batch_in_flight& batch);
  void after_drained(transfer_id transfer);
  void close_grants(fence_in_progress& fence);
  void peer_revoked(transfer_id transfer);
  void peer_confirmed(transfer_id transfer);
  void note_reads(transfer_id transfer, std::uint64_t lanes);
  [[nodiscard]] result<void> settle_reads();
  void reads_settled(transfer_id transfer);
  void answer_all_fences();
  void check_fences(steady_time now);

  const fabric fabric_;
  const link_options options_;
  const incarnation self_;
  region_table& regions_;
  progress_engine& engine_;
  sink_queue sink_;
  token secret_{};
  const std::uint64_t number_;  ///< also the owner of its queues
  const reach reach_;           ///< of all its own grants
  const steady_time opened_{std::chrono::steady_clock::now()};
  /// The retries of each rail's port when the link was opened.
  std::vector<std::optional<std::uint64_t>> retries_then_;

  mutable std::mutex mutex_;
  link_phase state_{link_phase::opened};
  std::optional<troupe::error> why_ended_;
  std::optional<offer_body> peer_;
  std::vector<std::unique_ptr<completion_queue>> completions_;  ///< one per rail
  std::vector<watch_id> watches_;
  std::unique_ptr<message_channel> messages_;
  std::vector<data_lane> lanes_;
  std::uint32_t depth_{0};  ///< of each lane: requests, and immediates from the peer
  bool polled_{false};
  bool torn_down_{false};
  bool goodbye_due_{false};
  steady_time goodbye_until_;
  steady_time asked_;  ///< when the probe in flight was sent
  /// Set when the peer's NIC refused an access. Usually the peer's process is ending, and the
  /// kernel takes its memory before its queue pairs; a probe a little later shows whether the peer
  /// is alive.
  std::optional<troupe::error> refused_;
  bool verdict_due_{false};  ///< that probe is in flight
  std::optional<timer_id> deadline_, probe_, fence_check_, teardown_;

  // Batches of ours.
  std::vector<std::unique_ptr<batch_in_flight>> active_;
  std::deque<batch_in_flight*> queued_;  ///< with requests still to be posted
  /// Small batches sent and unanswered, in order; how many the peer has answered, modulo 2^32; and
  /// those that wait until it has answered more.
  std::deque<small_flight> small_sent_;
  std::uint32_t small_answered_{0};
  struct waiting_small {
    small_flight flight;
    std::vector<std::byte> message;
  };
  std::deque<waiting_small> small_waiting_;
  std::vector<placed_piece> small_places_;  ///< of the batch being posted; reuses its memory
  struct unkeyed {
    batch_in_flight* batch{nullptr};
    steady_time since;
  };
  std::vector<unkeyed> unkeyed_;  ///< waiting for the keys to a grant
  std::unordered_map<std::uint64_t, std::shared_ptr<const grant_keys>> peer_grants_;
  struct peer_transfer {
    std::vector<std::uint64_t> grants;
    std::uint64_t read_over{0};  ///< a bit for each lane on which its batches have read
  };
  std::unordered_map<transfer_id, peer_transfer> peer_grants_of_;
  std::size_t peer_keys_{0};
  std::uint64_t bytes_on_the_way_{0};
  std::uint64_t reserved_frame_bytes_{0};
  std::uint32_t last_sequence_{0};
  std::uint32_t notices_sent_{0}, notices_taken_{0};  ///< modulo 2^32; the latter taken by the peer
  std::uint64_t bytes_written_{0}, bytes_read_{0};
  link_ledger ledger_;

  // Grants of ours, and fences.
  std::unordered_map<transfer_id, std::vector<std::unique_ptr<open_grant>>> granted_;
  std::size_t grants_{0};
  std::size_t window_requests_{0};  ///< waiting for room, on all lanes
  std::map<transfer_id, fence_in_progress> fences_;
  recent_transfers revoked_;  ///< transfers that the peer has revoked
  std::map<transfer_id, revocation> to_confirm_;
  bool reads_unsettled_{false};  ///< one of `to_confirm_` has only its reads to settle
  std::uint32_t taken_{0};       ///< the peer's notices, modulo 2^32
  std::uint32_t landed_{0};      ///< the peer's small batches, refused ones included, modulo 2^32
  std::atomic<bool> answers_due_{false};  ///< the peer may not know `landed_` yet
  std::uint64_t refused_operations_{0};
  /// Grants that small batches may still use, by id.
  std::unordered_map<std::uint64_t, const open_grant*> open_;

  // Owned by the holder of `reading_`.
  struct gathering {
    std::uint32_t immediates{0};
    std::optional<std::uint16_t> parts;
    std::vector<std::byte> frame;
  };
  std::atomic<bool> reading_{false};
  std::vector<std::uint32_t> read_;  ///< message buffers to post again at the end of the turn
  std::vector<std::byte> assembling_;
  std::unordered_map<std::uint32_t, gathering> gathered_;
  std::size_t gathered_bytes_{0};
  std::optional<troupe::error> failed_;
  bool hello_failed_{false};

  std::atomic<std::uint32_t> idle_polls_{0};
  std::atomic<bool> joining_{false};  ///< written under `mutex_`
  std::atomic<bool> up_{false};
  std::atomic<bool> gone_{false};  ///< torn down; nothing is left to poll
};

/// `why`: what `ibv_post_send` returned.
[[nodiscard]] inline unexpected refused_by_nic(int why) {
  return fail(errc::link_broken, "the NIC refused a request: " + what_errno(why));
}

/// `unauthorized`: the peer violated the protocol.
[[nodiscard]] inline unexpected against_protocol(const std::string& what) {
  return fail(errc::unauthorized, "the rdma peer broke the protocol: " + what);
}

}  // namespace troupe::transport::rdma
