#include "column_view.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "../../kernels/hashed/mix64.h"
#include "error.h"

namespace recsys {
namespace {

constexpr std::int64_t kUnknown = 1;
constexpr std::int64_t kDay = 86400, kHour = 3600;
constexpr std::int64_t kFirstYear = -62135596800, kLastYear = 253402300799;  // seconds since 1970

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  fail(RECSYS_BAD_REQUEST, parts...);
}

// FNV-1a (Fowler, Noll and Vo), 64 bits; recsys/features/text_hash.py has the same.
std::int64_t hash_of(const recsys_text& text) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (std::int64_t i = 0; i < text.size; ++i) {
    hash = (hash ^ static_cast<unsigned char>(text.data[i])) * 0x100000001b3u;
  }
  return static_cast<std::int64_t>(hash);
}

const std::int64_t* integers(const Tensor& tensor) {
  return static_cast<const std::int64_t*>(tensor.data.get());
}

std::int64_t floor_divided(std::int64_t value, std::int64_t by) {
  return value / by - (value % by < 0);
}

struct Date {
  std::int64_t month, day;  // from 0
};

// The day and month of a day since 1970 in the Gregorian calendar, whose years begin in March here
// (Hinnant, "chrono-Compatible Low-Level Date Algorithms").
Date date_of(std::int64_t days) {
  const std::int64_t shifted = days + 719468;
  const std::int64_t era_day = shifted - floor_divided(shifted, 146097) * 146097;
  const std::int64_t year =
      (era_day - era_day / 1460 + era_day / 36524 - era_day / 146096) / 365;
  const std::int64_t year_day = era_day - (365 * year + year / 4 - year / 100);
  const std::int64_t month = (5 * year_day + 2) / 153;  // from March
  return {(month + 2) % 12, year_day - (153 * month + 2) / 5};
}

std::int64_t part_of(const std::string& part, std::int64_t seconds) {
  const std::int64_t days = floor_divided(seconds, kDay);
  if (part == "hour") {
    return (seconds - days * kDay) / kHour;
  }
  if (part == "weekday") {  // day 0 was a Thursday
    const std::int64_t day = (days + 3) % 7;
    return day < 0 ? day + 7 : day;
  }
  const Date date = date_of(days);
  return part == "day" ? date.day : date.month;
}

const char* name_of_any(std::int32_t dtype) {
  return dtype < RECSYS_BOOL || dtype > RECSYS_TEXT ? "an unknown dtype"
                                                    : name_of(static_cast<recsys_dtype>(dtype));
}

const recsys_text& text_at(const recsys_tensor& tensor, std::int64_t i) {
  return static_cast<const recsys_text*>(tensor.data)[i];
}

void check_dtype(const recsys_tensor* tensor, bool is_right, const char* wanted) {
  if (tensor != nullptr && !is_right) {
    refuse(tensor->name, " must be ", wanted, "; received ", name_of_any(tensor->dtype), ".");
  }
}

bool is_number(const Column& column) {
  return column.kind == Column::Kind::kNumeric || column.kind == Column::Kind::kBuckets ||
         column.kind == Column::Kind::kVector;
}

}  // namespace

bool is_whole(std::int32_t dtype) { return dtype == RECSYS_INT64 || dtype == RECSYS_INT32; }

bool is_real(std::int32_t dtype) {
  return is_whole(dtype) || dtype == RECSYS_FLOAT32 || dtype == RECSYS_FLOAT64 ||
         dtype == RECSYS_BOOL;
}

std::int64_t integer_at(const recsys_tensor& tensor, std::int64_t i) {
  return tensor.dtype == RECSYS_INT64 ? static_cast<const std::int64_t*>(tensor.data)[i]
                                      : static_cast<const std::int32_t*>(tensor.data)[i];
}

double real_at(const recsys_tensor& tensor, std::int64_t i) {
  switch (tensor.dtype) {
    case RECSYS_BOOL: return static_cast<const std::uint8_t*>(tensor.data)[i] != 0;
    case RECSYS_FLOAT32: return static_cast<const float*>(tensor.data)[i];
    case RECSYS_FLOAT64: return static_cast<const double*>(tensor.data)[i];
    default: return static_cast<double>(integer_at(tensor, i));
  }
}

std::int64_t Vocabulary::row_of(std::int64_t hash) const {
  const std::int64_t* first = integers(hashes);
  const std::int64_t* last = first + hashes.shape[0];
  const std::int64_t* found = std::lower_bound(first, last, hash);
  return found == last || *found != hash ? kUnknown : integers(rows)[found - first];
}

std::int64_t Vocabulary::row_of(const recsys_text& text) const {
  const std::int64_t hash = hash_of(text);
  const std::int64_t* first = integers(hashes);
  const std::int64_t* last = first + hashes.shape[0];
  const std::int64_t place = std::lower_bound(first, last, hash) - first;
  if (place == hashes.shape[0] || first[place] != hash) {
    return kUnknown;
  }
  const std::int64_t begin = integers(offsets)[place], end = integers(offsets)[place + 1];
  const char* known = static_cast<const char*>(bytes.data.get()) + begin;
  const bool is_equal =
      end - begin == text.size &&
      (text.size == 0 || std::memcmp(known, text.data, static_cast<std::size_t>(text.size)) == 0);
  return is_equal ? integers(rows)[place] : kUnknown;
}

ColumnView ColumnView::of(const Column& column, const TensorsByName& tensors) {
  const auto find = [&](const std::string& name) -> const recsys_tensor* {
    const auto found = tensors.find(name);
    return found == tensors.end() ? nullptr : found->second;
  };
  ColumnView view;
  view.column = &column;
  view.values = find(column.name);
  view.missing = find(column.name + ".missing");
  view.lengths = column.is_list ? find(column.name + ".lengths") : nullptr;
  view.weights = column.weights.empty() ? nullptr : find(column.weights);
  const bool is_optional = column.is_optional || column.missing.has_value();
  if (view.values == nullptr && view.lengths == nullptr && !is_optional) {
    refuse("A request must have a column '", column.name, "'; it is missing.");
  }
  view.check_dtypes();
  const bool has_texts = !column.separator.empty() && column.is_text;
  if (has_texts && view.values != nullptr && view.lengths == nullptr) {
    view.split_texts();
  }
  view.check_sizes();
  return view;
}

// Without lengths, each row has a text with its values between separators. Missing and empty texts
// have no values.
void ColumnView::split_texts() {
  check_texts();
  if (missing != nullptr && missing->shape[0] != num_values()) {
    refuse(missing->name, " must have one entry per text of ", column->name, ", ", num_values(),
           "; received ", missing->shape[0], ".");
  }
  const std::string& separator = column->separator;
  split = std::make_shared<SplitTexts>();
  for (std::int64_t row = 0; row < num_values(); ++row) {
    const std::size_t before = split->texts.size();
    const recsys_text& text = text_at(*values, row);
    if (!is_missing(row) && text.size > 0) {
      const char* begin = text.data;
      const char* const end = begin + text.size;
      const char* stop = begin;
      do {
        stop = std::search(begin, end, separator.begin(), separator.end());
        split->texts.push_back({begin, stop - begin});
        begin = stop == end ? end : stop + separator.size();
      } while (stop != end);
    }
    split->lengths.push_back(static_cast<std::int64_t>(split->texts.size() - before));
  }
  split->num_values = static_cast<std::int64_t>(split->texts.size());
  split->num_rows = num_values();
  split->values_tensor = {values->name, RECSYS_TEXT, 1, &split->num_values, nullptr,
                          split->texts.data()};
  split->lengths_tensor = {values->name, RECSYS_INT64, 1, &split->num_rows, nullptr,
                           split->lengths.data()};
  values = &split->values_tensor;
  lengths = &split->lengths_tensor;
  missing = nullptr;
}

void ColumnView::check_dtypes() const {
  if (values != nullptr) {
    const std::int32_t dtype = values->dtype;
    if (is_number(*column)) {
      check_dtype(values, is_real(dtype), "numbers");
    } else if (column->is_text) {
      check_dtype(values, dtype == RECSYS_TEXT, "texts");
    } else {
      check_dtype(values, is_whole(dtype), "int64 or int32");
    }
  }
  check_dtype(missing, missing != nullptr && missing->dtype == RECSYS_BOOL, "bool");
  check_dtype(lengths, lengths != nullptr && is_whole(lengths->dtype), "int64 or int32");
  check_dtype(weights, weights != nullptr && is_real(weights->dtype), "numbers");
}

void ColumnView::check_sizes() const {
  for (const recsys_tensor* tensor : {missing, weights}) {
    if (tensor != nullptr && tensor->shape[0] != num_values()) {
      refuse(tensor->name, " must have one entry per value of ", column->name, ", ", num_values(),
             "; received ", tensor->shape[0], ".");
    }
  }
  if (!column->weights.empty() && weights == nullptr && num_values() > 0) {
    refuse(column->weights, " must have one weight per value of ", column->name,
           "; it is missing.");
  }
  std::int64_t sum = 0;
  for (std::int64_t row = 0; lengths != nullptr && row < lengths->shape[0]; ++row) {
    const std::int64_t length = integer_at(*lengths, row);
    if (length < 0 || __builtin_add_overflow(sum, length, &sum)) {
      refuse(lengths->name, " must have lengths from 0; received ", length, " for row ", row, ".");
    }
  }
  if (lengths != nullptr && sum != num_values()) {
    refuse(lengths->name, " must add up to the number of values, ", num_values(), "; received ",
           sum, ".");
  }
  check_texts();
}

void ColumnView::check_texts() const {
  for (std::int64_t i = 0; values != nullptr && values->dtype == RECSYS_TEXT && i < num_values();
       ++i) {
    if (text_at(*values, i).size < 0) {
      refuse(values->name, " must have texts of a size from 0; received ", text_at(*values, i).size,
             " at position ", i, ".");
    }
  }
}

std::int64_t ColumnView::num_values() const { return values == nullptr ? 0 : values->shape[0]; }

std::int64_t ColumnView::num_rows() const {
  return lengths != nullptr ? lengths->shape[0] : values == nullptr ? -1 : values->shape[0];
}

std::int64_t ColumnView::length_of(std::int64_t row) const {
  return lengths != nullptr ? integer_at(*lengths, row) : values == nullptr ? 0 : 1;
}

bool ColumnView::is_missing(std::int64_t i) const {
  if (values == nullptr ||
      (missing != nullptr && static_cast<const std::uint8_t*>(missing->data)[i] != 0)) {
    return true;
  }
  if (values->dtype == RECSYS_TEXT) {
    return text_at(*values, i).data == nullptr;
  }
  return !is_whole(values->dtype) && std::isnan(real_at(*values, i));
}

std::int64_t ColumnView::id_at(std::int64_t i) const {
  const bool is_text = values->dtype == RECSYS_TEXT;
  if (column->kind == Column::Kind::kCategorical) {
    return is_text ? column->vocabulary->row_of(text_at(*values, i))
                   : column->vocabulary->row_of(integer_at(*values, i));
  }
  const std::int64_t id = is_text ? hash_of(text_at(*values, i)) : integer_at(*values, i);
  if (column->kind == Column::Kind::kIds || !column->rows.has_value()) {
    return id;
  }
  const std::uint64_t mixed = mix64(static_cast<std::uint64_t>(id)) << 1 >> 1;
  return static_cast<std::int64_t>(mixed % static_cast<std::uint64_t>(*column->rows));
}

std::optional<double> ColumnView::number_at(std::int64_t row) const {
  const bool is_given = !is_missing(row);
  if (!is_given && !column->missing.has_value()) {
    return std::nullopt;
  }
  double value = is_given ? real_at(*values, row) : *column->missing;
  if (!std::isfinite(value)) {
    refuse(column->name, " must have finite numbers; received ", value, " in row ", row, ".");
  }
  if (column->low.has_value()) {
    value = std::min(std::max(value, *column->low), *column->high);
  }
  if (column->has_log) {
    if (value <= -1) {
      refuse(column->name, " must have numbers above -1; received ", value, " in row ", row, ".");
    }
    value = std::log1p(value);
  }
  if (std::abs(value) > std::numeric_limits<float>::max()) {
    refuse(column->name, " must have numbers in the range of float32; received ", value,
           " in row ", row, ".");
  }
  return value;
}

std::optional<std::int64_t> ColumnView::part_at(const std::string& part, std::int64_t row) const {
  if (is_missing(row)) {
    return std::nullopt;
  }
  const std::int64_t seconds = floor_divided(integer_at(*values, row), column->per_second);
  if (seconds < kFirstYear || seconds > kLastYear) {
    refuse(column->name, " must have times of the years 1 to 9999; received ",
           integer_at(*values, row), " in row ", row, ".");
  }
  return part_of(part, seconds);
}

}  // namespace recsys
