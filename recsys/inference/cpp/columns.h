// Raw columns of a request (texts, numbers and times) to the tensors of the model, as
// recsys.features converts them for training.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "manifest.h"
#include "tensor.h"

namespace recsys {

class RowValues;
struct ColumnView;
using TensorsByName = std::unordered_map<std::string, const recsys_tensor*>;

// The tensors of the model that were made from a request.
class Converted {
 public:
  void add(const std::string& name, Tensor tensor);
  recsys_request request() const;

 private:
  std::deque<std::string> names_;
  std::deque<Tensor> tensors_;
  std::vector<recsys_tensor> views_;
};

// The distinct values of a table, in the order of their hashes; whole numbers are their own hashes.
struct Vocabulary {
  Tensor hashes;   // int64 [values]
  Tensor rows;     // int64 [values]
  Tensor offsets;  // int64 [values + 1] in `bytes`; empty for numbers
  Tensor bytes;    // uint8

  // The row of a value; 1: it is not in the vocabulary.
  std::int64_t row_of(std::int64_t hash) const;
  std::int64_t row_of(const recsys_text& text) const;
};

// A column of the package's FeatureSpec.
struct Column {
  enum class Kind { kCategorical, kHashed, kIds, kNumeric, kBuckets, kVector, kTime };

  struct Part {
    std::string name;    // "hour", "weekday", "day" or "month"
    std::string tensor;  // of the model
  };

  std::string name;
  Kind kind = Kind::kIds;
  bool is_text = false;
  bool is_list = false;
  bool is_optional = false;
  std::string separator;         // of lists in texts; "": requests have lists
  std::string weights;           // the column of weights; "": none
  std::string tensor;            // of the model; "": of a dense column, or of parts
  const Vocabulary* vocabulary = nullptr;
  std::optional<std::int64_t> rows;  // of a hashed column; none: ids stay
  std::int64_t dim = 0;              // dense numbers of a row; 0: the column has ids
  // of a number
  std::optional<double> missing, low, high;
  bool has_log = false, is_standardized = false;
  double mean = 0, deviation = 1;
  std::vector<double> edges;
  // of a time
  std::int64_t per_second = 1;
  std::vector<Part> parts;
};

class Columns {
 public:
  // Reads the vocabularies of a version. Throws Error(RECSYS_BAD_PACKAGE).
  Columns(const Manifest& manifest, const std::string& version);

  // Whether requests have the tensors of the model.
  bool empty() const { return columns_.empty(); }

  // Converts a request. Throws Error(RECSYS_BAD_REQUEST) that names the column.
  std::shared_ptr<const Converted> convert(const recsys_request& request) const;

  // The values of the output whose rows are of a vocabulary; null: there is none.
  std::shared_ptr<const RowValues> row_values() const { return row_values_; }

 private:
  void read_vocabularies(const std::string& version);
  void read_column(const Json& json);
  void read_row_values(const std::vector<Output>& outputs);
  void add_numbers(const ColumnView& view, std::int64_t num_rows, float* out) const;
  void add_vectors(const ColumnView& view, std::int64_t num_rows, float* out) const;
  void add_buckets(const ColumnView& view, std::int64_t num_rows, Converted& out) const;
  void add_parts(const ColumnView& view, std::int64_t num_rows, Converted& out) const;
  void add_ids(const ColumnView& view, std::int64_t num_rows, Converted& out) const;
  // Adds the tensors of a feature. Lengths are null if there is one id per row.
  void add_bags(const std::string& name, const std::vector<std::int64_t>& ids,
                const std::vector<std::int64_t>* lengths, std::vector<float> weights,
                Converted& out) const;

  std::vector<Column> columns_;
  std::unordered_map<std::string, Vocabulary> vocabularies_;  // by table
  std::shared_ptr<const RowValues> row_values_;
  std::string dense_;         // the dense input of the model; "": none
  std::int64_t num_dense_ = 0;
  std::set<std::string> weighted_;  // tensors of the model whose ids have weights
};

}  // namespace recsys
