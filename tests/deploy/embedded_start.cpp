/// A process that embeds an engine: starts the store `NAME` of the deployment `FILE`, puts a value,
/// gets it back, and stops. Exits with 0, or with 3 and the error that a call returned.

#include <cstddef>
#include <iostream>
#include <new>
#include <string>
#include <vector>

#include "troupe/actors/engine.hpp"
#include "troupe/config/parse.hpp"

namespace {

constexpr int returned_error = 3;

troupe::result<void> put_and_get(troupe::engine& node, const std::string& name) {
  const std::vector<std::byte> value(3300, std::byte{7});
  const auto put = node.put(name, "key", value);
  if (!put) return troupe::fail(put.error());
  if (const auto done = node.wait(*put); !done) return troupe::fail(done.error());
  const auto get = node.get(name, "key");
  if (!get) return troupe::fail(get.error());
  const auto got = node.wait(*get);
  if (!got) return troupe::fail(got.error());
  if (got->value.bytes.size() != value.size())
    return troupe::fail(troupe::errc::internal, "another value came back");
  return {};
}

troupe::result<void> run(const troupe::config::deployment& deployment, const std::string& name) {
  auto node = troupe::engine::start(deployment, name);
  if (!node) return troupe::fail(node.error());
  auto served = put_and_get(**node, name);
  (*node)->stop();
  return served;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 3) return 2;
  const auto deployment = troupe::config::load(argv[1]);
  if (!deployment.value) {
    std::cerr << troupe::config::to_string(deployment.issues) << "\n";
    return returned_error;
  }
  if (const auto ran = run(*deployment.value, argv[2]); !ran) {
    std::cerr << troupe::to_string(ran.error()) << "\n";
    return returned_error;
  }
  return 0;
} catch (const std::bad_alloc&) {
  std::cerr << "no memory for the program's own words\n";
  return returned_error;
}
