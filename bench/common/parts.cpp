#include "parts.hpp"

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include <poll.h>
#include <unistd.h>

namespace troupe::bench {

void give(const control& runner, const row& r, const std::string& detail) {
  char wanted[48] = "";
  if (r.wanted) {
    std::snprintf(wanted, sizeof wanted, "(wanted %s %.2f) ",
                  r.lower_is_better ? "<=" : ">=", *r.wanted);
  }
  std::fprintf(stderr, "%-68s %9.2f %9.2f  ratio %6.2f %s%s %s\n", r.name.c_str(), r.ours, r.rival,
               r.ours / r.rival, wanted, r.unit, detail.c_str());
  const auto text = to_json(r);
  runner.put(std::uint64_t{text.size()});
  runner.put_bytes(text.data(), text.size());
}

std::vector<std::string> part(const std::function<void(const control&)>& body,
                              std::chrono::seconds limit) {
  const auto child = fork_child([&](const control& runner) {
    body(runner);
    runner.put(std::uint64_t{0});
    std::_Exit(0);
  });
  std::vector<std::string> rows;
  for (;;) {
    pollfd waits{child.fd, POLLIN, 0};
    if (::poll(&waits, 1, static_cast<int>(std::chrono::milliseconds{limit}.count())) == 0) {
      die("a part of the benchmark said nothing for " + std::to_string(limit.count()) + " s");
    }
    std::uint64_t size = 0;
    if (::read(child.fd, &size, sizeof size) != static_cast<ssize_t>(sizeof size)) {
      die("a part of the benchmark did not come to its end");
    }
    if (size == 0) break;
    std::string text(size, '\0');
    child.get_bytes(text.data(), size);
    rows.push_back(std::move(text));
  }
  ::close(child.fd);
  return rows;
}

}  // namespace troupe::bench
