#include "troupe/transport/shm/mapped_backend.hpp"

#include <utility>

#include "troupe/transport/link_check.hpp"

namespace troupe::transport::shm {

void mapped_backend::start() {
  if (auto started = shm_listener::start(context_)) {
    listener_ = std::move(*started);
  } else {
    why_not_ = std::move(started).error().message;
  }
  removals_ = context_.regions.on_removed([this](region_id region) { region_removed(region); });
}

void mapped_backend::close() {
  if (const auto removals = std::exchange(removals_, 0); removals != 0) {
    context_.regions.forget_listener(removals);
  }
  if (const auto listener = std::exchange(listener_, nullptr)) listener->stop();
}

result<std::shared_ptr<link>> mapped_backend::open(const link_options& options,
                                                   std::shared_ptr<link_sink> sink) {
  if (auto here = probe(); !here.usable) {
    return fail(errc::backend_unavailable, std::string{to_string(kind())} + ": " + here.reason);
  }
  if (auto ok = check_options(options, sink.get()); !ok) return fail(std::move(ok).error());
  auto made = make(options, std::move(sink));
  made->expect_dialer();
  const std::lock_guard lock{mutex_};
  auto links = std::make_shared<link_list>(*links_);
  std::erase_if(*links, [](const auto& link) { return link.expired(); });
  links->push_back(made);
  links_ = std::move(links);
  return std::shared_ptr<link>{std::move(made)};
}

void mapped_backend::region_removed(region_id region) {
  on_removed(region);
  std::unique_lock lock{mutex_};
  const auto links = links_;
  lock.unlock();
  for (const auto& candidate : *links) {
    if (const auto link = candidate.lock()) link->region_removed(region);
  }
}

}  // namespace troupe::transport::shm
