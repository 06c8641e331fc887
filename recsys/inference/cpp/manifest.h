// The manifest of a serving package: the description of one version.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "json.h"
#include "tensor.h"

namespace recsys {

struct Feature {
  std::string name;
  std::string tensor;  // its ids in a request; also <tensor>.lengths and <tensor>.weights
  std::optional<std::int64_t> rows;  // ids are below it; none: any id
  std::string index;                 // the table that maps hashed ids; "": ids are not hashed
};

struct Input {
  std::string name;
  bool is_jagged = false;
  recsys_dtype dtype = RECSYS_FLOAT32;
  // of a dense input
  std::vector<std::int64_t> shape;  // the first is -1
  std::optional<double> fill;       // value of a missing input; none: required
  // of a jagged input
  recsys_dtype lengths_dtype = RECSYS_INT64;
  bool is_weighted = false;
  std::vector<Feature> features;
};

struct Output {
  std::string name;
  bool is_jagged = false;
  recsys_dtype dtype = RECSYS_FLOAT32;
  std::vector<std::int64_t> shape;  // of the values; the first is -1
  bool is_weighted = false;
  std::optional<std::string> vocabulary;  // the table whose rows it has

  // The names of its tensors, in the order in which the program returns them.
  std::vector<std::string> tensors() const;
};

// What a request has and what it gets.
struct Schema {
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  std::int64_t max_rows = 0;  // of a batch
};

// Rows of a line of an index; a region of a table has whole lines.
constexpr std::int64_t kLineRows = 64;

// The index of a table with hashed ids.
struct IndexFiles {
  std::string ids;      // int64 [rows]
  std::string digests;  // uint8 [rows]
  std::int64_t regions = 1;
  std::int64_t seed = 0;
};

struct Table {
  std::string name;
  std::int64_t rows = 0;
  std::int64_t row_bytes = 0;
  std::string file;
  std::string buffer;
  std::int64_t offset = 0;  // in the buffer
  std::optional<IndexFiles> index;  // none: ids are row numbers
};

// A constant of the programs in which tables lie one after another.
struct Buffer {
  std::string name;
  std::int64_t bytes = 0;
};

struct ProgramFile {
  std::string kind;  // "aoti" or "torchscript"
  std::string file;
  std::string device;
  std::vector<std::string> constants;
};

struct File {
  std::string path;  // relative to the version
  std::int64_t bytes = 0;
  std::string sha256;
};

struct Manifest {
  std::string text;
  std::string id;  // SHA-256 of the text
  std::string torch, fbgemm, machine;
  std::vector<std::string> instruction_set;
  std::vector<ProgramFile> programs;
  Schema schema;
  std::vector<Table> tables;
  std::vector<Buffer> buffers;
  std::vector<File> files;
  Json::Array columns;  // descriptions of raw columns; none: requests have the model's tensors

  // Reads a version's manifest. Throws Error(RECSYS_BAD_PACKAGE).
  static Manifest read(const std::string& version);

  // Throws Error(RECSYS_BAD_PACKAGE) unless the files are whole; `tables`: read the tables, too.
  void verify_files(const std::string& version, bool tables) const;

  // Throws Error(RECSYS_BAD_PACKAGE) unless this machine and these releases can run the program.
  void check_machine(const ProgramFile& program, const std::string& torch_release,
                     const std::string& fbgemm_release) const;

  // A program by its kind; "": the first.
  const ProgramFile& program(const std::string& kind) const;
};

}  // namespace recsys
