// A program without torch, for tests of the other files: exact arithmetic on whole numbers.
//
// Inputs: dense [rows, 2], the features `a`, `b` and `h`, and the weighted feature `w`. Output
// `score` [rows, 1]: the row's dense values, plus the first bytes of the rows of table `t` for `a`,
// plus 3 x the ids of `b`, plus 5 x the rows of the hashed ids of `h`, plus the ids of `w` times their
// weights. Jagged output `rows`: the bytes of the rows of `t` for `a`. It raises an error for the
// dense value 666. A third output of the manifest, `items` [rows, 4], has the ids of `w`, then -1.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "program.h"

namespace recsys {
namespace {

constexpr std::int64_t kRowBytes = 8;
constexpr std::int64_t kItems = 4;

class FakeProgram : public Program {
 public:
  FakeProgram(Tables& tables, bool has_items) : tables_(tables), has_items_(has_items) {}

  std::vector<Tensor> run(const std::vector<Tensor>& inputs) override {
    const auto floats = [&](int i) { return static_cast<const float*>(inputs[i].data.get()); };
    const auto whole = [&](int i) {
      return static_cast<const std::int64_t*>(inputs[i].data.get());
    };
    check(inputs);  // a damaged manifest may pass other inputs
    const std::int64_t rows = inputs[0].shape[0];
    const auto* table = static_cast<const std::uint8_t*>(tables_.buffers().at("t.rows").get());
    Tensor score = allocate(RECSYS_FLOAT32, {rows, 1});
    auto* scores = static_cast<float*>(score.data.get());
    for (std::int64_t row = 0; row < rows; ++row) {
      scores[row] = floats(0)[2 * row] + floats(0)[2 * row + 1];
      if (floats(0)[2 * row] == 666) {
        throw std::runtime_error("The dense value is 666.");
      }
    }
    const std::int64_t *ids = whole(1), *lengths = whole(2);
    std::int64_t num_a = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < lengths[row]; ++i, ++num_a) {
        scores[row] += table[ids[num_a] * kRowBytes];
      }
    }
    const std::int64_t* b = ids + num_a;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < lengths[rows + row]; ++i) {
        scores[row] += 3 * static_cast<float>(*b++);
      }
    }
    const std::int64_t* h = b;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < lengths[2 * rows + row]; ++i) {
        scores[row] += 5 * static_cast<float>(*h++);
      }
    }
    const std::int64_t *w = whole(3), *w_lengths = whole(4);
    const float* weights = floats(5);
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t i = 0; i < w_lengths[row]; ++i) {
        scores[row] += static_cast<float>(*w++) * *weights++;
      }
    }
    Tensor values = allocate(RECSYS_UINT8, {num_a, kRowBytes});
    auto* bytes = static_cast<char*>(values.data.get());
    for (std::int64_t i = 0; i < num_a; ++i) {
      std::memcpy(bytes + i * kRowBytes, table + ids[i] * kRowBytes, kRowBytes);
    }
    Tensor found = allocate(RECSYS_INT64, {rows});
    std::memcpy(found.data.get(), lengths, static_cast<std::size_t>(rows) * sizeof *lengths);
    if (!has_items_) {
      return {score, values, found};
    }
    return {score, values, found, items_of(whole(3), w_lengths, rows)};
  }

 private:
  static Tensor items_of(const std::int64_t* ids, const std::int64_t* lengths, std::int64_t rows) {
    Tensor found = allocate(RECSYS_INT64, {rows, kItems});
    auto* items = static_cast<std::int64_t*>(found.data.get());
    std::fill_n(items, rows * kItems, -1);
    for (std::int64_t row = 0; row < rows; ++row) {
      std::copy_n(ids, std::min(lengths[row], kItems), items + row * kItems);
      ids += lengths[row];
    }
    return found;
  }

  static std::int64_t size(const Tensor& tensor) {
    std::int64_t found = 1;
    for (const std::int64_t length : tensor.shape) {
      found *= length;
    }
    return found;
  }

  static std::int64_t sum(const Tensor& lengths) {
    const auto* values = static_cast<const std::int64_t*>(lengths.data.get());
    return std::accumulate(values, values + size(lengths), std::int64_t{0});
  }

  static void check(const std::vector<Tensor>& inputs) {
    const std::vector<int> dtypes = {RECSYS_FLOAT32, RECSYS_INT64, RECSYS_INT64,
                                     RECSYS_INT64,   RECSYS_INT64, RECSYS_FLOAT32};
    bool fits = inputs.size() == dtypes.size();
    for (std::size_t i = 0; fits && i < dtypes.size(); ++i) {
      fits = inputs[i].dtype == dtypes[i];
    }
    fits = fits && inputs[0].shape.size() == 2 && inputs[0].shape[1] == 2;
    const std::int64_t rows = fits ? inputs[0].shape[0] : 0;
    fits = fits && size(inputs[2]) == 3 * rows && size(inputs[4]) == rows &&
           size(inputs[1]) == sum(inputs[2]) && size(inputs[3]) == sum(inputs[4]) &&
           size(inputs[5]) == size(inputs[3]);
    if (!fits) {
      throw std::runtime_error("The inputs do not fit the program.");
    }
  }

  Tables& tables_;
  const bool has_items_;
};

}  // namespace

std::unique_ptr<Program> load_program(const Manifest& manifest, const std::string&, Tables& tables,
                                      const Options& options) {
  manifest.check_machine(manifest.program(options.program), "2.13.0", "1.8.0");
  return std::make_unique<FakeProgram>(tables, manifest.schema.outputs.size() == 3);
}

std::string text_of_program_error(const std::exception& error) { return error.what(); }

}  // namespace recsys
