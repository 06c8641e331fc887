#include "row_values.h"

#include <algorithm>
#include <stdexcept>

#include "error.h"

namespace recsys {
namespace {

constexpr std::int64_t kNone = -1;   // a row of no item
constexpr std::int64_t kFirst = 2;   // after the rows of missing and unknown values
constexpr std::int64_t kNoPlace = -1;

const std::int64_t* integers(const Tensor& tensor) {
  return static_cast<const std::int64_t*>(tensor.data.get());
}

std::int64_t integer_at(const Tensor& tensor, std::int64_t i) {
  return tensor.dtype == RECSYS_INT64 ? integers(tensor)[i]
                                      : static_cast<const std::int32_t*>(tensor.data.get())[i];
}

}  // namespace

RowValues::RowValues(const Vocabulary& vocabulary, bool is_text, std::size_t output)
    : vocabulary_(vocabulary),
      is_text_(is_text),
      output_(output),
      places_(static_cast<std::size_t>(vocabulary.rows.shape[0]), kNoPlace) {
  const auto count = static_cast<std::int64_t>(places_.size());
  for (std::int64_t place = 0; place < count; ++place) {
    const std::int64_t row = integers(vocabulary_.rows)[place];
    if (row < kFirst || row - kFirst >= count || places_[row - kFirst] != kNoPlace) {
      throw std::invalid_argument(text_of("a vocabulary must have one value for each row from ",
                                          kFirst, " to ", count + kFirst - 1, "; received row ",
                                          row));
    }
    places_[row - kFirst] = place;
  }
}

std::vector<Tensor> RowValues::of(const std::vector<Tensor>& outputs) const {
  const Tensor& rows = outputs[output_];
  if (rows.dtype != RECSYS_INT64 && rows.dtype != RECSYS_INT32) {
    fail(RECSYS_FAILED, "rows must be int64 or int32; the program returned ", name_of(rows.dtype),
         ".");
  }
  const std::int64_t count = rows.numel(), end = kFirst + static_cast<std::int64_t>(places_.size());
  std::int64_t least = count > 0 ? integer_at(rows, 0) : kNone, most = least;
  for (std::int64_t i = 1; i < count; ++i) {
    least = std::min(least, integer_at(rows, i));
    most = std::max(most, integer_at(rows, i));
  }
  if (least < kNone || most >= end) {
    fail(RECSYS_FAILED, "rows must be from -1 to ", end - 1, "; received ", least, " to ", most,
         ".");
  }
  Tensor values = allocate(is_text_ ? RECSYS_TEXT : RECSYS_INT64, rows.shape);
  Tensor missing = allocate(RECSYS_BOOL, rows.shape);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t row = integer_at(rows, i);
    const bool is_missing = row < kFirst;
    static_cast<bool*>(missing.data.get())[i] = is_missing;
    const std::int64_t place = is_missing ? kNoPlace : places_[row - kFirst];
    if (!is_text_) {
      static_cast<std::int64_t*>(values.data.get())[i] =
          is_missing ? 0 : integers(vocabulary_.hashes)[place];
      continue;
    }
    recsys_text text{nullptr, 0};
    if (!is_missing) {
      const std::int64_t* offset = integers(vocabulary_.offsets) + place;
      text = {static_cast<const char*>(vocabulary_.bytes.data.get()) + offset[0],
              offset[1] - offset[0]};
    }
    static_cast<recsys_text*>(values.data.get())[i] = text;
  }
  return {values, missing};
}

}  // namespace recsys
