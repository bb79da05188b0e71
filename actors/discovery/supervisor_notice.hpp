#pragma once

/// What tells of a supervisor that nobody has to start (`supervisor.begin`). It stands in the folder of
/// the user's cluster (door_user_secret.hpp):
///
///     supervisor         the notice: {"host", "port", "pid", "incarnation"}, and where its process runs:
///                        {"boot_id", "network_namespace"}. Its supervisor holds a lock on it for as long
///                        as it lives; the kernel gives that up whatever ends it
///     supervisor.begin   locked by whoever looks and begins one, and by one that ends for want of nodes
///     supervisor.yaml    the deployment that the last one was begun with
///     supervisor.log     what it logs
///
/// A notice that nobody holds is of nobody. The locks are those of flock(2).

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

/// A lock on a file. Given up for every copy of the descriptor: a child that this process forks
/// meanwhile, and that becomes no other program, does not keep it.
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

/// The lock of whoever begins one. None: another has it, ask again in a moment. `invalid_config`,
/// `overloaded`: the file cannot be used.
[[nodiscard]] result<file_lock> lock_beginning(const std::string& folder);

/// What a look at the notice shows.
struct seen_notice {
  bool held{false};                           ///< a supervisor lives
  std::optional<found_supervisor> listens{};  ///< where it does. None: it does not say (yet)
  /// Of whoever wrote it last, living or not; 0: it does not say (yet).
  std::uint32_t pid{0};
  std::uint64_t incarnation{0};
};
/// `folder` is that of the cluster. What stands there is only believed where the deployment bears it
/// out: without `tls` a supervisor listens at a loopback address. `invalid_config`: what stands there is
/// no plain file of this user's, or cannot be locked, or a supervisor holds it that is on another machine or
/// in another network namespace; `overloaded`: it cannot be opened now.
[[nodiscard]] result<seen_notice> look_at_notice(const std::string& folder,
                                                 const config::deployment& of);

/// The notice of this process, which is the supervisor. Held until the object goes.
class supervisor_notice {
 public:
  /// Before it listens. `already_exists` naming the process that has it; `invalid_config`,
  /// `overloaded` as above.
  [[nodiscard]] static result<std::unique_ptr<supervisor_notice>> claim(
      const config::deployment& of);

  /// It listens there: from now on it is found.
  [[nodiscard]] result<void> publish(const std::string& host, std::uint16_t port,
                                     std::uint64_t incarnation) const;
  /// It is about to end for want of nodes, unless `still_idle`, which is asked when nobody can begin
  /// one, says otherwise. From then on nobody finds it, and whoever looks for one waits until this object
  /// goes. False: it has to go on; ask again later.
  [[nodiscard]] bool withdraw(const std::function<bool()>& still_idle);
  /// Nobody finds this notice any more: it was removed, with its folder or without, or another stands in its
  /// place. Whoever looks begins another supervisor.
  [[nodiscard]] bool is_lost() const;

 private:
  supervisor_notice(std::string folder, file_lock notice)
      : folder_{std::move(folder)}, notice_{std::move(notice)} {}

  std::string folder_;
  file_lock notice_;
  file_lock ending_;  ///< once it is withdrawn
};

}  // namespace troupe::actors
