// Random calls of the C API, most of them wrong: run under AddressSanitizer and UBSan.
//
//     fuzz VERSION CALLS SEED [raw]
//
// With `raw` requests have the raw columns of fake_package.py.
//
// Tensors refer to memory of exactly their size, so that reading past an end is an error.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "recsys_predictor.h"

namespace {

std::mt19937_64 generator;

std::int64_t below(std::int64_t limit) {
  return static_cast<std::int64_t>(generator() % static_cast<std::uint64_t>(limit));
}

template <typename T, std::size_t N>
T one_of(const T (&values)[N]) {
  return values[below(N)];
}

struct RandomTensor {
  std::string name;
  std::vector<std::int64_t> shape, strides;
  std::unique_ptr<char[]> data;
  recsys_tensor view{};
};

bool is_raw = false;  // requests have raw columns
long num_texts = 0;   // values of responses

// Replaces the bytes of a tensor by texts: known, unknown, missing and some of a bad size.
void write_texts(RandomTensor& tensor, std::int64_t count) {
  static const char* const kTexts[] = {"Oslo", "Oslo", "Bonn", "", "Z\xc3\xbcrich", nullptr, "x"};
  for (std::int64_t i = 0; i < count; ++i) {
    const char* text = one_of(kTexts);
    recsys_text value{text, text == nullptr ? 0 : static_cast<std::int64_t>(std::strlen(text))};
    if (below(200) == 0) {
      value.size = -1;
    }
    std::memcpy(tensor.data.get() + static_cast<std::size_t>(i) * sizeof value, &value, sizeof value);
  }
}

const char* random_name() {
  static const char* const kRaw[] = {"age",  "age.missing", "pay",         "city",        "city.lengths",
                                     "code", "any",         "any.lengths", "who",         "who.lengths",
                                     "share", "unknown",    "",            "who.missing", "city.missing"};
  static const char* const kNames[] = {"dense",     "a", "a.lengths", "b",         "b.lengths",
                                       "h",         "h.lengths", "w",         "w.lengths",      "w.weights", "a",
                                       "unknown",   "", "dense.lengths"};
  return is_raw ? one_of(kRaw) : one_of(kNames);
}

std::unique_ptr<RandomTensor> random_tensor() {
  static const std::int64_t kIds[] = {0,  1,  2,  3,  99, -1, INT64_MAX, INT64_MIN,
                                      1,  2,  0,  1,  1,  4};
  static const std::int64_t kSizes[] = {0, 1, 2, 2, 2, 3, 5, -1, INT64_MAX, 1LL << 33};
  static const std::int32_t kSizeOf[] = {1, 1, 4, 8, 2, 2, 4, 8, sizeof(recsys_text)};
  auto tensor = std::make_unique<RandomTensor>();
  tensor->name = random_name();
  const bool is_wild = below(6) == 0;
  const bool is_dense = tensor->name == "dense";
  std::int32_t dtype = is_dense || tensor->name == "w.weights" ? RECSYS_FLOAT32 : RECSYS_INT64;
  if (tensor->name == "age" || tensor->name == "pay" || tensor->name == "share") {
    dtype = below(2) == 0 ? RECSYS_FLOAT32 : RECSYS_FLOAT64;
  } else if (tensor->name == "city" || tensor->name == "any") {
    dtype = RECSYS_TEXT;
  } else if (tensor->name.find(".missing") != std::string::npos) {
    dtype = RECSYS_BOOL;
  }
  std::int64_t num_dims = is_dense ? 2 : 1;
  if (is_wild) {
    dtype = static_cast<std::int32_t>(below(11)) - 1;
    num_dims = below(4);
  }
  std::int64_t count = 1;
  for (std::int64_t i = 0; i < num_dims; ++i) {
    const std::int64_t size = is_wild ? one_of(kSizes) : i == 1 ? 2 : below(4);
    tensor->shape.push_back(size);
    tensor->strides.push_back(below(3));
    count = size < 0 || size > 1000 ? 0 : count * size;
  }
  const std::int32_t size = dtype >= 0 && dtype <= RECSYS_TEXT ? kSizeOf[dtype] : 1;
  tensor->data = std::make_unique<char[]>(static_cast<std::size_t>(count * size));
  for (std::int64_t i = 0; i < count; ++i) {
    if (size == 8) {
      std::int64_t value = below(3) != 0 ? below(3) : one_of(kIds);
      std::memcpy(tensor->data.get() + i * 8, &value, 8);
    } else {
      for (std::int32_t byte = 0; byte < size; ++byte) {
        tensor->data[static_cast<std::size_t>(i * size + byte)] = static_cast<char>(generator());
      }
    }
  }
  if (dtype == RECSYS_TEXT) {
    write_texts(*tensor, count);
  }
  bool is_huge = false;  // memory of such a shape cannot be had
  for (const std::int64_t dim : tensor->shape) {
    is_huge = is_huge || dim > 1000;
  }
  const void* data = is_huge || (is_wild && below(4) == 0) ? nullptr : tensor->data.get();
  tensor->view = {is_wild && below(20) == 0 ? nullptr : tensor->name.c_str(), dtype,
                  static_cast<std::int32_t>(num_dims), tensor->shape.data(),
                  below(12) == 0 ? tensor->strides.data() : nullptr, data};
  return tensor;
}

std::unique_ptr<RandomTensor> tensor_of(const std::string& name, std::int32_t dtype,
                                        std::vector<std::int64_t> shape, const void* values,
                                        std::size_t bytes) {
  auto tensor = std::make_unique<RandomTensor>();
  tensor->name = name;
  tensor->shape = std::move(shape);
  tensor->data = std::make_unique<char[]>(bytes);
  if (bytes > 0) {
    std::memcpy(tensor->data.get(), values, bytes);
  }
  tensor->view = {tensor->name.c_str(), dtype, static_cast<std::int32_t>(tensor->shape.size()),
                  tensor->shape.data(), nullptr, tensor->data.get()};
  return tensor;
}

// A good request of raw columns.
std::vector<std::unique_ptr<RandomTensor>> good_raw_request() {
  std::vector<std::unique_ptr<RandomTensor>> found;
  const std::int64_t rows = below(4);
  const std::vector<double> ages(static_cast<std::size_t>(rows), 1.5);
  found.push_back(tensor_of("age", RECSYS_FLOAT64, {rows}, ages.data(), ages.size() * 8));
  const std::vector<std::int64_t> codes(static_cast<std::size_t>(rows), below(100) - 50);
  found.push_back(tensor_of("code", RECSYS_INT64, {rows}, codes.data(), codes.size() * 8));
  const std::vector<std::int64_t> one(static_cast<std::size_t>(rows), 1);
  const std::vector<std::int64_t> ids(static_cast<std::size_t>(rows), below(6));
  found.push_back(tensor_of("who", RECSYS_INT64, {rows}, ids.data(), ids.size() * 8));
  found.push_back(tensor_of("who.lengths", RECSYS_INT64, {rows}, one.data(), one.size() * 8));
  found.push_back(tensor_of("share", RECSYS_FLOAT64, {rows}, ages.data(), ages.size() * 8));
  for (const std::string name : {"city", "any"}) {
    std::vector<std::int64_t> lengths;
    std::int64_t count = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
      lengths.push_back(below(3));
      count += lengths.back();
    }
    const std::vector<recsys_text> texts(static_cast<std::size_t>(count), {"Oslo", 4});
    found.push_back(tensor_of(name, RECSYS_TEXT, {count}, texts.data(),
                              texts.size() * sizeof(recsys_text)));
    found.push_back(
        tensor_of(name + ".lengths", RECSYS_INT64, {rows}, lengths.data(), lengths.size() * 8));
  }
  return found;
}

// A good request of a few rows, without some of its tensors.
std::vector<std::unique_ptr<RandomTensor>> good_request() {
  std::vector<std::unique_ptr<RandomTensor>> found;
  const std::int64_t rows = below(4);
  const std::vector<float> dense(static_cast<std::size_t>(rows) * 2, 1.5F);
  found.push_back(tensor_of("dense", RECSYS_FLOAT32, {rows, 2}, dense.data(), dense.size() * 4));
  for (const std::string name : {"a", "b", "w"}) {
    if (below(4) == 0) {
      continue;
    }
    std::vector<std::int64_t> ids, lengths;
    for (std::int64_t row = 0; row < rows; ++row) {
      lengths.push_back(below(3));
      for (std::int64_t i = 0; i < lengths.back(); ++i) {
        ids.push_back(below(5));
      }
    }
    const auto count = static_cast<std::int64_t>(ids.size());
    const std::vector<float> weights(ids.size(), 0.5F);
    found.push_back(tensor_of(name, RECSYS_INT64, {count}, ids.data(), ids.size() * 8));
    found.push_back(
        tensor_of(name + ".lengths", RECSYS_INT64, {rows}, lengths.data(), lengths.size() * 8));
    if (name == "w") {
      found.push_back(
          tensor_of("w.weights", RECSYS_FLOAT32, {count}, weights.data(), weights.size() * 4));
    }
  }
  return found;
}

void read_outputs(const recsys_responses* responses, std::int32_t request) {
  const recsys_tensor* outputs = nullptr;
  const std::int32_t count = recsys_response_outputs(responses, request, &outputs);
  static const std::size_t kSizeOf[] = {1, 1, 4, 8, 2, 2, 4, 8};
  volatile char sum = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    std::size_t bytes = kSizeOf[outputs[i].dtype];
    for (std::int32_t dim = 0; dim < outputs[i].num_dims; ++dim) {
      bytes *= static_cast<std::size_t>(outputs[i].shape[dim]);
    }
    for (std::size_t byte = 0; byte < bytes; ++byte) {
      sum = static_cast<char>(sum + static_cast<const char*>(outputs[i].data)[byte]);
    }
  }
}

// Reads all bytes of the values of a response.
void read_values(recsys_responses* responses, std::int32_t request) {
  const recsys_tensor* values = nullptr;
  std::int32_t count = 0;
  if (below(2) == 0 ||
      recsys_response_values(responses, request, &values, &count) != RECSYS_OK || count == 0) {
    return;
  }
  volatile char sum = 0;
  for (std::int64_t i = 0; i < values[0].shape[0] * values[0].shape[1]; ++i) {
    const bool is_missing = static_cast<const bool*>(values[1].data)[i];
    const recsys_text text = static_cast<const recsys_text*>(values[0].data)[i];
    if (is_missing != (text.data == nullptr)) {
      std::fprintf(stderr, "fuzz: a missing text must have no data\n");
      std::abort();
    }
    for (std::int64_t byte = 0; byte < text.size; ++byte) {
      sum = static_cast<char>(sum + text.data[byte]);
    }
    num_texts += text.size > 0;
  }
}

void random_update(recsys_predictor* predictor) {
  static const char* const kTables[] = {"t", "t", "t", "unknown", ""};
  const std::int64_t count = below(5), row_bytes = below(4) == 0 ? below(20) : 8;
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < count; ++i) {
    ids.push_back(below(5) == 0 ? below(200) - 100 : below(4));
  }
  const std::vector<char> rows(static_cast<std::size_t>(count * row_bytes), 7);
  recsys_update(predictor, one_of(kTables), ids.data(), count, rows.data(), row_bytes);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4 && argc != 5) {
    std::fprintf(stderr, "fuzz VERSION CALLS SEED [raw]\n");
    return 1;
  }
  const long calls = std::atol(argv[2]);
  is_raw = argc == 5;
  generator.seed(std::strtoull(argv[3], nullptr, 10));
  recsys_predictor* predictor = nullptr;
  if (recsys_open(argv[1], nullptr, &predictor) != RECSYS_OK) {
    std::fprintf(stderr, "fuzz: %s\n", recsys_last_error());
    return 1;
  }
  long answers = 0, refusals = 0;
  for (long call = 0; call < calls; ++call) {
    std::vector<std::unique_ptr<RandomTensor>> tensors;
    std::vector<std::vector<recsys_tensor>> views;
    const std::int64_t num_requests = below(5);
    for (std::int64_t i = 0; i < num_requests; ++i) {
      views.emplace_back();
      std::vector<std::unique_ptr<RandomTensor>> request;
      if (below(3) != 0) {
        request = is_raw ? good_raw_request() : good_request();
      }
      for (std::int64_t j = request.empty() ? below(7) : below(3) / 2; j > 0; --j) {
        request.push_back(random_tensor());
      }
      for (auto& tensor : request) {
        views.back().push_back(tensor->view);
        tensors.push_back(std::move(tensor));
      }
    }
    std::vector<recsys_request> requests;
    for (const auto& view : views) {
      requests.push_back({view.data(), static_cast<std::int32_t>(view.size())});
      std::int64_t rows = 0;
      recsys_check(predictor, &requests.back(), &rows);
    }
    recsys_responses* responses = nullptr;
    if (recsys_run(predictor, requests.data(), static_cast<std::int32_t>(requests.size()),
                   &responses) != RECSYS_OK) {
      std::fprintf(stderr, "fuzz: %s\n", recsys_last_error());
      return 1;
    }
    for (std::int32_t i = -1; i <= num_requests; ++i) {
      const bool is_answer = recsys_response_code(responses, i) == RECSYS_OK;
      const bool has_message = recsys_response_message(responses, i)[0] != '\0';
      if (is_answer == has_message) {
        std::fprintf(stderr, "fuzz: an error must have a message\n");
        return 1;
      }
      (is_answer ? answers : refusals) += 1;
      read_outputs(responses, i);
      read_values(responses, i);
    }
    recsys_responses_free(responses);
    random_update(predictor);
    if (call % 64 == 0) {
      recsys_run(nullptr, nullptr, 0, nullptr);
      recsys_apply(predictor, "/nowhere");
      recsys_swap(predictor, "/nowhere");
      recsys_check(predictor, nullptr, nullptr);
    }
  }
  recsys_close(predictor);
  recsys_close(nullptr);
  std::printf("%ld answers, %ld refusals, %ld texts\n", answers, refusals, num_texts);
  return 0;
}
