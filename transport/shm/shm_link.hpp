#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "troupe/transport/shm/copy_job.hpp"
#include "troupe/transport/shm/mapped_link.hpp"
#include "troupe/transport/shm/peer_regions.hpp"

namespace troupe::transport::shm {

/// One end of an `shm` link, whose bytes the CPU copies. Small batches, and larger ones that the
/// caller waits for, are copied on the posting thread; others in slices on a progress thread. An
/// `xgmi` link derives from it for host memory.
class shm_link : public mapped_link {
 public:
  shm_link(const backend_context& context, std::shared_ptr<shm_listener> listener,
           const link_options& options, std::shared_ptr<link_sink> sink,
           backend_kind kind = backend_kind::shm);

  [[nodiscard]] result<remote_grant> grant(region_id region, byte_set permitted, access rights,
                                           grant_scope scope) override;
  [[nodiscard]] result<void> post(batch work) override;
  [[nodiscard]] result<std::shared_ptr<const prepared_batch>> prepare(
      direction dir, std::vector<piece> pieces) override;
  [[nodiscard]] result<void> post_prepared(const prepared_batch& what, const posting& how) override;

 protected:
  void on_control() override;
  [[nodiscard]] result<void> on_shared(received in) override;
  void on_gone(region_id region) override;
  bool advance() override;
  bool prepare_memory() override;
  [[nodiscard]] bool memory_to_prepare() const override;
  void on_finished(mapped_job& job) override;
  void forget_peer_memory() override;
  /// Whether batches wait to be copied by `advance`; under the lock.
  [[nodiscard]] bool has_queued() const { return !queued_.empty(); }

  // -- what a leaf may add: memory of devices

  [[nodiscard]] virtual result<remote_grant> grant_of_device(region_use memory, byte_set permitted,
                                                             access rights,
                                                             const grant_scope& scope);
  /// Posts a batch that the CPU alone cannot copy, for the reason in `why`. Its checks are done,
  /// except those of its pieces.
  [[nodiscard]] virtual result<void> post_of_device(batch& work, troupe::error why);
  /// Finds how we reach the granted host region, and stores it in `made`.
  [[nodiscard]] result<void> find_remote(const remote_grant& grant, job_piece& made);
  /// Only after the control page was created or mapped.
  [[nodiscard]] const job_runner& runner() const { return *runner_; }

 private:
  [[nodiscard]] result<void> share_region(const region& memory);

  // -- copying (shm_link_post.cpp)
  [[nodiscard]] result<job_piece> prepare_piece(const batch& work, std::size_t index);
  [[nodiscard]] const mapped_region* mapped_now(region_id region);
  bool post_small(batch& work);
  [[nodiscard]] result<bool> fill(copy_job& job, const prepared_batch& what, const posting& how);
  [[nodiscard]] std::shared_ptr<copy_job> take_spare();
  [[nodiscard]] result<void> run_inline(const std::shared_ptr<copy_job>& job);
  void run(copy_job& job, std::uint64_t most_bytes);

  std::optional<job_runner> runner_;
  peer_regions peer_regions_;
  region_id last_region_;  ///< used by the last small batch; caches the lookup
  std::shared_ptr<const mapped_region> last_mapped_;
  std::deque<std::shared_ptr<copy_job>> queued_;  ///< active jobs that wait for `advance`
  std::vector<std::shared_ptr<copy_job>> spare_;  ///< of prepared batches; under the lock
  std::atomic<bool> slicing_{false};
};

}  // namespace troupe::transport::shm
