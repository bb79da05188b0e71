#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "troupe/transport/shm/shm_link.hpp"
#include "troupe/transport/xgmi/batch_launch.hpp"
#include "troupe/transport/xgmi/closed_regions.hpp"
#include "troupe/transport/xgmi/gpu_site.hpp"
#include "troupe/transport/xgmi/late_calls.hpp"
#include "troupe/transport/xgmi/options.hpp"
#include "troupe/transport/xgmi/peer_gpu_regions.hpp"

namespace troupe::transport::xgmi {

/// State shared by the links of one endpoint: its GPUs, their lanes, and where its regions lie.
struct gpu_side {
  gpu_side(xgmi_options with, std::shared_ptr<gpu_site> on)
      : options{std::move(with)}, site{std::move(on)}, lanes{*site->runtime} {}

  const xgmi_options options;
  const std::shared_ptr<gpu_site> site;
  copy_lanes lanes;
  late_calls late;

  /// The allocation in which a region of ours lies; asks the driver once. `backend_unavailable`:
  /// the region is not in GPU memory, or not in one allocation.
  [[nodiscard]] result<gpu_allocation> place_of(const region& memory);
  void forget(region_id region);

 private:
  std::mutex mutex_;
  std::unordered_map<region_id, gpu_allocation> places_;
};

/// The slot of a grant that a batch in flight uses; the batch is counted in it.
struct entered_slot {
  shm::grant_slot* slot;
  std::uint64_t grant;
};

struct xgmi_piece {
  region_use local;
  std::uint32_t device{0};  ///< GPU of the local region, which copies
  reachable_region remote;
  entered_slot slot{};
};

/// A batch that GPUs copy.
struct xgmi_job final : shm::mapped_job {
  void release_memory() override;
  /// All segments or none, since the GPU copies in any order.
  [[nodiscard]] std::vector<std::uint32_t> unfinished() const override;
  [[nodiscard]] bool ended() const noexcept;

  std::vector<xgmi_piece> pieces;
  std::vector<flight> flights;  ///< one per GPU that copies
  std::size_t entered{0};       ///< pieces whose slots are entered
};

/// One end of an `xgmi` link. The GPU of the local memory copies from or to the peer's memory,
/// which it has mapped. A batch stays in its grants' slots until the GPU is done with it, so a
/// fence of the owner waits for the copies. Copies of a killed process end before the process is
/// gone.
///
/// | batch   | on                              | becomes           |
/// | ------- | ------------------------------- | ----------------- |
/// | posted  | tables free, slots entered      | flying            |
/// | posted  | a slot's grant is gone          | failed            |
/// | posted  | too many tables lent            | waiting           |
/// | waiting | tables free                     | flying            |
/// | waiting | fence, close, break             | failed            |
/// | flying  | its marks are reached           | done              |
/// | flying  | reached, the driver refused one | failed            |
/// | flying  | reached, and fenced or closed   | failed (aborted)  |
/// | flying  | the GPU is lost                 | failed, link down |
///
/// Memory shared with the peer is freed after its deregistration only once the peer has reported
/// that it has closed it, or this end has given up the peer: memory must not be freed while another
/// process has it open.
///
/// Host memory (keyed values) moves over the same link as it does over `shm`.
class xgmi_link final : public shm::shm_link {
 public:
  xgmi_link(const backend_context& context, std::shared_ptr<shm::shm_listener> listener,
            std::shared_ptr<gpu_side> gpus, const link_options& options,
            std::shared_ptr<link_sink> sink);
  xgmi_link(const xgmi_link&) = delete;
  xgmi_link& operator=(const xgmi_link&) = delete;
  ~xgmi_link() override;

  [[nodiscard]] result<remote_grant> grant(region_id region, byte_set permitted, access rights,
                                           grant_scope scope) override;
  [[nodiscard]] result<void> post(batch work) override;

 protected:
  void on_control() override;
  [[nodiscard]] result<void> on_shared(shm::received in) override;
  void on_gone(region_id region) override;
  [[nodiscard]] result<void> on_closed(region_id region) override;
  bool prepare_memory() override;
  [[nodiscard]] bool memory_to_prepare() const override;
  bool advance() override;
  bool may_sleep_in_work() override;
  void on_doorbell() override;
  void on_leaf_timer() override;
  void on_finished(shm::mapped_job& job) override;
  void forget_peer_memory() override;
  [[nodiscard]] bool socket_end_is_death() const override { return false; }

 private:
  // -- memory lent and borrowed (xgmi_link_regions.cpp)
  [[nodiscard]] result<void> share_region(const region& memory, const gpu_allocation& place);
  void close_late(parted_region gone);
  void say_closed();
  void give_back_lent();
  void wait_for_copies();

  // -- copying (xgmi_link_post.cpp)
  [[nodiscard]] result<xgmi_piece> prepare_piece(const batch& work, std::size_t index);
  [[nodiscard]] result<void> find_remote(const remote_grant& grant, xgmi_piece& made);
  [[nodiscard]] result<void> enter_slots(xgmi_job& job) const;
  void start(xgmi_job& job);
  [[nodiscard]] bool crowded(const xgmi_job& job);
  bool leave_slots(xgmi_job& job) const;
  void end_running(const std::shared_ptr<xgmi_job>& job);
  bool start_waiting();

  const std::shared_ptr<gpu_side> gpus_;
  std::optional<peer_gpu_regions> peer_regions_;
  /// Owners of the memory of regions that the peer may have open, also after deregistration. Null
  /// for memory of the engine.
  std::unordered_map<region_id, std::shared_ptr<void>> lent_;
  const std::shared_ptr<closed_regions> closed_{std::make_shared<closed_regions>()};
  std::shared_ptr<bell> bell_;
  std::atomic<bool> armed_{false};  ///< the bell rings when the batches in flight have ended
  std::atomic<bool> looking_{false};
  std::vector<std::shared_ptr<xgmi_job>> flying_;
  std::deque<std::shared_ptr<xgmi_job>> queued_;
};

}  // namespace troupe::transport::xgmi
