// Backend for NVIDIA Triton: serves packages of recsys over HTTP and gRPC.
//
// Triton's dynamic batcher joins requests along the first dim, which must be the same number in all
// tensors of a request. Ids and lengths of ragged features differ in it, so the model has
// max_batch_size 0, and the batches are made here: a free instance takes all requests that wait,
// up to max_rows of the manifest.

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "../error.h"
#include "../json.h"
#include "call.h"
#include "queue.h"
#include "triton_api.h"

namespace recsys::triton {
namespace {

// The index of a CUDA device, or kCpu.
constexpr std::int32_t kCpu = -1;

// One version of a model.
class Model {
 public:
  explicit Model(TRITONBACKEND_Model* model) {
    triton_enum kind = 0;
    const char* folder = nullptr;
    std::uint64_t version = 0;
    check(TRITONBACKEND_ModelRepository(model, &kind, &folder));
    check(TRITONBACKEND_ModelVersion(model, &version));
    version_ = text_of(folder, "/", version);
    config_ = read_config(model);
    if (config_.at("max_batch_size").integer() != 0) {
      fail("max_batch_size must be 0; received ", config_.at("max_batch_size").integer(),
           ". Requests are merged by rows, up to max_rows of the manifest.");
    }
    recsys_default_options(&options_);
    if (const Json* parameters = config_.find("parameters")) {
      for (const auto& [name, value] : parameters->object()) {
        set_option(name, value.at("string_value").text());
      }
    }
  }

  // The queue of a device, which the first call opens.
  std::shared_ptr<Queue> queue(std::int32_t device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& found = queues_[device];
    if (found == nullptr) {
      recsys_options options = options_;
      options.device = device;
      options.num_runners = count_instances(device);
      options.program = program_.empty() ? nullptr : program_.c_str();
      found = std::make_shared<Queue>(version_, options);
    }
    return found;
  }

 private:
  template <typename... Parts>
  [[noreturn]] static void fail(const Parts&... parts) {
    throw std::runtime_error(text_of(parts...));
  }

  static Json read_config(TRITONBACKEND_Model* model) {
    TRITONSERVER_Message* message = nullptr;
    check(TRITONBACKEND_ModelConfig(model, 1, &message));
    const char* text = nullptr;
    std::size_t bytes = 0;
    check(TRITONSERVER_MessageSerializeToJson(message, &text, &bytes));
    Json config = Json::parse(std::string(text, bytes));
    check(TRITONSERVER_MessageDelete(message));
    return config;
  }

  void set_option(const std::string& name, const std::string& value) {
    if (name == "program") {
      program_ = value;
    } else if (name == "num_threads") {
      options_.num_threads = parse_number(name, value);
    } else if (name == "verify_tables") {
      options_.verify_tables = parse_number(name, value);
    } else if (name == "poll_ms") {
      options_.poll_ms = parse_number(name, value);
    } else {
      fail("The parameters must be among program, num_threads, verify_tables, poll_ms; received '",
           name, "'. Correct it in config.pbtxt.");
    }
  }

  static std::int32_t parse_number(const std::string& name, const std::string& value) {
    constexpr std::int64_t kMax = 86'400'000;  // a day of poll_ms
    char* end = nullptr;
    const long long number = std::strtoll(value.c_str(), &end, 10);
    if (value.empty() || *end != '\0' || number < 0 || number > kMax) {
      fail("The parameter ", name, " must be a number from 0 to ", kMax, "; received '", value,
           "'. Correct it in config.pbtxt.");
    }
    return static_cast<std::int32_t>(number);
  }

  std::int32_t count_instances(std::int32_t device) const {
    std::int64_t count = 0;
    for (const Json& group : config_.at("instance_group").array()) {
      if (group.at("kind").text() != "KIND_GPU") {
        count += device == kCpu ? group.at("count").integer() : 0;
        continue;
      }
      for (const Json& gpu : group.at("gpus").array()) {
        count += device == gpu.integer() ? group.at("count").integer() : 0;
      }
    }
    return count > 0 ? static_cast<std::int32_t>(count) : 1;
  }

  std::string version_;  // its folder
  Json config_;
  recsys_options options_{};
  std::string program_;
  std::mutex mutex_;
  std::map<std::int32_t, std::shared_ptr<Queue>> queues_;
};

// A thread that runs batches of the queue of its device.
class Instance {
 public:
  Instance(TRITONBACKEND_ModelInstance* instance, Model& model)
      : instance_(instance), queue_(model.queue(device_of(instance))) {
    thread_ = std::thread([this] { queue_->run(instance_, is_stopping_); });
  }

  ~Instance() {
    queue_->stop(is_stopping_);
    thread_.join();
  }
  Instance(const Instance&) = delete;
  Instance& operator=(const Instance&) = delete;

  void add(TRITONBACKEND_Request* request) {
    queue_->add(instance_, std::make_unique<Call>(request));
  }

 private:
  static std::int32_t device_of(TRITONBACKEND_ModelInstance* instance) {
    triton_enum kind = TRITON_KIND_CPU;
    check(TRITONBACKEND_ModelInstanceKind(instance, &kind));
    if (kind != TRITON_KIND_GPU) {
      return kCpu;
    }
    std::int32_t device = 0;
    check(TRITONBACKEND_ModelInstanceDeviceId(instance, &device));
    return device;
  }

  TRITONBACKEND_ModelInstance* instance_;
  std::shared_ptr<Queue> queue_;
  bool is_stopping_ = false;
  std::thread thread_;
};

// Runs a function of this file; an exception becomes an error.
template <typename Function>
TRITONSERVER_Error* guarded(const Function& function) {
  try {
    function();
    return nullptr;
  } catch (const std::exception& error) {
    return TRITONSERVER_ErrorNew(TRITON_ERROR_INVALID_ARG, error.what());
  } catch (...) {
    return TRITONSERVER_ErrorNew(TRITON_ERROR_INTERNAL, "recsys: unknown exception");
  }
}

template <typename State>
State* as(void* state) {
  return static_cast<State*>(state);
}

}  // namespace
}  // namespace recsys::triton

using recsys::triton::as;
using recsys::triton::check;
using recsys::triton::guarded;
using recsys::triton::Instance;
using recsys::triton::Model;

TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  return guarded([&] {
    std::uint32_t major = 0, minor = 0;
    check(TRITONBACKEND_ApiVersion(&major, &minor));
    if (major != TRITON_API_MAJOR) {
      throw std::runtime_error(recsys::text_of("Triton's API of backends must be version ",
                                               TRITON_API_MAJOR, "; received ", major, ".", minor,
                                               ". Use another release of Triton."));
    }
    auto state = std::make_unique<Model>(model);
    check(TRITONBACKEND_ModelSetState(model, state.get()));
    state.release();
  });
}

TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  return guarded([&] {
    void* state = nullptr;
    check(TRITONBACKEND_ModelState(model, &state));
    delete as<Model>(state);
  });
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance* instance) {
  return guarded([&] {
    TRITONBACKEND_Model* model = nullptr;
    void* state = nullptr;
    check(TRITONBACKEND_ModelInstanceModel(instance, &model));
    check(TRITONBACKEND_ModelState(model, &state));
    auto made = std::make_unique<Instance>(instance, *as<Model>(state));
    check(TRITONBACKEND_ModelInstanceSetState(instance, made.get()));
    made.release();
  });
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance* instance) {
  return guarded([&] {
    void* state = nullptr;
    check(TRITONBACKEND_ModelInstanceState(instance, &state));
    delete as<Instance>(state);
  });
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance,
                                                       TRITONBACKEND_Request** requests,
                                                       std::uint32_t count) {
  void* state = nullptr;
  TRITONSERVER_Error* error = TRITONBACKEND_ModelInstanceState(instance, &state);
  for (std::uint32_t i = 0; error == nullptr && i < count; ++i) {
    as<Instance>(state)->add(requests[i]);
  }
  return error;
}
