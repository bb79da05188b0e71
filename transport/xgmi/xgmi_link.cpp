#include "troupe/transport/xgmi/xgmi_link.hpp"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "troupe/transport/grant_table.hpp"
#include "troupe/transport/xgmi/grant_key.hpp"

namespace troupe::transport::xgmi {

namespace {

/// How long an ending node waits for a peer that copies from or into its memory.
constexpr std::chrono::milliseconds longest_goodbye{2000};

/// The link's own doorbell, rung by the driver. Owns a duplicate of the descriptor, since the
/// driver may ring after the link has ended.
class doorbell_bell final : public bell {
 public:
  explicit doorbell_bell(owned_fd fd) noexcept : fd_{std::move(fd)} {}
  void ring() noexcept override {
    [[maybe_unused]] const auto written = ::eventfd_write(fd_.get(), 1);
  }

 private:
  owned_fd fd_;
};

}  // namespace

// -- shared by the links of an endpoint

result<gpu_allocation> gpu_side::place_of(const region& memory) {
  {
    const std::lock_guard lock{mutex_};
    if (const auto at = places_.find(memory.id()); at != places_.end()) return at->second;
  }
  const auto who = "region " + std::to_string(memory.id().value) + " '" + memory.name() + "' ";
  const auto found = site->runtime->find(memory.data());
  if (!found) {
    return fail(errc::backend_unavailable,
                who +
                    "is not in memory of a GPU, which is what xgmi moves: put the pool on a GPU, "
                    "or use shm");
  }
  const auto offset = static_cast<std::uint64_t>(memory.data() - found->base);
  if (offset > found->size || memory.size() > found->size - offset) {
    return fail(
        errc::backend_unavailable,
        who + "goes on " + std::to_string(memory.size() - (found->size - offset)) +
            " bytes beyond the allocation that it begins in: register each allocation by itself");
  }
  const std::lock_guard lock{mutex_};
  places_.emplace(memory.id(), *found);
  return *found;
}

void gpu_side::forget(region_id region) {
  const std::lock_guard lock{mutex_};
  places_.erase(region);
}

// -- the link

xgmi_link::xgmi_link(const backend_context& context, std::shared_ptr<shm::shm_listener> listener,
                     std::shared_ptr<gpu_side> gpus, const link_options& options,
                     std::shared_ptr<link_sink> sink)
    : shm_link{context, std::move(listener), options, std::move(sink), backend_kind::xgmi},
      gpus_{std::move(gpus)} {}

/// A node that ends without a fence frees memory into which the peer's GPU may still copy. Within
/// one process the driver waits for the copies; for another process this destructor waits, with a
/// limit.
xgmi_link::~xgmi_link() {
  wait_for_copies();
  give_back_lent();
}

void xgmi_link::wait_for_copies() {
  if (!slots_ || peer_process_.pid() == static_cast<std::uint32_t>(::getpid())) return;
  const auto last = std::chrono::steady_clock::now() + longest_goodbye;
  while (slots_->any_draining() && peer_process_.alive() &&
         std::chrono::steady_clock::now() < last) {
    std::this_thread::sleep_for(std::chrono::milliseconds{1});
    slots_->sweep();
  }
}

void xgmi_link::on_control() {
  shm_link::on_control();
  const bool same_process = peer_process_.pid() == static_cast<std::uint32_t>(::getpid());
  peer_regions_.emplace(*gpus_->site, same_process, peer_process_.pid());
  owned_fd own{::fcntl(our_doorbell_.get(), F_DUPFD_CLOEXEC, 0)};
  if (own) bell_ = std::make_shared<doorbell_bell>(std::move(own));
}

// -- target side

result<remote_grant> xgmi_link::grant(region_id region, byte_set permitted, access rights,
                                      grant_scope scope) {
  auto memory = regions_.use(region);
  if (!memory) return fail(std::move(memory).error());
  if ((*memory)->kind() == memory_kind::host) {
    return shm_link::grant(region, permitted, rights, scope);
  }
  auto given = draw_grant(**memory, permitted, rights, scope, self_);
  if (!given) return given;
  auto place = gpus_->place_of(**memory);
  if (!place) return fail(std::move(place).error());

  const std::lock_guard lock{mutex_};
  if (state_ != link_phase::up) return not_up(kind_, state_, why_broken_);
  if (auto ok = share_region(**memory, *place); !ok) return fail(std::move(ok).error());
  auto slot = slots_->give(given->id, scope.transfer, std::move(*memory));
  if (!slot) return fail(std::move(slot).error());
  given->key = encode_grant_key(*slot);
  return given;
}

// -- sleeping

/// Lets the thread sleep during transfers too long for polling: the driver rings at their end.
bool xgmi_link::may_sleep_in_work() {
  std::shared_ptr<bell> what;
  {
    const std::lock_guard lock{mutex_};
    if (!queued_.empty() || has_queued() || !bell_) return false;
    if (std::ranges::any_of(flying_, [](const auto& job) { return job->ended(); })) return false;
    what = bell_;
  }
  if (armed_.exchange(true, std::memory_order_acq_rel)) return true;
  if (gpus_->lanes.ring_at_ends(what)) return true;
  armed_.store(false, std::memory_order_release);
  return false;
}

void xgmi_link::on_doorbell() {
  armed_.store(false, std::memory_order_release);
  if (closed_->any()) attention_.store(true, std::memory_order_release);
}

void xgmi_link::on_leaf_timer() {
  // An exchange, not a store: work added by a thread that found the flag set is visible below.
  watched_.exchange(false, std::memory_order_acq_rel);
  const bool to_tell = up_.load(std::memory_order_acquire) && closed_->size() != 0;
  if (in_work_.load(std::memory_order_acquire) == 0 && !to_tell) return;
  if (closed_->any()) attention_.store(true, std::memory_order_release);
  on_poll({});
  watch_over();
}

}  // namespace troupe::transport::xgmi
