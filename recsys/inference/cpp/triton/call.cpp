#include "call.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>

#include "../error.h"

namespace recsys::triton {
namespace {

struct DtypePair {
  triton_enum theirs;
  recsys_dtype ours;
  std::size_t bytes;
};

constexpr std::array<DtypePair, 9> kDtypes{{
    {TRITON_BOOL, RECSYS_BOOL, 1},
    {TRITON_UINT8, RECSYS_UINT8, 1},
    {TRITON_INT32, RECSYS_INT32, 4},
    {TRITON_INT64, RECSYS_INT64, 8},
    {TRITON_FP16, RECSYS_FLOAT16, 2},
    {TRITON_BF16, RECSYS_BFLOAT16, 2},
    {TRITON_FP32, RECSYS_FLOAT32, 4},
    {TRITON_FP64, RECSYS_FLOAT64, 8},
    {TRITON_BYTES, RECSYS_TEXT, sizeof(recsys_text)},
}};

const DtypePair& pair_of_theirs(triton_enum dtype, const char* tensor) {
  for (const DtypePair& pair : kDtypes) {
    if (pair.theirs == dtype) {
      return pair;
    }
  }
  throw ApiError(text_of(tensor, " must have a type of numbers or BYTES."));
}

const DtypePair& pair_of_ours(std::int32_t dtype) {
  const auto* found = std::find_if(kDtypes.begin(), kDtypes.end(),
                                   [&](const DtypePair& pair) { return pair.ours == dtype; });
  if (found == kDtypes.end()) {
    throw ApiError(text_of("The predictor returned the unknown dtype ", dtype, "."));
  }
  return *found;
}

std::uint64_t bytes_of(const recsys_tensor& tensor) {
  std::uint64_t bytes = pair_of_ours(tensor.dtype).bytes;
  for (std::int32_t dim = 0; dim < tensor.num_dims; ++dim) {
    bytes *= static_cast<std::uint64_t>(tensor.shape[dim]);
  }
  return bytes;
}

// Joins the buffers of an input in aligned memory.
std::unique_ptr<std::uint64_t[]> copy_input(TRITONBACKEND_Input* input, const char* name,
                                            std::uint64_t bytes, std::uint32_t num_buffers) {
  std::unique_ptr<std::uint64_t[]> copy(new std::uint64_t[bytes / sizeof(std::uint64_t) + 1]);
  auto* next = reinterpret_cast<char*>(copy.get());
  for (std::uint32_t i = 0; i < num_buffers; ++i) {
    const void* data = nullptr;
    std::uint64_t size = 0;
    triton_enum memory = TRITON_MEMORY_CPU;
    std::int64_t device = 0;
    check(TRITONBACKEND_InputBuffer(input, i, &data, &size, &memory, &device));
    if (memory == TRITON_MEMORY_GPU) {
      throw ApiError(text_of(name, " must be in host memory; received a tensor on GPU ", device,
                             ". Register a region of system shared memory."));
    }
    if (size > 0) {
      std::memcpy(next, data, size);
    }
    next += size;
  }
  return copy;
}

// The data of an input if they are in one aligned buffer, else nullptr.
const void* find_whole(TRITONBACKEND_Input* input, std::uint64_t bytes,
                       std::uint32_t num_buffers) {
  if (num_buffers != 1) {
    return nullptr;
  }
  const void* data = nullptr;
  std::uint64_t size = 0;
  triton_enum memory = TRITON_MEMORY_CPU;
  std::int64_t device = 0;
  check(TRITONBACKEND_InputBuffer(input, 0, &data, &size, &memory, &device));
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(data) % sizeof(std::uint64_t) == 0;
  return memory != TRITON_MEMORY_GPU && is_aligned && size == bytes ? data : nullptr;
}

// The texts of a BYTES tensor: before each one are the four bytes of its size.
std::vector<recsys_text> texts_of(const recsys_tensor& tensor, std::uint64_t bytes) {
  std::vector<recsys_text> texts;
  const char* next = static_cast<const char*>(tensor.data);
  const char* const end = next + bytes;
  while (next != end) {
    std::uint32_t size = 0;
    if (end - next < static_cast<std::ptrdiff_t>(sizeof size)) {
      break;
    }
    std::memcpy(&size, next, sizeof size);
    next += sizeof size;
    if (end - next < static_cast<std::ptrdiff_t>(size)) {
      break;
    }
    texts.push_back({next, static_cast<std::int64_t>(size)});
    next += size;
  }
  if (next != end || tensor.num_dims != 1 ||
      static_cast<std::int64_t>(texts.size()) != tensor.shape[0]) {
    throw ApiError(text_of(tensor.name, " must have the texts that its shape states; received ",
                           texts.size(), " texts."));
  }
  return texts;
}

// The data of a BYTES tensor; a missing text is empty.
std::string bytes_of_texts(const recsys_tensor& tensor) {
  std::string found;
  const auto* texts = static_cast<const recsys_text*>(tensor.data);
  const std::uint64_t count = bytes_of(tensor) / sizeof(recsys_text);
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto size = static_cast<std::uint32_t>(texts[i].size);
    found.append(reinterpret_cast<const char*>(&size), sizeof size);
    if (size > 0) {
      found.append(texts[i].data, size);
    }
  }
  return found;
}

// An output of a response, or its values, which are made only for a client that wants them.
const recsys_tensor* find_output(recsys_responses* responses, std::int32_t index,
                                 const char* name) {
  const auto find = [&](const recsys_tensor* tensors, std::int32_t count) -> const recsys_tensor* {
    const auto* end = tensors + count;
    const auto* found = std::find_if(tensors, end, [&](const recsys_tensor& tensor) {
      return std::strcmp(tensor.name, name) == 0;
    });
    return found == end ? nullptr : found;
  };
  const recsys_tensor* tensors = nullptr;
  std::int32_t count = recsys_response_outputs(responses, index, &tensors);
  const recsys_tensor* found = find(tensors, count);
  if (found == nullptr) {
    if (recsys_response_values(responses, index, &tensors, &count) != RECSYS_OK) {
      throw ApiError(recsys_last_error());
    }
    found = find(tensors, count);
  }
  if (found == nullptr) {
    throw ApiError(text_of("The program has no output '", name,
                           "'. Write config.pbtxt anew from the manifest."));
  }
  return found;
}

}  // namespace

void check(TRITONSERVER_Error* error) {
  if (error != nullptr) {
    const std::string message = TRITONSERVER_ErrorMessage(error);
    TRITONSERVER_ErrorDelete(error);
    throw ApiError(message);
  }
}

void log(triton_enum level, const std::string& message) {
  TRITONSERVER_Error* error = TRITONSERVER_LogMessage(level, "recsys", 0, message.c_str());
  if (error != nullptr) {
    TRITONSERVER_ErrorDelete(error);
  }
}

std::uint64_t now() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

void Call::read() {
  std::uint32_t count = 0;
  check(TRITONBACKEND_RequestInputCount(request_, &count));
  tensors_.reserve(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    TRITONBACKEND_Input* input = nullptr;
    check(TRITONBACKEND_RequestInputByIndex(request_, i, &input));
    recsys_tensor tensor{};
    triton_enum dtype = 0;
    std::uint32_t num_dims = 0;
    std::uint64_t bytes = 0;
    std::uint32_t num_buffers = 0;
    check(TRITONBACKEND_InputProperties(input, &tensor.name, &dtype, &tensor.shape, &num_dims,
                                        &bytes, &num_buffers));
    tensor.dtype = pair_of_theirs(dtype, tensor.name).ours;
    tensor.num_dims = static_cast<std::int32_t>(num_dims);
    const bool is_text = tensor.dtype == RECSYS_TEXT;
    if (!is_text && bytes != bytes_of(tensor)) {
      throw ApiError(text_of(tensor.name, " must have ", bytes_of(tensor),
                             " bytes by its shape; received ", bytes, "."));
    }
    tensor.data = find_whole(input, bytes, num_buffers);
    if (tensor.data == nullptr) {
      copies_.push_back(copy_input(input, tensor.name, bytes, num_buffers));
      tensor.data = copies_.back().get();
    }
    if (is_text) {
      texts_.push_back(texts_of(tensor, bytes));
      tensor.data = texts_.back().data();
    }
    tensors_.push_back(tensor);
  }
}

void Call::send_outputs(TRITONBACKEND_Response* response, recsys_responses* responses,
                        std::int32_t index) const {
  std::uint32_t num_wanted = 0;
  check(TRITONBACKEND_RequestOutputCount(request_, &num_wanted));
  for (std::uint32_t i = 0; i < num_wanted; ++i) {
    const char* name = nullptr;
    check(TRITONBACKEND_RequestOutputName(request_, i, &name));
    const recsys_tensor* found = find_output(responses, index, name);
    TRITONBACKEND_Output* output = nullptr;
    check(TRITONBACKEND_ResponseOutput(response, &output, name, pair_of_ours(found->dtype).theirs,
                                       found->shape, static_cast<std::uint32_t>(found->num_dims)));
    void* data = nullptr;
    triton_enum memory = TRITON_MEMORY_CPU;
    std::int64_t device = 0;
    const bool is_text = found->dtype == RECSYS_TEXT;
    const std::string texts = is_text ? bytes_of_texts(*found) : "";
    const void* source = is_text ? texts.data() : found->data;
    const std::uint64_t bytes = is_text ? texts.size() : bytes_of(*found);
    check(TRITONBACKEND_OutputBuffer(output, &data, bytes, &memory, &device));
    if (memory == TRITON_MEMORY_GPU) {
      throw ApiError(text_of(name, " is written to host memory; received a buffer on GPU ", device,
                             ". Register a region of system shared memory."));
    }
    if (bytes > 0) {
      std::memcpy(data, source, bytes);
    }
  }
}

void Call::answer(TRITONBACKEND_ModelInstance* instance, recsys_responses* responses,
                  std::int32_t index, const Times& times) {
  TRITONSERVER_Error* error = nullptr;
  bool success = false;
  try {
    TRITONBACKEND_Response* response = nullptr;
    check(TRITONBACKEND_ResponseNew(&response, request_));
    try {
      send_outputs(response, responses, index);
      success = true;
    } catch (const std::exception& failure) {
      error = TRITONSERVER_ErrorNew(TRITON_ERROR_INTERNAL, failure.what());
    }
    check(TRITONBACKEND_ResponseSend(response, TRITON_RESPONSE_FINAL, error));
  } catch (const std::exception& failure) {
    log(TRITON_LOG_ERROR, text_of("A response was not sent: ", failure.what()));
    success = false;
  }
  if (error != nullptr) {
    TRITONSERVER_ErrorDelete(error);
  }
  release(instance, success, times);
}

void Call::refuse(TRITONBACKEND_ModelInstance* instance, recsys_code code,
                  const std::string& message, const Times& times) {
  TRITONSERVER_Error* error = TRITONSERVER_ErrorNew(
      code == RECSYS_BAD_REQUEST ? TRITON_ERROR_INVALID_ARG : TRITON_ERROR_INTERNAL,
      message.c_str());
  try {
    TRITONBACKEND_Response* response = nullptr;
    check(TRITONBACKEND_ResponseNew(&response, request_));
    check(TRITONBACKEND_ResponseSend(response, TRITON_RESPONSE_FINAL, error));
  } catch (const std::exception& failure) {
    log(TRITON_LOG_ERROR, text_of("A response was not sent: ", failure.what()));
  }
  TRITONSERVER_ErrorDelete(error);
  release(instance, false, times);
}

void Call::release(TRITONBACKEND_ModelInstance* instance, bool success, const Times& times) {
  try {
    check(TRITONBACKEND_ModelInstanceReportStatistics(instance, request_, success, times.start,
                                                      times.compute_start, times.compute_end,
                                                      now()));
    check(TRITONBACKEND_RequestRelease(request_, TRITON_RELEASE_ALL));
  } catch (const std::exception& failure) {
    log(TRITON_LOG_ERROR, text_of("A request was not released: ", failure.what()));
  }
  request_ = nullptr;
}

}  // namespace recsys::triton
