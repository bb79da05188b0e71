#pragma once

#include <cstdint>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/transport/backend.hpp"

#include "hexadecimal.hpp"

// What two processes of a test say to each other over a pipe: one item per line, numbers in hex.
namespace troupe::transport::contract {

/// Never empty, so that it is one word of a line.
inline std::string to_hex(std::span<const std::byte> bytes) {
  return 'x' + testing::hexadecimal(bytes);
}

inline std::vector<std::byte> from_hex(std::string_view text) {
  return testing::from_hexadecimal(text.substr(text.empty() ? 0 : 1));
}

inline std::string line_of(const link_offer& offer) {
  return std::to_string(static_cast<int>(offer.kind)) + ' ' + std::to_string(offer.owner.value) +
         ' ' + to_hex(offer.payload) + '\n';
}

inline link_offer offer_of(const std::string& line) {
  std::istringstream in{line};
  link_offer offer;
  int kind = 0;
  std::string payload;
  in >> kind >> offer.owner.value >> payload;
  offer.kind = static_cast<backend_kind>(kind);
  offer.payload = from_hex(payload);
  return offer;
}

/// A grant to all of a region, for reading and writing.
inline std::string line_of(const remote_grant& grant) {
  std::ostringstream out;
  out << grant.id << ' ' << grant.region.value << ' ' << grant.owner.value << ' '
      << grant.transfer.value << ' ' << grant.region_size << ' ' << to_hex(grant.key) << '\n';
  return out.str();
}

inline remote_grant grant_of(const std::string& line) {
  std::istringstream in{line};
  remote_grant grant;
  std::string key;
  in >> grant.id >> grant.region.value >> grant.owner.value >> grant.transfer.value >>
      grant.region_size >> key;
  grant.rights = access::read_write;
  grant.permitted = {{0, grant.region_size, 0, 1}};
  grant.key = from_hex(key);
  return grant;
}

}  // namespace troupe::transport::contract
