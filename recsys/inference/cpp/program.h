// A compiled program that maps the inputs of a batch to outputs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "manifest.h"
#include "tables.h"
#include "tensor.h"

namespace recsys {

struct Options {
  int device = -1;      // index of a CUDA device; -1: CPU
  int num_runners = 1;  // calls that run at the same time
  int num_threads = 0;  // of one operator; 0: torch's default
  bool verify_tables = true;
  int poll_ms = 0;      // interval of reading new deltas; 0: only at opening
  std::string program;  // kind; "": the first of the manifest
  std::string fbgemm;   // folder of FBGEMM's libraries; "": the folder at build time
};

class Program {
 public:
  virtual ~Program() = default;

  // Runs a batch; several threads may call it. Throws std::exception.
  virtual std::vector<Tensor> run(const std::vector<Tensor>& inputs) = 0;
};

// Loads a program over the tables. program_torch.cpp defines it; tests of the other files define
// their own.
std::unique_ptr<Program> load_program(const Manifest& manifest, const std::string& version,
                                      Tables& tables, const Options& options);

// The text of an error of a program, without the stack of an interpreter.
std::string text_of_program_error(const std::exception& error);

}  // namespace recsys
