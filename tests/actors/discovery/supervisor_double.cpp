/// Stands in for the `troupe` command when a supervisor is begun: detaches itself and publishes a
/// notice that it listens, or does what TROUPE_DOUBLE says. It appends its pid to the file
/// TROUPE_DOUBLE_LIST once it is detached, and before that as well if it takes its time. It ends
/// after two minutes if nothing ends it earlier. If it takes its time, it continues once the file
/// TROUPE_DOUBLE_GATE exists.

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include <unistd.h>

#include "troupe/actors/discovery/supervisor_notice.hpp"
#include "troupe/config/parse.hpp"

namespace {

std::string from_environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

[[noreturn]] void stay() {
  while (true) ::pause();
}

void add_to_list() {
  std::ofstream{from_environment("TROUPE_DOUBLE_LIST"), std::ios::app} << ::getpid() << std::endl;
}

void wait_at_gate() {
  add_to_list();
  const auto gate = from_environment("TROUPE_DOUBLE_GATE");
  while (::access(gate.c_str(), F_OK) != 0) ::usleep(1000);
}

int be_the_supervisor(const std::string& file, const std::string& how) {
  const auto deployment = troupe::config::load(file);
  if (!deployment.value) {
    std::cerr << troupe::config::to_string(deployment.issues) << std::endl;
    return 2;
  }
  if (how == "comes to nothing") stay();
  if (how == "gets no notice") {
    std::cerr << "there is no notice to be had" << std::endl;
    return 2;
  }
  const auto notice = troupe::actors::supervisor_notice::claim(*deployment.value);
  if (!notice) {
    std::cerr << to_string(notice.error()) << std::endl;
    return 2;
  }
  if (how == "is silent") stay();
  if (how == "dies") {
    std::cerr << "first line\nsecond line\nthe port is taken, say\n" << std::flush;
    return 1;
  }
  const auto port = static_cast<std::uint16_t>(10'000 + ::getpid() % 50'000);
  if (!(*notice)->publish("127.0.0.1", port, static_cast<std::uint64_t>(::getpid()))) return 1;
  stay();
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> given{argv, argv + argc};
  const std::vector<std::string> expected{
      "troupe",   "node",       given.size() > 2 ? given[2] : "", "--name", "supervisor",
      "--detach", "--log-file", given.size() > 7 ? given[7] : ""};
  const auto how = from_environment("TROUPE_DOUBLE");
  ::alarm(120);
  if (how == "takes its time" || how == "takes its time and refuses") wait_at_gate();
  if (given != expected || how == "refuses" || how == "takes its time and refuses") {
    std::cerr << "it does not begin" << std::endl;
    return 3;
  }
  if (::fork() != 0) ::_exit(0);
  ::setsid();
  ::alarm(120);  // alarms are not inherited
  add_to_list();
  return be_the_supervisor(given[2], how);
}
