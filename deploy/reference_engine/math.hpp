#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// The arithmetic of the model. Every sum is taken in one fixed order that depends on the vectors'
/// length only, never on how many tokens are computed together: a token's values come out
/// bit-identical whether its prompt is computed whole, in chunks, or by another process of the same
/// build.
namespace troupe::reference {

/// A weight matrix: `rows` outputs of `columns` inputs each, row after row.
struct matrix {
  std::uint32_t rows{0};
  std::uint32_t columns{0};
  std::vector<float> values;

  [[nodiscard]] std::span<const float> row(std::uint32_t index) const {
    return std::span<const float>{values}.subspan(std::size_t{index} * columns, columns);
  }
};

[[nodiscard]] float dot(std::span<const float> a, std::span<const float> b) noexcept;
/// y[t] = w * x[t] for each of the tokens: x holds tokens * columns values, the result tokens *
/// rows.
[[nodiscard]] std::vector<float> project(const matrix& w, std::span<const float> x);
/// `to` += `factor` * `from`.
void add_scaled(std::span<float> to, float factor, std::span<const float> from) noexcept;
/// Root-mean-square normalisation of each row of `gain.size()` values.
[[nodiscard]] std::vector<float> rms_norm(std::span<const float> x, std::span<const float> gain);
/// Turns each pair (i, i + n/2) of a head by an angle that grows with the position.
void rotate(std::span<float> head, std::uint32_t position) noexcept;
/// In place; the values then sum to 1.
void softmax(std::span<float> scores) noexcept;
[[nodiscard]] float silu(float x) noexcept;
[[nodiscard]] float sigmoid(float x) noexcept;

/// A fixed generator (a Weyl sequence through a 64-bit mixer): the same numbers on every machine.
class number_source {
 public:
  explicit number_source(std::uint64_t seed) noexcept : state_{seed} {}
  [[nodiscard]] std::uint64_t next() noexcept;
  /// In [0, 1), 24 bits.
  [[nodiscard]] float uniform() noexcept;

 private:
  std::uint64_t state_;
};

/// FNV-1a over the bits of the values, continued from `from`: equal only for bit-identical results.
[[nodiscard]] std::uint64_t checksum(std::span<const float> values,
                                     std::uint64_t from = 0xcbf29ce484222325ULL) noexcept;

}  // namespace troupe::reference
