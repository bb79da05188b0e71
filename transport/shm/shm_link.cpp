#include "troupe/transport/shm/shm_link.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "troupe/transport/grant_table.hpp"
#include "troupe/transport/shm/tracing.hpp"

namespace troupe::transport::shm {

shm_link::shm_link(const backend_context& context, std::shared_ptr<shm_listener> listener,
                   const link_options& options, std::shared_ptr<link_sink> sink, backend_kind kind)
    : mapped_link{kind, context, std::move(listener), options, std::move(sink)} {}

// -- target side

result<remote_grant> shm_link::grant(region_id region, byte_set permitted, access rights,
                                     grant_scope scope) {
  auto memory = regions_.use(region);
  if (!memory) return fail(std::move(memory).error());
  if ((*memory)->kind() != memory_kind::host) {
    return grant_of_device(std::move(*memory), permitted, rights, scope);
  }
  auto given = draw_grant(**memory, permitted, rights, scope, self_);
  if (!given) return given;
  grant_key key;
  key.how = (*memory)->fd() >= 0 ? grant_key::memory::mapped : grant_key::memory::process;
  key.address = reinterpret_cast<std::uintptr_t>((*memory)->data());

  const std::lock_guard lock{mutex_};
  if (state_ != link_phase::up) return not_up(kind_, state_, why_broken_);
  if (auto ok = share_region(**memory); !ok) return fail(std::move(ok).error());
  auto slot = slots_->give(given->id, scope.transfer, std::move(*memory));
  if (!slot) return fail(std::move(slot).error());
  key.slot = *slot;
  given->key = key.encode();
  return given;
}

// An overriding leaf takes ownership of `memory`.
// NOLINTNEXTLINE(performance-unnecessary-value-param)
result<remote_grant> shm_link::grant_of_device(region_use memory, byte_set /*permitted*/,
                                               access /*rights*/, const grant_scope& /*scope*/) {
  return fail(regions_.use_on_host(memory->id(), kind_).error());
}

/// Makes sure that the peer can access the region. The descriptor is in the peer's socket before
/// the grant is handed out, so a holder of the grant finds it there.
result<void> shm_link::share_region(const region& memory) {
  if (memory.fd() < 0) {
    if (peer_reaches_our_memory_ || show_memory_late()) return {};
    return fail(
        errc::backend_unavailable,
        "region " + std::to_string(memory.id().value) + " '" + memory.name() +
            "' is memory of the engine, registered after this link was made, and the kernel does "
            "not let the peer reach it (process_vm_readv: " +
            why_not_traced(ptrace_scope()) +
            "); allocate the region through the endpoint, or use backend tcp");
  }
  if (shared_regions_.contains(memory.id())) return {};
  const int fd = memory.fd();
  region_shared_message said;
  said.region = memory.id().value;
  said.size = memory.mapped_size();
  if (auto ok = share(said, {&fd, 1}); !ok) return ok;
  shared_regions_.insert(memory.id());
  return {};
}

// -- what the peer shares

result<void> shm_link::on_shared(received in) {
  const auto* shared = std::get_if<region_shared_message>(&in.body);
  if (shared == nullptr || in.fds.size() != 1) {
    return fail(errc::unauthorized, "the shm peer shared no descriptor");
  }
  auto added = peer_regions_.add(*shared, std::move(in.fds.front()));
  attention_.store(true, std::memory_order_release);  // a round must populate its pages
  return added;
}

void shm_link::on_gone(region_id region) {
  std::shared_ptr<const mapped_region> unmapped;  // destroyed after the lock is released
  peer_regions_.remove(region);
  const std::lock_guard lock{mutex_};
  if (last_region_ == region) unmapped = std::move(last_mapped_);
}

void shm_link::on_control() {
  runner_.emplace(peer_process_, options_.post_batch_size);
}

bool shm_link::prepare_memory() {
  return peer_regions_.populate_part();
}

bool shm_link::memory_to_prepare() const {
  return peer_regions_.has_fresh();
}

void shm_link::on_finished(mapped_job& job) {
  const auto queued =
      std::ranges::find_if(queued_, [&](const auto& one) { return one.get() == &job; });
  if (queued == queued_.end()) return;
  queued_.erase(queued);
  in_work_.fetch_sub(1, std::memory_order_release);
}

void shm_link::forget_peer_memory() {
  peer_regions_.clear();
  last_mapped_.reset();
}

}  // namespace troupe::transport::shm
