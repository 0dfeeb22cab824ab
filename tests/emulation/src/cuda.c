/* libcuda.so.1: the driver's entry points that the CUDA bindings and KvikIO use. */
#define _GNU_SOURCE
#include "core.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef int CUresult;
typedef uint64_t CUdeviceptr;
typedef int CUdevice;
typedef void *CUcontext, *CUstream, *CUevent;

enum needs { NOTHING, INIT, CONTEXT };

static int begin(struct function **cache, const char *name, enum needs needs, int *device) {
    int code = core_begin(cache, name, NULL);
    if (code || needs == NOTHING) return code;
    if (!core_initialised) return NOT_INITIALIZED;
    code = core_device_current(device);
    return needs == CONTEXT ? code : OK;
}

/* Counts the call, lets a fault end it, and names the current device, which is 0 where there is none. */
#define BEGIN(needs)                                                                                                   \
    static struct function *function_;                                                                                 \
    int device = 0;                                                                                                    \
    {                                                                                                                  \
        int code_ = begin(&function_, __func__, needs, &device);                                                       \
        if (code_) return code_;                                                                                       \
    }                                                                                                                  \
    (void)device

/* ---- driver and devices ---- */

API CUresult cuInit(unsigned flags) {
    BEGIN(NOTHING);
    if (flags) return INVALID_VALUE;
    if (core_settings.init_error) return core_settings.init_error;
    if (!core_settings.devices) return NO_DEVICE;
    core_initialised = true;
    return OK;
}

API CUresult cuDriverGetVersion(int *version) {
    BEGIN(NOTHING);
    *version = core_settings.cuda_version;
    return OK;
}

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {OK, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {36, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", "API call is not supported in the installed CUDA driver"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

API CUresult cuGetErrorName(CUresult code, const char **name) {
    BEGIN(NOTHING);
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return *name = errors[i].name, OK;
    *name = NULL;
    return INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult code, const char **text) {
    BEGIN(NOTHING);
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) return *text = errors[i].text, OK;
    *text = NULL;
    return INVALID_VALUE;
}

API CUresult cuDeviceGetCount(int *count) {
    BEGIN(INIT);
    *count = core_settings.devices;
    return OK;
}

static bool known(CUdevice device) { return device >= 0 && device < core_settings.devices; }

API CUresult cuDeviceGet(CUdevice *out, int ordinal) {
    BEGIN(INIT);
    if (!known(ordinal)) return INVALID_DEVICE;
    *out = ordinal;
    return OK;
}

API CUresult cuDeviceGetName(char *name, int room, CUdevice which) {
    BEGIN(INIT);
    if (!known(which)) return INVALID_DEVICE;
    snprintf(name, room, "Emulated CUDA device %d", which);
    return OK;
}

API CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice which) {
    BEGIN(INIT);
    if (!known(which)) return INVALID_DEVICE;
    memset(uuid, 0, 16);
    uuid[15] = which + 1;
    return OK;
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice which) {
    BEGIN(INIT);
    if (!known(which)) return INVALID_DEVICE;
    *bytes = core_settings.memory;
    return OK;
}

API CUresult cuDeviceGetPCIBusId(char *name, int room, CUdevice which) {
    BEGIN(INIT);
    if (!known(which)) return INVALID_DEVICE;
    snprintf(name, room, "0000:%02x:00.0", which + 1);
    return OK;
}

API CUresult cuDeviceCanAccessPeer(int *can, CUdevice which, CUdevice peer) {
    BEGIN(INIT);
    if (!known(which) || !known(peer)) return INVALID_DEVICE;
    *can = which != peer;
    return OK;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice which) {
    BEGIN(INIT);
    if (!known(which)) return INVALID_DEVICE;
    switch (attribute) {
    case 10: *value = 32; break;        /* warp size */
    case 16: *value = 8; break;         /* multiprocessors */
    case 18: *value = (int)core_settings.integrated; break;
    case 33: *value = which + 1; break; /* PCI bus */
    case 40: *value = 2; break;         /* copy engines */
    case 75: *value = 9; break;         /* compute capability 9.0 */
    case 19:
    case 31:
    case 41:
    case 83:
    case 89:
    case 99:
    case 116:
        *value = 1;
        break; /* mapped host memory, concurrent kernels, unified addresses, managed memory, registration, RDMA */
    default: *value = 0;
    }
    return OK;
}

/* ---- contexts ---- */

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice which) {
    BEGIN(INIT);
    return core_context_retain(which, context);
}
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice which) {
    BEGIN(INIT);
    return core_context_release(which);
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice which, unsigned *flags, int *active) {
    BEGIN(INIT);
    if (!known(which)) return INVALID_DEVICE;
    if (flags) *flags = 0;
    *active = core_context_active(which);
    return OK;
}
API CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice which) {
    (void)flags;
    BEGIN(INIT);
    return core_context_create(which, context);
}
API CUresult cuCtxCreate_v3(CUcontext *context, void *affinity, int count, unsigned flags, CUdevice which) {
    (void)affinity, (void)count, (void)flags;
    BEGIN(INIT);
    return core_context_create(which, context);
}
API CUresult cuCtxCreate_v4(CUcontext *context, void *parameters, unsigned flags, CUdevice which) {
    (void)parameters, (void)flags;
    BEGIN(INIT);
    return core_context_create(which, context);
}
API CUresult cuCtxDestroy_v2(CUcontext context) {
    BEGIN(INIT);
    return core_context_destroy(context);
}
API CUresult cuCtxPushCurrent_v2(CUcontext context) {
    BEGIN(INIT);
    return core_context_push(context);
}
API CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    BEGIN(INIT);
    return core_context_pop(context);
}
API CUresult cuCtxSetCurrent(CUcontext context) {
    BEGIN(INIT);
    return core_context_set(context);
}
API CUresult cuCtxGetCurrent(CUcontext *context) {
    BEGIN(INIT);
    *context = core_context_current();
    return OK;
}
API CUresult cuCtxGetDevice(CUdevice *which) {
    BEGIN(CONTEXT);
    *which = device;
    return OK;
}
API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    BEGIN(CONTEXT);
    if (least) *least = 0;
    if (greatest) *greatest = 0;
    return OK;
}
API CUresult cuCtxSynchronize(void) {
    BEGIN(CONTEXT);
    return core_device_synchronize(device);
}

/* ---- memory ---- */

API CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    BEGIN(CONTEXT);
    *total = core_settings.memory;
    *free = *total - core_device_bytes(device);
    return OK;
}
API CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t size) {
    BEGIN(CONTEXT);
    return core_allocate(DEVICE, device, size, 0, pointer);
}
API CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t size, unsigned flags) {
    BEGIN(CONTEXT);
    return core_allocate(MANAGED, device, size, flags, pointer);
}
API CUresult cuMemFree_v2(CUdeviceptr pointer) {
    BEGIN(CONTEXT);
    return pointer ? core_free(pointer, false) : OK;
}
API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr pointer) {
    struct allocation found;
    BEGIN(CONTEXT);
    if (!core_find(pointer, &found)) return NOT_FOUND;
    if (base) *base = found.base;
    if (size) *size = found.size;
    return OK;
}
API CUresult cuMemHostAlloc(void **pointer, size_t size, unsigned flags) {
    BEGIN(CONTEXT);
    return core_allocate(PINNED, device, size, flags, (uint64_t *)pointer);
}
API CUresult cuMemAllocHost_v2(void **pointer, size_t size) {
    BEGIN(CONTEXT);
    return core_allocate(PINNED, device, size, 0, (uint64_t *)pointer);
}
API CUresult cuMemFreeHost(void *pointer) {
    BEGIN(CONTEXT);
    return core_free((uint64_t)pointer, true);
}
API CUresult cuMemHostRegister_v2(void *pointer, size_t size, unsigned flags) {
    BEGIN(CONTEXT);
    return core_register(pointer, size, device, flags);
}
API CUresult cuMemHostUnregister(void *pointer) {
    BEGIN(CONTEXT);
    return core_unregister(pointer);
}
API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *pointer, void *host, unsigned flags) {
    struct allocation found;
    BEGIN(CONTEXT);
    if (flags || !core_find((uint64_t)host, &found) || found.kind < PINNED) return INVALID_VALUE;
    *pointer = (uint64_t)host;
    return OK;
}

static CUresult attribute_of(void *data, int attribute, CUdeviceptr pointer, const struct allocation *found) {
    bool host = found->kind == PINNED || found->kind == REGISTERED;
    switch (attribute) {
    case 1: *(CUcontext *)data = core_context_primary(found->device); return OK;
    case 2: *(unsigned *)data = host ? 1 : 2; return OK; /* host, device; managed memory says device */
    case 3: *(CUdeviceptr *)data = pointer; return OK;
    case 4: /* host pointer */
        if (found->kind == DEVICE) return INVALID_VALUE;
        *(void **)data = (void *)pointer;
        return OK;
    case 6: *(unsigned *)data = 0; return OK;                         /* synchronous memory operations */
    case 7: *(unsigned long long *)data = found->identity; return OK; /* buffer id */
    case 8: *(unsigned *)data = found->kind == MANAGED; return OK;
    case 9: *(int *)data = found->device; return OK;
    case 10: *(unsigned *)data = found->kind == DEVICE; return OK; /* may be exported to other processes */
    case 11: *(CUdeviceptr *)data = found->base; return OK;
    case 12: *(size_t *)data = found->size; return OK;
    case 13: *(unsigned *)data = 1; return OK; /* mapped */
    }
    return NOT_SUPPORTED;
}

API CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr pointer) {
    struct allocation found;
    BEGIN(INIT);
    if (!core_find(pointer, &found)) return INVALID_VALUE;
    return attribute_of(data, attribute, pointer, &found);
}

static size_t attribute_size(int attribute) {
    switch (attribute) {
    case 1:
    case 3:
    case 4:
    case 7:
    case 11:
    case 12: return 8;
    case 5: return 16;
    default: return 4;
    }
}

/* Memory that the driver does not know is no error here: its attributes are zero, and its device is none (-2). */
API CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **data, CUdeviceptr pointer) {
    struct allocation found;
    BEGIN(INIT);
    bool there = core_find(pointer, &found);
    for (unsigned i = 0; i < count; i++) {
        if (there && !attribute_of(data[i], attributes[i], pointer, &found)) continue;
        memset(data[i], 0, attribute_size(attributes[i]));
        if (attributes[i] == 9) *(int *)data[i] = -2;
    }
    return OK;
}

/* ---- copies ---- */

static struct plane line(CUdeviceptr target, CUdeviceptr source, size_t size) {
    return (struct plane){target, source, size, size, size, 1};
}

/* A call that names a direction wants what it names, though unified addresses might let a driver do without. */
static bool on_device(CUdeviceptr pointer) {
    struct allocation found;
    return core_find(pointer, &found) && (found.kind == DEVICE || found.kind == MANAGED);
}

API CUresult cuMemcpy(CUdeviceptr target, CUdeviceptr source, size_t size) {
    BEGIN(CONTEXT);
    struct plane plane = line(target, source, size);
    return core_copy_now(&plane, device);
}
API CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void *source, size_t size) {
    BEGIN(CONTEXT);
    struct plane plane = line(target, (uint64_t)source, size);
    return size && !on_device(target) ? INVALID_VALUE : core_copy_now(&plane, device);
}
API CUresult cuMemcpyDtoH_v2(void *target, CUdeviceptr source, size_t size) {
    BEGIN(CONTEXT);
    struct plane plane = line((uint64_t)target, source, size);
    return size && !on_device(source) ? INVALID_VALUE : core_copy_now(&plane, device);
}
API CUresult cuMemcpyDtoD_v2(CUdeviceptr target, CUdeviceptr source, size_t size) {
    BEGIN(CONTEXT);
    struct plane plane = line(target, source, size);
    return size && !(on_device(source) && on_device(target)) ? INVALID_VALUE : core_copy_now(&plane, device);
}
API CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream) {
    BEGIN(CONTEXT);
    struct plane plane = line(target, source, size);
    return core_copy(&plane, stream, device, false);
}
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void *source, size_t size, CUstream stream) {
    BEGIN(CONTEXT);
    struct plane plane = line(target, (uint64_t)source, size);
    return size && !on_device(target) ? INVALID_VALUE : core_copy(&plane, stream, device, false);
}
API CUresult cuMemcpyDtoHAsync_v2(void *target, CUdeviceptr source, size_t size, CUstream stream) {
    BEGIN(CONTEXT);
    struct plane plane = line((uint64_t)target, source, size);
    return size && !on_device(source) ? INVALID_VALUE : core_copy(&plane, stream, device, false);
}
API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream) {
    BEGIN(CONTEXT);
    struct plane plane = line(target, source, size);
    return size && !(on_device(source) && on_device(target)) ? INVALID_VALUE : core_copy(&plane, stream, device, false);
}
API CUresult cuMemcpyPeerAsync(CUdeviceptr target, CUcontext target_context, CUdeviceptr source,
                               CUcontext source_context, size_t size, CUstream stream) {
    (void)target_context, (void)source_context;
    BEGIN(CONTEXT);
    struct plane plane = line(target, source, size);
    return core_copy(&plane, stream, device, false);
}

struct attributes {   /* CUmemcpyAttributes */
    int source_order; /* 1 in the stream's order, 2 during the call, 3 any time */
    int hints[4];
    unsigned flags;
};

static CUresult batch(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t count,
                      const struct attributes *attributes, size_t *starts, size_t kinds, CUstream stream, int device) {
    if ((uint64_t)stream <= 1 || !count || !kinds || kinds > count || starts[0]) return INVALID_VALUE;
    for (size_t i = 0, kind = 0; i < count; i++) {
        while (kind + 1 < kinds && starts[kind + 1] <= i) kind++;
        struct plane plane = line(targets[i], sources[i], sizes[i]);
        int code = core_copy(&plane, stream, device, attributes[kind].source_order == 2);
        if (code) return code;
    }
    return OK;
}

API CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t count,
                                   struct attributes *attributes, size_t *starts, size_t kinds, CUstream stream) {
    BEGIN(CONTEXT);
    return batch(targets, sources, sizes, count, attributes, starts, kinds, stream, device);
}
API CUresult cuMemcpyBatchAsync(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t count,
                                struct attributes *attributes, size_t *starts, size_t kinds, size_t *failed,
                                CUstream stream) {
    BEGIN(CONTEXT);
    if (failed) *failed = SIZE_MAX;
    return batch(targets, sources, sizes, count, attributes, starts, kinds, stream, device);
}

struct end { /* of a CUDA_MEMCPY2D */
    size_t x, y;
    unsigned type; /* 1 host, 2 device, 3 array, 4 unified */
    void *host;
    CUdeviceptr device;
    void *array;
    size_t pitch;
};
struct memcpy2d {
    struct end source, target;
    size_t width, height;
};

static CUresult place(const struct end *end, size_t width, uint64_t *pointer, size_t *pitch) {
    if (end->type != 1 && end->type != 2 && end->type != 4) return NOT_SUPPORTED;
    *pitch = end->pitch ? end->pitch : width;
    *pointer = (end->type == 1 ? (uint64_t)end->host : end->device) + end->y * *pitch + end->x;
    return end->type == 2 && width && !on_device(*pointer) ? INVALID_VALUE : OK;
}

static CUresult plane_of(const struct memcpy2d *copy, struct plane *plane) {
    plane->width = copy->width;
    plane->height = copy->height;
    int code = place(&copy->source, copy->width, &plane->source, &plane->source_pitch);
    return code ? code : place(&copy->target, copy->width, &plane->target, &plane->target_pitch);
}

API CUresult cuMemcpy2D_v2(const struct memcpy2d *copy) {
    struct plane plane;
    BEGIN(CONTEXT);
    int code = plane_of(copy, &plane);
    return code ? code : core_copy_now(&plane, device);
}
API CUresult cuMemcpy2DAsync_v2(const struct memcpy2d *copy, CUstream stream) {
    struct plane plane;
    BEGIN(CONTEXT);
    int code = plane_of(copy, &plane);
    return code ? code : core_copy(&plane, stream, device, false);
}
API CUresult cuMemsetD8_v2(CUdeviceptr target, unsigned char value, size_t size) {
    BEGIN(CONTEXT);
    struct plane plane = line(target, 0, size);
    return core_fill(&plane, value, NULL, device, true);
}
API CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t size, CUstream stream) {
    BEGIN(CONTEXT);
    struct plane plane = line(target, 0, size);
    return core_fill(&plane, value, stream, device, false);
}
API CUresult cuMemsetD2D8Async(CUdeviceptr target, size_t pitch, unsigned char value, size_t width, size_t height,
                               CUstream stream) {
    BEGIN(CONTEXT);
    struct plane plane = {.target = target, .target_pitch = pitch, .width = width, .height = height};
    return core_fill(&plane, value, stream, device, false);
}

/* ---- streams and events ---- */

API CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    BEGIN(CONTEXT);
    return flags > 1 ? INVALID_VALUE : core_stream_create(device, !(flags & 1), stream);
}
API CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    (void)priority;
    BEGIN(CONTEXT);
    return flags > 1 ? INVALID_VALUE : core_stream_create(device, !(flags & 1), stream);
}
API CUresult cuStreamDestroy_v2(CUstream stream) {
    BEGIN(INIT);
    return core_stream_destroy(stream);
}
/* A stream that has no context of its own, because it is the current one's, needs one. */
#define BEGIN_STREAM(stream) BEGIN((uint64_t)(stream) <= 2 ? CONTEXT : INIT)

API CUresult cuStreamSynchronize(CUstream stream) {
    BEGIN_STREAM(stream);
    return core_stream_synchronize(stream, device);
}
API CUresult cuStreamQuery(CUstream stream) {
    BEGIN_STREAM(stream);
    return core_stream_query(stream, device);
}
API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    (void)flags;
    BEGIN_STREAM(stream);
    return core_stream_wait(stream, device, event);
}
API CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
    int where;
    bool blocking;
    BEGIN_STREAM(stream);
    int code = core_stream_facts(stream, device, &where, &blocking);
    if (!code) *context = core_context_primary(where);
    return code;
}
API CUresult cuStreamGetDevice(CUstream stream, CUdevice *where) {
    bool blocking;
    BEGIN_STREAM(stream);
    return core_stream_facts(stream, device, where, &blocking);
}
API CUresult cuStreamGetFlags(CUstream stream, unsigned *flags) {
    int where;
    bool blocking;
    BEGIN_STREAM(stream);
    int code = core_stream_facts(stream, device, &where, &blocking);
    if (!code) *flags = !blocking;
    return code;
}
API CUresult cuStreamIsCapturing(CUstream stream, int *status) {
    BEGIN_STREAM(stream);
    return core_stream_capture(stream, device, status, NULL);
}
API CUresult cuStreamGetCaptureInfo_v2(CUstream stream, int *status, uint64_t *identity, void **graph, void ***nodes,
                                       size_t *count) {
    BEGIN_STREAM(stream);
    if (graph) *graph = NULL;
    if (nodes) *nodes = NULL;
    if (count) *count = 0;
    return core_stream_capture(stream, device, status, identity);
}
API CUresult cuStreamGetCaptureInfo_v3(CUstream stream, int *status, uint64_t *identity, void **graph, void ***nodes,
                                       void **edges, size_t *count) {
    BEGIN_STREAM(stream);
    if (graph) *graph = NULL;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return core_stream_capture(stream, device, status, identity);
}
API CUresult cuLaunchHostFunc(CUstream stream, void (*function)(void *), void *argument) {
    BEGIN_STREAM(stream);
    return core_stream_host(stream, device, function, argument);
}
API CUresult cuEventCreate(CUevent *event, unsigned flags) {
    (void)flags;
    BEGIN(CONTEXT);
    return core_event_create(device, event);
}
API CUresult cuEventDestroy_v2(CUevent event) {
    BEGIN(INIT);
    return core_event_destroy(event);
}
API CUresult cuEventRecord(CUevent event, CUstream stream) {
    BEGIN_STREAM(stream);
    return core_event_record(event, stream, device);
}
API CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
    (void)flags;
    BEGIN_STREAM(stream);
    return core_event_record(event, stream, device);
}
API CUresult cuEventSynchronize(CUevent event) {
    BEGIN(INIT);
    return core_event_synchronize(event);
}
API CUresult cuEventQuery(CUevent event) {
    BEGIN(INIT);
    return core_event_query(event);
}

/* ---- looking functions up ---- */

/* Names that mean different functions to callers of different versions: the newest that the caller knows is meant. */
static const struct {
    const char *name;
    int since;
    const char *symbol;
} versions[] = {
    {"cuCtxCreate", 12050, "cuCtxCreate_v4"},
    {"cuCtxCreate", 11040, "cuCtxCreate_v3"},
    {"cuCtxCreate", 0, "cuCtxCreate_v2"},
    {"cuMemcpyBatchAsync", 13000, "cuMemcpyBatchAsync_v2"},
    {"cuMemcpyBatchAsync", 0, "cuMemcpyBatchAsync"},
    {"cuStreamGetCaptureInfo", 12030, "cuStreamGetCaptureInfo_v3"},
    {"cuStreamGetCaptureInfo", 0, "cuStreamGetCaptureInfo_v2"},
};

/* In this library, however it was loaded. */
static void *symbol_of(const char *name) {
    static void *self;
    Dl_info info;
    if (!self && dladdr((void *)cuInit, &info)) self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return self ? dlsym(self, name) : NULL;
}

API CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    char symbol[128];
    (void)flags;
    BEGIN(NOTHING);
    *function = NULL;
    for (size_t i = 0; i < sizeof versions / sizeof *versions && !*function; i++)
        if (!strcmp(name, versions[i].name) && version >= versions[i].since) *function = symbol_of(versions[i].symbol);
    snprintf(symbol, sizeof symbol, "%s_v2", name);
    if (!*function) *function = symbol_of(symbol);
    if (!*function) *function = symbol_of(name);
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}

API CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
