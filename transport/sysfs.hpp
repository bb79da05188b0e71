#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace troupe::transport {

/// What a folder of the kernel's holds; what cannot be read, or goes while we look, is not there.
[[nodiscard]] std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder);

/// The first line of a file of the kernel's; empty where it cannot be read.
[[nodiscard]] std::string line_of(const std::filesystem::path& file);

}  // namespace troupe::transport
