#include "troupe/transport/xgmi/compute_watch.hpp"

#include <algorithm>

namespace troupe::transport::xgmi {

void compute_watch::caller::tell(std::optional<troupe::error> why) noexcept {
  // Held during the call, so that `forget` waits for it.
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
  auto found = stream_of(point.gpu, point.shared ? of_others : line % streams_per_gpu);
  if (!found) return fail(std::move(found).error());
  auto& on = **found;
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
    site_->events.leave(std::move(opened));  // the stream waits for it all the same
    return told;
  }
  forget_the_told(on);
  on.behind.push_back({std::move(one), std::move(opened)});
  if (!std::exchange(timed_, true)) {
    timer_ = engine_.call_at(std::chrono::steady_clock::now() + look_every, shared_from_this(), 0);
  }
  return {};
}

void compute_watch::forget_the_told(waiting_stream& on) {
  std::erase_if(on.behind, [](const auto& each) { return each.who->told(); });
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
  return &streams_.emplace(where, waiting_stream{*stream, *last, {}}).first->second;
}

void compute_watch::on_timer(std::uint64_t, steady_time) {
  std::vector<std::pair<std::shared_ptr<caller>, troupe::error>> lost;
  {
    const std::lock_guard lock{mutex_};
    if (closed_) return;
    timed_ = false;
    for (auto& [where, waiting] : streams_) {
      forget_the_told(waiting);
      if (waiting.behind.empty()) continue;
      if (auto now = site_->runtime->happened(waiting.last); !now) {
        for (auto& each : waiting.behind) {
          lost.emplace_back(std::move(each.who), now.error());
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
      // They stay, with the events that the stream may still have to come to.
      for (const auto& each : waiting.behind) all.push_back(each.who);
    }
  }
  for (const auto& each : all) each->forget();
}

}  // namespace troupe::transport::xgmi
