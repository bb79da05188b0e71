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

/// What a door proves itself with, as it was read at one time. Connections keep the one that they
/// began with.
struct door_credentials {
  door_security::mode mode{door_security::mode::open};
  std::vector<door_key> keys;                   ///< the first is ours, each is accepted
  std::shared_ptr<const door_tls_context> tls;  ///< in mode tls
};

/// Reads the files that the mode needs. `invalid_config`, naming the file.
///
/// The file of the secret holds one secret a line, without the blanks around it: at least 32
/// characters each, four lines at most. A node shows the first and accepts each of them. To change
/// the secret while nodes run: append the new one on every node, then move it to the first line on
/// every node, then take the old one out.
[[nodiscard]] result<std::shared_ptr<const door_credentials>> load_door_credentials(
    const door_security& security);

/// The credentials in force, read again when a file has changed. For one thread.
class door_credential_watch {
 public:
  using clock = std::chrono::steady_clock;
  struct listeners : door_options::credential_calls {
    /// The time of our certificate, or of an authority that it needs, will be over within a week: once
    /// a day.
    std::function<void(const std::string& sentence)> ends;
  };

  [[nodiscard]] static result<door_credential_watch> open(door_security security);

  /// Looks at the files, at most once a second. What cannot be read or does not fit leaves what was
  /// there in force and is tried again at each look, in silence for two seconds: files are replaced
  /// one after the other, and what does not fit yet may do so a moment later.
  [[nodiscard]] const std::shared_ptr<const door_credentials>& current(clock::time_point now,
                                                                       const listeners& tell);

 private:
  /// What tells one state of a file from another.
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
  std::optional<clock::time_point> misfit_;  ///< since when what is seen does not fit
  bool told_{false};                         ///< of that
  clock::time_point next_warning_{};         ///< of the end of our certificate or its authority
  clock::time_point next_look_{};
};

}  // namespace troupe::actors
