#include "troupe/transport/shm/staged_link.hpp"

#include <string>
#include <utility>

namespace troupe::transport::shm {

staged_link::staged_link(const backend_context& context, std::shared_ptr<shm_listener> listener,
                         std::shared_ptr<staging::staging_pool> pool, const link_options& options,
                         std::shared_ptr<link_sink> sink)
    : shm_link{context, std::move(listener), options, std::move(sink)},
      grants_{self_},
      copies_{std::move(pool), engine_},
      server_{copies_, grants_} {}

// -- target side

result<remote_grant> staged_link::grant_of_device(region_use memory, byte_set permitted,
                                                  access rights, const grant_scope& scope) {
  // Called for its error about devices that are not GPUs.
  if (auto ok = regions_.use_by_way_of_host(memory->id(), kind_); !ok) return fail(ok.error());
  if (auto ok = copies_.pool().prepare_streams(*memory->gpu()); !ok) {
    return fail(std::move(ok).error());
  }
  grant_key key;
  key.how = grant_key::memory::asked;
  const std::lock_guard lock{mutex_};
  if (state_ != link_phase::up) return not_up(kind_, state_, why_broken_);
  auto given = grants_.give(std::move(memory), permitted, rights, scope);
  if (given) given->key = key.encode();
  return given;
}

// -- what the peer shares

result<void> staged_link::on_shared(received in) {
  const auto* shared = std::get_if<chunks_shared_message>(&in.body);
  if (shared == nullptr) return shm_link::on_shared(std::move(in));
  if (in.fds.size() != 1) {
    return fail(errc::unauthorized, "the shm peer shared chunks without a descriptor");
  }
  auto area = chunk_area::map(std::move(in.fds.front()), shared->size);
  if (!area) return fail(std::move(area).error());
  const std::lock_guard lock{mutex_};
  if (state_ == link_phase::broken || state_ == link_phase::closed) return {};
  if (peer_area_) return fail(errc::unauthorized, "the shm peer shared its chunks twice");
  peer_area_ = unpinned_late(std::move(*area));
  used_.store(true, std::memory_order_release);
  in_work_.fetch_add(1, std::memory_order_seq_cst);  // until the link ends: chunks need polling
  engine_.wake();  // its thread may have slept while a caller of ours took the message
  return {};
}

/// Freeing pinned memory makes the driver wait for all work of the GPU, and that work may wait for
/// the thread that frees the memory. So the last owner leaves the freeing to another thread.
std::shared_ptr<chunk_area> staged_link::unpinned_late(std::shared_ptr<chunk_area> area) {
  auto* const at = area.get();
  return {at,
          [area = std::move(area), pool = copies_.pool().shared_from_this()](chunk_area*) mutable {
            pool->later([area = std::move(area)]() mutable { area.reset(); });
          }};
}

void staged_link::forget_peer_memory() {
  shm_link::forget_peer_memory();
  area_.reset();
  if (std::exchange(peer_area_, nullptr)) in_work_.fetch_sub(1, std::memory_order_release);
}

// -- sleeping

/// The peer's answers and requests ring the doorbell; the end of a GPU's copies rings a bell, too.
bool staged_link::may_sleep_in_work() {
  {
    const std::lock_guard lock{mutex_};
    if (has_queued() || due_.load(std::memory_order_seq_cst)) return false;
  }
  if (!copies_.any()) return true;
  if (!copies_.may_sleep()) return false;
  watch_over();
  return true;
}

void staged_link::on_leaf_timer() {
  watched_.store(false, std::memory_order_release);
  on_poll({});  // the next sleep sets the timer again
}

bool staged_link::heard_something() {
  if (!used_.load(std::memory_order_acquire)) return false;
  if (moving_.exchange(true, std::memory_order_acquire)) return true;  // another thread is moving
  std::shared_ptr<chunk_area> ours;
  std::shared_ptr<chunk_area> theirs;
  {
    const std::lock_guard lock{mutex_};
    ours = area_;
    theirs = peer_area_;
  }
  // A caller of `poll` may have left work behind since this thread last looked.
  bool heard = due_.load(std::memory_order_seq_cst) || (theirs && server_.asked(*theirs));
  for (std::size_t i = 0; ours && i < chunk_count && !heard; ++i) {
    heard = uses_[i].now == chunk_use::step::asked &&
            ours->state(i).answered.load(std::memory_order_acquire) != uses_[i].number - 1;
  }
  moving_.store(false, std::memory_order_release);
  return heard;
}

}  // namespace troupe::transport::shm
