/* The interface of libhipfile.so as its Python binding declares it, so that the binding builds over the emulation. */
#ifndef EMULATION_HIPFILE_H
#define EMULATION_HIPFILE_H

#include <hip/hip_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define HIPFILE_VERSION_MAJOR 0
#define HIPFILE_VERSION_MINOR 4
#define HIPFILE_VERSION_PATCH 0
#define HIPFILE_BASE_ERR 5000

typedef off_t hoff_t;

typedef enum {
    hipFileSuccess = 0,
    hipFileDriverNotInitialized = 5001,
    hipFileDriverInvalidProps = 5002,
    hipFileDriverUnsupportedLimit = 5003,
    hipFileDriverVersionMismatch = 5004,
    hipFileDriverVersionReadError = 5005,
    hipFileDriverClosing = 5006,
    hipFilePlatformNotSupported = 5007,
    hipFileIONotSupported = 5008,
    hipFileDeviceNotSupported = 5009,
    hipFileDriverError = 5010,
    hipFileHipDriverError = 5011,
    hipFileHipPointerInvalid = 5012,
    hipFileHipMemoryTypeInvalid = 5013,
    hipFileHipPointerRangeError = 5014,
    hipFileHipContextMismatch = 5015,
    hipFileInvalidMappingSize = 5016,
    hipFileInvalidMappingRange = 5017,
    hipFileInvalidFileType = 5018,
    hipFileInvalidFileOpenFlag = 5019,
    hipFileDIONotSet = 5020,
    hipFileInvalidValue = 5022,
    hipFileMemoryAlreadyRegistered = 5023,
    hipFileMemoryNotRegistered = 5024,
    hipFilePermissionDenied = 5025,
    hipFileDriverAlreadyOpen = 5026,
    hipFileHandleNotRegistered = 5027,
    hipFileHandleAlreadyRegistered = 5028,
    hipFileDeviceNotFound = 5029,
    hipFileInternalError = 5030,
    hipFileGetNewFDFailed = 5031,
    hipFileDriverSetupError = 5033,
    hipFileIODisabled = 5034,
    hipFileBatchSubmitFailed = 5035,
    hipFileGPUMemoryPinningFailed = 5036,
    hipFileBatchFull = 5037,
    hipFileAsyncNotSupported = 5038,
    hipFileIOMaxError = 5039
} hipFileOpError_t;

typedef struct {
    hipFileOpError_t err;
    hipError_t hip_drv_err;
} hipFileError_t;

typedef void *hipFileHandle_t;

typedef enum {
    hipFileHandleTypeOpaqueFD = 1,
    hipFileHandleTypeOpaqueWin32 = 2,
    hipFileHandleTypeUserspaceFS = 3
} hipFileFileHandleType_t;

typedef struct hipFileFSOps hipFileFSOps_t;

typedef struct {
    hipFileFileHandleType_t type;
    union {
        int fd;
        void *hFile;
    } handle;
    const hipFileFSOps_t *fs_ops;
} hipFileDescr_t;

typedef enum {
    hipFileLustreSupported = 0,
    hipFileWekaFSSupported = 1,
    hipFileNFSSupported = 2,
    hipFileGPFSSupported = 3,
    hipFileNVMeSupported = 4,
    hipFileNVMeoFSupported = 5,
    hipFileSCSISupported = 6,
    hipFileScaleFluxCSDSupported = 7,
    hipFileNVMeshSupported = 8,
    hipFileBeeGFSSupported = 9,
    hipFileNVMeP2PSupported = 11,
    hipFileScatefsSupported = 12
} hipFileDriverStatusFlags_t;

typedef enum { hipFileUsePollMode = 0, hipFileAllowCompatMode = 1 } hipFileDriverControlFlags_t;

typedef enum {
    hipFileDynRoutingSupported = 0,
    hipFileBatchIOSupported = 1,
    hipFileStreamsSupported = 2,
    hipFileParallelIOSupported = 3
} hipFileFeatureFlags_t;

typedef struct {
    struct {
        unsigned int major_version, minor_version;
        uint64_t poll_thresh_size, max_direct_io_size;
        unsigned int driver_status_flags, driver_control_flags;
    } nvfs;
    unsigned int feature_flags;
    uint64_t max_device_cache_size, per_buffer_cache_size, max_device_pinned_mem_size;
    unsigned int max_batch_io_count, max_batch_io_timeout_msecs;
} hipFileDriverProps_t;

#ifdef __cplusplus
extern "C" {
#endif
const char *hipFileGetOpErrorString(hipFileOpError_t status);
hipFileError_t hipFileDriverOpen(void);
hipFileError_t hipFileDriverClose(void);
int64_t hipFileUseCount(void);
hipFileError_t hipFileGetVersion(unsigned *major, unsigned *minor, unsigned *patch);
hipFileError_t hipFileDriverGetProperties(hipFileDriverProps_t *properties);
hipFileError_t hipFileHandleRegister(hipFileHandle_t *handle, hipFileDescr_t *description);
void hipFileHandleDeregister(hipFileHandle_t handle);
hipFileError_t hipFileBufRegister(const void *base, size_t size, int flags);
hipFileError_t hipFileBufDeregister(const void *base);
ssize_t hipFileRead(hipFileHandle_t handle, void *base, size_t size, hoff_t file_offset, hoff_t buffer_offset);
ssize_t hipFileWrite(hipFileHandle_t handle, const void *base, size_t size, hoff_t file_offset, hoff_t buffer_offset);
hipFileError_t hipFileReadAsync(hipFileHandle_t handle, void *base, size_t *size, hoff_t *file_offset,
                                hoff_t *buffer_offset, ssize_t *done, hipStream_t stream);
hipFileError_t hipFileWriteAsync(hipFileHandle_t handle, void *base, size_t *size, hoff_t *file_offset,
                                 hoff_t *buffer_offset, ssize_t *done, hipStream_t stream);
hipFileError_t hipFileStreamRegister(hipStream_t stream, unsigned flags);
hipFileError_t hipFileStreamDeregister(hipStream_t stream);
#ifdef __cplusplus
}
#endif

#endif
