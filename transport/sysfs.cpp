#include "troupe/transport/sysfs.hpp"

#include <fstream>
#include <system_error>

namespace troupe::transport {

std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> found;
  std::error_code bad;
  for (std::filesystem::directory_iterator at{folder, bad}, end; !bad && at != end;
       at.increment(bad)) {
    found.push_back(at->path());
  }
  return found;
}

std::string line_of(const std::filesystem::path& file) {
  std::ifstream in{file};
  std::string line;
  std::getline(in, line);
  return line;
}

}  // namespace troupe::transport
