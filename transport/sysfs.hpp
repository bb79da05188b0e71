#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace troupe::transport {

/// The entries of a kernel folder, without those that cannot be read or vanish meanwhile.
[[nodiscard]] std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder);

/// The first line of a kernel file; empty if it cannot be read.
[[nodiscard]] std::string line_of(const std::filesystem::path& file);

}  // namespace troupe::transport
