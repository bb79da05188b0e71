#pragma once

/// Keeps a supervisor's `membership_record` in one file, which is locked against a second
/// supervisor, replaced whole and never written in place (a file beside it is written, flushed and
/// renamed over it, and the folder flushed). A thread of the store writes the file, since a disk
/// may be slow.
///
/// A file that cannot be used (damaged, of another cluster, of a later release, no right to read
/// it) is renamed to `PATH.bad` with a line in the log, and the supervisor starts afresh. A file
/// that cannot be read for want of descriptors or memory, or because a disk fails, stays, and the
/// start fails.

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
  /// Locks and reads the file, and writes it once, to know that it is writable and to reserve
  /// `epoch_reserve` epochs. The folder must exist. Errors: `already_exists` (another supervisor
  /// uses the file), `invalid_config` (it cannot be written), `overloaded` (it cannot be read now).
  [[nodiscard]] static result<std::unique_ptr<membership_store>> open(std::string path,
                                                                      const std::string& cluster);
  /// Calls `close`.
  ~membership_store();
  membership_store(const membership_store&) = delete;
  membership_store& operator=(const membership_store&) = delete;

  /// The record of the previous supervisor; its `epoch_limit` is the one to go on from. Empty if
  /// there was no usable record.
  [[nodiscard]] const std::optional<membership_record>& found() const noexcept { return found_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// Callable from any thread, returns at once. The record is written soon, unless a newer one
  /// overtakes it. A failed write is tried again every second, with lines in the log.
  void save(membership_record record);
  /// Writes the last saved record if needed, and gives the file up. Waits for the disk.
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
  bool failing_{false};  // used only by the writing thread

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<membership_record> pending_;
  bool closing_{false};
  std::thread thread_;
};

/// Opens the store that `supervisor.state_file` of the deployment names. Null if there is none,
/// which is logged. `auto` is `CLUSTER-PORT.state` in `$STATE_DIRECTORY` (systemd's), else in
/// `troupe` of `$XDG_STATE_HOME`, else of `~/.local/state`; there is no store if no such folder can
/// be made or written, or the port is 0. Errors: those of `open`, but `invalid_config` only for a
/// path that is named.
[[nodiscard]] result<std::unique_ptr<membership_store>> open_membership_store(
    const config::deployment& deployment);

}  // namespace troupe::actors
