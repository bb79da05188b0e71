#include "values.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include <sys/mman.h>

#include "cache_model.hpp"

namespace troupe::engine_fuzz {

using std::chrono::steady_clock;

/// Memory of the engine that a peer may read until the outcome, and that is gone from then on.
class lent_value {
 public:
  lent_value(std::uint64_t key, std::size_t bytes) : key_{key}, bytes_{bytes} {
    memory_ = ::mmap(nullptr, std::max<std::size_t>(bytes, 1), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pattern(key_, {static_cast<std::byte*>(memory_), bytes_});
  }
  ~lent_value() { ::munmap(memory_, std::max<std::size_t>(bytes_, 1)); }
  lent_value(const lent_value&) = delete;
  lent_value& operator=(const lent_value&) = delete;

  [[nodiscard]] std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(memory_), bytes_};
  }
  [[nodiscard]] bool is(std::span<const std::byte> other) const {
    std::vector<std::byte> mine(bytes_);
    pattern(key_, mine);
    return std::ranges::equal(mine, other);
  }
  /// Whoever reads it now is refused by the kernel.
  void take_back() { ::mprotect(memory_, std::max<std::size_t>(bytes_, 1), PROT_NONE); }

 private:
  std::uint64_t key_;
  std::size_t bytes_;
  void* memory_;
};

value_stories::value_stories(engine& node, finder found, tally& counts, dice& d)
    : node_{node}, found_{std::move(found)}, counts_{counts}, dice_{d} {}

value_stories::~value_stories() = default;

void value_stories::put(const std::string& peer, const std::string& key, std::uint64_t seed,
                        std::uint32_t bytes, std::uint32_t give_up) {
  story one;
  one.peer = peer;
  one.key = key;
  one.value = std::make_unique<lent_value>(seed, bytes);
  one.given_up = give_up > 0;
  const auto asked = node_.put(one.peer, one.key, one.value->bytes());
  if (!asked) {
    wrong(one, to_string(asked.error()));
    return;
  }
  if (give_up == 1) (void)node_.abort(*asked, "fuzz");
  if (give_up == 2)
    one.give_up_at = steady_clock::now() + std::chrono::microseconds{dice_.roll_log(1, 3000)};
  live_.emplace(asked->value, std::move(one));
}

void value_stories::pump() {
  for (auto& [id, one] : live_) {
    if (!one.give_up_at || steady_clock::now() < *one.give_up_at) continue;
    one.give_up_at.reset();
    if (one.at == step::put) (void)node_.abort(operation_id{id}, "fuzz");
  }
}

std::string value_stories::open() const {
  std::string all;
  for (const auto& [id, one] : live_)
    all += " value " + one.key + " at step " + std::to_string(static_cast<int>(one.at));
  return all;
}

bool value_stories::take(event& e) {
  const auto found = live_.find(e.operation.value);
  if (found == live_.end()) return false;
  auto one = std::move(found->second);
  live_.erase(found);
  go_on(std::move(one), e);
  return true;
}

void value_stories::wrong(const story& one, const std::string& what) {
  found_("value " + one.key + " of " + std::to_string(one.value->bytes().size()) + " bytes at " +
         one.peer + ", step " + std::to_string(static_cast<int>(one.at)) + ": " + what);
}

void value_stories::ask(story one, step what) {
  one.at = what;
  const auto asked = what == step::query    ? node_.query(one.peer, one.key)
                     : what == step::remove ? node_.remove(one.peer, one.key)
                                            : node_.get(one.peer, one.key);
  if (!asked) {
    wrong(one, to_string(asked.error()));
    return;
  }
  live_.emplace(asked->value, std::move(one));
}

void value_stories::end_put(story one, const event_failed* failed) {
  one.value->take_back();
  if (failed == nullptr) {
    ask(std::move(one), step::get);
    return;
  }
  if (!one.given_up || failed->why.code != errc::aborted) wrong(one, to_string(failed->why));
  one.not_known = failed->why.message.find("not known") != std::string::npos;
  const auto next = one.not_known ? step::get : step::get_nothing;
  ask(std::move(one), next);
}

void value_stories::go_on(story one, event& e) {
  const auto* failed = std::get_if<event_failed>(&e.what);
  switch (one.at) {
    case step::put: end_put(std::move(one), failed); return;
    case step::get:
      if (const auto* value = std::get_if<event_value>(&e.what)) {
        counts_.bytes += value->value.bytes.size();
        if (!one.value->is(value->value.bytes)) wrong(one, "it is not what was put");
        ask(std::move(one), step::query);
        return;
      }
      if (failed == nullptr || !one.not_known || failed->why.code != errc::not_found)
        wrong(one, failed != nullptr ? to_string(failed->why) : "no value comes with it");
      break;
    case step::query: {
      const auto* info = std::get_if<event_info>(&e.what);
      if (info == nullptr || info->size != one.value->bytes().size())
        wrong(one, failed != nullptr ? to_string(failed->why) : "its size is another");
      ask(std::move(one), step::remove);
      return;
    }
    case step::remove:
      if (failed != nullptr) wrong(one, to_string(failed->why));
      ask(std::move(one), step::get_nothing);
      return;
    case step::get_nothing:
      if (failed == nullptr) {
        wrong(one, "it is there");
      } else if (failed->why.code != errc::not_found) {
        wrong(one, to_string(failed->why));
      }
      break;
  }
  ++counts_.values;
}

}  // namespace troupe::engine_fuzz
