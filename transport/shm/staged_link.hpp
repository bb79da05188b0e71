#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "troupe/transport/grant_table.hpp"
#include "troupe/transport/shm/chunk_memory.hpp"
#include "troupe/transport/shm/chunk_server.hpp"
#include "troupe/transport/shm/shm_link.hpp"
#include "troupe/transport/shm/staged_job.hpp"
#include "troupe/transport/staging/staged_copies.hpp"

namespace troupe::transport::shm {

/// One end of an `shm` link that also moves GPU memory, by way of chunks of pinned memory that both
/// ends have mapped. Between its own GPU and the peer's host memory the initiator copies alone; the
/// peer moves memory of its own GPUs on request (`chunk_memory`). Batches with host memory on both
/// sides move as on a link without GPUs.
///
/// No thread waits for a GPU or for the peer: the thread that makes progress polls them, one thread
/// at a time (`moving_`).
class staged_link final : public shm_link {
 public:
  staged_link(const backend_context& context, std::shared_ptr<shm_listener> listener,
              std::shared_ptr<staging::staging_pool> pool, const link_options& options,
              std::shared_ptr<link_sink> sink);

 protected:
  [[nodiscard]] result<remote_grant> grant_of_device(region_use memory, byte_set permitted,
                                                     access rights,
                                                     const grant_scope& scope) override;
  [[nodiscard]] result<void> post_of_device(batch& work, troupe::error why) override;
  [[nodiscard]] result<void> on_shared(received in) override;
  bool advance() override;
  bool may_sleep_in_work() override;
  bool heard_something() override;
  void on_leaf_timer() override;
  void on_finished(mapped_job& job) override;
  void forget_peer_memory() override;
  [[nodiscard]] std::shared_ptr<chunk_area> unpinned_late(std::shared_ptr<chunk_area> area);
  void revoke(transfer_id transfer) override { grants_.revoke(transfer); }
  void revoke_all() override { grants_.revoke_all(); }
  void add_users_of(region_id region, std::set<transfer_id>& to) const override {
    grants_.add_users_of(region, to);
  }
  [[nodiscard]] bool touches(transfer_id transfer) override { return copies_.touches(transfer); }
  [[nodiscard]] bool touches_any() override { return copies_.any(); }

 private:
  // -- posting (staged_link_post.cpp)
  [[nodiscard]] bool is_of_devices(const batch& work) const;
  [[nodiscard]] result<staged_piece> prepare_piece(const batch& work, std::size_t index);
  [[nodiscard]] result<void> need_chunks(const staged_job& job);

  // -- moving (staged_link_move.cpp)
  struct round {
    chunk_area* area{nullptr};
    std::uint64_t host_bytes{0};  ///< that the CPU may still copy in this round
    bool worked{false};
    bool tell{false};                         ///< a request or an answer was written for the peer
    std::optional<troupe::error> nonsense{};  ///< written by the peer: the link must end
  };
  bool move_chunks();
  void use_chunks(round& now);
  void go_on(round& now, std::size_t index);
  void start_chunks(round& now);
  void start_chunk(round& now, std::size_t index, const std::shared_ptr<staged_job>& job);
  void ask(round& now, std::size_t index);
  void copy_local(round& now, std::size_t index, direction dir);
  [[nodiscard]] result<void> copy_by_hand(round& now, std::size_t index);
  void arrive(round& now, std::size_t index);
  void leave(round& now, std::size_t index, std::optional<troupe::error> why = {});
  [[nodiscard]] bool begin_touch(staged_job& job);
  void end_touch(staged_job& job) noexcept { job.touching -= 1; }
  void end_jobs(round& now);

  /// Declared before the members that use them: a copy in flight does not own its chunk.
  std::shared_ptr<chunk_area> area_;       ///< ours; under the lock, or by the holder of `moving_`
  std::shared_ptr<chunk_area> peer_area_;  ///< the peer's; likewise
  grant_table grants_;                     ///< to memory of GPUs
  staging::staged_copies copies_;
  chunk_server server_;

  std::mutex area_mutex_;            ///< held to create `area_`; before the link's lock
  bool area_shared_{false};          ///< under `area_mutex_`
  std::atomic<bool> used_{false};    ///< chunks exist; a link without GPUs checks only this
  std::atomic<bool> due_{false};     ///< a batch was posted since the last round
  std::atomic<bool> moving_{false};  ///< guards what follows: one thread at a time
  std::array<chunk_use, chunk_count> uses_{};
  std::deque<std::shared_ptr<staged_job>> jobs_;
  std::vector<std::shared_ptr<staged_job>> fresh_;  ///< posted; under the lock
};

}  // namespace troupe::transport::shm
