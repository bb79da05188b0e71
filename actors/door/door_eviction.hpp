#pragma once

/// Chooses which stranger a full door drops, and remembers the networks whose strangers failed
/// lately. No socket and no clock: addresses are bytes (`door_sockets.hpp`), time is passed in.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <span>
#include <string>
#include <string_view>

namespace troupe::actors {

/// How far a stranger has come.
enum class door_stage : std::uint8_t {
  silent,      ///< has sent nothing
  speaking,    ///< has sent part of its HELLO
  challenged,  ///< its HELLO was answered, its proof is awaited
  proven,      ///< has the key; in mode tls its certificate is awaited
  refused,     ///< the refusal was sent, and it has not hung up yet
};
inline constexpr std::size_t door_stages = 5;

/// The networks whose strangers failed to prove themselves, each with points: one per failure, less
/// one per second. Bounded; the network whose last failure is longest ago is forgotten first.
class door_offenders {
 public:
  using time_point = std::chrono::steady_clock::time_point;
  static constexpr std::size_t capacity = 1024;
  static constexpr double least_points = 8;  ///< of an offender; occasional failures are normal
  static constexpr double most_points = 30;  ///< so a network is forgiven within 30 seconds

  door_offenders() = default;
  door_offenders(const door_offenders&) = delete;
  door_offenders& operator=(const door_offenders&) = delete;
  ~door_offenders() = default;

  void add(std::string_view network, time_point now);
  [[nodiscard]] bool has(std::string_view network, time_point now) const;
  [[nodiscard]] std::size_t size() const noexcept { return records_.size(); }

 private:
  struct record {
    double points{0};
    time_point at;  ///< of the last failure
    std::list<std::string_view>::iterator place;
  };
  [[nodiscard]] static double points_at(const record& of, time_point now);

  std::map<std::string, record, std::less<>> records_;
  std::list<std::string_view> by_last_failure_;  ///< longest ago first; views of the keys
};

/// The facts about a stranger that the choice uses.
struct door_seat {
  std::string_view address, network;
  door_stage stage{door_stage::silent};
  door_offenders::time_point since;  ///< when it came to `stage`
};

/// The index of the stranger to drop; `seats` is not empty. It is chosen
/// - from the party with most strangers. A party is one address; an IPv6 network counts as one
///   party only if it is an offender. A stranger of an offender counts as `offender_weight`;
/// - within the party, from the refused strangers if there are any, otherwise from the most common
///   stage: strangers that stay silent, or send HELLO and no more, displace only their own kind;
/// - among these, as the one that came to its stage first. A peer that answers before
///   `seats.size()` others arrive is never chosen because of a flood from its own address.
[[nodiscard]] std::size_t choose_who_goes(std::span<const door_seat> seats,
                                          const door_offenders& offenders,
                                          door_offenders::time_point now);
inline constexpr std::size_t offender_weight = 16;

}  // namespace troupe::actors
