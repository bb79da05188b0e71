#include "troupe/transport/staging/staged_copies.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

namespace troupe::transport::staging {

namespace {

/// How long a link that ends waits for copies of a GPU that does not finish.
constexpr std::chrono::seconds longest_goodbye{10};

}  // namespace

void copy_group::note(const troupe::error& failure) {
  const std::lock_guard lock{mutex_};
  if (!failure_) failure_ = failure;
}

std::optional<troupe::error> copy_group::failure() const {
  const std::lock_guard lock{mutex_};
  return failure_;
}

bool staged_copy::flown() const noexcept {
  return std::ranges::all_of(flights, [](const auto& one) { return one.ended(); });
}

staged_copies::~staged_copies() {
  const auto last = std::chrono::steady_clock::now() + longest_goodbye;
  while (under_way_.load(std::memory_order_acquire) != 0 &&
         std::chrono::steady_clock::now() < last) {
    static_cast<void>(look());
    std::this_thread::yield();
  }
}

std::shared_ptr<staged_copy> staged_copies::start(staging_chunk chunk, const order& what) {
  auto made = std::make_shared<staged_copy>();
  made->chunk = std::move(chunk);
  made->transfer = what.transfer;
  made->batch = what.batch;
  made->group = what.group;
  made->bytes = what.bytes;
  made->memory.reserve(what.memory.size());
  for (const auto& use : what.memory) made->memory.push_back(use.again());
  auto started = pool_->copy(what.dir, what.runs, what.from, what.bytes, made->chunk);
  made->flights = std::move(started.flights);
  made->failure = std::move(started.failure);
  if (made->group) made->group->begin();
  {
    const std::lock_guard lock{mutex_};
    copies_.push_back(made);
    under_way_.fetch_add(1, std::memory_order_seq_cst);
  }
  bell_->disarm();  // it was armed without this copy
  if (engine_.asleep()) engine_.wake();
  return made;
}

std::shared_ptr<staged_copy> staged_copies::refuse(const order& what, troupe::error why) {
  auto made = std::make_shared<staged_copy>();
  made->transfer = what.transfer;
  made->batch = what.batch;
  made->bytes = what.bytes;
  made->failure = std::move(why);
  const std::lock_guard lock{mutex_};
  copies_.push_back(made);
  under_way_.fetch_add(1, std::memory_order_seq_cst);
  return made;
}

result<staging_chunk> staged_copies::lend(const std::shared_ptr<chunk_quota>& quota) {
  bool starved = false;
  auto chunk = pool_->lend(quota, starved);
  if (starved) {
    starved_.store(true, std::memory_order_seq_cst);
    // The chunks may all have come back in the meantime, which wakes nobody.
    if (engine_.asleep()) engine_.wake();
  }
  return chunk;
}

bool staged_copies::may_sleep() {
  // A copy without a chunk waits for chunks of other links as well, which ring no bell.
  if (starved_.load(std::memory_order_seq_cst) || any_flown()) return false;
  if (bell_->arm()) return true;
  // The streams are shared by all links of the endpoint. Behind copies that another link started
  // after ours the bell rings late, by the time of a few chunks. But if another link's `look` has
  // just seen the end of ours, the bell may stand behind copies of other links alone: check again.
  if (pool_->ring_at_ends(bell_) && !any_flown()) return true;
  bell_->disarm();
  return false;
}

/// Whether `look` would find a copy that has ended.
bool staged_copies::any_flown() {
  const std::lock_guard lock{mutex_};
  return std::ranges::any_of(copies_, [](const auto& copy) { return copy->flown(); });
}

staged_copies::news staged_copies::look() {
  news told;
  std::vector<region_use> unused;  // released after the lock: the last use may free memory
  std::vector<std::shared_ptr<staged_copy>> ended;  // likewise, for their chunks
  pool_->look();
  const std::lock_guard lock{mutex_};
  told.ended = starved_.exchange(false, std::memory_order_relaxed);
  std::erase_if(copies_, [&](const std::shared_ptr<staged_copy>& copy) {
    if (!copy->flown()) return false;
    end(*copy, told, unused);
    ended.push_back(copy);
    return true;
  });
  std::erase_if(fenced_, [&](std::uint64_t transfer) {
    if (has(transfer_id{transfer})) return false;
    told.quiescent.push_back(transfer_id{transfer});
    return true;
  });
  return told;
}

/// Under the lock.
void staged_copies::end(staged_copy& copy, news& told, std::vector<region_use>& unused) {
  for (auto& flown : copy.flights) {
    if (auto why = flown.take_failure(); why && !copy.failure) copy.failure = std::move(why);
    flown.give_back_tables();
  }
  std::ranges::move(copy.memory, std::back_inserter(unused));
  copy.memory.clear();
  if (copy.failure && copy.batch != 0) told.failed.emplace_back(copy.batch, *copy.failure);
  if (copy.group) {
    if (copy.failure) copy.group->note(*copy.failure);
    copy.group->end();
  }
  copy.ended.store(true, std::memory_order_release);
  under_way_.fetch_sub(1, std::memory_order_release);
  told.ended = true;
}

/// Under the lock.
bool staged_copies::has(transfer_id transfer) const {
  return std::ranges::any_of(copies_, [&](const auto& copy) { return copy->transfer == transfer; });
}

bool staged_copies::touches(transfer_id transfer) {
  if (under_way_.load(std::memory_order_acquire) == 0) return false;
  const std::lock_guard lock{mutex_};
  return has(transfer);
}

bool staged_copies::fence(transfer_id transfer) {
  if (under_way_.load(std::memory_order_acquire) == 0) return false;
  const std::lock_guard lock{mutex_};
  if (!has(transfer)) return false;
  fenced_.insert(transfer.value);
  return true;
}

}  // namespace troupe::transport::staging
