// Programs of torch, and conversion of their tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "program.h"

namespace recsys {

using Parameters = std::map<std::string, at::Tensor>;

// A tensor of torch over the same memory.
at::Tensor torch_view(const Tensor& tensor);

// Views or copies of a batch's inputs on the device of a program.
std::vector<at::Tensor> to_device(const std::vector<Tensor>& tensors, const Options& options);

// Views or copies of outputs in host memory.
std::vector<Tensor> to_host(const std::vector<at::Tensor>& tensors);

// Loads a program of TorchScript, with its tables.
std::unique_ptr<Program> load_script(const ProgramFile& file, const std::string& version,
                                     const Parameters& parameters, const Options& options);

}  // namespace recsys
