// The values of a column in a request.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "columns.h"

namespace recsys {

bool is_whole(std::int32_t dtype);  // int64 or int32
bool is_real(std::int32_t dtype);   // numbers that a float64 can have

// A value of a tensor of whole or real numbers.
std::int64_t integer_at(const recsys_tensor& tensor, std::int64_t i);
double real_at(const recsys_tensor& tensor, std::int64_t i);

// Lists of a column that a request has as texts, one per row.
struct SplitTexts {
  std::vector<recsys_text> texts;
  std::vector<std::int64_t> lengths;
  std::int64_t num_values = 0, num_rows = 0;
  recsys_tensor values_tensor, lengths_tensor;
};

// The tensors of a column in a request. Functions throw Error(RECSYS_BAD_REQUEST).
struct ColumnView {
  const Column* column = nullptr;
  const recsys_tensor* values = nullptr;   // null: all values are missing
  const recsys_tensor* lengths = nullptr;  // null: one value per row, or no values
  const recsys_tensor* missing = nullptr;  // null: none, but NaN and texts without data
  const recsys_tensor* weights = nullptr;
  std::shared_ptr<SplitTexts> split;  // memory of values and lengths; null: of the request

  // Finds the tensors of a column, and checks their dtypes and sizes.
  static ColumnView of(const Column& column, const TensorsByName& tensors);

  std::int64_t num_values() const;
  std::int64_t num_rows() const;  // -1: no tensor states it
  std::int64_t length_of(std::int64_t row) const;
  bool is_missing(std::int64_t i) const;

  // The id of a value that is not missing.
  std::int64_t id_at(std::int64_t i) const;

  // A number after filling, clip and logarithm; none: it is missing.
  std::optional<double> number_at(std::int64_t row) const;

  // A part of a time, from 0; none: it is missing.
  std::optional<std::int64_t> part_at(const std::string& part, std::int64_t row) const;

 private:
  void split_texts();
  void check_dtypes() const;
  void check_sizes() const;
  void check_texts() const;
};

}  // namespace recsys
