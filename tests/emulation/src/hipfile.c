/* libhipfile.so: direct reads into the emulated devices. Nothing is written. */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <hipfile.h>
#include <string.h>

#define READ_LIMIT 0x7ffff000ul /* of one read; a longer one is short */

static hipFileError_t result(int code) {
    if (code && code < 5000) return (hipFileError_t){hipFileHipDriverError, (hipError_t)code};
    return (hipFileError_t){(hipFileOpError_t)code, hipSuccess};
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

API const char *hipFileGetOpErrorString(hipFileOpError_t status) {
    switch (status) {
    case hipFileSuccess: return "hipFile success";
    case hipFileHipDriverError: return "hip driver error";
    case hipFileHandleNotRegistered: return "file descriptor is not registered";
    case hipFileInvalidMappingSize: return "buffer mapping size is invalid";
    case hipFileAsyncNotSupported: return "hipFile async IO is not supported";
    default: return "hipFile error";
    }
}
API hipFileError_t hipFileDriverOpen(void) {
    BEGIN_SIMPLE;
    core_file_drivers(1);
    return result(OK);
}
API hipFileError_t hipFileDriverClose(void) {
    BEGIN_SIMPLE;
    core_file_drivers(-1);
    return result(OK);
}
API int64_t hipFileUseCount(void) { return core_statistics.file_drivers; }
API hipFileError_t hipFileGetVersion(unsigned *major, unsigned *minor, unsigned *patch) {
    BEGIN_SIMPLE;
    *major = HIPFILE_VERSION_MAJOR, *minor = HIPFILE_VERSION_MINOR, *patch = HIPFILE_VERSION_PATCH;
    return result(OK);
}
API hipFileError_t hipFileDriverGetProperties(hipFileDriverProps_t *properties) {
    BEGIN_SIMPLE;
    memset(properties, 0, sizeof *properties);
    properties->feature_flags = 1u << hipFileParallelIOSupported;
    if (core_settings.async_supported) properties->feature_flags |= 1u << hipFileStreamsSupported;
    return result(OK);
}
API hipFileError_t hipFileHandleRegister(hipFileHandle_t *handle, hipFileDescr_t *description) {
    BEGIN_SIMPLE;
    if (description->type != hipFileHandleTypeOpaqueFD) return result(hipFileInvalidValue);
    return result(core_file_register(description->handle.fd, handle));
}
API void hipFileHandleDeregister(hipFileHandle_t handle) {
    BEGIN;
    core_file_deregister(handle);
}
API hipFileError_t hipFileBufRegister(const void *base, size_t size, int flags) {
    (void)flags;
    BEGIN_SIMPLE;
    return result(core_buffer_register((uint64_t)base, size));
}
API hipFileError_t hipFileBufDeregister(const void *base) {
    BEGIN_SIMPLE;
    return result(core_buffer_deregister((uint64_t)base));
}
API ssize_t hipFileRead(hipFileHandle_t handle, void *base, size_t size, hoff_t file_offset, hoff_t buffer_offset) {
    BEGIN;
    struct file_read read = {handle, (uint64_t)base, size, READ_LIMIT, file_offset, buffer_offset, outcome};
    return core_file_read(&read);
}
API hipFileError_t hipFileReadAsync(hipFileHandle_t handle, void *base, size_t *size, hoff_t *file_offset,
                                    hoff_t *buffer_offset, ssize_t *done, hipStream_t stream) {
    BEGIN;
    struct file_read read = {.file = handle, .base = (uint64_t)base, .limit = READ_LIMIT, .outcome = outcome};
    return result(core_file_read_async(read, size, file_offset, buffer_offset, done, stream, core_hip_device(), false));
}
API hipFileError_t hipFileStreamRegister(hipStream_t stream, unsigned flags) {
    (void)stream;
    BEGIN_SIMPLE;
    if (!core_settings.async_supported) return result(hipFileAsyncNotSupported);
    return result(flags > 15 ? hipFileInvalidValue : OK);
}
API hipFileError_t hipFileStreamDeregister(hipStream_t stream) {
    (void)stream;
    BEGIN_SIMPLE;
    return result(core_settings.async_supported ? OK : hipFileAsyncNotSupported);
}
API ssize_t hipFileWrite(hipFileHandle_t handle, const void *base, size_t size, hoff_t file_offset,
                         hoff_t buffer_offset) {
    (void)handle, (void)base, (void)size, (void)file_offset, (void)buffer_offset;
    BEGIN;
    errno = ENOSYS;
    return -1;
}
API hipFileError_t hipFileWriteAsync(hipFileHandle_t handle, void *base, size_t *size, hoff_t *file_offset,
                                     hoff_t *buffer_offset, ssize_t *done, hipStream_t stream) {
    (void)handle, (void)base, (void)size, (void)file_offset, (void)buffer_offset, (void)done, (void)stream;
    BEGIN_SIMPLE;
    return result(hipFileAsyncNotSupported);
}
