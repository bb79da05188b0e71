#include "troupe/actors/operations/value_store.hpp"

#include <algorithm>
#include <new>
#include <optional>
#include <utility>

namespace troupe::actors {

namespace {

/// A longer time to live counts as none: the clock's own unit would overflow.
constexpr std::chrono::milliseconds for_ever = std::chrono::hours{24 * 365 * 100};

std::optional<kvcache::keyed_store::duration> duration_of(std::chrono::milliseconds ttl) {
  if (ttl.count() <= 0 || ttl >= for_ever) return std::nullopt;
  return ttl;
}

std::chrono::milliseconds left_of(const kvcache::value_info& info,
                                  value_store::clock::time_point now) {
  if (!info.expires) return {};
  // 0 would say "no end".
  return std::max(std::chrono::duration_cast<std::chrono::milliseconds>(*info.expires - now),
                  std::chrono::milliseconds{1});
}

}  // namespace

/// Ends a view. Allocated before the view exists, since a view without an owner would never end.
struct value_store::view_pin {
  std::shared_ptr<value_store> store;
  std::optional<kvcache::view_id> view;

  explicit view_pin(std::shared_ptr<value_store> of) : store{std::move(of)} {}
  view_pin(const view_pin&) = delete;
  view_pin& operator=(const view_pin&) = delete;
  ~view_pin() {
    if (view) store->release(*view);
  }
};

result<std::shared_ptr<value_store>> value_store::create(transport::endpoint& endpoint,
                                                         std::uint64_t size) {
  auto made = on_demand(endpoint, size);
  if (auto allocated = made->allocate(); !allocated) return fail(allocated.error());
  return made;
}

std::shared_ptr<value_store> value_store::on_demand(transport::endpoint& endpoint,
                                                    std::uint64_t size) {
  return std::shared_ptr<value_store>{new value_store{endpoint, size}};
}

value_store::value_store(transport::endpoint& endpoint, std::uint64_t size)
    : endpoint_{endpoint},
      size_{size},
      store_{kvcache::store_options{size, kvcache::on_full::fail}} {}

result<void> value_store::allocate() {
  if (!memory_.empty()) return {};
  const auto region = endpoint_.allocate(size_, "keyed values");
  if (!region) return fail(region.error());
  const auto memory = endpoint_.bytes(*region);
  if (!memory) return fail(memory.error());
  region_ = *region;
  memory_ = *memory;
  return {};
}

region_id value_store::region() const {
  const std::lock_guard lock{mutex_};
  return region_;
}

value_store::reservation::reservation(std::shared_ptr<value_store> store, kvcache::put_slot slot,
                                      std::chrono::milliseconds ttl)
    : store_{std::move(store)}, slot_{slot}, ttl_{ttl} {}

value_store::reservation::~reservation() {
  if (store_) store_->abort(slot_.put);
}

std::span<std::byte> value_store::reservation::bytes() const {
  return store_->memory_.subspan(slot_.offset, slot_.size);
}

result<void> value_store::reservation::commit() {
  auto committed = [this] {
    const std::lock_guard lock{store_->mutex_};
    return store_->store_.commit(slot_.put, clock::now(), duration_of(ttl_));
  }();
  // The destructor gives up a value that could not be committed.
  if (committed) store_.reset();
  return committed;
}

result<std::shared_ptr<const void>> value_store::reservation::commit_pinned(std::string_view key) {
  const auto store = store_;
  auto pin = std::make_shared<view_pin>(store);
  const std::lock_guard lock{store->mutex_};
  const auto now = clock::now();
  if (auto committed = store->store_.commit(slot_.put, now, duration_of(ttl_)); !committed) {
    return fail(committed.error());
  }
  store_.reset();
  try {
    const auto view = store->store_.get(key, now);
    if (!view) return fail(view.error());
    pin->view = view->view;
  } catch (const std::bad_alloc&) {
    (void)store->store_.remove(key, now);
    throw;
  }
  return pin;
}

result<value_store::reservation> value_store::reserve(std::string_view key, std::uint64_t size,
                                                      std::chrono::milliseconds ttl) {
  std::optional<reservation> room;  // outlives the lock: its destructor may take the mutex
  const std::lock_guard lock{mutex_};
  auto slot = store_.begin_put(key, size, clock::now());
  if (!slot) return fail(slot.error());
  room.emplace(reservation{shared_from_this(), *slot, ttl});
  if (auto allocated = allocate(); !allocated) return fail(allocated.error());
  return std::move(*room);
}

result<value_store::reservation> value_store::scratch(std::uint64_t size) {
  std::string key;
  {
    const std::lock_guard lock{mutex_};
    // No engine can name this key: it begins with a byte that `check_key` refuses.
    key.assign(1, '\0');
    key += std::to_string(next_scratch_++);
  }
  return reserve(key, size, {});
}

result<void> value_store::put(std::string_view key, std::span<const std::byte> value,
                              std::chrono::milliseconds ttl) {
  auto room = reserve(key, value.size(), ttl);
  if (!room) return fail(room.error());
  std::ranges::copy(value, room->bytes().begin());
  return room->commit();
}

result<value_store::pinned> value_store::get(std::string_view key) {
  auto pin = std::make_shared<view_pin>(shared_from_this());
  const std::lock_guard lock{mutex_};
  const auto now = clock::now();
  auto view = store_.get(key, now);
  if (!view) return fail(view.error());
  pin->view = view->view;
  pinned value;
  value.where = {view->offset, view->size, 0, 1};
  value.bytes = memory_.subspan(view->offset, view->size);
  if (const auto info = store_.query(key, now)) value.ttl = left_of(*info, now);
  value.pin = std::move(pin);
  return value;
}

result<value_store::information> value_store::query(std::string_view key) {
  const std::lock_guard lock{mutex_};
  const auto now = clock::now();
  const auto info = store_.query(key, now);
  if (!info) return fail(errc::not_found, "no value under key `" + std::string{key} + "`");
  return information{info->size, left_of(*info, now)};
}

result<void> value_store::remove(std::string_view key) {
  const std::lock_guard lock{mutex_};
  return store_.remove(key, clock::now());
}

void value_store::expire(clock::time_point now) {
  const std::lock_guard lock{mutex_};
  store_.expire(now);
}

bool value_store::anything_expires() const {
  const std::lock_guard lock{mutex_};
  return store_.next_expiry().has_value();
}

void value_store::describe(pool_report& report) const {
  const std::lock_guard lock{mutex_};
  const auto counters = store_.counters();
  report.store_bytes = size_;
  report.store_used = counters.memory.used;
  report.store_keys = counters.values;
}

void value_store::abort(kvcache::put_id put) {
  const std::lock_guard lock{mutex_};
  // Only a reservation that was not committed gets here, so the put is there.
  (void)store_.abort(put);
}

void value_store::release(kvcache::view_id view) {
  const std::lock_guard lock{mutex_};
  (void)store_.release(view);
}

}  // namespace troupe::actors
