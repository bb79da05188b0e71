#pragma once

/// How processes find a supervisor that no operator starts (`supervisor.begin`). The folder of the
/// user's cluster (door_user_secret.hpp) holds:
///
///     supervisor         the notice: {"host", "port", "pid", "incarnation"}, and where its process runs:
///                        {"boot_id", "network_namespace"}. Its supervisor holds a lock on it for as long
///                        as it lives; the kernel releases the lock however the process ends
///     supervisor.begin   locked by a process that begins a supervisor, and by a supervisor that
///                        ends for want of nodes
///     supervisor.yaml    the deployment that the last supervisor was begun with
///     supervisor.log     its log
///
/// An unlocked notice belongs to no living supervisor. The locks are those of flock(2).

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "troupe/actors/supervisor_begin.hpp"
#include "troupe/config/deployment.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/transport/owned_fd.hpp"

namespace troupe::actors {

/// A lock on a file. `give_up` releases it for every copy of the descriptor: a forked child that
/// does not exec does not keep it.
class file_lock {
 public:
  file_lock() = default;
  /// `held` is locked.
  explicit file_lock(transport::owned_fd held) noexcept : held_{std::move(held)} {}
  ~file_lock() { give_up(); }
  file_lock(file_lock&&) noexcept = default;
  file_lock& operator=(file_lock&& other) noexcept;

  [[nodiscard]] int fd() const noexcept { return held_.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(held_); }
  void give_up() noexcept;

 private:
  transport::owned_fd held_;
};

/// Takes the lock for beginning a supervisor. Empty if another process holds it; ask again in a
/// moment. `invalid_config`, `overloaded`: the file cannot be used.
[[nodiscard]] result<file_lock> lock_beginning(const std::string& folder);

/// The content of the notice.
struct seen_notice {
  bool held{false};                           ///< a supervisor lives
  std::optional<found_supervisor> listens{};  ///< its address; empty if not (yet) in the notice
  /// Of the process that wrote the notice last, living or not; 0 if not (yet) in the notice.
  std::uint32_t pid{0};
  std::uint64_t incarnation{0};
};
/// Reads the notice in `folder`, the cluster's folder. Its address is accepted only if it agrees
/// with the deployment: without `tls` a supervisor listens at a loopback address. `invalid_config`:
/// the notice is not a plain file of this user, or cannot be locked, or is held by a supervisor on
/// another machine or in another network namespace; `overloaded`: it cannot be opened now.
[[nodiscard]] result<seen_notice> look_at_notice(const std::string& folder,
                                                 const config::deployment& of);

/// The notice of this process, which is the supervisor. Held for the lifetime of the object.
class supervisor_notice {
 public:
  /// Takes the notice, before the supervisor listens. `already_exists` naming the process that
  /// holds it; `invalid_config`, `overloaded` as above.
  [[nodiscard]] static result<std::unique_ptr<supervisor_notice>> claim(
      const config::deployment& of);

  /// Publishes the address that the supervisor listens on: from now on others find it.
  [[nodiscard]] result<void> publish(const std::string& host, std::uint16_t port,
                                     std::uint64_t incarnation) const;
  /// Withdraws the notice of a supervisor that is about to end for want of nodes, if `still_idle`
  /// says so while no other can be begun. From then on nobody finds this supervisor, and processes
  /// that look for one wait until this object is destroyed. Returns false if the supervisor has to
  /// continue; try again later.
  [[nodiscard]] bool withdraw(const std::function<bool()>& still_idle);
  /// Whether nobody can find this notice any more: it, or its folder, was removed or replaced. The
  /// next process that looks begins another supervisor.
  [[nodiscard]] bool is_lost() const;

 private:
  supervisor_notice(std::string folder, file_lock notice)
      : folder_{std::move(folder)}, notice_{std::move(notice)} {}

  std::string folder_;
  file_lock notice_;
  file_lock ending_;  ///< once it is withdrawn
};

}  // namespace troupe::actors
