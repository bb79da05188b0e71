#include "troupe/deploy/cli/progress_line.hpp"

#include <algorithm>
#include <cmath>
#include <ostream>

namespace troupe::deploy::cli {

namespace {

constexpr std::size_t bar_width = 30;

}  // namespace

progress_line::~progress_line() {
  if (shown_ && terminal_) out_ << "\r\033[K" << std::flush;
}

void progress_line::show(double share, const std::string& text) {
  if (terminal_) {
    out_ << "\r\033[K" << bar_text(share) << "  " << text << std::flush;
    shown_ = true;
    return;
  }
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return;
  next_ = now + std::chrono::seconds{1};
  out_ << std::lround(std::clamp(share, 0.0, 1.0) * 100.0) << "%  " << text << std::endl;
}

std::string bar_text(double share) {
  share = std::clamp(share, 0.0, 1.0);
  const auto full = static_cast<std::size_t>(share * static_cast<double>(bar_width));
  auto percent = std::to_string(std::lround(share * 100.0)) + "%";
  percent.insert(0, percent.size() < 4 ? 4 - percent.size() : 0, ' ');
  std::string bar{'['};
  bar.append(full, '#').append(bar_width - full, '-').append("] ").append(percent);
  return bar;
}

}  // namespace troupe::deploy::cli
