// Tensors in host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "recsys_predictor.h"

namespace recsys {

// A contiguous tensor that keeps its memory alive.
struct Tensor {
  recsys_dtype dtype = RECSYS_FLOAT32;
  std::vector<std::int64_t> shape;
  std::shared_ptr<void> data;

  std::int64_t numel() const;
  std::size_t bytes() const;
};

// Bytes of one value.
std::size_t size_of(recsys_dtype dtype);

// Such as "float32".
const char* name_of(recsys_dtype dtype);

bool is_float(recsys_dtype dtype);

// A value; large int64 values are rounded.
double number_at(const Tensor& tensor, std::int64_t index);

// Such as "[-1, 13]".
std::string shape_text(const std::int64_t* shape, std::size_t num_dims);

// Throws std::invalid_argument for an unknown name.
recsys_dtype dtype_named(const std::string& name);

// Uninitialized memory, aligned for vector loads.
Tensor allocate(recsys_dtype dtype, std::vector<std::int64_t> shape);

}  // namespace recsys
