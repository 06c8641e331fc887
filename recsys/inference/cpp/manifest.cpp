#include "manifest.h"

#include <sys/utsname.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <filesystem>
#include <set>
#include <sstream>
#include <stdexcept>

#include "error.h"
#include "files.h"
#include "json.h"

namespace fs = std::filesystem;

namespace recsys {
namespace {

constexpr std::int64_t kFormat = 1;
constexpr std::int64_t kTableAlignment = 65536;

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

std::vector<std::int64_t> shape_of(const Json& json) {
  std::vector<std::int64_t> shape;
  for (const Json& size : json.array()) {
    shape.push_back(size.integer());
    if ((shape.size() == 1) != (shape.back() == -1) || shape.back() < -1) {
      refuse("a shape must begin with -1, and other sizes must not be negative");
    }
  }
  if (shape.empty()) {
    refuse("a shape must begin with -1");
  }
  return shape;
}

Feature feature_of(const Json& json) {
  Feature feature{json.at("name").text(), json.at("tensor").text(), std::nullopt, ""};
  if (!json.at("index").is_null()) {
    feature.index = json.at("index").text();
    if (feature.index.empty()) {
      refuse(text_of("feature '", feature.name, "' must name a table with an index"));
    }
  }
  if (!json.at("rows").is_null()) {
    feature.rows = json.at("rows").integer();
  }
  return feature;
}

bool is_jagged(const Json& json, const char* other) {
  const std::string& kind = json.at("kind").text();
  if (kind != "jagged" && kind != other) {
    refuse(text_of("'kind' must be 'jagged' or '", other, "'; received '", kind, "'"));
  }
  return kind == "jagged";
}

Input input_of(const Json& json) {
  Input input;
  input.name = json.at("name").text();
  input.is_jagged = is_jagged(json, "dense");
  input.dtype = dtype_named(json.at("dtype").text());
  if (input.is_jagged) {
    input.lengths_dtype = dtype_named(json.at("lengths_dtype").text());
    for (const recsys_dtype dtype : {input.dtype, input.lengths_dtype}) {
      if (dtype != RECSYS_INT32 && dtype != RECSYS_INT64) {
        refuse("ids and lengths must be int32 or int64");
      }
    }
    input.is_weighted = json.at("weighted").boolean();
    for (const Json& feature : json.at("features").array()) {
      input.features.push_back(feature_of(feature));
    }
  } else {
    input.shape = shape_of(json.at("shape"));
    if (!json.at("default").is_null()) {
      input.fill = json.at("default").number();
    }
  }
  return input;
}

Output output_of(const Json& json) {
  Output output;
  output.name = json.at("name").text();
  output.is_jagged = is_jagged(json, "rows");
  output.dtype = dtype_named(json.at("dtype").text());
  output.shape = shape_of(json.at("shape"));
  if (output.is_jagged) {
    dtype_named(json.at("lengths_dtype").text());
    output.is_weighted = !json.at("weights_dtype").is_null();
    if (output.is_weighted) {
      dtype_named(json.at("weights_dtype").text());
    }
  }
  const Json* vocabulary = json.find("vocabulary");
  if (vocabulary != nullptr && !vocabulary->is_null()) {
    output.vocabulary = vocabulary->text();
  }
  return output;
}

Table table_of(const Json& json) {
  Table table{json.at("name").text(),          json.at("rows").integer(),
              json.at("row_bytes").integer(),  json.at("file").text(),
              json.at("buffer").text(),        json.at("offset").integer(),
              std::nullopt};
  if (!json.at("index").is_null()) {
    const Json& index = json.at("index");
    table.index = IndexFiles{index.at("ids").text(), index.at("digests").text(),
                             index.at("regions").integer(), index.at("seed").integer()};
    index.at("unknown").text();
  }
  json.at("dim").integer();
  const std::string& dtype = json.at("dtype").text();
  const std::set<std::string> dtypes = {"int8", "int4", "int2", "float16", "float32"};
  if (dtypes.count(dtype) == 0) {
    refuse(text_of("table '", table.name, "' must not have the dtype '", dtype, "'"));
  }
  for (const Json& feature : json.at("features").array()) {
    feature.text();
  }
  if (table.rows < 0 || table.row_bytes <= 0 || table.offset < 0 ||
      table.offset % kTableAlignment != 0) {
    refuse(text_of("table '", table.name, "' has a bad size or offset"));
  }
  return table;
}

File file_of(const std::string& path, const Json& json) {
  const fs::path relative(path);
  if (path.empty() || relative.is_absolute()) {
    refuse(text_of("'", path, "' must be a path inside the version"));
  }
  for (const fs::path& part : relative) {
    if (part == ".." || part.empty()) {
      refuse(text_of("'", path, "' must be a path inside the version"));
    }
  }
  if (json.at("bytes").integer() < 0) {
    refuse(text_of("'", path, "' must not have a negative size"));
  }
  return {path, json.at("bytes").integer(), json.at("sha256").text()};
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream words(text);
  std::vector<std::string> found;
  for (std::string word; words >> word;) {
    found.push_back(word);
  }
  return found;
}

std::vector<std::string> texts_of(const Json& json) {
  std::vector<std::string> found;
  for (const Json& text : json.array()) {
    found.push_back(text.text());
  }
  return found;
}

const File* file_named(const Manifest& manifest, const std::string& path) {
  for (const File& candidate : manifest.files) {
    if (candidate.path == path) {
      return &candidate;
    }
  }
  return nullptr;
}

// An index must have whole files and regions of whole lines.
void check_index(const Manifest& manifest, const Table& table) {
  const IndexFiles& index = *table.index;
  const std::int64_t regions = index.regions;
  if (regions <= 0 || regions > 1 << 14 || (regions & (regions - 1)) != 0 || table.rows == 0 ||
      table.rows >= std::int64_t{1} << 37 || table.rows % (regions * kLineRows) != 0) {
    refuse(text_of("table '", table.name, "' must have regions of whole lines of ", kLineRows,
                   " rows"));
  }
  const File* ids = file_named(manifest, index.ids);
  const File* digests = file_named(manifest, index.digests);
  if (ids == nullptr || ids->bytes != 8 * table.rows || digests == nullptr ||
      digests->bytes != table.rows) {
    refuse(text_of("the index of table '", table.name, "' must have files of ", 8 * table.rows,
                   " and ", table.rows, " bytes"));
  }
}

// Features with hashed ids must name a table with an index, and have space for rows.
void check_features(const Manifest& manifest) {
  for (const Input& input : manifest.schema.inputs) {
    for (const Feature& feature : input.features) {
      bool is_known = feature.index.empty();
      for (const Table& table : manifest.tables) {
        is_known = is_known || (table.name == feature.index && table.index.has_value());
      }
      if (!is_known || (!feature.index.empty() && input.dtype != RECSYS_INT64)) {
        refuse(text_of("feature '", feature.name,
                       "' must have int64 ids and name a table with an index"));
      }
    }
  }
}

// Tables must be whole files, and must not overlap in their buffer.
void check_tables(const Manifest& manifest) {
  std::set<std::string> names;
  for (const Table& table : manifest.tables) {
    const Buffer* buffer = nullptr;  // of equal names the last one, as in Python
    for (const Buffer& candidate : manifest.buffers) {
      buffer = candidate.name == table.buffer ? &candidate : buffer;
    }
    std::int64_t bytes = 0;
    const bool overflows = __builtin_mul_overflow(table.rows, table.row_bytes, &bytes);
    if (buffer == nullptr || overflows || bytes > buffer->bytes - table.offset) {
      refuse(text_of("table '", table.name, "' must lie in a buffer"));
    }
    if (!names.insert(table.name).second) {
      refuse(text_of("two tables have the name '", table.name, "'"));
    }
    const File* file = file_named(manifest, table.file);
    if (table.index.has_value()) {
      check_index(manifest, table);
    }
    if (file == nullptr || file->bytes != bytes) {
      refuse(text_of("table '", table.name, "' must have a file of ", bytes, " bytes"));
    }
    for (const Table& other : manifest.tables) {
      if (&other != &table && other.buffer == table.buffer && other.offset >= table.offset &&
          other.offset < table.offset + bytes) {
        refuse(text_of("tables '", table.name, "' and '", other.name, "' overlap"));
      }
    }
  }
}

// Programs must have files; TorchScript, which has no rows, gets all buffers.
void check_programs(const Manifest& manifest) {
  std::multiset<std::string> buffers;
  for (const Buffer& buffer : manifest.buffers) {
    buffers.insert(buffer.name);
  }
  for (const ProgramFile& program : manifest.programs) {
    if (file_named(manifest, program.file) == nullptr) {
      refuse(text_of("files must have the program '", program.file, "'"));
    }
    const std::multiset<std::string> constants(program.constants.begin(), program.constants.end());
    if (program.kind == "torchscript" && constants != buffers) {
      refuse("constants of the program torchscript must be the buffers");
    }
  }
}

// One output at most may be rows of a vocabulary, whose values a response has.
void check_vocabularies(const Manifest& manifest) {
  std::set<std::string> known;
  for (const Json& column : manifest.columns) {
    if (column.at("kind").text() == "categorical") {
      known.insert(column.at("table").text());
    }
  }
  bool is_found = false;
  for (const Output& output : manifest.schema.outputs) {
    if (!output.vocabulary.has_value()) {
      continue;
    }
    const bool has_rows =
        !output.is_jagged && (output.dtype == RECSYS_INT32 || output.dtype == RECSYS_INT64);
    if (is_found || !has_rows || known.count(*output.vocabulary) == 0) {
      refuse(text_of("output '", output.name,
                     "' must have rows of a vocabulary, int64 or int32, as the only output"));
    }
    is_found = true;
  }
}

Manifest parse(const std::string& text) {
  const Json json = Json::parse(text);
  const std::int64_t format = json.at("format").integer();
  if (format != kFormat) {
    refuse(text_of("its format is ", format, "; this release reads format ", kFormat,
                   ". Write the package again with this release, or use a later one"));
  }
  Manifest manifest;
  manifest.text = text;
  manifest.id = sha256(text.data(), text.size());
  json.at("recsys").text();
  manifest.torch = json.at("torch").text();
  manifest.fbgemm = json.at("fbgemm").text();
  manifest.machine = json.at("machine").text();
  manifest.instruction_set = words_of(json.at("instruction_set").text());
  for (const Json& program : json.at("programs").array()) {
    manifest.programs.push_back({program.at("kind").text(), program.at("file").text(),
                                 program.at("device").text(), texts_of(program.at("constants"))});
  }
  for (const Json& input : json.at("inputs").array()) {
    manifest.schema.inputs.push_back(input_of(input));
  }
  for (const Json& output : json.at("outputs").array()) {
    manifest.schema.outputs.push_back(output_of(output));
  }
  manifest.schema.max_rows = json.at("limits").at("max_rows").integer();
  for (const Json& table : json.at("tables").array()) {
    manifest.tables.push_back(table_of(table));
  }
  for (const Json& buffer : json.at("buffers").array()) {
    manifest.buffers.push_back({buffer.at("name").text(), buffer.at("bytes").integer()});
    if (manifest.buffers.back().bytes < 0) {
      refuse("a buffer must not have a negative size");
    }
  }
  for (const auto& [path, file] : json.at("files").object()) {
    manifest.files.push_back(file_of(path, file));
  }
  manifest.columns = json.at("columns").array();
  check_tables(manifest);
  check_features(manifest);
  check_vocabularies(manifest);
  check_programs(manifest);
  return manifest;
}

// Whether a path, with its links resolved, is in a folder.
bool is_inside(const fs::path& path, const fs::path& folder) {
  const fs::path relative = fs::canonical(path).lexically_relative(fs::canonical(folder));
  return !relative.empty() && *relative.begin() != "..";
}

std::string minor_release(const std::string& release) {
  const std::size_t dot = release.find('.');
  return release.substr(0, release.find_first_of(".+", dot + 1));
}

#if defined(__x86_64__)
bool has_amx_tile() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d >> 24 & 1) != 0;
}
#endif

// Words are those of torch.backends: a word that is not known here is not supported.
bool cpu_supports(const std::string& word) {
#if defined(__x86_64__)
  if (word == "AVX2") {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }
  if (word == "AVX512") {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  if (word == "AVX512_VNNI") {
    return __builtin_cpu_supports("avx512vnni");
  }
  if (word == "AMX_TILE") {
    return has_amx_tile();
  }
#elif defined(__aarch64__)
  if (word == "NEON" || word == "ASIMD") {
    return true;
  }
#endif
  return word == "INVALID_VEC_ISA" || word == "DEFAULT";
}

}  // namespace

std::vector<std::string> Output::tensors() const {
  if (!is_jagged) {
    return {name};
  }
  const std::string prefix = name.empty() ? "" : name + ".";
  std::vector<std::string> found = {prefix + "values", prefix + "lengths"};
  if (is_weighted) {
    found.push_back(prefix + "weights");
  }
  return found;
}

Manifest Manifest::read(const std::string& version) {
  const std::string path = (fs::path(version) / "manifest.json").string();
  if (!fs::is_regular_file(path)) {
    fail(RECSYS_BAD_PACKAGE, "'", version, "' must be a version of a package, such as 'movies/1'; ",
         "it has no manifest.json.");
  }
  try {
    return parse(read_file(path));
  } catch (const std::exception& error) {
    fail(RECSYS_BAD_PACKAGE, "'", path, "' must be a manifest; ", error.what(), ".");
  }
}

void Manifest::verify_files(const std::string& version, bool tables) const {
  for (const File& file : files) {
    const fs::path path = fs::path(version) / file.path;
    std::error_code ignored;
    if (!fs::is_regular_file(path, ignored)) {
      fail(RECSYS_BAD_PACKAGE, "'", path.string(), "' is missing. Copy the package again.");
    }
    if (!is_inside(path, version)) {
      fail(RECSYS_BAD_PACKAGE, "'", path.string(), "' must be in the package; it is a link to '",
           fs::canonical(path).string(), "'.");
    }
    const auto bytes = static_cast<std::int64_t>(fs::file_size(path));
    if (bytes != file.bytes) {
      fail(RECSYS_BAD_PACKAGE, "'", path.string(), "' is damaged: it must have ", file.bytes,
           " bytes; received ", bytes, ". Copy the package again.");
    }
    bool is_table = false;
    for (const Table& table : this->tables) {
      is_table = is_table || table.file == file.path ||
                 (table.index.has_value() &&
                  (table.index->ids == file.path || table.index->digests == file.path));
    }
    if ((tables || !is_table) && sha256_of_file(path.string()) != file.sha256) {
      fail(RECSYS_BAD_PACKAGE, "'", path.string(),
           "' is damaged: it does not match its checksum in manifest.json. Copy the package again.");
    }
  }
}

void Manifest::check_machine(const ProgramFile& program, const std::string& torch_release,
                             const std::string& fbgemm_release) const {
  if (minor_release(torch) != minor_release(torch_release)) {
    fail(RECSYS_BAD_PACKAGE, "The package needs torch ", minor_release(torch), "; received ",
         torch_release, ". Install that release, or write the package again.");
  }
  if (minor_release(fbgemm) != minor_release(fbgemm_release)) {
    fail(RECSYS_BAD_PACKAGE, "The package needs fbgemm_gpu ", minor_release(fbgemm),
         "; received ", fbgemm_release, ". Install that release, or write the package again.");
  }
  if (program.kind != "aoti") {
    return;  // TorchScript compiles at load time
  }
  utsname system;
  uname(&system);
  if (machine != system.machine) {
    fail(RECSYS_BAD_PACKAGE, "The package needs a machine of kind ", machine, "; received ",
         system.machine, ". Write the package again on such a machine.");
  }
  for (const std::string& word : instruction_set) {
    if (!cpu_supports(word)) {
      fail(RECSYS_BAD_PACKAGE, "The package needs a CPU with ", word,
           ", which this CPU does not have. Write the package again on such a CPU.");
    }
  }
}

const ProgramFile& Manifest::program(const std::string& kind) const {
  std::string kinds;
  for (const ProgramFile& candidate : programs) {
    if (kind.empty() || candidate.kind == kind) {
      return candidate;
    }
    kinds += (kinds.empty() ? "" : ", ") + candidate.kind;
  }
  fail(RECSYS_BAD_PACKAGE, "program must be one of the package's kinds (", kinds, "); received '",
       kind, "'.");
}

}  // namespace recsys
