#include "troupe/transport/xgmi/gate_words.hpp"

#include <atomic>
#include <string>
#include <utility>

namespace troupe::transport::xgmi {

void gate_word::open() const noexcept {
  // Behind everything that this thread has seen to be there.
  std::atomic_ref<std::uint32_t>{*word.host}.store(value, std::memory_order_release);
}

result<gate_word> gate_words::take(std::uint32_t gpu) {
  const std::lock_guard lock{mutex_};
  auto& mine = gpus_[gpu];
  if (mine.free.empty()) {
    if (mine.made >= per_gpu) {
      return fail(errc::overloaded,
                  std::to_string(per_gpu) + " gates are shut on one GPU; open some of them first");
    }
    auto more = runtime_->make_words(gpu);
    if (!more) return fail(std::move(more).error());
    mine.made += more->size();
    mine.free.reserve(mine.made);
    for (const auto& word : *more) mine.free.push_back({word, 0});
  }
  auto taken = mine.free.back();
  mine.free.pop_back();
  ++taken.value;
  return taken;
}

void gate_words::give_back(const gate_word& open) noexcept {
  if (open.value == last_value) return;
  const std::lock_guard lock{mutex_};
  gpus_[open.word.device].free.push_back(open);
}

std::size_t gate_words::made() const {
  const std::lock_guard lock{mutex_};
  std::size_t all = 0;
  for (const auto& [gpu, words] : gpus_) all += words.made;
  return all;
}

}  // namespace troupe::transport::xgmi
