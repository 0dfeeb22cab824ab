/* libamdhip64.so: the HIP runtime's calls for memory, copies, streams and events.
 *
 * HIP has no contexts to push: a thread has a current device, and the first real use of a device makes its context.
 */
#define _GNU_SOURCE
#include "core.h"

#include <stdio.h>
#include <string.h>

typedef int hipError_t;
typedef void *hipStream_t, *hipEvent_t, *hipCtx_t;

static __thread int last_error;

static hipError_t last(int code) {
    if (code && code != NOT_READY) last_error = code;
    return code;
}

enum needs { NOTHING, INIT, CONTEXT };

static int begin(struct function **cache, const char *name, enum needs needs, int *device) {
    int code = core_begin(cache, name, NULL);
    *device = core_hip_device();
    if (code || needs == NOTHING) return code;
    if (core_settings.init_error) return core_settings.init_error;
    if (!core_settings.devices) return NO_DEVICE;
    return needs == CONTEXT ? core_context_touch(*device) : OK;
}

/* Counts the call, lets a fault end it, and names the current device. */
#define BEGIN(needs)                                                                                                   \
    static struct function *function_;                                                                                 \
    int device = 0;                                                                                                    \
    {                                                                                                                  \
        int code_ = begin(&function_, __func__, needs, &device);                                                       \
        if (code_) return last(code_);                                                                                 \
    }                                                                                                                  \
    (void)device

static bool known(int device) { return device >= 0 && device < core_settings.devices; }

/* ---- runtime and devices ---- */

API hipError_t hipInit(unsigned flags) {
    BEGIN(INIT);
    return last(flags ? INVALID_VALUE : OK);
}
API hipError_t hipDriverGetVersion(int *version) {
    BEGIN(NOTHING);
    *version = core_settings.hip_version;
    return OK;
}
API hipError_t hipRuntimeGetVersion(int *version) {
    BEGIN(NOTHING);
    *version = core_settings.hip_version;
    return OK;
}

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {OK, "hipSuccess", "no error"},
    {INVALID_VALUE, "hipErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "hipErrorOutOfMemory", "out of memory"},
    {NOT_INITIALIZED, "hipErrorNotInitialized", "initialization error"},
    {21, "hipErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {35, "hipErrorInsufficientDriver", "driver version is insufficient for runtime version"},
    {NO_DEVICE, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    {INVALID_DEVICE, "hipErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_CONTEXT, "hipErrorInvalidContext", "invalid device context"},
    {INVALID_HANDLE, "hipErrorInvalidHandle", "invalid resource handle"},
    {NOT_FOUND, "hipErrorNotFound", "named symbol not found"},
    {NOT_READY, "hipErrorNotReady", "device not ready"},
    {ILLEGAL_ADDRESS, "hipErrorIllegalAddress", "an illegal memory access was encountered"},
    {LAUNCH_TIMEOUT, "hipErrorLaunchTimeOut", "the launch timed out and was terminated"},
    {CONTEXT_IS_DESTROYED, "hipErrorContextIsDestroyed", "context is destroyed"},
    {ALREADY_REGISTERED, "hipErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {NOT_REGISTERED, "hipErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {719, "hipErrorLaunchFailure", "unspecified launch failure"},
    {NOT_SUPPORTED, "hipErrorNotSupported", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "hipErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "hipErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {CAPTURE_IMPLICIT, "hipErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {999, "hipErrorUnknown", "unknown error"},
};

API const char *hipGetErrorName(hipError_t code) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return errors[i].name;
    return "hipErrorUnknown";
}
API const char *hipGetErrorString(hipError_t code) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return errors[i].text;
    return "unknown error";
}
API hipError_t hipGetLastError(void) {
    int code = last_error;
    last_error = OK;
    return code;
}
API hipError_t hipPeekAtLastError(void) { return last_error; }

API hipError_t hipGetDeviceCount(int *count) {
    BEGIN(INIT);
    *count = core_settings.devices;
    return OK;
}
API hipError_t hipSetDevice(int which) {
    BEGIN(INIT);
    return last(core_hip_set_device(which));
}
API hipError_t hipGetDevice(int *which) {
    BEGIN(INIT);
    *which = device;
    return OK;
}
API hipError_t hipDeviceGet(int *out, int ordinal) {
    BEGIN(INIT);
    if (!known(ordinal)) return last(INVALID_DEVICE);
    *out = ordinal;
    return OK;
}
API hipError_t hipDeviceGetName(char *name, int room, int which) {
    BEGIN(INIT);
    if (!known(which)) return last(INVALID_DEVICE);
    snprintf(name, room, "Emulated HIP device %d", which);
    return OK;
}
API hipError_t hipDeviceGetPCIBusId(char *name, int room, int which) {
    BEGIN(INIT);
    if (!known(which)) return last(INVALID_DEVICE);
    snprintf(name, room, "0000:%02x:00.0", which + 1);
    return OK;
}
API hipError_t hipDeviceTotalMem(size_t *bytes, int which) {
    BEGIN(INIT);
    if (!known(which)) return last(INVALID_DEVICE);
    *bytes = core_settings.memory;
    return OK;
}
/* The attributes' numbers change between releases of HIP; but for hipDeviceAttributeIntegrated all say 0 here. */
API hipError_t hipDeviceGetAttribute(int *value, int attribute, int which) {
    BEGIN(INIT);
    if (!known(which)) return last(INVALID_DEVICE);
    *value = attribute == 16 ? (int)core_settings.integrated : 0;
    return OK;
}
API hipError_t hipDeviceCanAccessPeer(int *can, int which, int peer) {
    BEGIN(INIT);
    if (!known(which) || !known(peer)) return last(INVALID_DEVICE);
    *can = which != peer;
    return OK;
}
API hipError_t hipDeviceSynchronize(void) {
    BEGIN(CONTEXT);
    return last(core_device_synchronize(device));
}
API hipError_t hipDevicePrimaryCtxGetState(int which, unsigned *flags, int *active) {
    BEGIN(INIT);
    if (!known(which)) return last(INVALID_DEVICE);
    if (flags) *flags = 0;
    *active = core_context_active(which);
    return OK;
}
API hipError_t hipDevicePrimaryCtxRetain(hipCtx_t *context, int which) {
    BEGIN(INIT);
    return last(core_context_retain(which, context));
}
API hipError_t hipDevicePrimaryCtxRelease(int which) {
    BEGIN(INIT);
    return last(core_context_release(which));
}

/* ---- memory ---- */

API hipError_t hipMemGetInfo(size_t *free, size_t *total) {
    BEGIN(CONTEXT);
    *total = core_settings.memory;
    *free = *total - core_device_bytes(device);
    return OK;
}
API hipError_t hipMalloc(void **pointer, size_t size) {
    BEGIN(CONTEXT);
    if (!size) return *pointer = NULL, OK;
    return last(core_allocate(DEVICE, device, size, 0, (uint64_t *)pointer));
}
API hipError_t hipMallocManaged(void **pointer, size_t size, unsigned flags) {
    BEGIN(CONTEXT);
    return last(core_allocate(MANAGED, device, size, flags, (uint64_t *)pointer));
}
API hipError_t hipFree(void *pointer) {
    BEGIN(CONTEXT);
    return last(pointer ? core_free((uint64_t)pointer, false) : OK);
}
API hipError_t hipHostMalloc(void **pointer, size_t size, unsigned flags) {
    BEGIN(CONTEXT);
    return last(core_allocate(PINNED, device, size, flags, (uint64_t *)pointer));
}
API hipError_t hipHostAlloc(void **pointer, size_t size, unsigned flags) {
    BEGIN(CONTEXT);
    return last(core_allocate(PINNED, device, size, flags, (uint64_t *)pointer));
}
API hipError_t hipHostFree(void *pointer) {
    BEGIN(CONTEXT);
    return last(pointer ? core_free((uint64_t)pointer, true) : OK);
}
API hipError_t hipHostRegister(void *pointer, size_t size, unsigned flags) {
    BEGIN(CONTEXT);
    return last(core_register(pointer, size, device, flags));
}
API hipError_t hipHostUnregister(void *pointer) {
    BEGIN(CONTEXT);
    return last(core_unregister(pointer));
}
API hipError_t hipHostGetDevicePointer(void **pointer, void *host, unsigned flags) {
    struct allocation found;
    BEGIN(CONTEXT);
    if (flags || !core_find((uint64_t)host, &found) || found.kind < PINNED) return last(INVALID_VALUE);
    *pointer = host;
    return OK;
}
API hipError_t hipMemGetAddressRange(void **base, size_t *size, void *pointer) {
    struct allocation found;
    BEGIN(CONTEXT);
    if (!core_find((uint64_t)pointer, &found)) return last(NOT_FOUND);
    if (base) *base = (void *)found.base;
    if (size) *size = found.size;
    return OK;
}

struct pointer_attributes { /* hipPointerAttribute_t since ROCm 6 */
    int type;               /* 0 unregistered, 1 host, 2 device, 3 managed */
    int device;
    void *device_pointer, *host_pointer;
    int managed;
    unsigned flags;
};

/* Memory that the runtime does not know is an error, as HIP's documentation has it. */
API hipError_t hipPointerGetAttributes(struct pointer_attributes *attributes, const void *pointer) {
    struct allocation found;
    BEGIN(INIT);
    memset(attributes, 0, sizeof *attributes);
    if (!core_find((uint64_t)pointer, &found)) return last(INVALID_VALUE);
    bool host = found.kind == PINNED || found.kind == REGISTERED;
    attributes->type = host ? 1 : found.kind == MANAGED ? 3 : 2;
    attributes->device = found.device;
    attributes->device_pointer = (void *)pointer;
    attributes->host_pointer = found.kind == DEVICE ? NULL : (void *)pointer;
    attributes->managed = found.kind == MANAGED;
    attributes->flags = found.flags;
    return OK;
}

/* ---- copies ---- */

static bool on_device(uint64_t pointer) {
    struct allocation found;
    return core_find(pointer, &found) && (found.kind == DEVICE || found.kind == MANAGED);
}

/* The direction that the caller names has to be the one that the addresses say. */
static int check(const struct plane *plane, int direction) {
    if (!plane->width || !plane->height) return OK;
    bool to = on_device(plane->target), from = on_device(plane->source);
    switch (direction) {
    case 0: return to || from ? 21 : OK;
    case 1: return to ? OK : 21;
    case 2: return from ? OK : 21;
    case 3: return to && from ? OK : 21;
    case 4: return OK;
    }
    return 21;
}

static int copy(const struct plane *plane, int direction, hipStream_t stream, int device) {
    int code = check(plane, direction);
    return last(code ? code : core_copy(plane, stream, device, false));
}

static struct plane line(const void *target, const void *source, size_t size) {
    return (struct plane){(uint64_t)target, (uint64_t)source, size, size, size, 1};
}

API hipError_t hipMemcpy(void *target, const void *source, size_t size, int direction) {
    BEGIN(CONTEXT);
    struct plane plane = line(target, source, size);
    int code = check(&plane, direction);
    return last(code ? code : core_copy_now(&plane, device));
}
API hipError_t hipMemcpyWithStream(void *target, const void *source, size_t size, int direction, hipStream_t stream) {
    BEGIN(CONTEXT);
    struct plane plane = line(target, source, size);
    int code = copy(&plane, direction, stream, device);
    return code ? code : last(core_stream_synchronize(stream, device));
}
API hipError_t hipMemcpyAsync(void *target, const void *source, size_t size, int direction, hipStream_t stream) {
    BEGIN(CONTEXT);
    struct plane plane = line(target, source, size);
    return copy(&plane, direction, stream, device);
}
API hipError_t hipMemcpyHtoDAsync(void *target, const void *source, size_t size, hipStream_t stream) {
    BEGIN(CONTEXT);
    struct plane plane = line(target, source, size);
    return copy(&plane, 1, stream, device);
}
API hipError_t hipMemcpyDtoHAsync(void *target, const void *source, size_t size, hipStream_t stream) {
    BEGIN(CONTEXT);
    struct plane plane = line(target, source, size);
    return copy(&plane, 2, stream, device);
}
API hipError_t hipMemcpyDtoDAsync(void *target, const void *source, size_t size, hipStream_t stream) {
    BEGIN(CONTEXT);
    struct plane plane = line(target, source, size);
    return copy(&plane, 3, stream, device);
}
API hipError_t hipMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch,
                                size_t width, size_t height, int direction, hipStream_t stream) {
    BEGIN(CONTEXT);
    struct plane plane = {(uint64_t)target, (uint64_t)source, target_pitch, source_pitch, width, height};
    return copy(&plane, direction, stream, device);
}
API hipError_t hipMemset(void *target, int value, size_t size) {
    BEGIN(CONTEXT);
    struct plane plane = line(target, NULL, size);
    return last(core_fill(&plane, value, NULL, device, true));
}
API hipError_t hipMemsetAsync(void *target, int value, size_t size, hipStream_t stream) {
    BEGIN(CONTEXT);
    struct plane plane = line(target, NULL, size);
    return last(core_fill(&plane, value, stream, device, false));
}
API hipError_t hipMemset2DAsync(void *target, size_t pitch, int value, size_t width, size_t height,
                                hipStream_t stream) {
    BEGIN(CONTEXT);
    struct plane plane = {.target = (uint64_t)target, .target_pitch = pitch, .width = width, .height = height};
    return last(core_fill(&plane, value, stream, device, false));
}

/* ---- streams and events ---- */

API hipError_t hipStreamCreate(hipStream_t *stream) {
    BEGIN(CONTEXT);
    return last(core_stream_create(device, true, stream));
}
API hipError_t hipStreamCreateWithFlags(hipStream_t *stream, unsigned flags) {
    BEGIN(CONTEXT);
    return last(flags > 1 ? INVALID_VALUE : core_stream_create(device, !(flags & 1), stream));
}
API hipError_t hipStreamCreateWithPriority(hipStream_t *stream, unsigned flags, int priority) {
    (void)priority;
    BEGIN(CONTEXT);
    return last(flags > 1 ? INVALID_VALUE : core_stream_create(device, !(flags & 1), stream));
}
API hipError_t hipStreamDestroy(hipStream_t stream) {
    BEGIN(INIT);
    return last(core_stream_destroy(stream));
}
/* A stream that is the current device's is a use of it. */
#define BEGIN_STREAM(stream) BEGIN((uint64_t)(stream) <= 2 ? CONTEXT : INIT)

API hipError_t hipStreamSynchronize(hipStream_t stream) {
    BEGIN_STREAM(stream);
    return last(core_stream_synchronize(stream, device));
}
API hipError_t hipStreamQuery(hipStream_t stream) {
    BEGIN_STREAM(stream);
    return last(core_stream_query(stream, device));
}
API hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags) {
    (void)flags;
    BEGIN_STREAM(stream);
    return last(core_stream_wait(stream, device, event));
}
API hipError_t hipStreamGetFlags(hipStream_t stream, unsigned *flags) {
    int where;
    bool blocking;
    BEGIN_STREAM(stream);
    int code = core_stream_facts(stream, device, &where, &blocking);
    if (!code) *flags = !blocking;
    return last(code);
}
API hipError_t hipStreamGetDevice(hipStream_t stream, int *where) {
    bool blocking;
    BEGIN_STREAM(stream);
    return last(core_stream_facts(stream, device, where, &blocking));
}
API hipError_t hipStreamIsCapturing(hipStream_t stream, int *status) {
    BEGIN_STREAM(stream);
    return last(core_stream_capture(stream, device, status, NULL));
}
API hipError_t hipStreamGetCaptureInfo(hipStream_t stream, int *status, unsigned long long *identity) {
    BEGIN_STREAM(stream);
    return last(core_stream_capture(stream, device, status, (uint64_t *)identity));
}
API hipError_t hipLaunchHostFunc(hipStream_t stream, void (*function)(void *), void *argument) {
    BEGIN_STREAM(stream);
    return last(core_stream_host(stream, device, function, argument));
}
API hipError_t hipEventCreate(hipEvent_t *event) {
    BEGIN(CONTEXT);
    return last(core_event_create(device, event));
}
API hipError_t hipEventCreateWithFlags(hipEvent_t *event, unsigned flags) {
    (void)flags;
    BEGIN(CONTEXT);
    return last(core_event_create(device, event));
}
API hipError_t hipEventDestroy(hipEvent_t event) {
    BEGIN(INIT);
    return last(core_event_destroy(event));
}
API hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
    BEGIN_STREAM(stream);
    return last(core_event_record(event, stream, device));
}
API hipError_t hipEventSynchronize(hipEvent_t event) {
    BEGIN(INIT);
    return last(core_event_synchronize(event));
}
API hipError_t hipEventQuery(hipEvent_t event) {
    BEGIN(INIT);
    return last(core_event_query(event));
}
