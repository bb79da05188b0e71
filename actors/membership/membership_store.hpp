#pragma once

/// Where a supervisor keeps its `membership_record`: one file, locked against a second supervisor,
/// replaced whole and never written in place (a file beside it, flushed, renamed over it, the folder
/// flushed). It is written by a thread of the store's own, since a disk may be slow.
///
/// What is there and cannot be used (damaged, of another cluster, of a later release, no right to
/// read it) is renamed to `PATH.bad` with a line in the log, and the supervisor starts afresh. What
/// cannot be read for want of descriptors or memory, or by a failing disk, stays: the start fails.

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "troupe/actors/logging.hpp"
#include "troupe/actors/membership/membership_record.hpp"
#include "troupe/config/deployment.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/transport/owned_fd.hpp"

namespace troupe::actors {

class membership_store {
 public:
  /// Locks and reads the file, and writes it once, so that it is known to be writable and that
  /// `epoch_reserve` epochs may be used. The folder must be there. Errors: `already_exists` (another
  /// supervisor uses it), `invalid_config` (it cannot be written), `overloaded` (it cannot be read now).
  [[nodiscard]] static result<std::unique_ptr<membership_store>> open(std::string path,
                                                                      const std::string& cluster);
  /// `close`.
  ~membership_store();
  membership_store(const membership_store&) = delete;
  membership_store& operator=(const membership_store&) = delete;

  /// What the supervisor before this one left; its `epoch_limit` is the one to go on from. Empty:
  /// nothing that could be used.
  [[nodiscard]] const std::optional<membership_record>& found() const noexcept { return found_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// From any thread, returns at once: it is written soon, unless a newer one overtakes it. One that
  /// could not be written is tried again every second, with lines in the log.
  void save(membership_record record);
  /// Writes what was saved last and is not written yet, and gives the file up. Waits for the disk.
  void close();

 private:
  membership_store(std::string path, transport::owned_fd lock);
  [[nodiscard]] result<std::optional<membership_record>> read(const std::string& cluster) const;
  [[nodiscard]] result<std::string> read_text() const;
  [[nodiscard]] result<void> set_aside(const std::string& why) const;
  [[nodiscard]] result<void> write(const membership_record& record) const;
  void run();
  void write_pending(std::unique_lock<std::mutex>& lock);

  std::string path_;
  transport::owned_fd lock_;
  std::optional<membership_record> found_;
  log_limiter failures_;
  bool failing_{false};  // of the writing thread

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<membership_record> pending_;
  bool closing_{false};
  std::thread thread_;
};

/// The store of a deployment's supervisor, as `supervisor.state_file` says; null: it has none, which
/// the log says. `auto` is `CLUSTER-PORT.state` in `$STATE_DIRECTORY` (systemd's), else in `troupe` of
/// `$XDG_STATE_HOME`, else of `~/.local/state`; where no such folder can be made or written, or the
/// port is 0, there is none. Errors: those of `open`, the second only for a path that is named.
[[nodiscard]] result<std::unique_ptr<membership_store>> open_membership_store(
    const config::deployment& deployment);

}  // namespace troupe::actors
