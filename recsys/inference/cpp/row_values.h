// The values of the data that rows of a table stand for, such as recommended items.
#pragma once

#include <cstdint>
#include <vector>

#include "columns.h"
#include "tensor.h"

namespace recsys {

// The inverse of a vocabulary. Several threads may use it at the same time.
class RowValues {
 public:
  // `output`: the position of the rows in the outputs of a response. Throws std::invalid_argument
  // unless each row from 2 has one value.
  RowValues(const Vocabulary& vocabulary, bool is_text, std::size_t output);

  // The tensors `values`, int64 or texts, and `values.missing`, bool, in the shape of the rows. The
  // texts refer to the memory of this object. A row without a value, -1 to 1, has the number 0 or a
  // text without data. Throws Error(RECSYS_FAILED) for a row outside the table.
  std::vector<Tensor> of(const std::vector<Tensor>& outputs) const;

 private:
  const Vocabulary vocabulary_;
  const bool is_text_;
  const std::size_t output_;
  std::vector<std::int64_t> places_;  // in the vocabulary, of the rows from 2
};

}  // namespace recsys
