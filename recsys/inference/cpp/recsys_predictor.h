/* C API of the recsys predictor: opens a serving package and scores batches of requests.
 *
 * Functions return a recsys_code. recsys_last_error() has the message of the last failed call of
 * this thread. A predictor may be used by several threads at the same time. Names and messages are
 * UTF-8. No function throws an exception. */
#ifndef RECSYS_PREDICTOR_H
#define RECSYS_PREDICTOR_H

#include <stdint.h>

#define RECSYS_API __attribute__((visibility("default")))
#define RECSYS_API_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  RECSYS_OK = 0,
  RECSYS_BAD_REQUEST = 1, /* a tensor of a request is wrong; the message names it */
  RECSYS_BAD_PACKAGE = 2, /* a package cannot be opened; the message names the file */
  RECSYS_BAD_DELTA = 3,   /* a row update does not fit; nothing was changed */
  RECSYS_FAILED = 4       /* the program raised an error, or memory ran out */
} recsys_code;

typedef enum {
  RECSYS_BOOL = 0,
  RECSYS_UINT8 = 1,
  RECSYS_INT32 = 2,
  RECSYS_INT64 = 3,
  RECSYS_FLOAT16 = 4,
  RECSYS_BFLOAT16 = 5,
  RECSYS_FLOAT32 = 6,
  RECSYS_FLOAT64 = 7,
  RECSYS_TEXT = 8 /* of raw columns and their values: an array of recsys_text */
} recsys_dtype;

/* UTF-8, without a 0 at its end; data NULL: the value is missing. */
typedef struct {
  const char *data;
  int64_t size;
} recsys_text;

/* A named tensor in host memory. */
typedef struct {
  const char *name;
  int32_t dtype; /* a recsys_dtype */
  int32_t num_dims;
  const int64_t *shape;
  const int64_t *strides; /* in elements; NULL: contiguous. Other strides are refused. */
  const void *data;
} recsys_tensor;

typedef struct {
  const recsys_tensor *tensors;
  int32_t num_tensors;
} recsys_request;

typedef struct {
  int32_t device;             /* index of a CUDA device; -1: CPU */
  int32_t num_runners;        /* calls that run at the same time; more calls wait */
  int32_t num_threads;        /* threads of one operator; 0: torch's default */
  int32_t verify_tables;      /* 1: compare the checksums of tables, which reads them */
  int32_t poll_ms;            /* interval of reading new files in deltas/; 0: only at opening */
  const char *program;        /* "aoti" or "torchscript"; NULL: the first of the manifest */
  const char *fbgemm;         /* folder of FBGEMM's libraries; NULL: the folder at build time */
} recsys_options;

typedef struct recsys_predictor recsys_predictor;
typedef struct recsys_responses recsys_responses;

/* Sets: CPU, one runner, torch's threads, tables verified, no polling, the first program. */
RECSYS_API void recsys_default_options(recsys_options *options);

/* Opens one version of a package, such as "movies/1", and applies its deltas. */
RECSYS_API recsys_code recsys_open(const char *version, const recsys_options *options,
                                   recsys_predictor **predictor);
RECSYS_API void recsys_close(recsys_predictor *predictor);

/* The manifest, JSON; valid until the next swap or close. */
RECSYS_API const char *recsys_manifest(const recsys_predictor *predictor);

/* Checks a request and counts its rows, without running it. */
RECSYS_API recsys_code recsys_check(const recsys_predictor *predictor,
                                    const recsys_request *request, int64_t *num_rows);

/* Merges requests into one batch, runs it, and splits the outputs. A bad request fails alone: its
 * response has a code and a message. The call itself fails only if no response can be built. */
RECSYS_API recsys_code recsys_run(recsys_predictor *predictor, const recsys_request *requests,
                                  int32_t num_requests, recsys_responses **responses);
RECSYS_API recsys_code recsys_response_code(const recsys_responses *responses, int32_t request);
RECSYS_API const char *recsys_response_message(const recsys_responses *responses, int32_t request);
/* The outputs of a request in the order of the manifest; valid until the responses are freed. */
RECSYS_API int32_t recsys_response_outputs(const recsys_responses *responses, int32_t request,
                                           const recsys_tensor **outputs);
/* The values of the data that recommended rows stand for: "values", int64 or texts, and
 * "values.missing", bool, both in the shape of the rows. A row that is not an item has the number 0
 * or a text without data. Valid until the responses are freed; for one thread at a time. Without
 * a vocabulary of the rows in the package there are no tensors. RECSYS_FAILED: a row is outside its
 * table. */
RECSYS_API recsys_code recsys_response_values(recsys_responses *responses, int32_t request,
                                              const recsys_tensor **values, int32_t *num_values);
RECSYS_API void recsys_responses_free(recsys_responses *responses);

/* Opens another version and replaces the current one, which answers until then. Calls in flight
 * end with the version that they began with. After an error the current version goes on. */
RECSYS_API recsys_code recsys_swap(recsys_predictor *predictor, const char *version);

/* Writes rows of a table: ids [num_ids] and quantized rows [num_ids, row bytes]. No call reads a
 * part of a row. */
RECSYS_API recsys_code recsys_update(recsys_predictor *predictor, const char *table,
                                     const int64_t *ids, int64_t num_ids, const void *rows,
                                     int64_t row_bytes);
/* Applies one delta file; its sequence number must follow recsys_sequence(). */
RECSYS_API recsys_code recsys_apply(recsys_predictor *predictor, const char *file);
/* The sequence number of the last applied delta; 0: none. */
RECSYS_API int64_t recsys_sequence(const recsys_predictor *predictor);
/* The message of the last refused delta that polling found; empty: none. */
RECSYS_API const char *recsys_delta_error(const recsys_predictor *predictor);

RECSYS_API const char *recsys_last_error(void);

#ifdef __cplusplus
}
#endif

#endif /* RECSYS_PREDICTOR_H */
