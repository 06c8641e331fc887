#include "predictor.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <filesystem>
#include <shared_mutex>
#include <utility>

#include "columns.h"
#include "error.h"
#include "files.h"

namespace fs = std::filesystem;

namespace recsys {

class Version {
 public:
  Version(const std::string& folder, const Options& options)
      : folder_(folder),
        manifest_(verified(folder, options)),
        batcher_(manifest_.schema),
        columns_(manifest_, folder),
        tables_(manifest_, folder),
        program_(load_program(manifest_, folder, tables_, options)),
        text_(std::make_shared<const std::string>(manifest_.text)) {
    check_sample();
    follow();
  }

  std::int64_t max_rows() const { return batcher_.schema().max_rows; }

  // Checks a request of raw columns, or of the model's tensors if the package has no columns.
  CheckedRequest check(const Request& request) const {
    if (columns_.empty()) {
      return batcher_.check(request);
    }
    std::shared_ptr<const Converted> converted = columns_.convert(request);
    CheckedRequest found = batcher_.check(converted->request());
    found.memory = std::move(converted);
    return found;
  }

  std::shared_ptr<const std::string> text() const { return text_; }

  std::vector<Tensor> run_program(const Batch& batch) {
    const std::shared_lock<ReadWriteLock> guard(tables_.lock());
    for (const IdSpan& ids : batch.hashed) {
      tables_.map_ids(ids);
    }
    return program_->run(batch.inputs);
  }

  // Runs requests that were checked, and writes their responses.
  void run(const std::vector<CheckedRequest>& requests, const std::vector<Response*>& responses) {
    try {
      const Batch batch = batcher_.merge(requests);
      std::vector<std::vector<Tensor>> outputs = batcher_.split(batch, run_program(batch));
      for (std::size_t i = 0; i < responses.size(); ++i) {
        responses[i]->names = batcher_.output_names();
        responses[i]->outputs = std::move(outputs[i]);
        responses[i]->row_values = columns_.row_values();
      }
    } catch (const std::exception& error) {
      for (Response* response : responses) {
        response->code = RECSYS_FAILED;
        response->message = text_of_program_error(error);
      }
    }
  }

  void update(const TableUpdate& update) {
    const std::lock_guard<std::mutex> guard(updates_);
    tables_.check(update);
    tables_.write(update);
  }

  void apply(const std::string& file) {
    const std::lock_guard<std::mutex> guard(updates_);
    apply_next(file);
  }

  // Applies new files in deltas/. Throws Error(RECSYS_BAD_DELTA) at the first that does not fit.
  void follow() {
    const std::lock_guard<std::mutex> guard(updates_);
    const fs::path deltas = fs::path(folder_) / "deltas";
    while (true) {
      const fs::path next = deltas / delta_name(sequence_ + 1);
      std::error_code ignored;
      if (!fs::exists(next, ignored)) {
        break;
      }
      apply_next(next.string());
    }
    check_no_later(deltas);
  }

  std::int64_t sequence() const {
    const std::lock_guard<std::mutex> guard(state_);
    return sequence_;
  }

  std::string delta_error() const {
    const std::lock_guard<std::mutex> guard(state_);
    return delta_error_;
  }

  void set_delta_error(const std::string& message) {
    const std::lock_guard<std::mutex> guard(state_);
    delta_error_ = message;
  }

 private:
  static Manifest verified(const std::string& folder, const Options& options) {
    Manifest manifest = Manifest::read(folder);
    manifest.verify_files(folder, options.verify_tables);
    return manifest;
  }

  void apply_next(const std::string& file) {
    const Delta delta = Delta::read(file, manifest_.id);
    if (delta.sequence != sequence_ + 1) {
      fail(RECSYS_BAD_DELTA, "'", file, "' must have the sequence number ", sequence_ + 1,
           "; received ", delta.sequence, ".");
    }
    for (const TableUpdate& update : delta.updates) {
      tables_.check(update);
      tables_.check_hashed(update);
    }
    for (const TableUpdate& update : delta.updates) {
      tables_.write(update);
    }
    const std::lock_guard<std::mutex> guard(state_);
    sequence_ = delta.sequence;
  }

  void check_no_later(const fs::path& deltas) const {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(deltas, ignored)) {
      const std::string name = entry.path().filename().string();
      const std::string next = delta_name(sequence_ + 1);
      if (name.size() == next.size() && entry.path().extension() == ".delta" && name > next &&
          !fs::exists(deltas / next, ignored)) {
        fail(RECSYS_BAD_DELTA, "'", deltas.string(), "' must have ", next, " before ", name,
             "; it is missing.");
      }
    }
  }

  // Runs the request of the package and compares the outputs with its response.
  void check_sample() {
    const fs::path path = fs::path(folder_) / "sample.safetensors";
    Response response;
    Safetensors sample;
    try {
      const std::size_t bytes = fs::file_size(path);
      sample = parse_safetensors(map_file(path.string(), bytes), bytes);
    } catch (const std::exception& error) {
      fail(RECSYS_BAD_PACKAGE, "'", path.string(), "' must be a sample; ", error.what(), ".");
    }
    constexpr const char* kRequest = "request.";
    std::vector<TensorView> tensors;
    for (const auto& [name, tensor] : sample.tensors) {
      if (name.rfind(kRequest, 0) == 0) {
        tensors.push_back({name.c_str() + std::strlen(kRequest), tensor.dtype,
                           static_cast<std::int32_t>(tensor.shape.size()), tensor.shape.data(),
                           nullptr, tensor.data.get()});
      }
    }
    try {
      const Request request{tensors.data(), static_cast<std::int32_t>(tensors.size())};
      run({batcher_.check(request)}, {&response});
    } catch (const Error& error) {
      fail(RECSYS_BAD_PACKAGE, "The sample of the package must be a request; ", error.what());
    }
    if (response.code != RECSYS_OK) {
      fail(RECSYS_BAD_PACKAGE, "The program must run the sample of the package; it raised: ",
           response.message);
    }
    for (std::size_t i = 0; i < response.names.size(); ++i) {
      const auto wanted = sample.tensors.find("response." + response.names[i]);
      if (wanted == sample.tensors.end() || !is_close(response.outputs[i], wanted->second)) {
        fail(RECSYS_BAD_PACKAGE, "The program must return the response of the sample; output ",
             response.names[i], " differs. Write the package again.");
      }
    }
  }

  static bool is_close(const Tensor& found, const Tensor& wanted) {
    if (found.dtype != wanted.dtype || found.shape != wanted.shape) {
      return false;
    }
    for (std::int64_t i = 0; i < found.numel(); ++i) {
      const double a = number_at(found, i), b = number_at(wanted, i);
      const bool are_equal = a == b || (std::isnan(a) && std::isnan(b));
      if (!are_equal && !(is_float(found.dtype) && std::abs(a - b) <= 1e-5 + 1e-4 * std::abs(b))) {
        return false;
      }
    }
    return true;
  }

  const std::string folder_;
  const Manifest manifest_;
  const Batcher batcher_;
  const Columns columns_;
  Tables tables_;
  const std::unique_ptr<Program> program_;
  const std::shared_ptr<const std::string> text_;
  std::mutex updates_;        // one update at a time
  mutable std::mutex state_;  // of the following
  std::int64_t sequence_ = 0;
  std::string delta_error_;
};

namespace {

// Runs a function in a thread that ends with it. A compiled program has thread-local variables, and
// stays in memory as long as a thread that has called it.
template <typename Function>
void in_own_thread(Function function) {
  std::exception_ptr error;
  std::thread([&] {
    try {
      function();
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) {
    std::rethrow_exception(error);
  }
}

std::shared_ptr<Version> open_version(const std::string& folder, const Options& options) {
  std::unique_ptr<Version> opened;
  in_own_thread([&] { opened = std::make_unique<Version>(folder, options); });
  return {opened.release(), [](Version* version) { in_own_thread([=] { delete version; }); }};
}

}  // namespace

Predictor::Predictor(const std::string& version, const Options& options)
    : options_(options), version_(open_version(version, options)) {
  if (options.poll_ms > 0) {
    poller_ = std::thread(&Predictor::poll, this);
  }
}

Predictor::~Predictor() {
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    is_closing_ = true;
  }
  closing_.notify_all();
  if (poller_.joinable()) {
    poller_.join();
  }
}

std::shared_ptr<Version> Predictor::current() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return version_;
}

std::shared_ptr<const std::string> Predictor::manifest() const { return current()->text(); }

std::int64_t Predictor::check(const Request& request) const {
  return current()->check(request).num_rows;
}

std::vector<Response> Predictor::run(const std::vector<Request>& requests) {
  const std::shared_ptr<Version> version = current();
  const std::int64_t max_rows = version->max_rows();
  std::vector<Response> responses(requests.size());
  std::vector<CheckedRequest> batch;
  std::vector<Response*> answers;
  std::int64_t num_rows = 0;
  const auto run_batch = [&] {
    if (!batch.empty()) {
      version->run(batch, answers);
    }
    batch.clear();
    answers.clear();
    num_rows = 0;
  };
  for (std::size_t i = 0; i < requests.size(); ++i) {
    try {
      CheckedRequest checked = version->check(requests[i]);
      if (num_rows + checked.num_rows > max_rows) {
        run_batch();
      }
      num_rows += checked.num_rows;
      batch.push_back(std::move(checked));
      answers.push_back(&responses[i]);
    } catch (const Error& error) {
      responses[i].code = error.code;
      responses[i].message = error.what();
    }
  }
  run_batch();
  return responses;
}

void Predictor::swap(const std::string& version) {
  std::shared_ptr<Version> opened = open_version(version, options_);
  std::shared_ptr<Version> old;  // is destroyed without the lock
  const std::lock_guard<std::mutex> guard(mutex_);
  old = std::exchange(version_, std::move(opened));
}

void Predictor::update(const TableUpdate& update) { current()->update(update); }

void Predictor::apply(const std::string& file) { current()->apply(file); }

std::int64_t Predictor::sequence() const { return current()->sequence(); }

std::string Predictor::delta_error() const { return current()->delta_error(); }

void Predictor::poll() {
  std::unique_lock<std::mutex> guard(mutex_);
  while (!closing_.wait_for(guard, std::chrono::milliseconds(options_.poll_ms),
                            [&] { return is_closing_; })) {
    const std::shared_ptr<Version> version = version_;
    guard.unlock();
    try {
      version->follow();
      version->set_delta_error("");
    } catch (const std::exception& error) {
      version->set_delta_error(error.what());
    }
    guard.lock();
  }
}

}  // namespace recsys
