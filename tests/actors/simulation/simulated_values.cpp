#include "simulated_values.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "troupe/actors/context/engine_checks.hpp"
#include "troupe/actors/values/value_regions.hpp"

namespace troupe::actors::engine_simulation {

namespace {

/// How long after its deadline an operation has its outcome in a process that is awake, and how
/// long after that if a peer has to be shut out of memory first.
constexpr milliseconds soon_after{100}, shut_out{30'000};
/// The stores go by the clock of the machine: their values live longer than any run, until `expire`
/// looks from behind the end of that time.
constexpr std::chrono::hours time_to_live{1};
constexpr std::uint64_t slot_count = 6, slot_bytes = 64U << 10U;

/// Word `i` of a value. The first one names it.
std::uint64_t word_of(content_id content, std::uint64_t i) {
  if (i == 0) return content;
  auto all = (content + (i << 20U)) * 0x9E3779B97F4A7C15U;
  return (all ^ (all >> 29U)) * 0xBF58476D1CE4E5B9U;
}

void fill(std::span<std::byte> bytes, content_id content) {
  for (std::uint64_t at = 0; at < bytes.size(); at += sizeof at) {
    const auto word = word_of(content, at / sizeof at);
    std::memcpy(bytes.data() + at, &word, std::min(sizeof at, bytes.size() - at));
  }
}

/// Empty: these are not the bytes of one value, from its start.
std::optional<content_id> content_of(std::span<const std::byte> bytes) {
  content_id content = 0;
  if (bytes.empty()) return content;
  std::memcpy(&content, bytes.data(), std::min(sizeof content, bytes.size()));
  for (std::uint64_t at = 0; at < bytes.size(); at += sizeof at) {
    auto here = word_of(content, at / sizeof at);
    const auto there = here;
    std::memcpy(&here, bytes.data() + at, std::min(sizeof at, bytes.size() - at));
    if (here != there) return std::nullopt;
  }
  return content != 0 ? std::optional{content} : std::nullopt;
}

std::string name_of(value_verb verb) {
  const char* names[] = {"put", "get", "query", "remove"};
  return names[static_cast<std::size_t>(verb)];
}

/// Whether what fails in a run may have caused it. The memory and the grants of a node are in order.
bool is_plausible(const troupe::error& why) {
  constexpr std::array causes{errc::pool_exhausted, errc::overloaded,        errc::peer_unreachable,
                              errc::peer_lost,      errc::stale_incarnation, errc::deadline,
                              errc::aborted};
  if (why.code == errc::already_exists) return why.message.starts_with("store: ");
  if (why.code == errc::internal) return why.message.find("crashed") != std::string::npos;
  return std::ranges::count(causes, why.code) != 0;
}

moment earlier(const std::optional<moment>& known, moment other) {
  return known ? std::min(*known, other) : other;
}

}  // namespace

// -- what may be stored

void value_ledger::wrong(const value_question& q, const std::string& what) const {
  violate(q.by + ": the " + name_of(q.verb) + " of " + q.key + " at " + q.store + " " + what);
}

put_ptr value_ledger::find(const history& of, content_id content, std::uint64_t size) {
  for (const auto& one : of.puts) {
    if (one->content == content && one->size == size) return one;
  }
  return nullptr;
}

bool value_ledger::was_put(const std::string& store, const std::string& key,
                           content_id content) const {
  const auto of = keys_.find({store, key});
  return of != keys_.end() && std::ranges::any_of(of->second.puts, [&](const auto& one) {
           return one->content == content;
         });
}

void value_ledger::expires(const std::string& store) {
  for (auto& [where, of] : keys_) {
    if (where.first != store) continue;
    for (const auto& one : of.puts) {
      if (one->lasts) continue;
      one->may_be_gone = true;
      if (one->there) one->gone = earlier(one->gone, now());
    }
  }
}

void value_ledger::begins(const question_ptr& q) {
  q->begun = now();
  q->first_life = lives_[q->store];
  auto& of = keys_[{q->store, q->key}];
  if (q->put) {
    q->put->first_life = q->first_life;
    q->put->may_be_gone = std::ranges::any_of(
        of.removals, [&](const auto& one) { return one->last_life >= q->first_life; });
    of.puts.push_back(q->put);
  } else if (q->verb == value_verb::remove) {
    for (const auto& one : of.puts) one->may_be_gone = true;
    of.removals.push_back(q);
  }
}

/// Returns whether it is certain in which life of the store it was.
bool value_ledger::ends(const question_ptr& q) {
  q->last_life = lives_[q->store];
  if (q->put) q->put->last_life = std::min(q->put->last_life, q->last_life);
  return q->first_life == q->last_life;
}

void value_ledger::has_failed(const question_ptr& q, bool for_certain) {
  // A removal that failed may still come, so it stays in the list.
  (void)ends(q);
  if (!q->put || !for_certain) return;
  q->put->failed = true;
  if (q->put->seen) wrong(*q, "is told that it failed, and its value was stored");
}

void value_ledger::is_done(const question_ptr& q) {
  const bool settled = ends(q);
  auto& of = keys_[{q->store, q->key}];
  if (q->put) {
    q->put->seen = true;
    if (settled) q->put->there = earlier(q->put->there, now());
  } else {
    std::erase(of.removals, q);
    if (std::ranges::none_of(of.puts, [&](const auto& one) { return may_find(*q, *one); })) {
      wrong(*q, "is done, and nothing can have been there");
    }
  }
  shows(*q, q->put);
}

void value_ledger::finds_nothing(const question_ptr& q) {
  (void)ends(q);
  std::erase(keys_[{q->store, q->key}].removals, q);
  shows(*q, nullptr);
}

bool value_ledger::may_find(const value_question& q, const put_value& put) {
  return !put.failed && !(put.gone && *put.gone < q.begun) && put.last_life >= q.first_life &&
         put.first_life <= q.last_life;
}

void value_ledger::finds(const question_ptr& q, content_id content, std::uint64_t size) {
  const bool settled = ends(q);
  const auto put = find(keys_[{q->store, q->key}], content, size);
  const auto told = "finds value " + std::to_string(content);
  if (!put) return wrong(*q, told + ", which nobody has put there");
  if (put->failed) return wrong(*q, told + ", though its put was told that it failed");
  if (!may_find(*q, *put)) return wrong(*q, told + ", which was gone before");
  put->seen = true;
  if (settled) {
    put->first_life = put->last_life = q->first_life;
    put->there = earlier(put->there, now());
  }
  shows(*q, put);
}

void value_ledger::hears_of(const question_ptr& q, std::uint64_t size, bool lasts) {
  (void)ends(q);
  const auto fits = [&](const put_ptr& one) {
    return one->size == size && one->lasts == lasts && may_find(*q, *one);
  };
  if (std::ranges::none_of(keys_[{q->store, q->key}].puts, fits)) {
    wrong(*q, "hears of a value that cannot be there");
  }
}

/// At some time of the operation the store had that value under the key, or none.
void value_ledger::shows(const value_question& q, const put_ptr& there) {
  if (q.first_life != q.last_life) return;
  for (const auto& one : keys_[{q.store, q.key}].puts) {
    if (one == there || !one->there || *one->there >= q.begun || one->first_life != q.first_life) {
      continue;
    }
    if (!one->may_be_gone) {
      wrong(q, "does not find value " + std::to_string(one->content) + ", which nobody removed");
    }
    one->gone = earlier(one->gone, now());
  }
}

void value_ledger::holds(const std::string& store, const std::string& key,
                         std::optional<content_id> content, std::uint64_t size) const {
  const auto of = keys_.find({store, key});
  const auto put = content && of != keys_.end() ? find(of->second, *content, size) : nullptr;
  const auto told = store + " holds under " + key + " ";
  if (!put) return violate(told + "what nobody has put there");
  if (put->failed) return violate(told + "a value whose put was told that it failed");
  if (put->gone || put->last_life < lives_.at(store)) return violate(told + "what must be gone");
  put->seen = true;
}

// -- an engine's

simulated_values::simulated_values(engine_node& at, value_ledger& in,
                                   std::function<void(std::uint64_t)> wrote)
    : at_{at}, ledger_{in}, wrote_{std::move(wrote)}, slots_(slot_count) {
  ledger_.store_begins(at_.name);
}

void simulated_values::furnish(engine_node& at, dice& chance) {
  auto& context = *at.context;
  const auto size = std::uint64_t{160 + chance.upto(96)} << 10U;
  if (chance.one_in(2)) {
    if (auto made = value_store::create(*context.endpoint, size)) context.values = *made;
  }
  if (!context.values) context.values = value_store::on_demand(*context.endpoint, size);
}

void simulated_values::count(const value_question& of, const std::string& how,
                             std::optional<std::uint64_t> size) {
  const auto* kind = !size ? "" : *size > max_inline ? " large" : " small";
  ++ledger_.counts[name_of(of.verb) + kind + " " + how];
}

simulated_values::operation simulated_values::on(value_verb verb, const std::string& store,
                                                 const std::string& key) const {
  operation of;
  of.asked = std::make_shared<value_question>();
  of.asked->verb = verb;
  of.asked->by = at_.name;
  of.asked->store = store;
  of.asked->key = key;
  return of;
}

// -- what it begins

void simulated_values::ask(const std::string& store, const std::string& key) {
  auto& dice = chance();
  switch (dice.upto(9)) {
    case 0:
    case 1: return put(on(value_verb::put, store, key), small_size());
    case 2:
    case 3: return put(on(value_verb::put, store, key), large_size());
    case 4: return begin(on(value_verb::query, store, key), {});
    case 5:
    case 6: return begin(on(value_verb::remove, store, key), {});
    default: return begin(on(value_verb::get, store, key), {});
  }
}

void simulated_values::remove(const std::string& store, const std::string& key) {
  begin(on(value_verb::remove, store, key), {});
}

void simulated_values::begin_trial(const std::string& store, const std::string& key, bool large) {
  auto of = on(value_verb::put, store, key);
  of.trial = true;
  ++trials_;
  put(std::move(of), large ? large_size() : small_size());
}

void simulated_values::expire() {
  at_.context->values->expire(value_store::clock::now() + 2 * time_to_live);
  ledger_.expires(at_.name);
}

std::uint64_t simulated_values::small_size() const {
  if (chance().one_in(20)) return 0;
  return chance().one_in(4) ? max_inline : 8 + chance().upto(4000);
}

std::uint64_t simulated_values::large_size() const {
  return max_inline + 1 + (chance().one_in(4) ? 0 : chance().upto(24U << 10U));
}

void simulated_values::put(operation of, std::uint64_t size) {
  auto& dice = chance();
  // Empty values cannot be told apart.
  if (size == 0 && ledger_.was_put(of.asked->store, of.asked->key, 0)) size = 8;
  start_value order;
  std::optional<lent_bytes> bytes;
  switch (of.trial ? 0 : dice.upto(5)) {
    case 1: bytes = lend_copy(of, order, size); break;
    case 2: bytes = lend_view(of); break;
    case 3: bytes = lend_block(of); break;
    default: break;
  }
  if (!bytes) bytes = lend_slot(of, size);
  if (!bytes) return;
  order.value = *bytes;
  auto made = std::make_shared<put_value>();
  made->content = bytes->empty() ? 0 : of.content;
  made->size = bytes->size();
  made->lasts = of.trial || !dice.one_in(4);
  if (!made->lasts) order.ttl_ms = static_cast<std::uint64_t>(milliseconds{time_to_live}.count());
  of.asked->put = std::move(made);
  begin(std::move(of), std::move(order));
}

/// As of a value in memory of a GPU.
simulated_values::lent_bytes simulated_values::lend_copy(operation& of, start_value& order,
                                                         std::uint64_t size) {
  auto copy = std::make_shared<std::vector<std::byte>>(size);
  of.content = ledger_.new_content();
  fill(*copy, of.content);
  const lent_bytes bytes{*copy};
  order.copy = std::move(copy);
  ++ledger_.counts["put from a copy"];
  return bytes;
}

/// A value that was got is put as it is, under another key.
std::optional<simulated_values::lent_bytes> simulated_values::lend_view(operation& of) {
  if (views_.empty()) return std::nullopt;
  const auto& held = views_.rbegin()->second;
  if (ledger_.was_put(of.asked->store, of.asked->key, held.content)) return std::nullopt;
  of.content = held.content;
  of.view = held.view.pin;
  ++ledger_.counts["put from a view"];
  return held.view.bytes;
}

/// A value that ends in the first block of the cache, if the pool gives that.
std::optional<simulated_values::lent_bytes> simulated_values::lend_block(operation& of) {
  auto got = at_.context->pool->allocate(1);
  if (!got) return std::nullopt;
  of.block = std::move(*got);
  if (of.block.blocks.front() != block_id{0}) {
    give_back(of.block);
    return std::nullopt;
  }
  of.content = ledger_.new_content();
  const auto end = room_before_blocks + at_.context->layout->layers[0].planes[0].head_bytes;
  const auto begin = chance().upto(room_before_blocks - max_inline);
  const auto bytes = std::span{at_.memory.front()}.subspan(begin, end - begin);
  fill(bytes, of.content);
  wrote_(end);
  of.in_block = true;
  ++ledger_.counts["put from a block"];
  return bytes;
}

/// Memory of the engine's own, sometimes what other puts read as well.
std::optional<simulated_values::lent_bytes> simulated_values::lend_slot(operation& of,
                                                                        std::uint64_t size) {
  const bool shares = !of.trial && chance().one_in(3);
  const auto fits = [&](const slot& one) {
    if (!shares) return one.users == 0;
    return one.users != 0 && !ledger_.was_put(of.asked->store, of.asked->key, one.content);
  };
  const auto found = std::ranges::find_if(slots_, fits);
  if (found == slots_.end()) return std::nullopt;
  if (found->users++ == 0) {
    found->bytes.resize(slot_bytes);
    found->content = ledger_.new_content();
    fill(found->bytes, found->content);
  }
  of.content = found->content;
  of.memory = &*found;
  return std::span{found->bytes}.first(size);
}

void simulated_values::give_back(kvcache::allocation& block) {
  if (block.blocks.empty()) return;
  (void)at_.context->pool->free(block.owner, block.blocks);
  block.blocks.clear();
}

/// Writes to the first block of the cache if nobody has it and no put needs it.
void simulated_values::reuse_block() {
  auto& pool = *at_.context->pool;
  auto all = pool.allocate(pool.counters().free);
  if (!all) return;
  if (std::ranges::count(all->blocks, block_id{0}) != 0) {
    const auto end = room_before_blocks + at_.context->layout->layers[0].planes[0].head_bytes;
    std::fill_n(at_.memory.front().begin(), end, std::byte{0xA5});
    wrote_(end);
  }
  (void)pool.free(all->owner, all->blocks);
}

/// The memory is the engine's again: the engine writes to it at once.
void simulated_values::give_back(operation& of) {
  give_back(of.block);
  if (of.in_block) reuse_block();
  if (of.memory == nullptr || --of.memory->users != 0) return;
  std::ranges::fill(of.memory->bytes, std::byte{0xA5});
}

void simulated_values::begin(operation of, start_value order) {
  auto& context = *at_.context;
  const auto& q = of.asked;
  order.verb = q->verb;
  order.peer = q->store;
  order.key = q->key;
  if (!order.copy) order.pinned = pool_blocks_of(context, order.value);
  if (order.pinned != of.block.blocks || !context.pool->pin(order.pinned)) {
    return ledger_.wrong(*q, "has other blocks of the pool than its value lies in");
  }
  const auto id = stopped_ ? result<operation_id>{fail(errc::aborted, "stopped")}
                           : context.operations.begin({operation_kind::value, {}, 0, false});
  if (!id) {
    (void)context.pool->unpin(order.pinned);
    if (of.trial) ledger_.wrong(*q, "cannot begin long after the last fault");
    return give_back(of);
  }
  ledger_.note(at_.name + ": operation " + std::to_string(id->value) + " begins, " +
               name_of(q->verb) + " of " + q->key + " at " + q->store + ", value " +
               std::to_string(of.content) + " of " + std::to_string(order.value.size()));
  of.lent = q->verb == value_verb::put && q->store != at_.name && !order.copy &&
            order.pinned.empty() && order.value.size() > max_inline &&
            context.settings.backend != transport::backend_kind::shm;
  // The pool keeps a block from all others while the put needs it.
  if (chance().one_in(2)) give_back(of.block);
  const bool gives_up = !of.trial && chance().one_in(6);
  const auto given = context.settings.default_deadline;
  of.due = at_.now() + given;
  ledger_.begins(q);
  open_.emplace(*id, std::move(of));
  order.operation = *id;
  at_.order(engine_command{std::move(order)});
  at_.behind_orders([this, op = *id, given] {
    if (const auto found = open_.find(op); found != open_.end()) {
      found->second.due = at_.now() + given;
    }
  });
  watch(*id);
  if (!gives_up) return;
  const auto most = milliseconds{chance().one_in(2) ? 20U : 3000U};
  at_.here(at_.world().transports().between(microseconds{0}, most),
           [this, op = *id] { abort(op); });
}

void simulated_values::abort(operation_id which) {
  const auto found = open_.find(which);
  if (stopped_ || found == open_.end()) return;
  // Only a put may have to wait, for its last word or until its memory is its own.
  if (found->second.asked->verb != value_verb::put) found->second.due = at_.now();
  at_.order(engine_command{abort_operation{which, "the engine gives it up"}});
}

/// Looks whether it ends in time, now and then until it has.
void simulated_values::watch(operation_id id) {
  const auto found = open_.find(id);
  if (found == open_.end() || !at_.alive) return;
  const auto& of = found->second;
  const auto due = std::max(of.due + (of.lent ? shut_out : milliseconds{0}),
                            at_.frozen_until + milliseconds{500});
  if (at_.now() > due + soon_after) return ledger_.wrong(*of.asked, "has no outcome in time");
  at_.world().transports().time.after(milliseconds{250}, [this, id, weak = at_.weak_from_this()] {
    if (const auto lives = weak.lock(); lives && lives->alive) watch(id);
  });
}

// -- what it is told

bool simulated_values::take(event& told) {
  const auto found = open_.find(told.operation);
  if (found == open_.end()) return false;
  auto of = std::move(found->second);
  open_.erase(found);
  give_back(of);
  const auto& q = of.asked;
  const auto* failed = std::get_if<event_failed>(&told.what);
  ledger_.note(at_.name + ": operation " + std::to_string(told.operation.value) +
               (failed != nullptr ? " fails: " + to_string(failed->why) : " is done"));
  const auto size = q->put ? std::optional{q->put->size} : std::nullopt;
  if (failed != nullptr) {
    has_failed(of, failed->why);
  } else if (auto* value = std::get_if<event_value>(&told.what);
             value != nullptr && q->verb == value_verb::get) {
    const auto bytes = value->value.bytes;
    const auto content = content_of(bytes);
    count(*q, "done", bytes.size());
    if (!content) {
      ledger_.wrong(*q, "finds bytes of no value");
    } else {
      ledger_.finds(q, *content, bytes.size());
      keep({std::move(value->value), *content});
    }
  } else if (const auto* info = std::get_if<event_info>(&told.what);
             info != nullptr && q->verb == value_verb::query) {
    count(*q, "done");
    if (info->ttl > time_to_live) ledger_.wrong(*q, "hears of a longer time than any value has");
    ledger_.hears_of(q, info->size, info->ttl.count() == 0);
  } else if (std::holds_alternative<event_done>(told.what) &&
             (q->put || q->verb == value_verb::remove)) {
    count(*q, "done", size);
    ledger_.is_done(q);
  } else {
    ledger_.wrong(*q, "is told what is no outcome of it");
  }
  if (of.trial) next_of_trial(*q, failed);
  return true;
}

void simulated_values::has_failed(const operation& of, const troupe::error& why) {
  const auto& q = of.asked;
  const auto size = q->put ? std::optional{q->put->size} : std::nullopt;
  const bool unknown =
      why.message.find("it is not known whether the value is stored") != std::string::npos;
  if (!q->put && why.code == errc::not_found) {
    count(*q, "not found");
    return ledger_.finds_nothing(q);
  }
  count(*q, unknown && q->put ? "unknown" : "failed", size);
  if (!is_plausible(why)) ledger_.wrong(*q, "fails for no reason of its own: " + to_string(why));
  if (why.code == errc::pool_exhausted) ++ledger_.counts["no room"];
  ledger_.has_failed(q, !unknown);
  // Whether it is there all the same.
  if (q->put && !of.trial && chance().one_in(2)) begin(on(value_verb::get, q->store, q->key), {});
}

void simulated_values::next_of_trial(const value_question& q, const event_failed* failed) {
  if (failed != nullptr) {
    return ledger_.wrong(q, "fails long after the last fault: " + to_string(failed->why));
  }
  --trials_;
  if (q.verb == value_verb::remove) return;
  auto next = on(q.verb == value_verb::put ? value_verb::get : value_verb::remove, q.store, q.key);
  next.trial = true;
  ++trials_;
  begin(std::move(next), {});
}

/// Holds what was got for a while, and looks that it stays what it is.
void simulated_values::keep(held_view got) {
  const auto number = ++last_view_;
  views_.emplace(number, std::move(got));
  at_.here(at_.world().transports().between(microseconds{0}, milliseconds{2000}), [this, number] {
    check();
    views_.erase(number);
  });
}

// -- memory

bool simulated_values::lie_at(const link_simulation::touch& what) const {
  return what.region >= at_.memory.size() || (what.region == 0 && what.offset < room_before_blocks);
}

void simulated_values::touched(transfer_id transfer, const link_simulation::touch& what) {
  const region_id region{static_cast<std::uint32_t>(what.region + 1)};
  const auto wrong = [&](const std::string& how) {
    ledger_.violate("transfer " + std::to_string(transfer.value) + how + at_.name);
  };
  if (!what.written) {
    // The engine overwrites what it lent once it is given back, and a stored value never changes.
    if (!content_of(at_.bytes_of(region).subspan(what.offset, what.length))) {
      wrong(" reads what is no value, or no longer, at ");
    }
    return;
  }
  if (region != at_.context->values->region()) return wrong(" writes memory that is lent at ");
  at_.world().transports().time.after(microseconds{0}, [this, weak = at_.weak_from_this()] {
    if (const auto lives = weak.lock(); lives && lives->alive) check();
  });
}

void simulated_values::check() const {
  for (std::uint32_t i = 0; i < keys; ++i) {
    const auto value = at_.context->values->get(key(i));
    if (value) {
      ledger_.holds(at_.name, key(i), content_of(value->bytes), value->bytes.size());
    }
  }
  for (const auto& [number, held] : views_) {
    if (content_of(held.view.bytes) != held.content) {
      ledger_.violate(at_.name + " holds a value that it got, and its bytes have changed");
    }
  }
}

std::string simulated_values::leftovers() {
  auto& context = *at_.context;
  views_.clear();
  for (std::uint32_t i = 0; i < keys; ++i) (void)context.values->remove(key(i));
  pool_report stored, copied;
  context.values->describe(stored);
  if (context.value_copies) context.value_copies->describe(copied);
  const auto kept =
      (context.values->region() == region_id{} ? 0U : 1U) + (context.value_copies ? 1U : 0U);
  if (!open_.empty() || trials_ != 0) return "an operation on a value";
  if (context.counters.local_copies != 0) return "a copy that is counted";
  if (!context.value_regions.empty()) return "a value that is registered";
  if (at_.later.size() != kept) return "memory of a value";
  if (stored.store_keys != 0) return "a value under a key that nobody knows";
  if (stored.store_used != 0) return "a value that is pinned, or was not stored";
  if (copied.store_used != 0) return "a copy of a value";
  return {};
}

}  // namespace troupe::actors::engine_simulation
