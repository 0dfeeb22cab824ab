/* libcufile.so.0: GPU-direct reads into the emulated devices. Nothing is written. */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>

typedef struct {
    int err, cu_err;
} CUfileError_t;
typedef struct {
    int type; /* 1: a file descriptor */
    union {
        int fd;
        void *handle;
    } handle;
    const void *operations;
} CUfileDescr_t;
typedef void *CUfileHandle_t;

static CUfileError_t result(int code) {
    if (code && code < 5000) return (CUfileError_t){FILE_DRIVER_ERROR, code};
    return (CUfileError_t){code, 0};
}

#define BEGIN                                                                                                          \
    static struct function *function_;                                                                                 \
    struct outcome outcome;                                                                                            \
    core_begin(&function_, __func__, &outcome)
/* Counts the call, and lets a fault end it. */
#define BEGIN_SIMPLE                                                                                                   \
    BEGIN;                                                                                                             \
    core_sleep(outcome.sleep_us);                                                                                      \
    if (outcome.error) return result(outcome.error)

API CUfileError_t cuFileDriverOpen(void) {
    BEGIN_SIMPLE;
    core_file_drivers(1);
    return result(OK);
}
API CUfileError_t cuFileDriverClose_v2(void) {
    BEGIN_SIMPLE;
    core_file_drivers(-1);
    return result(OK);
}
API CUfileError_t cuFileDriverClose(void) { return cuFileDriverClose_v2(); }
API long cuFileUseCount(void) { return core_statistics.file_drivers; }
API CUfileError_t cuFileGetVersion(int *version) {
    BEGIN_SIMPLE;
    *version = 1150; /* 1.15.0 */
    return result(OK);
}
API CUfileError_t cuFileDriverGetProperties(void *properties) {
    (void)properties;
    BEGIN_SIMPLE;
    return result(OK);
}
API CUfileError_t cuFileDriverSetPollMode(bool poll, size_t threshold) {
    (void)poll, (void)threshold;
    BEGIN_SIMPLE;
    return result(OK);
}
API CUfileError_t cuFileDriverSetMaxDirectIOSize(size_t size) {
    (void)size;
    BEGIN_SIMPLE;
    return result(OK);
}
API CUfileError_t cuFileDriverSetMaxCacheSize(size_t size) {
    (void)size;
    BEGIN_SIMPLE;
    return result(OK);
}
API CUfileError_t cuFileDriverSetMaxPinnedMemSize(size_t size) {
    (void)size;
    BEGIN_SIMPLE;
    return result(OK);
}

API CUfileError_t cuFileHandleRegister(CUfileHandle_t *handle, CUfileDescr_t *description) {
    BEGIN_SIMPLE;
    return result(description->type == 1 ? core_file_register(description->handle.fd, handle) : FILE_INVALID_VALUE);
}
API void cuFileHandleDeregister(CUfileHandle_t handle) {
    BEGIN;
    core_file_deregister(handle);
}
API CUfileError_t cuFileBufRegister(const void *base, size_t size, int flags) {
    (void)flags;
    BEGIN_SIMPLE;
    return result(core_buffer_register((uint64_t)base, size));
}
API CUfileError_t cuFileBufDeregister(const void *base) {
    BEGIN_SIMPLE;
    return result(core_buffer_deregister((uint64_t)base));
}

API ssize_t cuFileRead(CUfileHandle_t handle, void *base, size_t size, off_t file_offset, off_t buffer_offset) {
    BEGIN;
    struct file_read read = {handle, (uint64_t)base, size, 0, file_offset, buffer_offset, outcome};
    return core_file_read(&read);
}

/* Stream flags: 1, 2, 4 promise that buffer offset, file offset, size are fixed, 8 that they are 4 KiB aligned. */
#define MAX_STREAMS 1024
static struct {
    void *stream;
    unsigned flags;
} registered[MAX_STREAMS];

static unsigned flags_of(void *stream) {
    unsigned flags = 0;
    core_lock();
    for (int i = 0; i < MAX_STREAMS; i++)
        if (stream && registered[i].stream == stream) flags = registered[i].flags;
    core_unlock();
    return flags;
}

static void replace(void *old, void *stream, unsigned flags) {
    core_lock();
    for (int i = 0; i < MAX_STREAMS; i++)
        if (registered[i].stream == old) {
            registered[i].stream = stream;
            registered[i].flags = flags;
            break;
        }
    core_unlock();
}

API CUfileError_t cuFileStreamRegister(void *stream, unsigned flags) {
    BEGIN_SIMPLE;
    if (flags > 15) return result(FILE_INVALID_VALUE);
    if (stream) replace(NULL, stream, flags);
    return result(OK);
}
API CUfileError_t cuFileStreamDeregister(void *stream) {
    BEGIN_SIMPLE;
    if (stream) replace(stream, NULL, 0);
    return result(OK);
}

API CUfileError_t cuFileReadAsync(CUfileHandle_t handle, void *base, size_t *size, off_t *file_offset,
                                  off_t *buffer_offset, ssize_t *done, void *stream) {
    int device = 0;
    BEGIN;
    core_device_current(&device);
    unsigned flags = flags_of(stream);
    if ((flags & 8) && ((*size | *file_offset | ((uint64_t)base + *buffer_offset)) & 4095))
        return result(FILE_INVALID_VALUE);
    struct file_read read = {.file = handle, .base = (uint64_t)base, .outcome = outcome};
    return result(core_file_read_async(read, size, file_offset, buffer_offset, done, stream, device, (flags & 7) == 7));
}

API ssize_t cuFileWrite(CUfileHandle_t handle, const void *base, size_t size, off_t file_offset, off_t buffer_offset) {
    (void)handle, (void)base, (void)size, (void)file_offset, (void)buffer_offset;
    BEGIN;
    errno = ENOSYS;
    return -1;
}
API CUfileError_t cuFileWriteAsync(CUfileHandle_t handle, void *base, size_t *size, off_t *file_offset,
                                   off_t *buffer_offset, ssize_t *done, void *stream) {
    (void)handle, (void)base, (void)size, (void)file_offset, (void)buffer_offset, (void)done, (void)stream;
    BEGIN_SIMPLE;
    return result(FILE_ASYNC_NOT_SUPPORTED);
}

/* Batches are there to be found, and fail. */
API CUfileError_t cuFileBatchIOSetUp(void **batch, unsigned count) {
    (void)batch, (void)count;
    BEGIN_SIMPLE;
    return result(FILE_INTERNAL_ERROR);
}
API CUfileError_t cuFileBatchIOSubmit(void *batch, unsigned count, void *parameters, unsigned flags) {
    (void)batch, (void)count, (void)parameters, (void)flags;
    BEGIN_SIMPLE;
    return result(FILE_INTERNAL_ERROR);
}
API CUfileError_t cuFileBatchIOGetStatus(void *batch, unsigned least, unsigned *count, void *events, void *timeout) {
    (void)batch, (void)least, (void)count, (void)events, (void)timeout;
    BEGIN_SIMPLE;
    return result(FILE_INTERNAL_ERROR);
}
API CUfileError_t cuFileBatchIOCancel(void *batch) {
    (void)batch;
    BEGIN_SIMPLE;
    return result(FILE_INTERNAL_ERROR);
}
API void cuFileBatchIODestroy(void *batch) { (void)batch; }
