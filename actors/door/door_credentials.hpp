#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "troupe/actors/door/door.hpp"
#include "troupe/actors/door/door_handshake.hpp"
#include "troupe/actors/door/door_tls.hpp"

namespace troupe::actors {

/// The credentials of a door, as read at one time. A connection keeps the credentials that it began
/// with.
struct door_credentials {
  door_security::mode mode{door_security::mode::open};
  std::vector<door_key> keys;                   ///< the first is ours, each is accepted
  std::shared_ptr<const door_tls_context> tls;  ///< in mode tls
};

/// Reads the files that the mode needs. `invalid_config`, naming the file.
///
/// The secret file holds one secret a line (surrounding blanks are ignored): at least 32 characters
/// each, four lines at most. A node proves itself with the first and accepts any of them. To change
/// the secret while nodes run: append the new one on every node, then move it to the first line on
/// every node, then remove the old one.
[[nodiscard]] result<std::shared_ptr<const door_credentials>> load_door_credentials(
    const door_security& security);

/// The credentials in force, read again when a file has changed. For one thread.
class door_credential_watch {
 public:
  using clock = std::chrono::steady_clock;
  struct listeners : door_options::credential_calls {
    /// Called once a day when our certificate, or an authority that it needs, expires within a
    /// week.
    std::function<void(const std::string& sentence)> ends;
  };

  [[nodiscard]] static result<door_credential_watch> open(door_security security);

  /// Checks the files, at most once a second. If they cannot be read or do not fit together, the
  /// old credentials stay in force and each check tries again. A misfit is reported only after two
  /// seconds: files are replaced one after the other, and may fit together a moment later.
  [[nodiscard]] const std::shared_ptr<const door_credentials>& current(clock::time_point now,
                                                                       const listeners& tell);

 private:
  /// Tells whether a file has changed.
  struct stamp {
    std::uint64_t device{0}, inode{0}, size{0};
    std::int64_t modified_s{0}, modified_ns{0}, changed_s{0}, changed_ns{0};
    friend bool operator==(const stamp&, const stamp&) = default;
  };
  using stamps = std::array<stamp, 4>;

  explicit door_credential_watch(door_security security) : security_{std::move(security)} {}
  [[nodiscard]] static stamp stamp_of(const std::string& path);
  [[nodiscard]] stamps look() const;
  void read_again(clock::time_point now, const listeners& tell);
  void warn_of_the_end(clock::time_point now, const listeners& tell);

  door_security security_;
  std::shared_ptr<const door_credentials> in_force_;
  stamps seen_{};
  std::optional<clock::time_point> misfit_;  ///< since when the files do not fit together
  bool told_{false};                         ///< the misfit was reported
  clock::time_point next_warning_{};         ///< of the expiry of our certificate or its authority
  clock::time_point next_look_{};
};

}  // namespace troupe::actors
