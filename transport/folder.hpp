#pragma once

#include <filesystem>
#include <optional>
#include <vector>

namespace troupe::transport {

/// The paths of the entries of a folder, in no order; no value if it cannot be read. Running out of
/// memory throws, where the iterators of `std::filesystem` in libstdc++ 12 and 14 would end the
/// process.
[[nodiscard]] std::optional<std::vector<std::filesystem::path>> read_folder(
    const std::filesystem::path& folder);

}  // namespace troupe::transport
