#include "troupe/transport/xgmi/stream_gates.hpp"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

namespace troupe::transport::xgmi {

class stream_gates::gate final : public stream_gate {
 public:
  gate(std::shared_ptr<gpu_site> site, const gate_word& word)
      : site_{std::move(site)}, word_{word} {}
  ~gate() override { open_once(); }
  void open() noexcept override { open_once(); }
  [[nodiscard]] bool is_open() const noexcept { return open_.load(); }

 private:
  void open_once() noexcept {
    if (open_.exchange(true)) return;
    word_.open();
    site_->gates.give_back(word_);
  }

  const std::shared_ptr<gpu_site> site_;
  const gate_word word_;
  std::atomic<bool> open_{false};
};

result<std::shared_ptr<stream_gate>> stream_gates::hold(const compute_stream& stream) {
  auto& gpus = *site_->runtime;
  if (const auto state = gpus.state(); !state.usable) {
    return fail(errc::no_device, "no GPU whose streams could wait: " + state.reason);
  }
  if (stream.gpu >= gpus.devices().size()) {
    return fail(errc::invalid_config,
                "GPU " + std::to_string(stream.gpu) + " of a stream is not one of the " +
                    std::to_string(gpus.devices().size()) + " that this process sees");
  }
  auto word = site_->gates.take(stream.gpu, stream.handle);
  if (!word) return fail(std::move(word).error());
  auto made = std::make_shared<gate>(site_, *word);
  // Register the gate first, and hold no lock during the call: a driver whose queue for the stream
  // is full blocks the caller until an earlier gate of the stream is opened, which `close` must be
  // able to do. A gate that `close` opens before the stream waits lets the stream pass.
  if (!keep(made)) return fail(errc::aborted, "the node stops");
  if (auto ok = gpus.wait_at({stream.gpu, stream.handle}, word->word, word->value); !ok) {
    return fail(std::move(ok).error());
  }
  return std::shared_ptr<stream_gate>{std::move(made)};
}

bool stream_gates::keep(const std::shared_ptr<gate>& made) {
  const std::lock_guard lock{mutex_};
  if (closed_) return false;
  if (gates_.size() >= look_at_) {
    std::erase_if(gates_, [](const auto& each) {
      const auto known = each.lock();
      return !known || known->is_open();
    });
    look_at_ = std::max<std::size_t>(64, 2 * gates_.size());
  }
  gates_.push_back(made);
  return true;
}

void stream_gates::close() {
  std::vector<std::weak_ptr<gate>> all;
  {
    const std::lock_guard lock{mutex_};
    closed_ = true;
    all = std::exchange(gates_, {});
  }
  for (const auto& each : all) {
    if (const auto known = each.lock()) known->open();
  }
}

}  // namespace troupe::transport::xgmi
