#include "troupe/transport/folder.hpp"

#include <cerrno>
#include <fstream>
#include <memory>
#include <string_view>

#include <dirent.h>

namespace troupe::transport {

std::optional<std::vector<std::filesystem::path>> read_folder(const std::filesystem::path& folder) {
  struct closing {
    void operator()(DIR* open) const noexcept { ::closedir(open); }
  };
  const std::unique_ptr<DIR, closing> open{::opendir(folder.c_str())};
  if (!open) return std::nullopt;
  std::vector<std::filesystem::path> found;
  while (true) {
    errno = 0;
    const auto* entry = ::readdir(open.get());
    if (entry == nullptr && errno != 0) return std::nullopt;
    if (entry == nullptr) return found;
    const std::string_view name{static_cast<const char*>(entry->d_name)};
    if (name != "." && name != "..") found.push_back(folder / name);
  }
}

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
