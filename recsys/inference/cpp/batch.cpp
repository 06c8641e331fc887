#include "batch.h"

#include <algorithm>
#include <cstring>

#include "error.h"

namespace recsys {
namespace {

constexpr std::int64_t kNoLimit = -1;

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  fail(RECSYS_BAD_REQUEST, parts...);
}

// The words of `recsys.kernels.bounds.bad_id_text`.
std::string bad_id_text(const std::string& feature, std::int64_t id, std::int64_t position,
                        std::int64_t rows) {
  return "Id " + std::to_string(id) + " at position " + std::to_string(position) +
         " of feature '" + feature + "' must be from 0 to " + std::to_string(rows - 1) + ".";
}

bool is_integer(std::int32_t dtype) { return dtype == RECSYS_INT64 || dtype == RECSYS_INT32; }

std::string shape_text(const TensorView& tensor) {
  return recsys::shape_text(tensor.shape, static_cast<std::size_t>(tensor.num_dims));
}

// Calls a function with a pointer to a tensor's int32 or int64 values.
template <typename Function>
auto with_integers(const TensorView& tensor, Function function) {
  return tensor.dtype == RECSYS_INT64 ? function(static_cast<const std::int64_t*>(tensor.data))
                                      : function(static_cast<const std::int32_t*>(tensor.data));
}

// Converts values to the dtype of a program's input; returns the end of what was written.
char* append_integers(char* out, recsys_dtype dtype, const TensorView& from) {
  return with_integers(from, [&](const auto* values) {
    const std::int64_t count = from.shape[0];
    if (static_cast<recsys_dtype>(from.dtype) == dtype) {
      const std::size_t bytes = static_cast<std::size_t>(count) * size_of(dtype);
      if (bytes > 0) {
        std::memcpy(out, values, bytes);
      }
      return out + bytes;
    }
    if (dtype == RECSYS_INT64) {
      return reinterpret_cast<char*>(
          std::copy_n(values, count, reinterpret_cast<std::int64_t*>(out)));
    }
    auto* narrow = reinterpret_cast<std::int32_t*>(out);
    std::transform(values, values + count, narrow,
                   [](auto value) { return static_cast<std::int32_t>(value); });
    return reinterpret_cast<char*>(narrow + count);
  });
}

// Appends equal lengths.
char* append_repeated(char* out, recsys_dtype dtype, std::int64_t value, std::int64_t count) {
  if (dtype == RECSYS_INT64) {
    return reinterpret_cast<char*>(std::fill_n(reinterpret_cast<std::int64_t*>(out), count, value));
  }
  return reinterpret_cast<char*>(std::fill_n(reinterpret_cast<std::int32_t*>(out), count,
                                             static_cast<std::int32_t>(value)));
}

void fill(const Tensor& tensor, char* first, std::size_t count, double value) {
  switch (tensor.dtype) {
    case RECSYS_FLOAT32: std::fill_n(reinterpret_cast<float*>(first), count, value); break;
    case RECSYS_FLOAT64: std::fill_n(reinterpret_cast<double*>(first), count, value); break;
    case RECSYS_INT64: std::fill_n(reinterpret_cast<std::int64_t*>(first), count, value); break;
    case RECSYS_INT32: std::fill_n(reinterpret_cast<std::int32_t*>(first), count, value); break;
    case RECSYS_UINT8: std::fill_n(reinterpret_cast<std::uint8_t*>(first), count, value); break;
    case RECSYS_BOOL: std::fill_n(reinterpret_cast<bool*>(first), count, value != 0); break;
    default:  // float16 and bfloat16: only zero has bits that are known here
      std::memset(first, 0, count * size_of(tensor.dtype));
  }
}

}  // namespace

Batcher::Batcher(Schema schema) : schema_(std::move(schema)) {
  for (std::size_t i = 0; i < schema_.inputs.size(); ++i) {
    const Input& input = schema_.inputs[i];
    if (!input.is_jagged) {
      slots_.insert({input.name, {Part::kDense, i, i}});
      const bool is_half = input.dtype == RECSYS_FLOAT16 || input.dtype == RECSYS_BFLOAT16;
      if (is_half && input.fill.value_or(0) != 0) {
        fail(RECSYS_BAD_PACKAGE, "The default of ", input.name, " must be 0, as it is ",
             name_of(input.dtype), ".");
      }
    }
    for (const Feature& feature : input.features) {
      const std::size_t index = features_.size();
      // other ids would lose bits on their way to the program
      limits_.push_back(feature.rows.value_or(input.dtype == RECSYS_INT32
                                                  ? std::int64_t{1} << 31
                                                  : kNoLimit));
      slots_.insert({feature.tensor, {Part::kIds, i, index}});
      slots_.insert({feature.tensor + ".lengths", {Part::kLengths, i, index}});
      if (input.is_weighted) {
        slots_.insert({feature.tensor + ".weights", {Part::kWeights, i, index}});
      }
      features_.push_back(&feature);
      is_weighted_.push_back(input.is_weighted);
    }
  }
  for (const Output& output : schema_.outputs) {
    for (const std::string& name : output.tensors()) {
      output_names_.push_back(name);
    }
  }
}

const Batcher::Slot& Batcher::slot_of(const std::string& name) const {
  const auto found = slots_.find(name);
  if (found == slots_.end()) {
    std::string known;
    for (const Input& input : schema_.inputs) {
      if (!input.is_jagged) {
        known += (known.empty() ? "" : ", ") + input.name;
      }
      for (const Feature& feature : input.features) {
        known += (known.empty() ? "" : ", ") + feature.tensor;
      }
    }
    refuse("A request must have tensors of the model (", known, "); received '", name, "'.");
  }
  return found->second;
}

void Batcher::check_tensor(const TensorView& tensor, const Slot& slot) const {
  const Input& input = schema_.inputs[slot.input];
  const char* name = tensor.name;
  if (tensor.dtype < RECSYS_BOOL || tensor.dtype > RECSYS_FLOAT64) {
    refuse(name, " must have a dtype of recsys_dtype; received ", tensor.dtype, ".");
  }
  const auto dtype = static_cast<recsys_dtype>(tensor.dtype);
  const bool is_list = slot.part == Part::kIds || slot.part == Part::kLengths;
  const recsys_dtype wanted = slot.part == Part::kDense ? input.dtype : RECSYS_FLOAT32;
  if (is_list ? !is_integer(dtype) : dtype != wanted) {
    refuse(name, " must be ", is_list ? "int64 or int32" : name_of(wanted), "; received ",
           name_of(dtype), ".");
  }
  const std::vector<std::int64_t> any = {-1};
  const std::vector<std::int64_t>& shape = slot.part == Part::kDense ? input.shape : any;
  bool fits = static_cast<std::size_t>(std::max(tensor.num_dims, 0)) == shape.size();
  for (std::size_t i = 0; fits && i < shape.size(); ++i) {
    fits = i == 0 ? tensor.shape[0] >= 0 : tensor.shape[i] == shape[i];
  }
  if (!fits) {
    refuse(name, " must have the shape ", recsys::shape_text(shape.data(), shape.size()),
           "; received ",
           tensor.num_dims < 0 || tensor.num_dims > 64 ? "a bad number of dims"
                                                       : shape_text(tensor),
           ".");
  }
  std::int64_t step = 1;
  bool is_contiguous = true;
  for (int i = tensor.num_dims - 1; i >= 0; --i) {
    if (tensor.strides != nullptr && tensor.shape[i] > 1 && tensor.strides[i] != step) {
      is_contiguous = false;
    }
    if (__builtin_mul_overflow(step, tensor.shape[i], &step)) {
      refuse(name, " must be smaller; received the shape ", shape_text(tensor), ".");
    }
  }
  if (!is_contiguous && step > 0) {
    refuse(name, " must be contiguous; received strides ",
           recsys::shape_text(tensor.strides, static_cast<std::size_t>(tensor.num_dims)),
           " for the shape ", shape_text(tensor), ".");
  }
  if (tensor.data == nullptr && step > 0) {
    refuse(name, " must have data; received a null pointer.");
  }
}

void Batcher::check_bags(const CheckedRequest::Bags& bags, std::size_t feature) const {
  const std::string& name = features_[feature]->tensor;
  const std::int64_t rows = limits_[feature];
  const std::int64_t num_ids = bags.num_ids();
  if (bags.lengths != nullptr) {
    with_integers(*bags.lengths, [&](const auto* lengths) {
      std::int64_t sum = 0;
      for (std::int64_t row = 0; row < bags.lengths->shape[0]; ++row) {
        if (lengths[row] < 0) {
          refuse(name, ".lengths must not be negative; received ", lengths[row], " for row ", row,
                 ".");
        }
        if (__builtin_add_overflow(sum, lengths[row], &sum)) {
          sum = -1;
          break;
        }
      }
      if (sum != num_ids) {
        refuse(name, ".lengths must add up to the number of ids, ", num_ids, "; received ",
               sum < 0 ? "more than 2^63" : std::to_string(sum), ".");
      }
    });
  }
  if (is_weighted_[feature] && bags.ids != nullptr &&
      (bags.weights == nullptr || bags.weights->shape[0] != num_ids)) {
    refuse(name, ".weights must have one number per id, ", num_ids, "; received ",
           bags.weights == nullptr ? "none" : std::to_string(bags.weights->shape[0]), ".");
  }
  if (bags.weights != nullptr && bags.ids == nullptr && bags.weights->shape[0] != 0) {
    refuse(name, ".weights must come with ids; received no tensor ", name, ".");
  }
  if (bags.ids == nullptr || rows == kNoLimit) {
    return;
  }
  with_integers(*bags.ids, [&](const auto* ids) {
    // no branch, so that the compiler can use vector instructions
    bool is_bad = false;
    for (std::int64_t i = 0; i < num_ids; ++i) {
      is_bad |= static_cast<std::uint64_t>(static_cast<std::int64_t>(ids[i])) >=
                static_cast<std::uint64_t>(rows);
    }
    for (std::int64_t i = 0; is_bad && i < num_ids; ++i) {
      if (ids[i] < 0 || ids[i] >= rows) {
        refuse(bad_id_text(name, ids[i], i, rows));
      }
    }
  });
}

std::int64_t Batcher::count_rows(const CheckedRequest& request) const {
  std::int64_t rows = -1;
  std::string first;
  const auto agree = [&](const std::string& name, std::int64_t found) {
    if (rows >= 0 && found != rows) {
      refuse(name, " must have ", rows, " rows, as ", first, " has; received ", found, ".");
    }
    if (rows < 0) {
      rows = found;
      first = name;
    }
  };
  for (const TensorView* dense : request.dense) {
    if (dense != nullptr) {
      agree(dense->name, dense->shape[0]);
    }
  }
  for (std::size_t i = 0; i < features_.size(); ++i) {
    const CheckedRequest::Bags& bags = request.bags[i];
    if (bags.lengths != nullptr) {
      agree(bags.lengths->name, bags.lengths->shape[0]);
    } else if (bags.ids != nullptr) {
      agree(bags.ids->name, bags.ids->shape[0]);
    }
  }
  if (rows < 0) {
    refuse("A request must have a tensor that states its rows: a dense input, ids or lengths.");
  }
  if (rows > schema_.max_rows) {
    refuse("A request must have at most ", schema_.max_rows, " rows; received ", rows,
           ". Split the request.");
  }
  return rows;
}

CheckedRequest Batcher::check(const Request& request) const {
  CheckedRequest found;
  found.dense.resize(schema_.inputs.size());
  found.bags.resize(features_.size());
  if (request.num_tensors < 0 || (request.num_tensors > 0 && request.tensors == nullptr)) {
    refuse("A request must have a list of tensors; received none.");
  }
  for (std::int32_t i = 0; i < request.num_tensors; ++i) {
    const TensorView& tensor = request.tensors[i];
    if (tensor.name == nullptr || (tensor.num_dims > 0 && tensor.shape == nullptr)) {
      refuse("A tensor must have a name and a shape; received none for tensor ", i, ".");
    }
    const Slot& slot = slot_of(tensor.name);
    check_tensor(tensor, slot);
    const TensorView*& place = slot.part == Part::kDense     ? found.dense[slot.index]
                               : slot.part == Part::kIds     ? found.bags[slot.index].ids
                               : slot.part == Part::kLengths ? found.bags[slot.index].lengths
                                                             : found.bags[slot.index].weights;
    if (place != nullptr) {
      refuse("A request must have each tensor once; received '", tensor.name, "' twice.");
    }
    place = &tensor;
  }
  for (std::size_t i = 0; i < schema_.inputs.size(); ++i) {
    const Input& input = schema_.inputs[i];
    if (!input.is_jagged && found.dense[i] == nullptr && !input.fill.has_value()) {
      refuse("A request must have ", input.name, ", which has no default; it is missing.");
    }
  }
  found.num_rows = count_rows(found);
  for (std::size_t i = 0; i < features_.size(); ++i) {
    check_bags(found.bags[i], i);
  }
  return found;
}

Batch Batcher::merge(const std::vector<CheckedRequest>& requests) const {
  Batch batch;
  for (const CheckedRequest& request : requests) {
    batch.rows.push_back(request.num_rows);
    batch.num_rows += request.num_rows;
  }
  std::size_t first = 0;  // feature of the input
  for (std::size_t i = 0; i < schema_.inputs.size(); ++i) {
    const Input& input = schema_.inputs[i];
    if (!input.is_jagged) {
      std::vector<std::int64_t> shape = input.shape;
      shape[0] = batch.num_rows;
      Tensor& merged = batch.inputs.emplace_back(allocate(input.dtype, std::move(shape)));
      const std::int64_t values = batch.num_rows == 0 ? 0 : merged.numel() / batch.num_rows;
      char* out = static_cast<char*>(merged.data.get());
      for (const CheckedRequest& request : requests) {
        const auto count = static_cast<std::size_t>(request.num_rows * values);
        const std::size_t bytes = count * size_of(input.dtype);
        if (request.dense[i] == nullptr) {
          fill(merged, out, count, *input.fill);
        } else if (bytes > 0) {
          std::memcpy(out, request.dense[i]->data, bytes);
        }
        out += bytes;
      }
      continue;
    }
    const std::size_t end = first + input.features.size();
    std::int64_t num_ids = 0;
    for (const CheckedRequest& request : requests) {
      for (std::size_t f = first; f < end; ++f) {
        num_ids += request.bags[f].num_ids();
      }
    }
    const auto num_features = static_cast<std::int64_t>(input.features.size());
    Tensor ids = allocate(input.dtype, {num_ids});
    Tensor lengths = allocate(input.lengths_dtype, {num_features * batch.num_rows});
    Tensor weights = allocate(RECSYS_FLOAT32, {input.is_weighted ? num_ids : 0});
    char* next_id = static_cast<char*>(ids.data.get());
    char* next_length = static_cast<char*>(lengths.data.get());
    char* next_weight = static_cast<char*>(weights.data.get());
    for (std::size_t f = first; f < end; ++f) {
      char* const first_id = next_id;
      for (const CheckedRequest& request : requests) {
        const CheckedRequest::Bags& bags = request.bags[f];
        if (bags.ids != nullptr) {
          next_id = append_integers(next_id, input.dtype, *bags.ids);
        }
        if (bags.lengths != nullptr) {
          next_length = append_integers(next_length, input.lengths_dtype, *bags.lengths);
        } else {
          next_length = append_repeated(next_length, input.lengths_dtype,
                                        bags.ids == nullptr ? 0 : 1, request.num_rows);
        }
        if (input.is_weighted && bags.num_ids() > 0) {
          const auto bytes = static_cast<std::size_t>(bags.num_ids()) * sizeof(float);
          std::memcpy(next_weight, bags.weights->data, bytes);
          next_weight += bytes;
        }
      }
      if (!features_[f]->index.empty()) {
        auto* own = reinterpret_cast<std::int64_t*>(first_id);
        batch.hashed.push_back(
            {features_[f]->index, own, reinterpret_cast<std::int64_t*>(next_id) - own});
      }
    }
    batch.inputs.push_back(std::move(ids));
    batch.inputs.push_back(std::move(lengths));
    if (input.is_weighted) {
      batch.inputs.push_back(std::move(weights));
    }
    first = end;
  }
  return batch;
}

namespace {

void check_output(const Tensor& tensor, const std::string& name, std::int64_t rows) {
  if (tensor.shape.empty() || tensor.shape[0] != rows) {
    fail(RECSYS_FAILED, "Output ", name, " must have ", rows, " rows; the program returned the ",
         "shape ", recsys::shape_text(tensor.shape.data(), tensor.shape.size()), ".");
  }
}

// A view of some rows.
Tensor rows_of(const Tensor& tensor, std::int64_t first, std::int64_t count) {
  Tensor part{tensor.dtype, tensor.shape, nullptr};
  const std::size_t row =
      tensor.shape[0] == 0 ? 0 : tensor.bytes() / static_cast<std::size_t>(tensor.shape[0]);
  part.shape[0] = count;
  part.data = std::shared_ptr<void>(
      tensor.data, static_cast<char*>(tensor.data.get()) + static_cast<std::size_t>(first) * row);
  return part;
}

std::int64_t sum_of(const Tensor& lengths, std::int64_t first, std::int64_t count) {
  const TensorView view{nullptr, lengths.dtype, 1, lengths.shape.data(), nullptr,
                        lengths.data.get()};
  return with_integers(view, [&](const auto* values) {
    std::int64_t sum = 0;
    for (std::int64_t i = first; i < first + count; ++i) {
      sum += values[i];
    }
    return sum;
  });
}

}  // namespace

std::vector<std::vector<Tensor>> Batcher::split(const Batch& batch,
                                                const std::vector<Tensor>& outputs) const {
  if (outputs.size() != output_names_.size()) {
    fail(RECSYS_FAILED, "The program must return ", output_names_.size(), " tensors; received ",
         outputs.size(), ".");
  }
  std::vector<std::vector<Tensor>> found(batch.rows.size());
  std::size_t next = 0;
  for (const Output& output : schema_.outputs) {
    const Tensor& values = outputs[next];
    const Tensor& lengths = outputs[output.is_jagged ? next + 1 : next];
    check_output(lengths, output.name, batch.num_rows);
    if (output.is_jagged) {
      if (!is_integer(lengths.dtype)) {
        fail(RECSYS_FAILED, "Lengths of output ", output.name, " must be integers; received ",
             name_of(lengths.dtype), ".");
      }
      const std::int64_t num_values = sum_of(lengths, 0, batch.num_rows);
      check_output(values, output.name, num_values);
      if (output.is_weighted) {
        check_output(outputs[next + 2], output.name, num_values);
      }
    }
    std::int64_t first_row = 0, first_value = 0;
    for (std::size_t i = 0; i < batch.rows.size(); ++i) {
      const std::int64_t rows = batch.rows[i];
      if (output.is_jagged) {
        const std::int64_t count = sum_of(lengths, first_row, rows);
        found[i].push_back(rows_of(values, first_value, count));
        found[i].push_back(rows_of(lengths, first_row, rows));
        if (output.is_weighted) {
          found[i].push_back(rows_of(outputs[next + 2], first_value, count));
        }
        first_value += count;
      } else {
        found[i].push_back(rows_of(values, first_row, rows));
      }
      first_row += rows;
    }
    next += output.tensors().size();
  }
  return found;
}

}  // namespace recsys
