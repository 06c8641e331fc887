// Scores batches by an exported program, without Python: the smallest form of what a server does.
//
//     score MODEL BATCHES SCORES [--time RUNS] [--fbgemm FOLDER]
//
// MODEL: what export_torchscript or export_aoti wrote; the latter's name ends in ".pt2". Its checksum
//     is in MODEL.sha256.
// BATCHES: a file of torch.save: a list of batches, or a dict that has one as "inputs". A batch is
//     a tuple or list of the tensors that the program takes.
// SCORES: the file to write, for torch.load: a tuple of what the program returned for each batch: a
//     tensor, or, of a dict, a tuple of pairs of name and tensor.
// --time: run each batch so many times more, and print the median time.
// --fbgemm: where the libraries of FBGEMM are, if they have moved since the program was built.

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <openssl/evp.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/runtime/jit_exception.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/script.h>
#include <torch/version.h>

using at::Tensor;
using c10::IValue;  // any value that TorchScript knows: a tensor, a list, a dict, ...
using Batch = std::vector<Tensor>;

struct Program {
  std::vector<std::string> inputs;  // the names of the tensors that it takes
  std::function<IValue(const Batch&)> run;
};

struct Arguments {
  std::string model, batches, scores;
  std::string fbgemm = FBGEMM_FOLDER;  // CMakeLists.txt asks Python where it is
  int runs = 0;
};

// Joins the parts of a message; main prints it.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::runtime_error(c10::str(parts...));
}

Arguments parse(const std::vector<std::string>& given) {
  Arguments arguments;
  std::vector<std::string> files;
  for (size_t i = 0; i < given.size(); ++i) {
    const bool has_value = i + 1 < given.size();
    if (given[i] == "--time" && has_value) {
      arguments.runs = std::atoi(given[++i].c_str());
      if (arguments.runs < 1) {
        fail("--time must be a number of runs, 1 or more; received '", given[i], "'.");
      }
    } else if (given[i] == "--fbgemm" && has_value) {
      arguments.fbgemm = given[++i];
    } else {
      files.push_back(given[i]);
    }
  }
  if (files.size() != 3) {
    fail("Usage: score MODEL BATCHES SCORES [--time RUNS] [--fbgemm FOLDER]; received ",
         files.size(), " files.");
  }
  arguments.model = files[0];
  arguments.batches = files[1];
  arguments.scores = files[2];
  return arguments;
}

void check_file(const std::string& path) {
  if (!std::filesystem::is_regular_file(path)) {
    fail("There is no such file.");
  }
}

// Returns the SHA-256 of a file as hexadecimal digits.
std::string sha256(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> state(EVP_MD_CTX_new(),
                                                                     EVP_MD_CTX_free);
  EVP_DigestInit_ex(state.get(), EVP_sha256(), nullptr);
  std::vector<char> block(1 << 20);
  while (file.read(block.data(), static_cast<std::streamsize>(block.size())), file.gcount() > 0) {
    EVP_DigestUpdate(state.get(), block.data(), static_cast<size_t>(file.gcount()));
  }
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int size = 0;
  EVP_DigestFinal_ex(state.get(), digest.data(), &size);
  std::ostringstream text;
  text << std::hex << std::setfill('0');
  for (unsigned int i = 0; i < size; ++i) {
    text << std::setw(2) << static_cast<int>(digest[i]);
  }
  return text.str();
}

// A program has no check of its own: with one flipped bit it may load, and score otherwise.
void verify_checksum(const std::string& path) {
  std::ifstream sums(path + ".sha256");
  std::string expected;
  if (!(sums >> expected)) {
    fail("Its checksum must be in '", path, ".sha256'. Copy both files, or export it again.");
  }
  if (sha256(path) != expected.substr(expected.find_first_not_of('\\'))) {
    fail("It is damaged: it does not match its checksum in '", path,
         ".sha256'. Copy or export it again.");
  }
}

// What an error says, without the stack of the interpreter.
std::string text_of(const std::exception& error) {
  if (const auto* raised = dynamic_cast<const torch::jit::JITException*>(&error)) {
    return raised->getOriginalMsg().value_or(raised->what());
  }
  if (const auto* checked = dynamic_cast<const c10::Error*>(&error)) {
    return checked->what_without_backtrace();
  }
  return error.what();
}

// A program names the operators that it calls; these libraries have those of FBGEMM. They use each
// other, so the order counts. They stay loaded.
void load_fbgemm(const std::string& folder) {
  std::istringstream names(FBGEMM_LIBRARIES);
  for (std::string name; std::getline(names, name, ':');) {
    const std::string path = folder + "/" + name + ".so";
    if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      fail("The libraries of fbgemm_gpu, made for torch ", TORCH_VERSION, ", must be in '", folder,
           "'. Name their folder by --fbgemm. Received: ", dlerror());
    }
  }
}

// Reads the names in a JSON list.
std::vector<std::string> parse_names(const std::string& list) {
  std::vector<std::string> names;
  std::istringstream text(list);
  while (text.ignore() && (text >> std::ws).peek() == '"') {
    names.emplace_back();
    text >> std::quoted(names.back());
  }
  return names;
}

IValue make_tuple(std::vector<IValue> values) {
  return c10::ivalue::Tuple::create(std::move(values));
}

Program load_script(const std::string& path) {
  auto module = std::make_shared<torch::jit::Module>(torch::jit::load(path));
  Program program;
  for (const auto& argument : module->get_method("forward").function().getSchema().arguments()) {
    if (argument.name() != "self") {
      program.inputs.push_back(argument.name());
    }
  }
  program.run = [module](const Batch& batch) {
    const IValue output = module->forward(std::vector<IValue>(batch.begin(), batch.end()));
    if (!output.isGenericDict()) {
      return output;
    }
    std::vector<IValue> pairs;
    for (const auto& entry : output.toGenericDict()) {
      pairs.push_back(make_tuple({entry.key(), entry.value()}));
    }
    return make_tuple(pairs);
  };
  return program;
}

// A package returns a list of tensors; export_aoti writes down what they are called.
Program load_package(const std::string& path) {
  // Packages check the dtypes and sizes of what they get only if asked to.
  setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", /*overwrite=*/0);
  auto loader = std::make_shared<torch::inductor::AOTIModelPackageLoader>(path);
  auto metadata = loader->get_metadata();
  if (!metadata.count("inputs") || !metadata.count("outputs")) {
    fail("The package does not say what it takes and returns.");
  }
  const auto names = parse_names(metadata["outputs"]);
  auto run = [loader, names](const Batch& batch) -> IValue {
    Batch inputs = batch;
    for (Tensor& tensor : inputs) {
      tensor = tensor.contiguous();  // the compiled code takes any strides for those
    }
    std::vector<Tensor> outputs = loader->run(inputs);
    if (names == std::vector<std::string>{"output"}) {
      return outputs.at(0);
    }
    std::vector<IValue> pairs;
    for (size_t i = 0; i < names.size(); ++i) {
      pairs.push_back(make_tuple({names[i], outputs.at(i)}));
    }
    return make_tuple(pairs);
  };
  return {parse_names(metadata["inputs"]), run};
}

Program load_program(const std::string& path) {
  try {
    check_file(path);
    verify_checksum(path);
    return path.ends_with(".pt2") ? load_package(path) : load_script(path);
  } catch (const std::exception& error) {
    fail("A program must be a file of export_torchscript or, if its name ends in '.pt2', of "
         "export_aoti; received '", path, "'. ", text_of(error));
  }
}

std::vector<IValue> elements(const IValue& value) {
  if (value.isTuple()) {
    return value.toTupleRef().elements().vec();
  }
  if (!value.isList()) {
    fail("Where a list or a tuple must be, there is: ", value.tagKind(), ".");
  }
  return value.toListRef().vec();
}

std::vector<Batch> read_batches(const std::string& path) {
  try {
    check_file(path);
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
    IValue content = torch::jit::pickle_load(bytes);
    if (content.isGenericDict()) {
      content = content.toGenericDict().at("inputs");
    }
    std::vector<Batch> batches;
    for (const IValue& tensors : elements(content)) {
      Batch& batch = batches.emplace_back();
      for (const IValue& tensor : elements(tensors)) {
        batch.push_back(tensor.toTensor());
      }
    }
    return batches;
  } catch (const std::exception& error) {
    fail("Batches must be a list, or a dict with one as 'inputs', of tuples of tensors, in a file "
         "of torch.save; received '", path, "'. ", text_of(error));
  }
}

double median_us(const Program& program, const Batch& batch, int runs) {
  std::vector<double> times;
  for (int i = 0; i < runs; ++i) {
    const auto start = std::chrono::steady_clock::now();
    program.run(batch);
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    times.push_back(took.count());
  }
  std::nth_element(times.begin(), times.begin() + runs / 2, times.end());
  return times[runs / 2];
}

IValue score_batch(const Program& program, const Batch& batch) {
  if (batch.size() != program.inputs.size()) {
    fail("A batch must have ", program.inputs.size(), " tensors (",
         c10::Join(", ", program.inputs), "); received ", batch.size(), ".");
  }
  return program.run(batch);
}

void score(const Arguments& arguments) {
  load_fbgemm(arguments.fbgemm);
  const c10::InferenceMode guard;  // as torch.inference_mode() does
  const Program program = load_program(arguments.model);
  std::vector<IValue> scores;
  for (const Batch& batch : read_batches(arguments.batches)) {
    try {
      scores.push_back(score_batch(program, batch));
    } catch (const std::exception& error) {
      fail("Batch ", scores.size(), " of '", arguments.batches, "': ", text_of(error));
    }
    if (arguments.runs > 0) {
      median_us(program, batch, 10);  // TorchScript optimizes a program in its first runs
      std::cout << "batch " << scores.size() - 1 << ": "
                << median_us(program, batch, arguments.runs) << " us\n";
    }
  }
  const std::vector<char> bytes = torch::jit::pickle_save(make_tuple(scores));
  std::ofstream file(arguments.scores, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file.flush()) {
    fail("Scores must go to a file that can be written; received '", arguments.scores, "'.");
  }
  std::cout << scores.size() << " batches scored: " << arguments.scores << "\n";
}

int main(int argc, char** argv) {
  try {
    score(parse({argv + 1, argv + argc}));
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "score: " << text_of(error) << "\n";
    return 1;
  }
}
