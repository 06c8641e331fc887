#include "tensor.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "error.h"

namespace recsys {
namespace {

constexpr std::size_t kAlignment = 64;

struct Kind {
  const char* name;
  std::size_t size;
};

// In the order of recsys_dtype.
constexpr Kind kKinds[] = {{"bool", 1},    {"uint8", 1},    {"int32", 4},   {"int64", 8},
                           {"float16", 2}, {"bfloat16", 2}, {"float32", 4}, {"float64", 8},
                           {"text", sizeof(recsys_text)}};

}  // namespace

std::size_t size_of(recsys_dtype dtype) { return kKinds[dtype].size; }

const char* name_of(recsys_dtype dtype) { return kKinds[dtype].name; }

bool is_float(recsys_dtype dtype) {
  return dtype >= RECSYS_FLOAT16 && dtype <= RECSYS_FLOAT64;
}

namespace {

double half_number(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double sign = bits >> 15 == 0 ? 1 : -1;
  if (exponent == 31) {
    return fraction == 0 ? sign * HUGE_VAL : std::nan("");
  }
  return sign * (exponent == 0 ? std::ldexp(fraction, -24)
                               : std::ldexp(fraction + 1024, exponent - 25));
}

float bfloat16_number(std::uint16_t bits) {
  const std::uint32_t wide = std::uint32_t{bits} << 16;
  float found = 0;
  std::memcpy(&found, &wide, sizeof found);
  return found;
}

}  // namespace

double number_at(const Tensor& tensor, std::int64_t index) {
  const void* data = tensor.data.get();
  switch (tensor.dtype) {
    case RECSYS_BOOL:
    case RECSYS_UINT8: return static_cast<const std::uint8_t*>(data)[index];
    case RECSYS_INT32: return static_cast<const std::int32_t*>(data)[index];
    case RECSYS_INT64: return static_cast<double>(static_cast<const std::int64_t*>(data)[index]);
    case RECSYS_FLOAT16: return half_number(static_cast<const std::uint16_t*>(data)[index]);
    case RECSYS_BFLOAT16: return bfloat16_number(static_cast<const std::uint16_t*>(data)[index]);
    case RECSYS_FLOAT32: return static_cast<const float*>(data)[index];
    case RECSYS_FLOAT64: return static_cast<const double*>(data)[index];
    case RECSYS_TEXT: break;
  }
  return std::nan("");
}

recsys_dtype dtype_named(const std::string& name) {
  for (int i = RECSYS_BOOL; i <= RECSYS_FLOAT64; ++i) {
    if (name == kKinds[i].name) {
      return static_cast<recsys_dtype>(i);
    }
  }
  throw std::invalid_argument(text_of("there is no dtype '", name, "'"));
}

std::string shape_text(const std::int64_t* shape, std::size_t num_dims) {
  std::string found = "[";
  for (std::size_t i = 0; i < num_dims; ++i) {
    found += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return found + "]";
}

std::int64_t Tensor::numel() const {
  std::int64_t found = 1;
  for (const std::int64_t size : shape) {
    found *= size;
  }
  return found;
}

std::size_t Tensor::bytes() const { return static_cast<std::size_t>(numel()) * size_of(dtype); }

Tensor allocate(recsys_dtype dtype, std::vector<std::int64_t> shape) {
  Tensor tensor{dtype, std::move(shape), nullptr};
  const std::size_t used = std::max<std::size_t>(tensor.bytes(), 1);
  void* memory = std::aligned_alloc(kAlignment, (used + kAlignment - 1) / kAlignment * kAlignment);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  tensor.data = std::shared_ptr<void>(memory, std::free);
  return tensor;
}

}  // namespace recsys
