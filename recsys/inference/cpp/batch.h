// Requests: checks, merging into one batch, and splitting of the outputs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "manifest.h"
#include "tensor.h"

namespace recsys {

class RowValues;
using TensorView = recsys_tensor;
using Request = recsys_request;

// The tensors of a request in the order of the schema. It refers to the request's memory.
struct CheckedRequest {
  struct Bags {
    const TensorView* ids = nullptr;      // null: no ids
    const TensorView* lengths = nullptr;  // null: one id per row, or no ids
    const TensorView* weights = nullptr;
    std::int64_t num_ids() const { return ids == nullptr ? 0 : ids->shape[0]; }
  };

  std::int64_t num_rows = 0;
  std::vector<const TensorView*> dense;  // per input; null: jagged, or missing
  std::vector<Bags> bags;                // per feature of all inputs
  std::shared_ptr<const void> memory;    // of tensors that are not the request's; may be null
};

// Ids of a feature, in an input of a batch, to be replaced by rows.
struct IdSpan {
  std::string table;
  std::int64_t* ids = nullptr;
  std::int64_t count = 0;
};

// The inputs of a program, in order.
struct Batch {
  std::vector<Tensor> inputs;
  std::vector<IdSpan> hashed;
  std::vector<std::int64_t> rows;  // of each request
  std::int64_t num_rows = 0;
};

struct Response {
  recsys_code code = RECSYS_OK;
  std::string message;
  std::vector<std::string> names;
  std::vector<Tensor> outputs;
  std::shared_ptr<const RowValues> row_values;  // of an output; null: of none
};

// Checks and merges requests by a schema.
class Batcher {
 public:
  explicit Batcher(Schema schema);

  // Throws Error(RECSYS_BAD_REQUEST) that names the tensor.
  CheckedRequest check(const Request& request) const;

  // Joins requests: for each feature, the bags of all requests.
  Batch merge(const std::vector<CheckedRequest>& requests) const;

  // The outputs of each request. Throws Error(RECSYS_FAILED) if they do not match the batch.
  std::vector<std::vector<Tensor>> split(const Batch& batch,
                                         const std::vector<Tensor>& outputs) const;

  const Schema& schema() const { return schema_; }
  // The names of all output tensors.
  const std::vector<std::string>& output_names() const { return output_names_; }

 private:
  enum class Part { kDense, kIds, kLengths, kWeights };
  struct Slot {
    Part part;
    std::size_t input;
    std::size_t index;  // of the input for dense, of the feature for other parts
  };

  const Slot& slot_of(const std::string& name) const;
  void check_tensor(const TensorView& tensor, const Slot& slot) const;
  void check_bags(const CheckedRequest::Bags& bags, std::size_t feature) const;
  std::int64_t count_rows(const CheckedRequest& request) const;

  Schema schema_;
  std::vector<const Feature*> features_;
  std::vector<bool> is_weighted_;     // per feature
  std::vector<std::int64_t> limits_;  // ids of a feature are below it; negative: no limit
  std::unordered_map<std::string, Slot> slots_;
  std::vector<std::string> output_names_;
};

}  // namespace recsys
