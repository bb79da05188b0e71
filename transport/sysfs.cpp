#include "troupe/transport/sysfs.hpp"

#include <fstream>

#include "troupe/transport/folder.hpp"

namespace troupe::transport {

std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder) {
  return read_folder(folder).value_or(std::vector<std::filesystem::path>{});
}

std::string line_of(const std::filesystem::path& file) {
  std::ifstream in{file};
  std::string line;
  std::getline(in, line);
  return line;
}

}  // namespace troupe::transport
