// Checks that a leak is found: memory that is unreachable when the program ends.

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <string_view>

namespace {

/// Out of line, so that no register of `main` still holds the address.
[[gnu::noinline]] void leave_some(bool behind) {
  auto some = std::make_unique<char[]>(4096);
  std::memset(some.get(), 1, 4096);
  if (behind) static_cast<void>(some.release());
}

}  // namespace

int main(int count, char** words) {
  const bool leak = count > 1 && std::string_view{words[1]} == "leak";
  for (int i = 0; i < 8; ++i) leave_some(leak);
  std::cout << "8 of 4096\n";
  return EXIT_SUCCESS;
}
