#include <algorithm>
#include <functional>
#include <utility>

#include "troupe/transport/batch_check.hpp"
#include "troupe/transport/shm/staged_link.hpp"

// The initiator's side of batches that go through chunks: which batches do, and their checks.

namespace troupe::transport::shm {

bool staged_link::is_of_devices(const batch& work) const {
  return std::ranges::any_of(work.pieces, [&](const piece& one) {
    if (!one.remote) return false;
    const auto key = grant_key::decode(one.remote->key);
    if (!key) return false;
    if (key->how == grant_key::memory::asked) return true;
    const auto local = regions_.use(one.local);
    return local && (*local)->kind() != memory_kind::host;
  });
}

result<staged_piece> staged_link::prepare_piece(const batch& work, std::size_t index) {
  const auto& piece = work.pieces[index];
  staged_piece made;
  auto local = regions_.use_by_way_of_host(piece.local, kind_);
  if (!local) return in_piece(index, std::move(local).error());
  made.local = std::move(*local);
  if (auto ok = check_piece(work, index, options_.peer, *made.local); !ok) return fail(ok.error());
  made.base = made.local->data();
  if (const auto gpu = made.local->gpu(); gpu && made.local->kind() != memory_kind::host) {
    made.gpu = *gpu;
    if (auto ok = copies_.pool().prepare_streams(*gpu); !ok) return in_piece(index, ok.error());
  }
  const auto key = grant_key::decode(piece.remote->key);
  if (!key) return in_piece(index, key.error());
  made.grant = piece.remote->id;
  made.asks = key->how == grant_key::memory::asked;
  if (made.asks) return made;
  if (auto ok = find_remote(*piece.remote, made.by_hand); !ok) return in_piece(index, ok.error());
  return made;
}

/// Creates our chunks, shares them with the peer if it must move bytes, and pins them if a GPU of
/// ours does; each once.
result<void> staged_link::need_chunks(const staged_job& job) {
  if (job.total == 0) return {};
  const std::lock_guard making{area_mutex_};
  std::shared_ptr<chunk_area> area;
  {
    const std::lock_guard lock{mutex_};
    area = area_;
  }
  const bool is_new = !area;
  if (is_new) {
    auto made = chunk_area::create();
    if (!made) return fail(std::move(made).error());
    area = unpinned_late(std::move(*made));
  }
  for (const auto& piece : job.pieces) {
    if (piece.gpu == staging::memory_run::on_host) continue;
    if (auto ok = area->pin(copies_.pool().runtime(), piece.gpu); !ok) return ok;
  }
  const bool asks = std::ranges::any_of(job.pieces, [](const auto& one) { return one.asks; });
  const std::lock_guard lock{mutex_};
  if (state_ != link_phase::up) return not_up(kind_, state_, why_broken_);
  if (asks && !area_shared_) {
    const int fd = area->fd();
    if (auto ok = share(chunks_shared_message{sizeof(chunk_memory)}, {&fd, 1}); !ok) return ok;
    area_shared_ = true;
  }
  area_ = std::move(area);
  return {};
}

result<void> staged_link::post_of_device(batch& work, troupe::error why) {
  if (!is_of_devices(work)) return refused(std::move(why));
  auto prepared = make_job<staged_job>(work, std::bind_front(&staged_link::prepare_piece, this));
  if (!prepared) return refused(std::move(prepared).error());
  const auto& job = *prepared;
  if (auto ok = need_chunks(*job); !ok) return refused(std::move(ok).error());
  {
    const std::lock_guard lock{mutex_};
    if (auto ok = take_in(job); !ok) return ok;
    fresh_.push_back(job);
    used_.store(true, std::memory_order_release);
    in_work_.fetch_add(1, std::memory_order_seq_cst);
  }
  due_.store(true, std::memory_order_seq_cst);
  move_chunks();
  if (due_.load(std::memory_order_seq_cst) && engine_.asleep()) engine_.wake();
  return {};
}

/// Under the lock.
void staged_link::on_finished(mapped_job& job) {
  const bool used = used_.load(std::memory_order_acquire);
  auto* const staged = used ? dynamic_cast<staged_job*>(&job) : nullptr;
  if (staged == nullptr) {
    shm_link::on_finished(job);
    return;
  }
  staged->over = true;
  in_work_.fetch_sub(1, std::memory_order_release);
}

}  // namespace troupe::transport::shm
