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
  for (const auto& [where, waiting] : streams_) {
    site_->runtime->release_event(waiting.last);
    site_->runtime->release_stream(waiting.stream);
  }
}

result<void> compute_watch::after(const compute_point& point, std::uint64_t line, news then) {
  auto& gpus = *site_->runtime;
  if (point.event == nullptr) {
    return fail(errc::invalid_config, "the compute point has no event; record one on the stream");
  }
  if (const auto state = gpus.state(); !state.usable) {
    return fail(errc::no_device, "no GPU whose work could be waited for: " + state.reason);
  }
  const std::lock_guard lock{mutex_};
  if (closed_) return fail(errc::aborted, "the node stops");
  auto found = stream_of(point.gpu, line);
  if (!found) return fail(std::move(found).error());
  auto& on = **found;
  auto one = std::make_shared<caller>(std::move(then));
  if (auto ok = gpus.wait_for(on.stream, point.event); !ok) return ok;
  if (auto ok = gpus.record(on.last, on.stream); !ok) return ok;
  if (auto ok = gpus.ring_after(on.stream, one); !ok) return ok;
  std::erase_if(on.callers, [](const auto& each) { return each->told(); });
  on.callers.push_back(std::move(one));
  if (!std::exchange(timed_, true)) {
    timer_ = engine_.call_at(std::chrono::steady_clock::now() + look_every, shared_from_this(), 0);
  }
  return {};
}

result<compute_watch::waiting_stream*> compute_watch::stream_of(std::uint32_t gpu,
                                                                std::uint64_t line) {
  const std::pair where{gpu, line % streams_per_gpu};
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
      std::erase_if(waiting.callers, [](const auto& each) { return each->told(); });
      if (waiting.callers.empty()) continue;
      if (auto now = site_->runtime->happened(waiting.last); !now) {
        for (auto& each : waiting.callers) lost.emplace_back(std::move(each), now.error());
        waiting.callers.clear();
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
      all.insert(all.end(), waiting.callers.begin(), waiting.callers.end());
      waiting.callers.clear();
    }
  }
  for (const auto& each : all) each->forget();
}

}  // namespace troupe::transport::xgmi
