#include "columns.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <set>
#include <stdexcept>

#include "column_view.h"
#include "error.h"
#include "files.h"
#include "row_values.h"

namespace fs = std::filesystem;

namespace recsys {
namespace {

constexpr std::int64_t kMissing = 0;
constexpr std::int64_t kMostNumbers = 1 << 24;  // of a vector

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  fail(RECSYS_BAD_REQUEST, parts...);
}

Tensor tensor_of(const std::vector<std::int64_t>& values) {
  Tensor tensor = allocate(RECSYS_INT64, {static_cast<std::int64_t>(values.size())});
  std::copy(values.begin(), values.end(), static_cast<std::int64_t*>(tensor.data.get()));
  return tensor;
}

Column::Kind kind_named(const std::string& name) {
  const std::pair<const char*, Column::Kind> kinds[] = {
      {"categorical", Column::Kind::kCategorical}, {"hashed", Column::Kind::kHashed},
      {"ids", Column::Kind::kIds},                 {"numeric", Column::Kind::kNumeric},
      {"buckets", Column::Kind::kBuckets},         {"vector", Column::Kind::kVector},
      {"time", Column::Kind::kTime},
  };
  for (const auto& [known, kind] : kinds) {
    if (name == known) {
      return kind;
    }
  }
  throw std::invalid_argument(text_of("there is no column of kind '", name, "'"));
}

const std::int64_t* integers(const Tensor& tensor) {
  return static_cast<const std::int64_t*>(tensor.data.get());
}

bool is_list_of(const Tensor& tensor, recsys_dtype dtype) {
  return tensor.data != nullptr && tensor.dtype == dtype && tensor.shape.size() == 1;
}

// Whether all texts of a vocabulary are in its bytes.
bool is_whole_vocabulary(const Vocabulary& vocabulary, bool is_text) {
  if (!is_list_of(vocabulary.hashes, RECSYS_INT64) || !is_list_of(vocabulary.rows, RECSYS_INT64) ||
      vocabulary.rows.shape != vocabulary.hashes.shape) {
    return false;
  }
  const std::int64_t size = vocabulary.rows.shape[0];
  if (!is_text || size == 0) {
    return true;
  }
  if (!is_list_of(vocabulary.offsets, RECSYS_INT64) || vocabulary.offsets.shape[0] != size + 1 ||
      !is_list_of(vocabulary.bytes, RECSYS_UINT8)) {
    return false;
  }
  const std::int64_t* offsets = integers(vocabulary.offsets);
  return offsets[0] >= 0 && std::is_sorted(offsets, offsets + size + 1) &&
         offsets[size] <= vocabulary.bytes.shape[0];
}

void require(bool holds, const std::string& column, const char* wanted) {
  if (!holds) {
    throw std::invalid_argument(text_of("column '", column, "' must have ", wanted));
  }
}

float single(const std::string& column, double number, std::int64_t row) {
  if (!(std::abs(number) <= std::numeric_limits<float>::max())) {
    refuse(column, " must have finite numbers in the range of float32; received ", number,
           " in row ", row, ".");
  }
  return static_cast<float>(number);
}

std::optional<double> optional_number(const Json& json, const char* key) {
  const Json& found = json.at(key);
  return found.is_null() ? std::nullopt : std::optional<double>(found.number());
}

}  // namespace

void Converted::add(const std::string& name, Tensor tensor) {
  names_.push_back(name);
  tensors_.push_back(std::move(tensor));
  const Tensor& kept = tensors_.back();
  views_.push_back({names_.back().c_str(), kept.dtype,
                    static_cast<std::int32_t>(kept.shape.size()), kept.shape.data(), nullptr,
                    kept.data.get()});
}

recsys_request Converted::request() const {
  return {views_.data(), static_cast<std::int32_t>(views_.size())};
}

Columns::Columns(const Manifest& manifest, const std::string& version) {
  if (manifest.columns.empty()) {
    return;
  }
  try {
    read_vocabularies(version);
    for (const Json& json : manifest.columns) {
      read_column(json);
    }
    read_row_values(manifest.schema.outputs);
  } catch (const std::invalid_argument& error) {
    fail(RECSYS_BAD_PACKAGE, "'", version, "' must have a description of its columns; ",
         error.what(), ".");
  }
  for (const Input& input : manifest.schema.inputs) {
    if (!input.is_jagged) {
      dense_ = input.name;
    }
    for (const Feature& feature : input.features) {
      if (input.is_weighted) {
        weighted_.insert(feature.tensor);
      }
    }
  }
  for (const Column& column : columns_) {
    num_dense_ += column.dim;
  }
}

void Columns::read_vocabularies(const std::string& version) {
  const std::string path = (fs::path(version) / "columns.safetensors").string();
  if (!fs::is_regular_file(path)) {
    fail(RECSYS_BAD_PACKAGE, "'", path, "' is missing. Copy the package again.");
  }
  const std::size_t size = fs::file_size(path);
  for (auto& [name, tensor] : parse_safetensors(map_file(path, size), size).tensors) {
    const std::size_t dot = name.rfind('.');
    const std::string part = name.substr(dot + 1);
    Vocabulary& found = vocabularies_[name.substr(0, dot)];
    (part == "hashes"    ? found.hashes
     : part == "rows"    ? found.rows
     : part == "offsets" ? found.offsets
                         : found.bytes) = tensor;
  }
}

void Columns::read_column(const Json& json) {
  Column column;
  column.name = json.at("name").text();
  column.kind = kind_named(json.at("kind").text());
  json.at("dtype").text();
  const Json* optional = json.find("optional");
  column.is_optional = optional != nullptr && optional->boolean();
  if (column.kind == Column::Kind::kTime) {
    column.per_second = json.at("per_second").integer();
    require(column.per_second > 0, column.name, "a positive unit");
    for (const Json& part : json.at("parts").array()) {
      column.parts.push_back({part.at("part").text(), part.at("tensor").text()});
      const std::string& name = column.parts.back().name;
      require(name == "hour" || name == "weekday" || name == "day" || name == "month", column.name,
              "parts of a time");
    }
  } else if (column.kind == Column::Kind::kVector) {
    column.is_list = json.at("is_list").boolean();
    column.dim = json.at("dim").integer();
    require(column.is_list, column.name, "lists");
    require(column.dim > 0 && column.dim <= kMostNumbers, column.name, "a size of its vectors");
  } else if (column.kind == Column::Kind::kNumeric || column.kind == Column::Kind::kBuckets) {
    column.missing = optional_number(json, "missing");
    column.low = optional_number(json, "low");
    column.high = optional_number(json, "high");
    column.has_log = json.at("log1p").boolean();
    column.is_standardized = json.at("standardize").boolean();
    column.mean = json.at("mean").number();
    column.deviation = json.at("deviation").number();
    require(column.low.has_value() == column.high.has_value(), column.name, "two limits");
    require(column.deviation > 0, column.name, "a positive deviation");
    column.dim = column.kind == Column::Kind::kNumeric;
    if (column.kind == Column::Kind::kBuckets) {
      column.tensor = json.at("tensor").text();
      for (const Json& edge : json.at("edges").array()) {
        column.edges.push_back(edge.number());
      }
      require(std::is_sorted(column.edges.begin(), column.edges.end()), column.name,
              "rising edges");
    }
  } else {
    column.is_text = json.at("type").text() == "text";
    column.is_list = json.at("is_list").boolean();
    const Json* separator = json.find("separator");
    if (separator != nullptr && !separator->is_null()) {
      column.separator = separator->text();
      require(column.is_list && !column.separator.empty(), column.name, "lists to separate");
    }
    column.tensor = json.at("tensor").text();
    column.weights = json.at("weights").is_null() ? "" : json.at("weights").text();
    if (!json.at("rows").is_null()) {
      column.rows = json.at("rows").integer();
      require(*column.rows > 0, column.name, "rows");
    }
    if (column.kind == Column::Kind::kCategorical) {
      const auto found = vocabularies_.find(json.at("table").text());
      if (found == vocabularies_.end() || !is_whole_vocabulary(found->second, column.is_text)) {
        throw std::invalid_argument(text_of("column '", column.name, "' has no whole vocabulary"));
      }
      column.vocabulary = &found->second;
    }
  }
  columns_.push_back(std::move(column));
}

void Columns::read_row_values(const std::vector<Output>& outputs) {
  std::size_t position = 0;
  for (const Output& output : outputs) {
    if (output.vocabulary.has_value()) {  // of a categorical column, by the manifest's rules
      const Vocabulary& found = vocabularies_.at(*output.vocabulary);
      const auto column = std::find_if(columns_.begin(), columns_.end(), [&](const Column& one) {
        return one.vocabulary == &found;
      });
      row_values_ = std::make_shared<RowValues>(found, column->is_text, position);
    }
    position += output.tensors().size();
  }
}

namespace {

// Finds the tensors of a request by name, and checks their shapes.
TensorsByName by_name(const recsys_request& request) {
  TensorsByName found;
  if (request.num_tensors < 0 || (request.num_tensors > 0 && request.tensors == nullptr)) {
    refuse("A request must have a list of tensors; received none.");
  }
  for (std::int32_t i = 0; i < request.num_tensors; ++i) {
    const recsys_tensor& tensor = request.tensors[i];
    if (tensor.name == nullptr || (tensor.num_dims > 0 && tensor.shape == nullptr)) {
      refuse("A tensor must have a name and a shape; received none for tensor ", i, ".");
    }
    if (tensor.num_dims != 1 || tensor.shape[0] < 0) {
      refuse(tensor.name, " must have the shape [-1]; received ", tensor.num_dims, " dims.");
    }
    const bool is_plain = tensor.strides == nullptr || tensor.shape[0] < 2 || tensor.strides[0] == 1;
    if (!is_plain || (tensor.data == nullptr && tensor.shape[0] > 0)) {
      refuse(tensor.name, " must have contiguous data; received strides or a null pointer.");
    }
    if (!found.insert({tensor.name, &tensor}).second) {
      refuse("A request must have each tensor once; received '", tensor.name, "' twice.");
    }
  }
  return found;
}

}  // namespace

std::shared_ptr<const Converted> Columns::convert(const recsys_request& request) const {
  const TensorsByName tensors = by_name(request);
  std::vector<ColumnView> views;
  std::int64_t num_rows = -1;
  std::string first;
  for (const Column& column : columns_) {
    const ColumnView& view = views.emplace_back(ColumnView::of(column, tensors));
    const std::int64_t found = view.num_rows();
    if (found >= 0 && num_rows >= 0 && found != num_rows) {
      refuse(column.name, " must have ", num_rows, " rows, as ", first, " has; received ", found,
             ".");
    }
    if (found >= 0 && num_rows < 0) {
      num_rows = found;
      first = column.name;
    }
  }
  if (num_rows < 0) {
    refuse("A request must have a column that states its rows; received none.");
  }
  auto converted = std::make_shared<Converted>();
  Tensor dense = allocate(RECSYS_FLOAT32, {num_rows, num_dense_});
  auto* next = static_cast<float*>(dense.data.get());  // the number of the first row
  for (const ColumnView& view : views) {
    switch (view.column->kind) {
      case Column::Kind::kNumeric: add_numbers(view, num_rows, next++); break;
      case Column::Kind::kVector:
        add_vectors(view, num_rows, next);
        next += view.column->dim;
        break;
      case Column::Kind::kBuckets: add_buckets(view, num_rows, *converted); break;
      case Column::Kind::kTime: add_parts(view, num_rows, *converted); break;
      default: add_ids(view, num_rows, *converted);
    }
  }
  if (!dense_.empty()) {
    converted->add(dense_, std::move(dense));
  }
  return converted;
}

void Columns::add_numbers(const ColumnView& view, std::int64_t num_rows, float* out) const {
  const Column& column = *view.column;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    double number = view.number_at(row).value_or(column.mean);
    if (column.is_standardized) {
      number = (number - column.mean) / column.deviation;
    }
    out[row * num_dense_] = single(column.name, number, row);
  }
}

void Columns::add_vectors(const ColumnView& view, std::int64_t num_rows, float* out) const {
  const Column& column = *view.column;
  std::int64_t next = 0;
  for (std::int64_t row = 0; row < num_rows; ++row, out += num_dense_) {
    const std::int64_t length = view.length_of(row);
    if (length == 0) {  // a missing vector
      std::fill_n(out, column.dim, 0.0F);
      continue;
    }
    if (length != column.dim) {
      refuse(column.name, " must have lists of length ", column.dim, "; received ", length,
             " in row ", row, ".");
    }
    for (std::int64_t i = 0; i < length; ++i, ++next) {
      if (view.is_missing(next)) {
        refuse(column.name, " must have no missing number in a vector; received one in row ", row,
               ".");
      }
      out[i] = single(column.name, real_at(*view.values, next), row);
    }
  }
}

void Columns::add_buckets(const ColumnView& view, std::int64_t num_rows, Converted& out) const {
  const std::vector<double>& edges = view.column->edges;
  std::vector<std::int64_t> rows;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::optional<double> number = view.number_at(row);
    rows.push_back(number.has_value()
                       ? 1 + (std::upper_bound(edges.begin(), edges.end(), *number) - edges.begin())
                       : kMissing);
  }
  add_bags(view.column->tensor, rows, nullptr, {}, out);
}

void Columns::add_parts(const ColumnView& view, std::int64_t num_rows, Converted& out) const {
  for (const Column::Part& part : view.column->parts) {
    std::vector<std::int64_t> rows;
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const std::optional<std::int64_t> found = view.part_at(part.name, row);
      rows.push_back(found.has_value() ? 1 + *found : kMissing);
    }
    add_bags(part.tensor, rows, nullptr, {}, out);
  }
}

void Columns::add_ids(const ColumnView& view, std::int64_t num_rows, Converted& out) const {
  const Column& column = *view.column;
  const bool keeps_missing = column.kind == Column::Kind::kCategorical;
  std::vector<std::int64_t> ids, lengths;
  std::vector<float> weights;
  std::int64_t next = 0;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    std::int64_t length = 0;
    for (const std::int64_t end = next + view.length_of(row); next < end; ++next) {
      const bool is_missing = view.is_missing(next);
      if (is_missing && !keeps_missing) {
        continue;
      }
      ids.push_back(is_missing ? kMissing : view.id_at(next));
      ++length;
      if (view.weights != nullptr) {
        weights.push_back(single(column.weights, real_at(*view.weights, next), row));
      }
    }
    if (view.values == nullptr && keeps_missing && !column.is_list) {
      ids.push_back(kMissing);
      length = 1;
      if (!column.weights.empty()) {
        weights.push_back(0.0F);  // a missing id has no weight
      }
    }
    lengths.push_back(length);
  }
  add_bags(column.tensor, ids, &lengths, std::move(weights), out);
}

void Columns::add_bags(const std::string& name, const std::vector<std::int64_t>& ids,
                       const std::vector<std::int64_t>* lengths, std::vector<float> weights,
                       Converted& out) const {
  out.add(name, tensor_of(ids));
  if (lengths != nullptr) {
    out.add(name + ".lengths", tensor_of(*lengths));
  }
  if (weighted_.count(name) > 0) {
    weights.resize(ids.size(), 1.0F);  // 1 for columns without weights
    Tensor tensor = allocate(RECSYS_FLOAT32, {static_cast<std::int64_t>(ids.size())});
    std::copy(weights.begin(), weights.end(), static_cast<float*>(tensor.data.get()));
    out.add(name + ".weights", std::move(tensor));
  }
}

}  // namespace recsys
