/* The functions of NVIDIA Triton's C API that the backend calls or implements.
 *
 * Declared here, because a Triton server comes without headers. tritonserver has the functions;
 * the backend finds them when the server loads it. */
#ifndef RECSYS_TRITON_API_H
#define RECSYS_TRITON_API_H

#include <stddef.h>
#include <stdint.h>

#define TRITON_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Versions of the API of backends that have all of the functions below. */
enum { TRITON_API_MAJOR = 1, TRITON_API_MINOR = 0 };

typedef struct TRITONSERVER_Error TRITONSERVER_Error; /* NULL: success */
typedef struct TRITONSERVER_Message TRITONSERVER_Message;
typedef struct TRITONBACKEND_Input TRITONBACKEND_Input;
typedef struct TRITONBACKEND_Model TRITONBACKEND_Model;
typedef struct TRITONBACKEND_ModelInstance TRITONBACKEND_ModelInstance;
typedef struct TRITONBACKEND_Output TRITONBACKEND_Output;
typedef struct TRITONBACKEND_Request TRITONBACKEND_Request;
typedef struct TRITONBACKEND_Response TRITONBACKEND_Response;

typedef uint32_t triton_enum;
enum { TRITON_ERROR_INTERNAL = 1, TRITON_ERROR_INVALID_ARG = 3 }; /* HTTP 500 and 400 */
enum { TRITON_LOG_INFO = 0, TRITON_LOG_WARN = 1, TRITON_LOG_ERROR = 2 };
enum { TRITON_MEMORY_CPU = 0, TRITON_MEMORY_CPU_PINNED = 1, TRITON_MEMORY_GPU = 2 };
enum { TRITON_KIND_AUTO = 0, TRITON_KIND_CPU = 1, TRITON_KIND_GPU = 2, TRITON_KIND_MODEL = 3 };
enum { TRITON_RESPONSE_FINAL = 1, TRITON_RELEASE_ALL = 1 };
enum {
  TRITON_BOOL = 1,
  TRITON_UINT8 = 2,
  TRITON_INT32 = 8,
  TRITON_INT64 = 9,
  TRITON_FP16 = 10,
  TRITON_FP32 = 11,
  TRITON_FP64 = 12,
  TRITON_BYTES = 13,
  TRITON_BF16 = 14
};

/* --- functions of the server ------------------------------------------------------------- */

/* A copy of the message is kept. */
TRITONSERVER_Error *TRITONSERVER_ErrorNew(triton_enum code, const char *message);
void TRITONSERVER_ErrorDelete(TRITONSERVER_Error *error);
const char *TRITONSERVER_ErrorMessage(TRITONSERVER_Error *error);
TRITONSERVER_Error *TRITONSERVER_LogMessage(triton_enum level, const char *file, int line,
                                            const char *message);
TRITONSERVER_Error *TRITONSERVER_MessageSerializeToJson(TRITONSERVER_Message *message,
                                                        const char **text, size_t *bytes);
TRITONSERVER_Error *TRITONSERVER_MessageDelete(TRITONSERVER_Message *message);

TRITONSERVER_Error *TRITONBACKEND_ApiVersion(uint32_t *major, uint32_t *minor);

TRITONSERVER_Error *TRITONBACKEND_ModelName(TRITONBACKEND_Model *model, const char **name);
TRITONSERVER_Error *TRITONBACKEND_ModelVersion(TRITONBACKEND_Model *model, uint64_t *version);
/* The folder of the model, which has the versions' folders. */
TRITONSERVER_Error *TRITONBACKEND_ModelRepository(TRITONBACKEND_Model *model, triton_enum *kind,
                                                  const char **folder);
TRITONSERVER_Error *TRITONBACKEND_ModelConfig(TRITONBACKEND_Model *model, uint32_t version,
                                              TRITONSERVER_Message **config);
TRITONSERVER_Error *TRITONBACKEND_ModelState(TRITONBACKEND_Model *model, void **state);
TRITONSERVER_Error *TRITONBACKEND_ModelSetState(TRITONBACKEND_Model *model, void *state);

TRITONSERVER_Error *TRITONBACKEND_ModelInstanceModel(TRITONBACKEND_ModelInstance *instance,
                                                     TRITONBACKEND_Model **model);
TRITONSERVER_Error *TRITONBACKEND_ModelInstanceKind(TRITONBACKEND_ModelInstance *instance,
                                                    triton_enum *kind);
TRITONSERVER_Error *TRITONBACKEND_ModelInstanceDeviceId(TRITONBACKEND_ModelInstance *instance,
                                                        int32_t *device);
TRITONSERVER_Error *TRITONBACKEND_ModelInstanceState(TRITONBACKEND_ModelInstance *instance,
                                                     void **state);
TRITONSERVER_Error *TRITONBACKEND_ModelInstanceSetState(TRITONBACKEND_ModelInstance *instance,
                                                        void *state);
/* Times in nanoseconds, of the system clock. */
TRITONSERVER_Error *TRITONBACKEND_ModelInstanceReportStatistics(
    TRITONBACKEND_ModelInstance *instance, TRITONBACKEND_Request *request, bool success,
    uint64_t start, uint64_t compute_start, uint64_t compute_end, uint64_t end);
TRITONSERVER_Error *TRITONBACKEND_ModelInstanceReportBatchStatistics(
    TRITONBACKEND_ModelInstance *instance, uint64_t batch_size, uint64_t start,
    uint64_t compute_start, uint64_t compute_end, uint64_t end);

TRITONSERVER_Error *TRITONBACKEND_RequestInputCount(TRITONBACKEND_Request *request,
                                                    uint32_t *count);
TRITONSERVER_Error *TRITONBACKEND_RequestInputByIndex(TRITONBACKEND_Request *request,
                                                      uint32_t index,
                                                      TRITONBACKEND_Input **input);
TRITONSERVER_Error *TRITONBACKEND_RequestOutputCount(TRITONBACKEND_Request *request,
                                                     uint32_t *count);
TRITONSERVER_Error *TRITONBACKEND_RequestOutputName(TRITONBACKEND_Request *request,
                                                    uint32_t index, const char **name);
TRITONSERVER_Error *TRITONBACKEND_RequestRelease(TRITONBACKEND_Request *request, uint32_t flags);

/* The data of an input may lie in several buffers. */
TRITONSERVER_Error *TRITONBACKEND_InputProperties(TRITONBACKEND_Input *input, const char **name,
                                                  triton_enum *dtype, const int64_t **shape,
                                                  uint32_t *num_dims, uint64_t *bytes,
                                                  uint32_t *num_buffers);
/* `memory` is the wanted and then the found kind of memory. */
TRITONSERVER_Error *TRITONBACKEND_InputBuffer(TRITONBACKEND_Input *input, uint32_t index,
                                              const void **data, uint64_t *bytes,
                                              triton_enum *memory, int64_t *device);

TRITONSERVER_Error *TRITONBACKEND_ResponseNew(TRITONBACKEND_Response **response,
                                              TRITONBACKEND_Request *request);
TRITONSERVER_Error *TRITONBACKEND_ResponseOutput(TRITONBACKEND_Response *response,
                                                 TRITONBACKEND_Output **output, const char *name,
                                                 triton_enum dtype, const int64_t *shape,
                                                 uint32_t num_dims);
TRITONSERVER_Error *TRITONBACKEND_OutputBuffer(TRITONBACKEND_Output *output, void **data,
                                               uint64_t bytes, triton_enum *memory,
                                               int64_t *device);
/* The response is sent or freed; the error stays the caller's. */
TRITONSERVER_Error *TRITONBACKEND_ResponseSend(TRITONBACKEND_Response *response, uint32_t flags,
                                               TRITONSERVER_Error *error);

/* --- functions of the backend ------------------------------------------------------------ */

TRITON_EXPORT TRITONSERVER_Error *TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model *model);
TRITON_EXPORT TRITONSERVER_Error *TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model *model);
TRITON_EXPORT TRITONSERVER_Error *TRITONBACKEND_ModelInstanceInitialize(
    TRITONBACKEND_ModelInstance *instance);
TRITON_EXPORT TRITONSERVER_Error *TRITONBACKEND_ModelInstanceFinalize(
    TRITONBACKEND_ModelInstance *instance);
/* After success the requests are the backend's, which releases each when it is answered. */
TRITON_EXPORT TRITONSERVER_Error *TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance *instance, TRITONBACKEND_Request **requests, uint32_t count);

#ifdef __cplusplus
}
#endif

#endif /* RECSYS_TRITON_API_H */
