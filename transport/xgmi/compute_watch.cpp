#include "troupe/transport/xgmi/compute_watch.hpp"

#include <algorithm>

namespace troupe::transport::xgmi {

void compute_watch::caller::tell(std::optional<troupe::error> why) noexcept {
  // Locked during the call, so that `forget` waits for it.
  const std::lock_guard lock{mutex_};
  if (const auto then = std::exchange(then_, {})) then(std::move(why));
}

void compute_watch::caller::forget() {
  const std::lock_guard lock{mutex_};
  then_ = {};
}

bool compute_watch::caller::told() {
  const std::lock_guard lock{mutex_};
  return !then_;
}

compute_watch::compute_watch(std::shared_ptr<gpu_site> site, progress_engine& engine)
    : site_{std::move(site)}, engine_{engine} {}

compute_watch::~compute_watch() {
  for (auto& [where, waiting] : streams_) {
    if (const auto now = site_->runtime->happened(waiting.last); !now || !*now) {
      for (auto& each : waiting.behind) site_->events.leave(std::move(each.event));
    }
    site_->runtime->release_event(waiting.last);
    site_->runtime->release_stream(waiting.stream);
  }
}

result<void> compute_watch::after(const compute_point& point, std::uint64_t line, news then) {
  auto& gpus = *site_->runtime;
  if (point.event == nullptr && !point.shared) {
    return fail(errc::invalid_config, "the compute point has no event; record one on the stream");
  }
  if (point.event != nullptr && point.shared) {
    return fail(errc::invalid_config,
                "the compute point has an event of this process and one of another; name one");
  }
  if (const auto state = gpus.state(); !state.usable) {
    return fail(errc::no_device, "no GPU whose work could be waited for: " + state.reason);
  }
  const std::lock_guard lock{mutex_};
  if (closed_) return fail(errc::aborted, "the node stops");
  const auto now = std::chrono::steady_clock::now();
  auto found = stream_of(
      point.gpu, point.shared ? number_for_others(point.gpu, line, now) : line % streams_per_gpu);
  if (!found) return fail(std::move(found).error());
  auto& on = **found;
  forget_the_told(on, now);
  if (on.behind.size() >= most_behind) {
    return fail(errc::overloaded,
                std::to_string(on.behind.size()) + " points wait behind one that GPU " +
                    gpus.devices()[point.gpu].bus_id +
                    " does not reach; wait for earlier layers first, and if the process that "
                    "recorded that point has died, restart this one");
  }
  std::shared_ptr<const opened_event> opened;
  if (point.shared) {
    auto event = site_->events.open(point.gpu, *point.shared);
    if (!event) return fail(std::move(event).error());
    opened = std::move(*event);
  }
  auto one = std::make_shared<caller>(std::move(then));
  auto* const event = opened ? opened->handle() : point.event;
  if (auto ok = gpus.wait_for(on.stream, event); !ok) return ok;
  auto told = gpus.record(on.last, on.stream);
  if (told) told = gpus.ring_after(on.stream, one);
  if (!told) {
    site_->events.leave(std::move(opened));  // the stream still waits for the event
    return told;
  }
  on.behind.push_back({line, std::move(one), std::move(opened)});
  if (!std::exchange(timed_, true)) {
    timer_ = engine_.call_at(now + look_every, shared_from_this(), 0);
  }
  return {};
}

/// Drops the called callers at the front; a stream reaches its points in order.
void compute_watch::forget_the_told(waiting_stream& on, steady_time now) {
  const auto first =
      std::ranges::find_if_not(on.behind, [](const auto& each) { return each.who->told(); });
  if (first == on.behind.begin() && !on.behind.empty()) return;
  on.behind.erase(on.behind.begin(), first);
  on.moved = now;
}

/// Under the lock: the number of the stream on which the line already waits; otherwise of the first
/// stream that moves and has room, which may have to be made; otherwise of the one with room that
/// moved last.
std::uint64_t compute_watch::number_for_others(std::uint32_t gpu, std::uint64_t line,
                                               steady_time now) {
  std::optional<std::uint64_t> moves;
  auto last = streams_per_gpu;
  steady_time last_moved{};
  for (auto number = streams_per_gpu; number < streams_per_gpu + streams_of_others; ++number) {
    const auto known = streams_.find({gpu, number});
    if (known == streams_.end()) return moves.value_or(number);
    auto& on = known->second;
    forget_the_told(on, now);
    if (std::ranges::find(on.behind, line, &point_behind::line) != on.behind.end()) return number;
    if (on.behind.size() >= most_behind) continue;
    if (!moves && now - on.moved < patience) moves = number;
    if (on.moved > last_moved) {
      last = number;
      last_moved = on.moved;
    }
  }
  return moves.value_or(last);
}

result<compute_watch::waiting_stream*> compute_watch::stream_of(std::uint32_t gpu,
                                                                std::uint64_t number) {
  const std::pair where{gpu, number};
  if (const auto known = streams_.find(where); known != streams_.end()) return &known->second;
  auto stream = site_->runtime->make_stream(gpu);
  if (!stream) return fail(std::move(stream).error());
  auto last = site_->runtime->make_event(gpu);
  if (!last) {
    site_->runtime->release_stream(*stream);
    return fail(std::move(last).error());
  }
  return &streams_.emplace(where, waiting_stream{*stream, *last, {}, {}}).first->second;
}

void compute_watch::on_timer(std::uint64_t, steady_time now) {
  std::vector<std::pair<std::shared_ptr<caller>, troupe::error>> lost;
  {
    const std::lock_guard lock{mutex_};
    if (closed_) return;
    timed_ = false;
    for (auto& [where, waiting] : streams_) {
      forget_the_told(waiting, now);
      if (waiting.behind.empty()) continue;
      if (auto came = site_->runtime->happened(waiting.last); !came) {
        for (auto& each : waiting.behind) {
          lost.emplace_back(std::move(each.who), came.error());
          site_->events.leave(std::move(each.event));
        }
        waiting.behind.clear();
      } else {
        timed_ = true;
      }
    }
    if (timed_) {
      timer_ =
          engine_.call_at(std::chrono::steady_clock::now() + look_every, shared_from_this(), 0);
    }
  }
  for (auto& [who, why] : lost) who->tell(std::move(why));
}

void compute_watch::close() {
  std::vector<std::shared_ptr<caller>> all;
  {
    const std::lock_guard lock{mutex_};
    if (std::exchange(closed_, true)) return;
    if (timed_) engine_.cancel(timer_);
    for (auto& [where, waiting] : streams_) {
      // The entries stay: the stream may still have to reach their events.
      for (const auto& each : waiting.behind) all.push_back(each.who);
    }
  }
  for (const auto& each : all) each->forget();
}

}  // namespace troupe::transport::xgmi
