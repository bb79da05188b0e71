#include "troupe/deploy/reference_engine/reference_engine.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "troupe/config/resolve.hpp"
#include "troupe/deploy/reference_engine/worker.hpp"

namespace troupe::reference {

namespace {

constexpr std::size_t max_inbox = 65'536;
constexpr std::chrono::milliseconds idle_wait{1'000};

/// Passes calls from Troupe's threads to the worker's. Its descriptor is readable while there are
/// calls, or once it is closed.
class inbox {
 public:
  inbox() : fd_{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)} {}
  ~inbox() { ::close(fd_); }
  inbox(const inbox&) = delete;
  inbox& operator=(const inbox&) = delete;

  void push(call what) {
    std::optional<error> refusal;
    {
      const std::lock_guard lock{mutex_};
      if (closed_)
        refusal = error{errc::aborted, "the engine stops"};
      else if (calls_.size() >= max_inbox)
        refusal = error{errc::overloaded, "too many calls wait for the engine; try again later"};
      else
        calls_.push_back(std::move(what));
    }
    if (refusal) return what.reply(fail(*refusal));
    signal();
  }
  void close() {
    {
      const std::lock_guard lock{mutex_};
      closed_ = true;
    }
    signal();
  }
  [[nodiscard]] bool closed() const {
    const std::lock_guard lock{mutex_};
    return closed_;
  }
  [[nodiscard]] std::deque<call> take() {
    std::uint64_t count = 0;
    while (::read(fd_, &count, sizeof count) < 0 && errno == EINTR) {
    }
    const std::lock_guard lock{mutex_};
    return std::exchange(calls_, {});
  }
  [[nodiscard]] int fd() const noexcept { return fd_; }

 private:
  void signal() const noexcept {
    const std::uint64_t one = 1;
    while (::write(fd_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }
  int fd_;
  mutable std::mutex mutex_;
  std::deque<call> calls_;
  bool closed_{false};
};

class reference_engine_impl final : public reference_engine {
 public:
  reference_engine_impl(std::shared_ptr<inbox> calls, std::unique_ptr<troupe::engine> node,
                        worker_context context, config::role role)
      : inbox_{std::move(calls)},
        node_{std::move(node)},
        context_{std::move(context)},
        role_{role},
        worker_{role == config::role::prefill ? make_prefill_worker(context_)
                                              : make_decode_worker(context_)},
        thread_{[this] { run(); }} {}

  ~reference_engine_impl() override { reference_engine_impl::stop(); }

  void stop() override {
    std::call_once(stopped_, [this] {
      inbox_->close();
      thread_.join();
      node_->stop();
    });
  }

  troupe::engine& node() override { return *node_; }

 private:
  void run() {
    while (!inbox_->closed()) {
      for (auto& what : inbox_->take()) dispatch(std::move(what));
      for (auto& what : node_->take()) worker_->on_event(std::move(what));
      const bool busy = worker_->step();
      node_->set_queue_length(worker_->requests());
      if (!busy) sleep();
    }
    for (auto& what : inbox_->take()) what.reply(fail(errc::aborted, "the engine stops"));
    worker_->stop();
  }

  void dispatch(call what) {
    if (what.method == "prefill" || what.method == "decode") return role_call(std::move(what));
    if (what.method == "abort") return what.reply(abort(what));
    if (what.method == "text") return what.reply(text(what));
    if (what.method == "model") return what.reply(model());
    what.reply(fail(errc::not_found,
                    "the reference engine knows the calls prefill, decode, text, abort "
                    "and model, not " +
                        what.method));
  }

  void role_call(call what) {
    if (what.method == role_name()) return worker_->on_call(std::move(what));
    what.reply(fail(errc::invalid_config, context_.name + " is a " + role_name() +
                                              " node and does not take the call " + what.method));
  }

  [[nodiscard]] std::string role_name() const { return std::string{config::to_string(role_)}; }

  result<payload> abort(const call& what) {
    auto request = abort_from(what.payload);
    if (!request) return fail(request.error());
    if (auto ok = worker_->abort(*request); !ok) return fail(ok.error());
    return payload{'{', '}'};
  }

  result<payload> text(const call& what) const {
    auto request = abort_from(what.payload);
    if (!request) return fail(request.error());
    auto reply = worker_->text(*request);
    if (!reply) return fail(reply.error());
    return to_json(*reply);
  }

  result<payload> model() const {
    const auto& layout = context_.layout();
    return to_json(
        model_reply{context_.model->config(), layout.dtype, layout.block_tokens, layout.blocks});
  }

  /// Sleeps until a call, an event, or the worker's next wake-up.
  void sleep() {
    auto wait = idle_wait;
    if (const auto wakeup = worker_->next_wakeup()) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(*wakeup - clock::now());
      wait = std::clamp(left + std::chrono::milliseconds{1}, std::chrono::milliseconds{0}, wait);
    }
    std::array<pollfd, 2> fds{pollfd{inbox_->fd(), POLLIN, 0},
                              pollfd{node_->event_fd(), POLLIN, 0}};
    (void)::poll(fds.data(), fds.size(), static_cast<int>(wait.count()));
  }

  std::shared_ptr<inbox> inbox_;
  std::unique_ptr<troupe::engine> node_;
  worker_context context_;
  config::role role_;
  std::unique_ptr<worker> worker_;
  std::once_flag stopped_;
  std::thread thread_;
};

}  // namespace

namespace {

result<worker_context> make_context(troupe::engine& node, std::string_view name,
                                    const config::deployment& deployment, std::uint64_t seed,
                                    bool brings_cache) {
  auto config = model_for(node.layout(), seed);
  if (!config) return fail(config.error());
  auto model = transformer::create(std::move(*config));
  if (!model) return fail(model.error());
  std::vector<std::span<std::byte>> regions;
  for (std::size_t i = 0; i < kvcache::region_sizes(node.layout()).size(); ++i) {
    auto region = node.region(i);
    if (!region) return fail(region.error());
    regions.push_back(*region);
  }
  auto memory = cache_memory::create(node.layout(), std::move(regions));
  if (!memory) return fail(memory.error());
  return worker_context{&node,
                        std::string{name},
                        std::move(*model),
                        std::move(*memory),
                        slot_pool{node.layout()},
                        brings_cache ? own_blocks(node.layout().blocks) : node_blocks(node),
                        deployment.limits.transfer_deadline};
}

}  // namespace

result<std::unique_ptr<reference_engine>> reference_engine::start(
    const config::deployment& deployment, std::string_view name, reference_options options) {
  const auto nodes = config::resolve(deployment);
  const auto* self = config::find_node(nodes, name);
  if (self == nullptr)
    return fail(errc::not_found, "no node " + std::string{name} + " in this deployment");
  if (self->role != config::role::prefill && self->role != config::role::decode)
    return fail(errc::invalid_config, std::string{name} + " is a " +
                                          std::string{config::to_string(self->role)} +
                                          "; the reference engine runs prefill and decode nodes");
  auto calls = std::make_shared<inbox>();
  engine_options below;
  below.on_call = [calls](call what) { calls->push(std::move(what)); };
  if (options.layout) {
    below.layout = options.layout;
    below.allocate.emplace();  // huge pages if available, on any NUMA node
  }
  auto node = options.claim != nullptr
                  ? actors::start_with_name(deployment, *options.claim, std::move(below))
                  : engine::start(deployment, name, std::move(below));
  if (!node) return fail(node.error());
  auto context =
      make_context(**node, name, deployment, options.model_seed, options.layout.has_value());
  if (!context) return fail(context.error());
  return std::unique_ptr<reference_engine>{new reference_engine_impl{
      std::move(calls), std::move(*node), std::move(*context), self->role}};
}

}  // namespace troupe::reference
