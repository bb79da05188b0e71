#include "values.hpp"

#include <algorithm>
#include <utility>

#include "verdict.hpp"
#include "waiting.hpp"

namespace troupe::engine_fuzz {

using namespace std::chrono_literals;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

value_stories::value_stories(const scenario& s, std::uint32_t node, engine& e, finder found,
                             tally& counts, block_lender blocks)
    : s_{s},
      self_{node},
      node_{e},
      found_{std::move(found)},
      counts_{counts},
      lender_{std::move(blocks)},
      may_be_late_{s.values_expire()} {}

value_stories::~value_stories() = default;

void value_stories::begin_round(const round& now) {
  victim_ = victim_of(now);
  stands_ = has_standing(now);
  woken_ = false;
}

void value_stories::hear_of_wake() {
  woken_ = true;
  later_.splice(later_.end(), parked_);
}

// -- asking

void value_stories::put(const std::string& peer, const std::string& key, const put_plan& plan) {
  story one;
  one.plan = plan;
  one.peer = peer;
  one.key = key;
  begin_put(std::move(one), step::put, plan.seed);
}

void value_stories::begin_put(story one, step what, std::uint64_t seed) {
  one.at = what;
  one.value = lender_.lend(one.plan, seed);
  one.put_asked = steady_clock::now();
  const auto asked =
      node_.put(one.peer, one.key, one.value->bytes(), milliseconds{one.plan.ttl_ms});
  if (!asked) {
    one.value->take_back();
    if (!was_lost(one, step::get_nothing, asked.error())) wrong(one, to_string(asked.error()));
    return;
  }
  one.value->put_began();
  if (what == step::put) {
    if (one.plan.when == given_up::at_once) (void)node_.abort(*asked, "fuzz");
    if (one.plan.when == given_up::soon)
      one.give_up_at = one.put_asked + std::chrono::microseconds{one.plan.soon_us};
  }
  live_.emplace(asked->value, std::move(one));
}

void value_stories::ask(story one, step what) {
  if (what == step::put_again) {
    begin_put(std::move(one), what, one.plan.seed + 2);
    return;
  }
  if (one.at != what) one.tries = 0;
  one.at = what;
  one.asked = steady_clock::now();
  const auto asked = what == step::query    ? node_.query(one.peer, one.key)
                     : what == step::remove ? node_.remove(one.peer, one.key)
                                            : node_.get(one.peer, one.key);
  if (!asked) {
    if (!was_lost(one, what, asked.error())) wrong(one, to_string(asked.error()));
    return;
  }
  live_.emplace(asked->value, std::move(one));
}

void value_stories::ask_later(story one, step what, std::chrono::microseconds pause) {
  later_.push_back({steady_clock::now() + pause, std::move(one), what});
}

void value_stories::pump() {
  const auto now = steady_clock::now();
  for (auto& [id, one] : live_) {
    if (!one.give_up_at || now < *one.give_up_at) continue;
    one.give_up_at.reset();
    if (one.at == step::put) (void)node_.abort(operation_id{id}, "fuzz");
  }
  for (auto it = later_.begin(); it != later_.end();) {
    if (now < it->when) {
      ++it;
      continue;
    }
    auto is_due = std::move(*it);
    it = later_.erase(it);
    ask(std::move(is_due.what), is_due.next);
  }
}

std::string value_stories::open() const {
  std::string all;
  for (const auto& [id, one] : live_)
    all += " value " + one.key + " at step " + std::to_string(static_cast<int>(one.at));
  for (const auto& one : later_) all += " value " + one.what.key + " waits";
  for (const auto& one : parked_) all += " value " + one.what.key + " waits for its node";
  return all;
}

void value_stories::wrong(const story& one, const std::string& what) {
  found_("value " + one.key + " of " + std::to_string(one.value->size()) + " bytes at " + one.peer +
         ", step " + std::to_string(static_cast<int>(one.at)) + ": " + what);
}

// -- what came

bool value_stories::take(event& e) {
  const auto found = live_.find(e.operation.value);
  if (found == live_.end()) return false;
  auto one = std::move(found->second);
  live_.erase(found);
  go_on(std::move(one), e);
  return true;
}

void value_stories::go_on(story one, event& e) {
  const auto* failed = std::get_if<event_failed>(&e.what);
  if (one.at == step::put || one.at == step::put_again) {
    end_put(std::move(one), failed);
    return;
  }
  if (failed != nullptr && was_lost(one, one.at, failed->why)) return;
  if (was_late(one, failed)) return;
  switch (one.at) {
    case step::get: end_get(std::move(one), e); return;
    case step::query: end_query(std::move(one), e); return;
    case step::remove: end_remove(std::move(one), failed); return;
    default: end_get_nothing(std::move(one), failed);
  }
}

bool value_stories::is_disturbed(const story& one) const {
  return victim_ && (*victim_ == self_ || s_.name_of(*victim_) == one.peer);
}

bool value_stories::is_loss(const story& one, const troupe::error& why) const {
  if (!is_disturbed(one)) return false;
  switch (why.code) {
    case errc::peer_lost:
    case errc::peer_unreachable:
    case errc::link_broken:
    case errc::stale_incarnation:  // another process has its port now
    case errc::aborted: return true;
    case errc::deadline: return may_be_late_;
    // Nobody knows a node that had joined once it is gone.
    case errc::not_found: return s_.is_open() && !stands_;
    default: return false;
  }
}

bool value_stories::was_lost(story& one, step what, const troupe::error& why) {
  if (!is_loss(one, why)) return false;
  ++one.tries;
  if (!stands_) {
    end(one);
  } else if (!woken_) {
    parked_.push_back({steady_clock::now(), std::move(one), what});
  } else {
    const auto now = steady_clock::now();
    if (now - one.missed_since.value_or(now) > testing::wait_limit) {
      wrong(one, "its node goes on and is not reached: " + to_string(why));
      return true;
    }
    if (!one.missed_since) one.missed_since = now;
    ask_later(std::move(one), what, 5ms);
  }
  return true;
}

bool value_stories::was_late(story& one, const event_failed* failed) {
  if (failed == nullptr || !may_be_late_ || failed->why.code != errc::deadline) return false;
  // On a busy machine a deadline of a few milliseconds may never be met.
  if (++one.tries > 50) {
    end(one);
  } else {
    const auto what = one.at;
    ask_later(std::move(one), what, 1ms);
  }
  return true;
}

bool value_stories::may_be_over(const story& one) {
  return one.plan.ttl_ms > 0 &&
         steady_clock::now() >= one.put_asked + milliseconds{one.plan.ttl_ms};
}

void value_stories::end_put(story one, const event_failed* failed) {
  one.value->take_back();
  one.put_ended = steady_clock::now();
  if (failed == nullptr) {
    ask(std::move(one), step::get);
    return;
  }
  const auto& why = failed->why;
  const bool gave_up = one.at == step::put && one.plan.when != given_up::never;
  // The node may hold a failed put, and with it the key, for a moment longer.
  const bool in_hand = one.at == step::put_again && why.code == errc::already_exists;
  if (in_hand && one.put_ended - one.taken_since.value_or(one.put_ended) < testing::wait_limit) {
    if (!one.taken_since) one.taken_since = one.put_ended;
    ask_later(std::move(one), step::put_again, 1ms);
    return;
  }
  if (!(gave_up && why.code == errc::aborted) && !(may_be_late_ && why.code == errc::deadline) &&
      !is_loss(one, why))
    wrong(one, to_string(why));
  one.not_known = why.message.find("not known") != std::string::npos;
  if (one.not_known) {
    ask(std::move(one), step::get);
  } else if (one.plan.again && !one.put_again) {
    one.put_again = true;
    ask(std::move(one), step::put_again);
  } else {
    ask(std::move(one), step::get_nothing);
  }
}

void value_stories::end_get(story one, const event& e) {
  const auto* value = std::get_if<event_value>(&e.what);
  if (value == nullptr) {
    const auto* failed = std::get_if<event_failed>(&e.what);
    const bool may_be_missing = one.not_known || may_be_over(one);
    if (failed == nullptr || !may_be_missing || failed->why.code != errc::not_found)
      wrong(one, failed != nullptr ? to_string(failed->why) : "no value comes with it");
    end(one);
    return;
  }
  const auto ttl = milliseconds{one.plan.ttl_ms};
  counts_.bytes += value->value.bytes.size();
  if (!one.value->is(value->value.bytes)) wrong(one, "it is not what was put");
  if (ttl.count() > 0 && !one.not_known && one.asked > one.put_ended + ttl)
    wrong(one, "it is there longer than it was to live");
  if (ttl.count() == 0 || one.not_known) {
    ask(std::move(one), step::query);
  } else if (ttl < 500ms) {
    const auto left = one.put_ended + ttl - steady_clock::now();
    one.looked = true;
    ask_later(std::move(one), step::get_nothing,
              std::chrono::duration_cast<std::chrono::microseconds>(left) + 1ms);
  } else {
    ask(std::move(one), step::query);
  }
}

void value_stories::end_query(story one, const event& e) {
  const auto* info = std::get_if<event_info>(&e.what);
  if (info == nullptr) {
    const auto* failed = std::get_if<event_failed>(&e.what);
    if (failed == nullptr || failed->why.code != errc::not_found || !may_be_over(one))
      wrong(one, failed != nullptr ? to_string(failed->why) : "nothing is said of it");
    end(one);
    return;
  }
  if (info->size != one.value->size()) wrong(one, "its size is another");
  const auto ttl = milliseconds{one.plan.ttl_ms};
  if (info->ttl > ttl || (info->ttl.count() == 0) != (ttl.count() == 0))
    wrong(one, "it is said to live for " + std::to_string(info->ttl.count()) + " ms");
  ask(std::move(one), step::remove);
}

void value_stories::end_remove(story one, const event_failed* failed) {
  // An earlier remove, whose answer was late, may have removed the value.
  const bool may_be_missing = one.tries > 0 || may_be_over(one);
  if (failed != nullptr && !(may_be_missing && failed->why.code == errc::not_found))
    wrong(one, to_string(failed->why));
  one.looked = true;
  ask(std::move(one), step::get_nothing);
}

void value_stories::end_get_nothing(story one, const event_failed* failed) {
  if (failed == nullptr) {
    wrong(one, "it is there");
  } else if (failed->why.code != errc::not_found) {
    wrong(one, to_string(failed->why));
  }
  if (one.looked) {
    end(one);
    return;
  }
  // A value that is stored late is there by then.
  one.looked = true;
  ask_later(std::move(one), step::get_nothing, 20ms);
}

void value_stories::end(const story&) {
  ++counts_.values;
}

}  // namespace troupe::engine_fuzz
