// C++ API of the predictor: opens a serving package and scores batches of requests.
//
//   recsys::Predictor predictor("movies/1", {});
//   std::vector<recsys::Response> responses = predictor.run({request});
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "batch.h"
#include "manifest.h"
#include "program.h"
#include "tables.h"

namespace recsys {

// An open version of a package.
class Version;

// Functions throw recsys::Error. Several threads may use a predictor at the same time.
class Predictor {
 public:
  // Opens one version of a package, and applies its deltas.
  Predictor(const std::string& version, const Options& options);
  ~Predictor();
  Predictor(const Predictor&) = delete;
  Predictor& operator=(const Predictor&) = delete;

  // The manifest of the current version, JSON.
  std::shared_ptr<const std::string> manifest() const;

  // Checks a request and returns its rows.
  std::int64_t check(const Request& request) const;

  // Merges requests into batches of at most the manifest's max_rows, runs them, and splits the
  // outputs. A bad request fails alone: its response has a code and a message.
  std::vector<Response> run(const std::vector<Request>& requests);

  // Opens another version and replaces the current one. Calls in flight end with the version that
  // they began with. After an error the current version goes on.
  void swap(const std::string& version);

  // Writes rows of a table.
  void update(const TableUpdate& update);

  // Applies a delta, whose sequence number must follow `sequence`.
  void apply(const std::string& file);

  // The sequence number of the last applied delta; 0: none.
  std::int64_t sequence() const;

  // The message of the last refused delta that polling found; "": none.
  std::string delta_error() const;

 private:
  std::shared_ptr<Version> current() const;
  void poll();

  const Options options_;
  mutable std::mutex mutex_;  // of the following
  std::shared_ptr<Version> version_;
  std::condition_variable closing_;
  bool is_closing_ = false;
  std::thread poller_;
};

}  // namespace recsys
