// Programs of AOTInductor, and what both kinds share. program_script.cpp has TorchScript.
#include "program_torch.h"

#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>
#include <caffe2/serialize/inline_container.h>
#include <dlfcn.h>
#include <elf.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <sstream>
#include <unordered_map>

#include "error.h"
#include "files.h"

namespace fs = std::filesystem;

namespace recsys {
namespace {

struct Kind {
  recsys_dtype dtype;
  at::ScalarType torch;
};

constexpr Kind kKinds[] = {
    {RECSYS_BOOL, at::kBool},         {RECSYS_UINT8, at::kByte},    {RECSYS_INT32, at::kInt},
    {RECSYS_INT64, at::kLong},        {RECSYS_FLOAT16, at::kHalf},  {RECSYS_BFLOAT16, at::kBFloat16},
    {RECSYS_FLOAT32, at::kFloat},     {RECSYS_FLOAT64, at::kDouble}};

recsys_dtype dtype_of(const at::Tensor& tensor) {
  for (const Kind& kind : kKinds) {
    if (kind.torch == tensor.scalar_type()) {
      return kind.dtype;
    }
  }
  fail(RECSYS_FAILED, "An output must have a dtype of recsys_dtype; received ",
       c10::toString(tensor.scalar_type()), ".");
}

// Loads the operators of FBGEMM, once per process. The libraries use each other, so their order
// counts.
void load_fbgemm(const std::string& folder) {
  static std::mutex mutex;
  static bool is_loaded = false;
  const std::lock_guard<std::mutex> guard(mutex);
  if (is_loaded) {
    return;
  }
  std::istringstream names(FBGEMM_LIBRARIES);
  for (std::string name; std::getline(names, name, ':');) {
    const std::string path = (fs::path(folder) / (name + ".so")).string();
    if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      fail(RECSYS_BAD_PACKAGE, "The libraries of fbgemm_gpu ", FBGEMM_RELEASE,
           " must be in the folder '", folder, "'; received: ", dlerror(),
           ". Name their folder by the option fbgemm.");
    }
  }
  is_loaded = true;
}

// Makes a library of GCC removable from memory: the dynamic linker keeps a library with symbols of
// the binding STB_GNU_UNIQUE until the process ends, so each new version would leak its code.
void allow_unloading(char* library, std::size_t size) {
  Elf64_Ehdr header;
  if (size < sizeof header) {
    return;
  }
  std::memcpy(&header, library, sizeof header);
  for (int i = 0; i < header.e_shnum; ++i) {
    Elf64_Shdr section;
    const std::size_t at = header.e_shoff + static_cast<std::size_t>(i) * header.e_shentsize;
    if (at + sizeof section > size) {
      return;
    }
    std::memcpy(&section, library + at, sizeof section);
    if (section.sh_type != SHT_DYNSYM || section.sh_offset + section.sh_size > size) {
      continue;
    }
    auto* symbols = reinterpret_cast<Elf64_Sym*>(library + section.sh_offset);
    for (std::size_t s = 0; s < section.sh_size / sizeof(Elf64_Sym); ++s) {
      if (ELF64_ST_BIND(symbols[s].st_info) == STB_GNU_UNIQUE) {
        symbols[s].st_info = ELF64_ST_INFO(STB_GLOBAL, ELF64_ST_TYPE(symbols[s].st_info));
      }
    }
  }
}

// Extracts the compiled code of a package of torch.export, and returns the library's path.
std::string extract(const std::string& path, const std::string& folder) {
  caffe2::serialize::PyTorchStreamReader reader(path);
  std::string library;
  for (const std::string& name : reader.getAllRecords()) {
    const fs::path relative(name);
    for (const fs::path& part : relative) {
      if (part == ".." || relative.is_absolute()) {
        fail(RECSYS_BAD_PACKAGE, "'", path, "' must have files inside its folder; received '",
             name, "'.");
      }
    }
    // all files that the library reads are beside it
    if (name.find("data/aotinductor/") == std::string::npos) {
      continue;
    }
    const auto [data, size] = reader.getRecord(name);
    if (relative.extension() == ".so") {
      allow_unloading(static_cast<char*>(data.get()), size);
    }
    const std::string target = (fs::path(folder) / relative.filename()).string();
    std::ofstream file(target, std::ios::binary);
    file.write(static_cast<const char*>(data.get()), static_cast<std::streamsize>(size));
    if (!file.flush()) {
      fail(RECSYS_BAD_PACKAGE, "'", target, "' must be writable; the disk may be full.");
    }
    if (relative.extension() == ".so") {
      library = target;
    }
  }
  if (library.empty()) {
    fail(RECSYS_BAD_PACKAGE, "'", path, "' must have a compiled library; it has none.");
  }
  return library;
}

class CompiledProgram : public Program {
 public:
  CompiledProgram(const ProgramFile& file, const std::string& version, Parameters parameters,
                  const Options& options)
      : options_(options), parameters_(std::move(parameters)) {
    const std::string device =
        options.device < 0 ? "cpu" : text_of("cuda:", options.device);
    const auto& makers = torch::inductor::getAOTIModelRunnerRegistry();
    const auto maker = makers.find(device.substr(0, device.find(':')));
    if (maker == makers.end()) {
      fail(RECSYS_BAD_PACKAGE, "This build of torch has no device '", device, "'.");
    }
    const TemporaryFolder folder;  // a loaded library needs no file
    const std::string library = extract((fs::path(version) / file.file).string(), folder.path());
    runner_ = maker->second(library, static_cast<std::size_t>(options.num_runners), device,
                            folder.path(), /*run_single_threaded=*/false);
    std::unordered_map<std::string, at::Tensor> constants;
    for (const auto& [name, original] : runner_->getConstantNamesToOriginalFQNs()) {
      const auto found = parameters_.find(original);
      if (found == parameters_.end()) {
        fail(RECSYS_BAD_PACKAGE, "dense.safetensors must have '", original, "'; it is missing.");
      }
      // torch never frees its handles of user-managed constants, so these must not own memory
      const at::Tensor& owner = found->second;
      constants[name] = at::from_blob(owner.data_ptr(), owner.sizes(), owner.options());
    }
    runner_->update_constant_buffer(constants, /*use_inactive=*/false,
                                    /*validate_full_updates=*/true, /*user_managed=*/true);
  }

  std::vector<Tensor> run(const std::vector<Tensor>& inputs) override {
    const c10::InferenceMode guard;
    return to_host(runner_->run(to_device(inputs, options_)));
  }

 private:
  const Options options_;
  const Parameters parameters_;  // the runner refers to their memory
  std::unique_ptr<torch::inductor::AOTIModelContainerRunner> runner_;
};

}  // namespace

at::Tensor torch_view(const Tensor& tensor) {
  for (const Kind& kind : kKinds) {
    if (kind.dtype == tensor.dtype) {
      const std::shared_ptr<void> owner = tensor.data;
      return at::from_blob(tensor.data.get(), tensor.shape, [owner](void*) {},
                           at::TensorOptions(kind.torch));
    }
  }
  fail(RECSYS_FAILED, "A tensor must have a dtype of recsys_dtype.");
}

std::vector<at::Tensor> to_device(const std::vector<Tensor>& tensors, const Options& options) {
  thread_local int num_threads = 0;
  if (options.num_threads > 0 && options.num_threads != num_threads) {
    num_threads = options.num_threads;
    at::set_num_threads(num_threads);  // holds for this thread
  }
  std::vector<at::Tensor> found;
  found.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    at::Tensor view = torch_view(tensor);
    if (options.device >= 0) {
      view = view.to(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(options.device)));
    }
    found.push_back(std::move(view));
  }
  return found;
}

std::vector<Tensor> to_host(const std::vector<at::Tensor>& tensors) {
  std::vector<Tensor> found;
  found.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor host = tensor.cpu().contiguous();
    found.push_back({dtype_of(host), host.sizes().vec(),
                     std::shared_ptr<void>(std::make_shared<at::Tensor>(host), host.data_ptr())});
  }
  return found;
}

namespace {

// The constants of a package, on the device of its program.
Parameters read_parameters(const Manifest& manifest, const std::string& version, Tables& tables,
                           const Options& options) {
  Parameters found;
  const auto add = [&](const std::string& name, const Tensor& tensor) {
    found[name] = to_device({tensor}, options).front();
  };
  const std::string path = (fs::path(version) / "dense.safetensors").string();
  if (fs::exists(path)) {
    try {
      const std::size_t bytes = fs::file_size(path);
      for (const auto& [name, tensor] : parse_safetensors(map_file(path, bytes), bytes).tensors) {
        add(name, tensor);
      }
    } catch (const std::exception& error) {
      fail(RECSYS_BAD_PACKAGE, "'", path, "' must be a safetensors file; ", error.what(), ".");
    }
  }
  for (const Buffer& buffer : manifest.buffers) {
    add(buffer.name, {RECSYS_UINT8, {buffer.bytes}, tables.buffers().at(buffer.name)});
  }
  if (options.device >= 0) {
    tables.copy_rows = [found](const Table& table, const std::int64_t* ids, std::int64_t count,
                               const char* rows) {
      const at::Tensor device_rows =
          found.at(table.buffer)
              .narrow(0, table.offset, table.rows * table.row_bytes)
              .view({table.rows, table.row_bytes});
      const auto copied = [&](const void* data, at::IntArrayRef shape, at::ScalarType dtype) {
        return at::from_blob(const_cast<void*>(data), shape, at::TensorOptions(dtype))
            .to(device_rows.device());
      };
      device_rows.index_copy_(0, copied(ids, {count}, at::kLong),
                              copied(rows, {count, table.row_bytes}, at::kByte));
    };
  }
  return found;
}

}  // namespace

std::unique_ptr<Program> load_program(const Manifest& manifest, const std::string& version,
                                      Tables& tables, const Options& options) {
  const ProgramFile& file = manifest.program(options.program);
  manifest.check_machine(file, TORCH_RELEASE, FBGEMM_RELEASE);
  const bool is_on_gpu = file.device.rfind("cuda", 0) == 0;
  if (is_on_gpu != (options.device >= 0)) {
    fail(RECSYS_BAD_PACKAGE, "The program must run on ", file.device,
         ", for which it was compiled; received the device ",
         options.device < 0 ? "cpu" : text_of("cuda:", options.device), ".");
  }
  load_fbgemm(options.fbgemm.empty() ? FBGEMM_FOLDER : options.fbgemm);
  try {
    Parameters parameters = read_parameters(manifest, version, tables, options);
    if (file.kind == "aoti") {
      return std::make_unique<CompiledProgram>(file, version, std::move(parameters), options);
    }
    return load_script(file, version, parameters, options);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail(RECSYS_BAD_PACKAGE, "'", (fs::path(version) / file.file).string(),
         "' must be a program; ", text_of_program_error(error));
  }
}

}  // namespace recsys
