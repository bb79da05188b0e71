#include "troupe/actors/engine/engine_edge.hpp"

#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/logging.hpp"
#include "troupe/kvcache/or_error.hpp"

namespace troupe::actors {

namespace {

/// For calls that return no error: logs an error and returns `otherwise` instead.
template <class T>
T logged(result<T> outcome, T otherwise) noexcept {
  if (outcome) return std::move(*outcome);
  try {
    logger("node")->error("{}", to_string(outcome.error()));
  } catch (...) {  // no memory for the log line either
  }
  return otherwise;
}

void logged(const result<void>& outcome) noexcept {
  if (outcome) return;
  try {
    logger("node")->error("{}", to_string(outcome.error()));
  } catch (...) {  // as above
  }
}

class engine_with_edge final : public engine {
 public:
  explicit engine_with_edge(std::unique_ptr<engine> inner) : inner_{std::move(inner)} {}

  void stop() override {
    logged(or_error("stop", [&] { inner_->stop(); }));
  }
  result<void> wait_registered(std::chrono::milliseconds timeout) override {
    return or_error("wait_registered", [&] { return inner_->wait_registered(timeout); });
  }

  // -- the cache

  const kvcache::cache_layout& layout() const override { return inner_->layout(); }
  result<std::span<std::byte>> region(std::size_t index) const override {
    return or_error("region", [&] { return inner_->region(index); });
  }
  result<kvcache::allocation> allocate_blocks(std::uint32_t count) override {
    return or_error("allocate_blocks", [&] { return inner_->allocate_blocks(count); });
  }
  result<void> free_blocks(kvcache::block_owner owner, std::span<const block_id> blocks) override {
    return or_error("free_blocks", [&] { return inner_->free_blocks(owner, blocks); });
  }

  // -- transfers

  result<operation_id> send(send_spec spec) override {
    return or_error("send", [&] { return inner_->send(std::move(spec)); });
  }
  result<void> add_blocks(operation_id send, std::vector<block_id> blocks,
                          std::uint32_t group) override {
    return or_error("add_blocks",
                    [&] { return inner_->add_blocks(send, std::move(blocks), group); });
  }
  result<void> layers_ready(operation_id send, std::uint32_t layer_begin, std::uint32_t layer_end,
                            std::uint32_t token_end) override {
    return or_error("layers_ready",
                    [&] { return inner_->layers_ready(send, layer_begin, layer_end, token_end); });
  }
  result<void> layers_ready(operation_id send, std::uint32_t layer_begin, std::uint32_t layer_end,
                            std::uint32_t token_end, transport::compute_point computed) override {
    return or_error("layers_ready", [&] {
      return inner_->layers_ready(send, layer_begin, layer_end, token_end, computed);
    });
  }
  result<void> seal(operation_id send, std::uint32_t tokens, std::vector<std::byte> aux) override {
    return or_error("seal", [&] { return inner_->seal(send, tokens, std::move(aux)); });
  }
  result<operation_id> receive(receive_spec spec) override {
    return or_error("receive", [&] { return inner_->receive(std::move(spec)); });
  }
  result<operation_id> release(std::string request, std::vector<std::string> sources,
                               std::vector<std::uint64_t> lives) override {
    return or_error("release", [&] {
      return inner_->release(std::move(request), std::move(sources), std::move(lives));
    });
  }
  result<operation_id> hold(std::string request, std::vector<std::string> sources,
                            std::vector<std::uint64_t> lives) override {
    return or_error("hold", [&] {
      return inner_->hold(std::move(request), std::move(sources), std::move(lives));
    });
  }
  result<void> await_layers(operation_id receive, std::uint32_t layer_begin,
                            std::uint32_t layer_end, std::uint32_t token_end,
                            transport::compute_stream stream) override {
    return or_error("await_layers", [&] {
      return inner_->await_layers(receive, layer_begin, layer_end, token_end, stream);
    });
  }
  result<void> abort(operation_id operation, std::string reason) override {
    return or_error("abort", [&] { return inner_->abort(operation, std::move(reason)); });
  }

  // -- keyed values

  result<operation_id> put(std::string peer, std::string key, std::span<const std::byte> value,
                           std::chrono::milliseconds ttl) override {
    return or_error("put",
                    [&] { return inner_->put(std::move(peer), std::move(key), value, ttl); });
  }
  result<operation_id> get(std::string peer, std::string key) override {
    return or_error("get", [&] { return inner_->get(std::move(peer), std::move(key)); });
  }
  result<operation_id> query(std::string peer, std::string key) override {
    return or_error("query", [&] { return inner_->query(std::move(peer), std::move(key)); });
  }
  result<operation_id> remove(std::string peer, std::string key) override {
    return or_error("remove", [&] { return inner_->remove(std::move(peer), std::move(key)); });
  }

  // -- the cluster

  std::uint64_t incarnation() const override { return inner_->incarnation(); }
  std::uint64_t supervisor_incarnation() const override { return inner_->supervisor_incarnation(); }
  result<operation_id> place(placement_request request) override {
    return or_error("place", [&] { return inner_->place(std::move(request)); });
  }
  void placed_request_ended(std::string request) override {
    logged(or_error("placed_request_ended",
                    [&] { inner_->placed_request_ended(std::move(request)); }));
  }
  void set_queue_length(std::uint32_t requests) override { inner_->set_queue_length(requests); }
  drain_standing draining() const override { return inner_->draining(); }
  void report_failure(std::string why) override {
    logged(or_error("report_failure", [&] { inner_->report_failure(std::move(why)); }));
  }
  void recover() override {
    logged(or_error("recover", [&] { inner_->recover(); }));
  }
  node_report report() const override {
    return logged(or_error("report", [&] { return result<node_report>{inner_->report()}; }),
                  node_report{});
  }

  // -- events

  int event_fd() const override { return inner_->event_fd(); }
  std::vector<event> take(std::size_t max) override {
    return logged(or_error("take", [&] { return result<std::vector<event>>{inner_->take(max)}; }),
                  {});
  }
  std::vector<event> wait(std::chrono::milliseconds timeout, std::size_t max) override {
    return logged(
        or_error("wait", [&] { return result<std::vector<event>>{inner_->wait(timeout, max)}; }),
        {});
  }
  result<outcome> wait(operation_id operation) override {
    return or_error("wait", [&] { return inner_->wait(operation); });
  }
  std::optional<result<outcome>> wait(operation_id operation,
                                      std::chrono::milliseconds timeout) override {
    using within = std::optional<result<outcome>>;
    auto waited =
        or_error("wait", [&] { return result<within>{inner_->wait(operation, timeout)}; });
    if (!waited) return result<outcome>{fail(std::move(waited).error())};
    return std::move(*waited);
  }
  bool poll() override {
    return logged(or_error("poll", [&] { return result<bool>{inner_->poll()}; }), false);
  }

 private:
  const std::unique_ptr<engine> inner_;
};

}  // namespace

std::unique_ptr<engine> with_edge(std::unique_ptr<engine> inner) {
  return std::make_unique<engine_with_edge>(std::move(inner));
}

}  // namespace troupe::actors
