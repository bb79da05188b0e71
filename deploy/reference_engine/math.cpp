#include "troupe/deploy/reference_engine/math.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

namespace troupe::reference {

namespace {

constexpr std::size_t lanes = 16;

}  // namespace

float dot(std::span<const float> a, std::span<const float> b) noexcept {
  // Independent sums that the compiler may keep in vector registers without changing any order.
  std::array<float, lanes> sums{};
  const std::size_t n = a.size();
  const std::size_t even = n / lanes * lanes;
  for (std::size_t i = 0; i < even; i += lanes)
    for (std::size_t j = 0; j < lanes; ++j) sums[j] += a[i + j] * b[i + j];
  for (std::size_t i = even; i < n; ++i) sums[i - even] += a[i] * b[i];
  for (std::size_t width = lanes / 2; width > 0; width /= 2)
    for (std::size_t j = 0; j < width; ++j) sums[j] += sums[j + width];
  return sums[0];
}

std::vector<float> project(const matrix& w, std::span<const float> x) {
  const std::size_t tokens = x.size() / w.columns;
  std::vector<float> y(tokens * w.rows);
  // A row of weights is used for every token while it is in cache.
  for (std::uint32_t row = 0; row < w.rows; ++row) {
    const auto weights = w.row(row);
    for (std::size_t t = 0; t < tokens; ++t)
      y[t * w.rows + row] = dot(weights, x.subspan(t * w.columns, w.columns));
  }
  return y;
}

void add_scaled(std::span<float> to, float factor, std::span<const float> from) noexcept {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] += factor * from[i];
}

std::vector<float> rms_norm(std::span<const float> x, std::span<const float> gain) {
  const std::size_t width = gain.size();
  std::vector<float> y(x.size());
  for (std::size_t at = 0; at < x.size(); at += width) {
    const auto row = x.subspan(at, width);
    const float mean = dot(row, row) / static_cast<float>(width);
    const float scale = 1.0f / std::sqrt(mean + 1e-5f);
    for (std::size_t i = 0; i < width; ++i) y[at + i] = row[i] * scale * gain[i];
  }
  return y;
}

void rotate(std::span<float> head, std::uint32_t position) noexcept {
  const std::size_t half = head.size() / 2;
  for (std::size_t i = 0; i < half; ++i) {
    const double exponent = -static_cast<double>(i) / static_cast<double>(half);
    const double angle = static_cast<double>(position) * std::pow(10000.0, exponent);
    const auto c = static_cast<float>(std::cos(angle));
    const auto s = static_cast<float>(std::sin(angle));
    const float a = head[i];
    const float b = head[i + half];
    head[i] = a * c - b * s;
    head[i + half] = a * s + b * c;
  }
}

void softmax(std::span<float> scores) noexcept {
  if (scores.empty()) return;
  const float top = *std::max_element(scores.begin(), scores.end());
  float sum = 0.0f;
  for (float& s : scores) {
    s = std::exp(s - top);
    sum += s;
  }
  for (float& s : scores) s /= sum;
}

float sigmoid(float x) noexcept {
  return 1.0f / (1.0f + std::exp(-x));
}

float silu(float x) noexcept {
  return x * sigmoid(x);
}

std::uint64_t number_source::next() noexcept {
  state_ += 0x9e3779b97f4a7c15ULL;
  std::uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

float number_source::uniform() noexcept {
  return static_cast<float>(next() >> 40) * 0x1.0p-24f;
}

std::uint64_t checksum(std::span<const float> values, std::uint64_t from) noexcept {
  for (const float value : values) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    for (unsigned shift = 0; shift < 32; shift += 8) {
      from ^= (bits >> shift) & 0xffu;
      from *= 0x100000001b3ULL;
    }
  }
  return from;
}

}  // namespace troupe::reference
