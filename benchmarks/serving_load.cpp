// Load of benchmarks/serving.py: closed-loop clients of an HTTP server, and calls in this process.
//
//     serving_load http PORT REQUEST CLIENTS SECONDS [RATE]
//     serving_load calls VERSION REQUEST THREADS SECONDS RUNNERS
//
// http: REQUEST is a file with the bytes of one HTTP/1.1 request. CLIENTS connections to loopback
//     send it again when the response is complete. RATE: at most so many requests a second.
// calls: REQUEST is a file of tensors, see `read_tensors`. THREADS call a predictor that has
//     RUNNERS runners and one thread per operator.
// Prints JSON: requests, errors, seconds, and percentiles of the latency in microseconds.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "recsys_predictor.h"

using Clock = std::chrono::steady_clock;

double us_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double, std::micro>(end - start).count();
}

std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("There is no file '" + path + "'.");
  }
  return {std::istreambuf_iterator<char>(file), {}};
}

void print(std::vector<double> times, std::int64_t errors, double seconds) {
  std::sort(times.begin(), times.end());
  const auto at = [&](double part) {
    return times.empty() ? 0.0 : times[static_cast<std::size_t>(part * (times.size() - 1))];
  };
  std::printf("{\"requests\": %zu, \"errors\": %lld, \"seconds\": %.3f, \"p50\": %.1f, "
              "\"p90\": %.1f, \"p99\": %.1f}\n",
              times.size(), static_cast<long long>(errors), seconds, at(0.5), at(0.9), at(0.99));
}

// --- HTTP ---------------------------------------------------------------------------------------

struct Connection {
  int socket = -1;
  std::string received;
  std::size_t wanted = 0;  // bytes of the response; 0: its header is not complete
  bool is_waiting = false;
  Clock::time_point start;
};

int connect_to(int port) {
  const int found = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(found, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    throw std::runtime_error("There is no server at port " + std::to_string(port) + ".");
  }
  const int one = 1;
  setsockopt(found, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  return found;
}

void send_request(Connection& connection, const std::string& request) {
  connection.received.clear();
  connection.wanted = 0;
  connection.is_waiting = true;
  connection.start = Clock::now();
  for (std::size_t sent = 0; sent < request.size();) {
    const ssize_t count = send(connection.socket, request.data() + sent, request.size() - sent,
                               MSG_NOSIGNAL);
    if (count <= 0) {
      throw std::runtime_error("The server has closed a connection.");
    }
    sent += static_cast<std::size_t>(count);
  }
}

// Reads what has come; returns whether the response is complete.
bool receive(Connection& connection) {
  char block[65536];
  const ssize_t count = recv(connection.socket, block, sizeof(block), 0);
  if (count <= 0) {
    throw std::runtime_error("The server has closed a connection.");
  }
  connection.received.append(block, static_cast<std::size_t>(count));
  if (connection.wanted == 0) {
    const std::size_t end = connection.received.find("\r\n\r\n");
    if (end == std::string::npos) {
      return false;
    }
    std::string header = connection.received.substr(0, end);
    std::transform(header.begin(), header.end(), header.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    const std::size_t length = header.find("\r\ncontent-length:");
    if (length == std::string::npos) {
      throw std::runtime_error("A response has no content-length.");
    }
    connection.wanted = end + 4 + std::strtoull(header.c_str() + length + 17, nullptr, 10);
  }
  return connection.received.size() >= connection.wanted;
}

void run_http(int port, const std::string& request, int clients, double seconds, double rate) {
  std::vector<Connection> connections(static_cast<std::size_t>(clients));
  const int poll = epoll_create1(0);
  for (auto& connection : connections) {
    connection.socket = connect_to(port);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = &connection;
    epoll_ctl(poll, EPOLL_CTL_ADD, connection.socket, &event);
  }
  std::vector<double> times;
  times.reserve(1 << 20);
  std::int64_t errors = 0;
  std::int64_t num_sent = 0;
  const auto start = Clock::now();
  const double end = seconds * 1e6;
  const auto is_due = [&](double us) { return rate <= 0 || num_sent < us * rate / 1e6; };
  std::vector<Connection*> idle;
  for (auto& connection : connections) {
    idle.push_back(&connection);
  }
  std::size_t num_waiting = 0;
  std::vector<epoll_event> events(connections.size());
  for (double us = 0; us < end || num_waiting > 0; us = us_between(start, Clock::now())) {
    while (us < end && !idle.empty() && is_due(us)) {
      send_request(*idle.back(), request);
      idle.pop_back();
      ++num_sent;
      ++num_waiting;
    }
    const int found = epoll_wait(poll, events.data(), static_cast<int>(events.size()),
                                 rate > 0 ? 1 : 1000);
    for (int i = 0; i < found; ++i) {
      auto& connection = *static_cast<Connection*>(events[static_cast<std::size_t>(i)].data.ptr);
      if (!receive(connection)) {
        continue;
      }
      times.push_back(us_between(connection.start, Clock::now()));
      errors += connection.received.compare(9, 3, "200") != 0;
      idle.push_back(&connection);
      --num_waiting;
    }
    if (us > end + 30e6) {
      throw std::runtime_error("The server did not answer within 30 s.");
    }
  }
  print(std::move(times), errors, us_between(start, Clock::now()) / 1e6);
}

// --- calls in this process ----------------------------------------------------------------------

struct Tensors {
  std::vector<recsys_tensor> tensors;
  std::vector<std::string> names;
  std::vector<std::vector<std::int64_t>> shapes;
  std::vector<std::vector<std::int64_t>> data;  // aligned
};

// Reads int64 values: the number of tensors; then per tensor: bytes of the name, dtype, number of
// dims, the shape, bytes of the data; then the names and data, each filled up to 8 bytes.
Tensors read_tensors(const std::string& path) {
  const std::string bytes = read_bytes(path);
  std::size_t at = 0;
  const auto number = [&] {
    std::int64_t value = 0;
    std::memcpy(&value, bytes.data() + at, sizeof(value));
    at += sizeof(value);
    return value;
  };
  Tensors found;
  const auto count = static_cast<std::size_t>(number());
  std::vector<std::int64_t> name_bytes(count), data_bytes(count);
  found.tensors.resize(count);
  found.names.resize(count);
  found.shapes.resize(count);
  found.data.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    name_bytes[i] = number();
    found.tensors[i].dtype = static_cast<std::int32_t>(number());
    found.shapes[i].resize(static_cast<std::size_t>(number()));
    for (auto& size : found.shapes[i]) {
      size = number();
    }
    data_bytes[i] = number();
  }
  for (std::size_t i = 0; i < count; ++i) {
    found.names[i] = bytes.substr(at, static_cast<std::size_t>(name_bytes[i]));
    at += static_cast<std::size_t>((name_bytes[i] + 7) / 8 * 8);
    found.data[i].resize(static_cast<std::size_t>((data_bytes[i] + 7) / 8));
    std::memcpy(found.data[i].data(), bytes.data() + at, static_cast<std::size_t>(data_bytes[i]));
    at += static_cast<std::size_t>((data_bytes[i] + 7) / 8 * 8);
    found.tensors[i].name = found.names[i].c_str();
    found.tensors[i].num_dims = static_cast<std::int32_t>(found.shapes[i].size());
    found.tensors[i].shape = found.shapes[i].data();
    found.tensors[i].strides = nullptr;
    found.tensors[i].data = found.data[i].data();
  }
  return found;
}

void run_calls(const std::string& version, const std::string& path, int threads, double seconds,
               int runners) {
  recsys_options options;
  recsys_default_options(&options);
  options.num_runners = runners;
  options.num_threads = 1;
  recsys_predictor* predictor = nullptr;
  if (recsys_open(version.c_str(), &options, &predictor) != RECSYS_OK) {
    throw std::runtime_error(recsys_last_error());
  }
  const Tensors tensors = read_tensors(path);
  const recsys_request request{tensors.tensors.data(),
                               static_cast<std::int32_t>(tensors.tensors.size())};
  const auto call = [&] {
    recsys_responses* responses = nullptr;
    const recsys_code code = recsys_run(predictor, &request, 1, &responses);
    const bool is_good = code == RECSYS_OK && recsys_response_code(responses, 0) == RECSYS_OK;
    if (code == RECSYS_OK) {
      recsys_responses_free(responses);
    }
    return is_good;
  };
  for (int i = 0; i < 100; ++i) {
    call();
  }
  std::mutex mutex;
  std::vector<double> times;
  std::int64_t errors = 0;
  const auto start = Clock::now();
  std::vector<std::thread> workers;
  for (int i = 0; i < threads; ++i) {
    workers.emplace_back([&] {
      std::vector<double> own;
      std::int64_t failed = 0;
      while (us_between(start, Clock::now()) < seconds * 1e6) {
        const auto before = Clock::now();
        failed += !call();
        own.push_back(us_between(before, Clock::now()));
      }
      const std::lock_guard<std::mutex> lock(mutex);
      times.insert(times.end(), own.begin(), own.end());
      errors += failed;
    });
  }
  for (auto& worker : workers) {
    worker.join();
  }
  print(std::move(times), errors, us_between(start, Clock::now()) / 1e6);
  recsys_close(predictor);
}

int main(int argc, char** argv) {
  const std::vector<std::string> given(argv + 1, argv + argc);
  try {
    if (given.size() >= 5 && given[0] == "http") {
      run_http(std::stoi(given[1]), read_bytes(given[2]), std::stoi(given[3]),
               std::stod(given[4]), given.size() > 5 ? std::stod(given[5]) : 0);
    } else if (given.size() == 6 && given[0] == "calls") {
      run_calls(given[1], given[2], std::stoi(given[3]), std::stod(given[4]),
                std::stoi(given[5]));
    } else {
      throw std::runtime_error("See the head of serving_load.cpp for the arguments.");
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "serving_load: " << error.what() << "\n";
    return 1;
  }
}
