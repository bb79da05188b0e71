#pragma once

/// Which stranger at a full door goes, and which hosts have sent useless ones lately. No socket and no
/// clock: addresses are bytes (`door_sockets.hpp`), time is passed in.

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
  speaking,    ///< has sent a part of its HELLO
  challenged,  ///< its HELLO was answered, its proof is awaited
  proven,      ///< has the key; in mode tls its certificate is awaited
  refused,     ///< was told why, and has not hung up yet
};
inline constexpr std::size_t door_stages = 5;

/// The networks whose strangers failed to prove themselves, each with points: one per failure, less one
/// per second. Bounded; the network that has not failed for longest is forgotten first.
class door_offenders {
 public:
  using time_point = std::chrono::steady_clock::time_point;
  static constexpr std::size_t capacity = 1024;
  static constexpr double least_points = 8;  ///< fewer: anybody may fail now and then
  static constexpr double most_points = 30;  ///< so that a network is forgiven within 30 seconds

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
  std::list<std::string_view> by_last_failure_;  ///< the longest ago first; views of the keys
};

/// A stranger, as far as the choice goes.
struct door_seat {
  std::string_view address, network;
  door_stage stage{door_stage::silent};
  door_offenders::time_point since;  ///< when it came to that stage
};

/// The index of the stranger that goes; `seats` is not empty. It is
/// - of the party with most strangers. A party is one address; a network of IPv6 is one party only
///   where it offends. A stranger of an offender counts as `offender_weight`;
/// - of that party a refused one if there is any, else one of the stage that most are in: neither those
///   that stay silent nor those that say HELLO and no more displace others than their own kind;
/// - of those the one that came to its stage first. An end that answers sooner than `seats.size()`
///   others come is never chosen for a flood of its own address.
[[nodiscard]] std::size_t choose_who_goes(std::span<const door_seat> seats,
                                          const door_offenders& offenders,
                                          door_offenders::time_point now);
inline constexpr std::size_t offender_weight = 16;

}  // namespace troupe::actors
