#include "troupe/deploy/cli/announcement.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <sstream>

#include <fcntl.h>
#include <unistd.h>

namespace troupe::deploy::cli {

namespace {

constexpr std::size_t max_line = 4096;

}  // namespace

std::string to_line(const announcement& what) {
  switch (what.what) {
    case announcement::kind::listening:
      return "listening " + what.text + " " + std::to_string(what.port) + "\n";
    case announcement::kind::registered: return "registered\n";
    case announcement::kind::drained: return "drained\n";
    case announcement::kind::failed: {
      std::string text = what.text.substr(0, max_line / 2);
      std::replace(text.begin(), text.end(), '\n', ' ');
      return "failed " + text + "\n";
    }
  }
  return {};
}

std::optional<announcement> announcement_from(const std::string& line) {
  std::istringstream in{line};
  std::string word;
  in >> word;
  announcement what;
  if (word == "listening") {
    in >> what.text >> what.port;
    if (in.fail()) return std::nullopt;
    return what;
  }
  if (word == "registered") return announcement{announcement::kind::registered, {}, 0};
  if (word == "drained") return announcement{announcement::kind::drained, {}, 0};
  if (word == "failed") {
    what.what = announcement::kind::failed;
    std::getline(in >> std::ws, what.text);
    return what;
  }
  return std::nullopt;
}

// -- the node's end

void announcer::say(const announcement& what) const {
  if (!fd_) return;
  const auto line = to_line(what);
  // The listener may be gone; the node goes on without it.
  [[maybe_unused]] const auto written = ::write(fd_.get(), line.data(), line.size());
}

// -- the starter's end

result<announcements> announcements::open() {
  const auto refused = [] {
    return fail(errc::internal, std::string{"cannot make a pipe: "} + std::strerror(errno));
  };
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return refused();
  announcements made{ends[0], ends[1]};
  if (::fcntl(made.fd(), F_SETFL, O_NONBLOCK) != 0) return refused();
  // Let the next child inherit it.
  if (::fcntl(made.far_end(), F_SETFD, 0) != 0) return refused();
  return made;
}

std::optional<announcement> announcements::take() {
  while (!over_ && text_.size() < max_line && text_.find('\n') == std::string::npos) {
    std::array<char, 512> part{};
    const auto count = ::read(fd(), part.data(), part.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) break;  // nothing more for now
    if (count == 0) over_ = true;
    text_.append(part.data(), static_cast<std::size_t>(count));
  }
  while (true) {
    const auto end = text_.find('\n');
    if (end == std::string::npos) return std::nullopt;
    const auto line = text_.substr(0, end);
    text_.erase(0, end + 1);
    if (auto what = announcement_from(line)) return what;
  }
}

}  // namespace troupe::deploy::cli
