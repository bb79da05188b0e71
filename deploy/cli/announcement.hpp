#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/owned_fd.hpp"

/// Lines that a `troupe node` process writes over a pipe to the `troupe up` that started it:
///
///     listening HOST PORT   the port is bound (once)
///     registered            the supervisor has taken it in (once; not said by the supervisor)
///     failed SENTENCE       it cannot start and ends
///     drained               an operator drained it: it ends in good order
namespace troupe::deploy::cli {

struct announcement {
  enum class kind : std::uint8_t { listening, registered, failed, drained };
  kind what{kind::listening};
  std::string text;       ///< host, or the sentence
  std::uint16_t port{0};  ///< of `listening`
};

[[nodiscard]] std::string to_line(const announcement& what);
/// Parses a line; empty if it is not an announcement.
[[nodiscard]] std::optional<announcement> announcement_from(const std::string& line);

/// The node's end. Writes nothing if it was made without a descriptor.
class announcer {
 public:
  explicit announcer(int fd) noexcept : fd_{fd} {}
  void say(const announcement& what) const;

 private:
  transport::owned_fd fd_;
};

/// The end of the process that starts nodes. Movable.
class announcements {
 public:
  /// A pipe whose other end (`far_end`) a child process inherits. `internal` when the system
  /// refuses.
  [[nodiscard]] static result<announcements> open();

  /// Readable while lines wait, or once the far end is closed.
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] int far_end() const noexcept { return far_end_.get(); }
  /// Closes our copy of the far end. Without this the child's end would go unnoticed, and later
  /// children would inherit the copy.
  void close_far_end() noexcept { far_end_.reset(); }
  /// The next line; empty if none waits.
  [[nodiscard]] std::optional<announcement> take();
  /// Whether no more lines will come.
  [[nodiscard]] bool over() const noexcept { return over_; }

 private:
  announcements(int fd, int far_end) noexcept : fd_{fd}, far_end_{far_end} {}
  transport::owned_fd fd_;
  transport::owned_fd far_end_;
  bool over_{false};
  std::string text_;
};

}  // namespace troupe::deploy::cli
