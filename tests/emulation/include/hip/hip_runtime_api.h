/* As much of the HIP runtime's header as hipfile.h and its Python binding need. */
#ifndef EMULATION_HIP_RUNTIME_API_H
#define EMULATION_HIP_RUNTIME_API_H

#include <stddef.h>

typedef enum { hipSuccess = 0, hipErrorUnknown = 999 } hipError_t;
typedef struct emulated_hip_stream *hipStream_t;

#ifdef __cplusplus
extern "C" {
#endif
hipError_t hipPeekAtLastError(void);
#ifdef __cplusplus
}
#endif

#endif
