// Compares the products of every kernel that this CPU runs with the portable ones: the same integers inside a group, so
// that only the order of float32 sums differs. Prints one line for each kernel; exits with 1 if one differs.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "lakh_engine.h"
#include "vector_kernels.h"

namespace {

constexpr int64_t kPieces = 4;

struct Size {
  int64_t rows, columns;

  int64_t groups() const { return columns / 32; }
  int64_t blocks() const { return (rows + 7) / 8; }
  int64_t panels() const { return (rows + 31) / 32; }
  int64_t all() const { return kPieces * rows; }
};

// Rows and groups that fill neither blocks nor panels nor pairs, and several parts for threads to share.
constexpr Size kSizes[] = {{43, 288}, {59, 64}, {8, 32}, {150, 416}};

struct Matrix {
  int64_t bits;
  std::vector<uint8_t> values;
  std::vector<uint16_t> scales, minimums;
};

Matrix random_matrix(int64_t bits, Size size, std::mt19937& random) {
  Matrix made = {bits, std::vector<uint8_t>(size.blocks() * size.groups() * 32 * bits), {}, {}};
  for (auto& value : made.values) value = uint8_t(random());  // every byte, -128 included
  for (int64_t i = 0; i < size.blocks() * size.groups() * 8; ++i) {
    made.scales.push_back(uint16_t(0x2000 + random() % 0x1000));             // 2^-7 .. 2^-3
    made.minimums.push_back(uint16_t(0xa000 + random() % 0x1000));           // -2^-7 .. -2^-3
  }
  made.scales[3] = 0x0001;  // a subnormal number
  return made;
}

// In float32: the integers of 8 bits.
std::vector<float> floats_of(const Matrix& matrix, Size size) {
  std::vector<float> made(size.panels() * 32 * size.columns);
  for (size_t i = 0; i < made.size(); ++i) made[i] = float(int8_t(matrix.values[i % matrix.values.size()])) / 64.0f;
  return made;
}

// Weights of one size in 8 and 4 bits, and tokens.
struct Case {
  Size size;
  int64_t num;
  Matrix w8, w4;
  std::vector<float> x;

  Case(Size size, int64_t num, unsigned seed) : size(size), num(num) {
    std::mt19937 random(seed);
    w8 = random_matrix(8, size, random), w4 = random_matrix(4, size, random);
    x.resize(num * size.columns);
    for (auto& value : x) value = float(random() % 2001) / 1000.0f - 1.0f;
  }

  // Of a weight whose rows are in four formats: 8 bits without and with minimums, 4 bits, float32.
  std::vector<float> product(const std::string& kernel, int64_t first = 0, int64_t last = -1) const {
    const int64_t count = (last < 0 ? num : last) - first;
    std::vector<float> y(count * size.all(), NAN);
    const auto w32 = floats_of(w8, size);
    if (lakh_engine_select(kernel.c_str()) != 0) return y;
    const lakh_engine_piece pieces[] = {{8, w8.values.data(), w8.scales.data(), nullptr, size.rows},
                                        {8, w8.values.data(), w8.scales.data(), w8.minimums.data(), size.rows},
                                        {4, w4.values.data(), w4.scales.data(), w4.minimums.data(), size.rows},
                                        {32, w32.data(), nullptr, nullptr, size.rows}};
    lakh_engine_matmul(pieces, kPieces, size.columns, x.data() + first * size.columns, count, y.data());
    return y;
  }
};

// The products of a token beside others, shared between threads, have the same bits as alone.
bool has_own_bits(const std::string& kernel) {
  for (const Size size : kSizes) {
    const Case all(size, 70, 3);
    lakh_engine_set_threads(3);
    const auto together = all.product(kernel);
    lakh_engine_set_threads(1);
    for (int64_t n = 0; n < all.num; ++n) {
      const auto alone = all.product(kernel, n, n + 1);
      if (!std::equal(alone.begin(), alone.end(), together.begin() + n * size.all())) return false;
    }
  }
  return true;
}

// The largest difference from the portable products, for each matrix of the largest product.
double largest_difference(const std::string& kernel) {
  double worst = 0;
  for (const Size size : kSizes) {
    for (int64_t num : {1, 2, 3, 4, 5, 12, 16, 37, 48, 59, 70}) {
      Case all(size, num, unsigned(num));
      for (int64_t j = 0; j < 32; ++j) all.x[j] = j % 3 == 0 ? 3e4f : -3e4f;  // every activation at its largest
      const auto expected = all.product("portable"), found = all.product(kernel);
      for (int64_t first = 0; first < num * size.all(); first += size.rows) {
        double largest = 0, error = 0;
        for (int64_t i = first; i < first + size.rows; ++i) {
          largest = std::fmax(largest, std::fabs(expected[i]));
          error = std::isfinite(found[i]) ? std::fmax(error, std::fabs(found[i] - expected[i])) : INFINITY;
        }
        worst = std::fmax(worst, error / largest);
      }
    }
  }
  return worst;
}

// Tiles have the bits of VNNI: their integers are exact, and the float32 operations are in the same order.
bool are_bits_equal(const char* one, const char* other) {
  for (const Size size : kSizes) {
    for (int64_t num = 1; num <= 70; ++num) {
      const Case all(size, num, unsigned(num));
      if (all.product(one) != all.product(other)) return false;
    }
  }
  std::printf("%s: the same bits as %s\n", one, other);
  return true;
}

// What a token's attention, norms, rotation, gates and bounds give, one after the other.
std::vector<float> vector_results(const lakh::VectorKernels& kernels, bool is_int8, int64_t size) {
  constexpr int64_t kSlots = 41, kShare = 5;
  std::mt19937 random(11);
  const auto numbers = [&](int64_t count) {
    std::vector<float> made(count);
    for (auto& value : made) value = float(random() % 2001) / 1000.0f - 1.0f;
    return made;
  };
  const auto q = numbers(kShare * size), keys = numbers(kSlots * size), values = numbers(kSlots * size);
  std::vector<int8_t> bytes(2 * kSlots * size);
  std::vector<float> scales(2 * kSlots), scores(lakh::kMaxHeads * kSlots), out(kShare * size);
  for (int64_t s = 0; s < kSlots; ++s) {
    kernels.round(&keys[s * size], size, &bytes[s * size], &scales[s]);
    kernels.round(&values[s * size], size, &bytes[(kSlots + s) * size], &scales[kSlots + s]);
  }
  int64_t slots[kSlots - 2];  // more scores than the widest vector has, and a rest
  for (int64_t s = 0; s < kSlots - 2; ++s) slots[s] = (7 * s + 3) % kSlots;
  const lakh::CachedHead plain = {keys.data(), nullptr, values.data(), nullptr};
  const lakh::CachedHead rounded = {bytes.data(), scales.data(), &bytes[kSlots * size], &scales[kSlots]};
  const lakh::Scores how = {0.2f, is_int8 ? 1.5f : 0.0f, is_int8 ? values.data() : nullptr};
  kernels.attend(is_int8 ? rounded : plain, how, q.data(), kShare, size, slots, kSlots - 2, out.data(), scores.data());
  std::vector<float> found = out;
  kernels.norm(out.data(), q.data(), size, 1e-5f, out.data());
  kernels.rotate(out.data(), keys.data(), values.data(), size);
  kernels.add(out.data(), q.data(), kShare * size, out.data());
  kernels.add_scaled(out.data(), keys.data(), 0.7f, kShare * size);
  found.insert(found.end(), out.begin(), out.end());
  found.resize(found.size() + kShare * size);
  kernels.gate(out.data(), kShare * size / 2, &found[2 * kShare * size]);
  kernels.clamped_gate(out.data(), kShare * size / 2, &found[5 * kShare * size / 2]);
  kernels.layer_norm(out.data(), q.data(), keys.data(), kShare * size, 1e-5f, out.data());
  found.insert(found.end(), out.begin(), out.end());
  kernels.multiply(out.data(), keys.data(), kShare * size, out.data());
  kernels.gelu(out.data(), kShare * size, out.data());
  found.insert(found.end(), out.begin(), out.end());
  kernels.bound(out.data(), 0.8f, kShare * size, out.data());
  found.insert(found.end(), out.begin(), out.end());
  return found;
}

bool are_vectors_equal(const char* name, const lakh::VectorKernels* kernels) {
  if (kernels == nullptr) return true;
  double worst = 0;
  for (int number = 0; number < 4; ++number) {
    const bool is_int8 = number % 2 == 1;
    const int64_t size = number < 2 ? 20 : 84;  // 84: whole tiles of the widest vectors, and a rest
    const auto expected = vector_results(*lakh::portable_vector_kernels(), is_int8, size);
    const auto found = vector_results(*kernels, is_int8, size);
    for (size_t i = 0; i < found.size(); ++i) {
      const double error = std::fabs(found[i] - expected[i]) / std::fmax(1.0, std::fabs(expected[i]));
      worst = std::isfinite(found[i]) ? std::fmax(worst, error) : INFINITY;
    }
  }
  std::printf("%s vectors: largest difference %.1e\n", name, worst);
  return worst < 2e-5;
}

// Groups of activations, rounded: zeros, halves, a tiny scale, and random numbers.
struct Rounded {
  static constexpr int64_t kGroups = 64;
  int8_t values[kGroups * 32];
  float scales[kGroups], sums[kGroups];
  int32_t offsets[kGroups];

  explicit Rounded(const lakh::VectorKernels& kernels) {
    std::mt19937 random(13);
    std::vector<float> x(kGroups * 32);
    for (auto& value : x) value = float(random() % 2001) / 1000.0f - 1.0f;
    for (int64_t j = 0; j < 32; ++j) x[j] = 0, x[32 + j] = float(j) - 15.5f, x[64 + j] = float(j) * 1e-42f;
    x[32] = 127;  // a scale of 1
    kernels.round_groups(x.data(), kGroups, values, scales, sums, offsets);
  }

  // FNV-1a of all bytes.
  uint32_t checksum() const {
    uint32_t found = 2166136261u;
    const auto add = [&](const void* from, size_t size) {
      for (size_t i = 0; i < size; ++i) found = (found ^ static_cast<const uint8_t*>(from)[i]) * 16777619u;
    };
    add(values, sizeof values), add(scales, sizeof scales), add(sums, sizeof sums), add(offsets, sizeof offsets);
    return found;
  }
};

// Activations are rounded to the same bits on every processor.
bool is_rounding_equal(const char* name, const lakh::VectorKernels* kernels) {
  constexpr uint32_t kExpected = 0xbb55441a;
  const uint32_t found = kernels == nullptr ? kExpected : Rounded(*kernels).checksum();
  if (found != kExpected) std::printf("%s: activations are rounded to other bits (%08x)\n", name, found);
  return found == kExpected;
}

}  // namespace

int main() {
  std::istringstream names(lakh_engine_kernels());
  std::vector<std::string> kernels;
  for (std::string kernel; names >> kernel;) kernels.push_back(kernel);
  bool is_equal = true;
  for (const auto& kernel : kernels) {
    const double worst = largest_difference(kernel);
    std::printf("%s: largest difference %.1e of the largest product\n", kernel.c_str(), worst);
    is_equal = is_equal && worst < 2e-6;
    if (!has_own_bits(kernel)) {
      std::printf("%s: a token beside others has other bits than alone\n", kernel.c_str());
      is_equal = false;
    }
  }
  if (kernels.front() == "amx" && !are_bits_equal("amx", "vnni")) {
    std::printf("amx: other bits than vnni\n");
    is_equal = false;
  }
  is_equal = are_vectors_equal("avx2", lakh::avx2_vector_kernels()) && is_equal;
  is_equal = are_vectors_equal("avx512", lakh::avx512_vector_kernels()) && is_equal;
  is_equal = is_rounding_equal("portable", lakh::portable_vector_kernels()) && is_equal;
  is_equal = is_rounding_equal("avx2", lakh::avx2_vector_kernels()) && is_equal;
  is_equal = is_rounding_equal("avx512", lakh::avx512_vector_kernels()) && is_equal;
  return is_equal ? 0 : 1;
}
