// The C API over recsys::Predictor: no exception leaves it.
#include <map>
#include <new>
#include <string>
#include <vector>

#include "error.h"
#include "predictor.h"
#include "row_values.h"

struct recsys_predictor {
  recsys_predictor(const char* version, const recsys::Options& options)
      : predictor(version, options) {}

  recsys::Predictor predictor;
};

struct recsys_responses {
  struct Values {
    std::vector<recsys::Tensor> tensors;
    std::vector<recsys_tensor> views;
  };

  std::vector<recsys::Response> responses;
  std::vector<std::vector<recsys_tensor>> views;
  std::map<std::int32_t, Values> values;  // of the responses whose values were read
};

namespace {

thread_local std::string last_error;

recsys_code set_error(recsys_code code, const char* message) noexcept {
  try {
    last_error = message;
  } catch (...) {
    last_error.clear();
  }
  return code;
}

// Calls a function, and converts an exception to a code and a message.
template <typename Function>
recsys_code guarded(Function function) noexcept {
  try {
    function();
    return RECSYS_OK;
  } catch (const recsys::Error& error) {
    return set_error(error.code, error.what());
  } catch (const std::bad_alloc&) {
    return set_error(RECSYS_FAILED, "Memory ran out.");
  } catch (const std::exception& error) {
    return set_error(RECSYS_FAILED, error.what());
  } catch (...) {
    return set_error(RECSYS_FAILED, "An unknown error was raised.");
  }
}

// A text for the caller, kept by this thread.
const char* kept(std::string text) {
  thread_local std::string found;
  found = std::move(text);
  return found.c_str();
}

void require(bool holds, const char* message) {
  if (!holds) {
    recsys::fail(RECSYS_BAD_REQUEST, message);
  }
}

recsys::Options options_of(const recsys_options* given) {
  recsys::Options options;
  if (given != nullptr) {
    require(given->num_runners >= 1, "num_runners must be at least 1.");
    require(given->num_threads >= 0, "num_threads must not be negative.");
    options.device = given->device;
    options.num_runners = given->num_runners;
    options.num_threads = given->num_threads;
    options.verify_tables = given->verify_tables != 0;
    options.poll_ms = given->poll_ms;
    options.program = given->program == nullptr ? "" : given->program;
    options.fbgemm = given->fbgemm == nullptr ? "" : given->fbgemm;
  }
  return options;
}

recsys_tensor view_of(const char* name, const recsys::Tensor& tensor) {
  return {name, tensor.dtype, static_cast<std::int32_t>(tensor.shape.size()), tensor.shape.data(),
          nullptr, tensor.data.get()};
}

bool has(const recsys_responses* responses, std::int32_t request) {
  return responses != nullptr && request >= 0 &&
         static_cast<std::size_t>(request) < responses->responses.size();
}

}  // namespace

extern "C" {

void recsys_default_options(recsys_options* options) {
  if (options != nullptr) {
    *options = {-1, 1, 0, 1, 0, nullptr, nullptr};
  }
}

recsys_code recsys_open(const char* version, const recsys_options* options,
                        recsys_predictor** predictor) {
  return guarded([&] {
    require(version != nullptr && predictor != nullptr, "recsys_open must have all arguments.");
    *predictor = nullptr;
    *predictor = new recsys_predictor(version, options_of(options));
  });
}

void recsys_close(recsys_predictor* predictor) {
  guarded([&] { delete predictor; });
}

const char* recsys_manifest(const recsys_predictor* predictor) {
  return predictor == nullptr ? "" : kept(*predictor->predictor.manifest());
}

recsys_code recsys_check(const recsys_predictor* predictor, const recsys_request* request,
                         int64_t* num_rows) {
  return guarded([&] {
    require(predictor != nullptr && request != nullptr && num_rows != nullptr,
            "recsys_check must have all arguments.");
    *num_rows = predictor->predictor.check(*request);
  });
}

recsys_code recsys_run(recsys_predictor* predictor, const recsys_request* requests,
                       int32_t num_requests, recsys_responses** responses) {
  return guarded([&] {
    require(predictor != nullptr && responses != nullptr && num_requests >= 0 &&
                (requests != nullptr || num_requests == 0),
            "recsys_run must have all arguments.");
    *responses = nullptr;
    auto found = std::make_unique<recsys_responses>();
    found->responses = predictor->predictor.run({requests, requests + num_requests});
    for (const recsys::Response& response : found->responses) {
      std::vector<recsys_tensor>& views = found->views.emplace_back();
      for (std::size_t i = 0; i < response.outputs.size(); ++i) {
        views.push_back(view_of(response.names[i].c_str(), response.outputs[i]));
      }
    }
    *responses = found.release();
  });
}

recsys_code recsys_response_code(const recsys_responses* responses, int32_t request) {
  return has(responses, request) ? responses->responses[request].code : RECSYS_BAD_REQUEST;
}

const char* recsys_response_message(const recsys_responses* responses, int32_t request) {
  return has(responses, request) ? responses->responses[request].message.c_str()
                                 : "There is no such response.";
}

int32_t recsys_response_outputs(const recsys_responses* responses, int32_t request,
                                const recsys_tensor** outputs) {
  const bool is_known = has(responses, request);
  if (outputs != nullptr) {
    *outputs = is_known ? responses->views[request].data() : nullptr;
  }
  return is_known ? static_cast<int32_t>(responses->views[request].size()) : 0;
}

recsys_code recsys_response_values(recsys_responses* responses, int32_t request,
                                   const recsys_tensor** values, int32_t* num_values) {
  return guarded([&] {
    require(values != nullptr && num_values != nullptr,
            "recsys_response_values must have all arguments.");
    *values = nullptr;
    *num_values = 0;
    require(has(responses, request), "There is no such response.");
    const recsys::Response& response = responses->responses[request];
    if (response.row_values == nullptr) {
      return;
    }
    if (responses->values.count(request) == 0) {
      recsys_responses::Values found{response.row_values->of(response.outputs), {}};
      found.views = {view_of("values", found.tensors[0]),
                     view_of("values.missing", found.tensors[1])};
      responses->values[request] = std::move(found);
    }
    const std::vector<recsys_tensor>& views = responses->values[request].views;
    *values = views.data();
    *num_values = static_cast<int32_t>(views.size());
  });
}

void recsys_responses_free(recsys_responses* responses) { delete responses; }

recsys_code recsys_swap(recsys_predictor* predictor, const char* version) {
  return guarded([&] {
    require(predictor != nullptr && version != nullptr, "recsys_swap must have all arguments.");
    predictor->predictor.swap(version);
  });
}

recsys_code recsys_update(recsys_predictor* predictor, const char* table, const int64_t* ids,
                          int64_t num_ids, const void* rows, int64_t row_bytes) {
  return guarded([&] {
    require(predictor != nullptr && table != nullptr && num_ids >= 0 &&
                (num_ids == 0 || (ids != nullptr && rows != nullptr)),
            "recsys_update must have all arguments.");
    predictor->predictor.update({table, ids, num_ids, rows, row_bytes});
  });
}

recsys_code recsys_apply(recsys_predictor* predictor, const char* file) {
  return guarded([&] {
    require(predictor != nullptr && file != nullptr, "recsys_apply must have all arguments.");
    predictor->predictor.apply(file);
  });
}

int64_t recsys_sequence(const recsys_predictor* predictor) {
  return predictor == nullptr ? 0 : predictor->predictor.sequence();
}

const char* recsys_delta_error(const recsys_predictor* predictor) {
  return predictor == nullptr ? "" : kept(predictor->predictor.delta_error());
}

const char* recsys_last_error(void) { return last_error.c_str(); }

}  // extern "C"
