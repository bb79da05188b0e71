#include <iostream>

#include "troupe/actors/engine.hpp"
#include "troupe/kvcache/errc.hpp"
#include "troupe/transport/backend.hpp"

// Compiled and linked against an installed Troupe, outside of its own build.
int main() {
  std::cout << troupe::to_string(troupe::errc::peer_lost) << '\n';
  return 0;
}
