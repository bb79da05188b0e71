#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace troupe::transport {

/// A FIFO queue that keeps its memory: it allocates only to grow longer than it has ever been.
template <class T>
class kept_queue {
 public:
  void push_back(T what) { items_.push_back(std::move(what)); }
  [[nodiscard]] bool empty() const noexcept { return first_ == items_.size(); }
  [[nodiscard]] std::size_t size() const noexcept { return items_.size() - first_; }
  [[nodiscard]] T& front() noexcept { return items_[first_]; }
  [[nodiscard]] const T& front() const noexcept { return items_[first_]; }
  void pop_front() {
    items_[first_++] = T{};
    if (first_ == items_.size()) {
      clear();
    } else if (first_ >= most_left && first_ * 2 >= items_.size()) {
      // A queue that is never empty must not grow for ever.
      items_.erase(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(first_));
      first_ = 0;
    }
  }
  void clear() noexcept {
    items_.clear();
    first_ = 0;
  }
  [[nodiscard]] auto begin() const noexcept {
    return items_.begin() + static_cast<std::ptrdiff_t>(first_);
  }
  [[nodiscard]] auto end() const noexcept { return items_.end(); }

 private:
  static constexpr std::size_t most_left = 64;
  std::vector<T> items_;
  std::size_t first_{0};
};

}  // namespace troupe::transport
