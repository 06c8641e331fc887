// Programs of TorchScript.
#include <c10/core/InferenceMode.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/runtime/jit_exception.h>
#include <torch/csrc/jit/serialization/import.h>

#include <filesystem>
#include <optional>

#include "error.h"
#include "program_torch.h"

namespace recsys {
namespace {

class ScriptProgram : public Program {
 public:
  ScriptProgram(const std::string& path, const Parameters& parameters, const Options& options)
      : options_(options), module_(torch::jit::load(path, device())) {
    for (const auto& [name, tensor] : parameters) {
      set_attribute(name, tensor);
    }
  }

  std::vector<Tensor> run(const std::vector<Tensor>& inputs) override {
    const c10::InferenceMode guard;
    std::vector<c10::IValue> arguments;
    for (at::Tensor& tensor : to_device(inputs, options_)) {
      arguments.emplace_back(std::move(tensor));
    }
    const c10::IValue output = method()(std::move(arguments));
    std::vector<at::Tensor> outputs;
    if (output.isTensor()) {
      outputs.push_back(output.toTensor());
    } else {
      for (const auto& entry : output.toGenericDict()) {
        outputs.push_back(entry.value().toTensor());
      }
    }
    return to_host(outputs);
  }

 private:
  std::optional<at::Device> device() const {
    return options_.device < 0
               ? std::nullopt
               : std::optional(
                     at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(options_.device)));
  }

  torch::jit::Method method() const { return module_.get_method("forward"); }

  // Sets a tensor by its path, such as "model.lookups.0.weights".
  void set_attribute(const std::string& path, const at::Tensor& tensor) {
    torch::jit::Module owner = module_;
    std::size_t start = 0;
    for (std::size_t dot = path.find('.'); dot != std::string::npos;
         start = dot + 1, dot = path.find('.', start)) {
      owner = owner.attr(path.substr(start, dot - start)).toModule();
    }
    owner.setattr(path.substr(start), tensor);
  }

  const Options options_;
  const torch::jit::Module module_;
};

}  // namespace

std::unique_ptr<Program> load_script(const ProgramFile& file, const std::string& version,
                                     const Parameters& parameters, const Options& options) {
  Parameters buffers;  // the program has all others itself
  for (const std::string& name : file.constants) {
    buffers[name] = parameters.at(name);
  }
  const std::string path = (std::filesystem::path(version) / file.file).string();
  return std::make_unique<ScriptProgram>(path, buffers, options);
}

std::string text_of_program_error(const std::exception& error) {
  if (const auto* raised = dynamic_cast<const torch::jit::JITException*>(&error)) {
    return raised->getOriginalMsg().value_or(raised->what());
  }
  if (const auto* checked = dynamic_cast<const c10::Error*>(&error)) {
    return checked->what_without_backtrace();
  }
  return error.what();
}

}  // namespace recsys
