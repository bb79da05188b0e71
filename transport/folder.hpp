#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace troupe::transport {

/// The paths of the entries of a folder, in no order; no value if it cannot be read. Running out of
/// memory throws, where the iterators of `std::filesystem` in libstdc++ 12 and 14 would end the
/// process.
[[nodiscard]] std::optional<std::vector<std::filesystem::path>> read_folder(
    const std::filesystem::path& folder);
/// The entries of a kernel folder, without those that cannot be read or vanish meanwhile.
[[nodiscard]] std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder);

/// The first line of a kernel file; empty if it cannot be read.
[[nodiscard]] std::string line_of(const std::filesystem::path& file);

}  // namespace troupe::transport
