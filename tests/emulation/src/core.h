/* The state that the emulated libraries share: devices, memory, contexts, streams, files, faults, counters.
 *
 * libcuda, libcufile, libamdhip64 and libhipfile are thin tables of entry points over it. It proves ordering, bounds
 * and lifetimes of the code that calls them. It says nothing about what a vendor's driver does beyond that.
 *
 * One mutex guards everything here. Functions that end in _locked want it held.
 */
#ifndef CORE_H
#define CORE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define API __attribute__((visibility("default")))
#define MAX_DEVICES 16

/* Error numbers that CUDA and HIP have in common. */
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_TIMEOUT = 702,
    CONTEXT_IS_DESTROYED = 709,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_IMPLICIT = 906,
};

/* Error numbers that cuFile and hipFile have in common. */
enum {
    FILE_DRIVER_ERROR = 5011,
    FILE_POINTER_INVALID = 5012,
    FILE_MEMORY_TYPE_INVALID = 5013,
    FILE_RANGE_ERROR = 5014,
    FILE_INVALID_VALUE = 5022,
    FILE_BUFFER_ALREADY_REGISTERED = 5023,
    FILE_BUFFER_NOT_REGISTERED = 5024,
    FILE_HANDLE_NOT_REGISTERED = 5027,
    FILE_INTERNAL_ERROR = 5030,
    FILE_ASYNC_NOT_SUPPORTED = 5038,
};

enum mode { EAGER, DEFERRED, LATE };
enum memory_kind { DEVICE, MANAGED, PINNED, REGISTERED };
enum capture { CAPTURE_NONE, CAPTURE_ACTIVE, CAPTURE_BROKEN };

struct settings {
    long devices;          /* how many there are */
    long memory;           /* bytes of each */
    long cuda_version;     /* what cuDriverGetVersion says */
    long hip_version;      /* what hipDriverGetVersion says */
    long init_error;       /* what cuInit, hipInit and the first HIP call return */
    long mode;             /* when queued operations run: enum mode */
    long delay_us;         /* late: how long after being queued */
    long seed;             /* late: which of the streams that could run goes first; 0 is the longest waiting */
    long patience;         /* deferred: queries answered NOT_READY before the work that is asked about runs */
    long hold_timeout_ms;  /* how long a wait for a held stream lasts before it fails */
    long strict_alignment; /* file reads: 4 KiB alignment of offset, size and address */
    long read_limit;       /* file reads: most bytes of one; 0 is the vendor's */
    long async_supported;  /* file reads on a stream */
    long async_limit;      /* file reads on streams: most outstanding; 0 is any number */
    long integrated;       /* the devices' memory is the host's */
};
extern struct settings core_settings;

struct statistics {
    long device_bytes, device_peak, pinned_bytes, pinned_peak, registered_bytes, managed_bytes;
    long allocations, streams, events, contexts, files, buffers, file_drivers;
    long pending, pending_peak; /* operations queued and not yet run */
    long captured;              /* operations that a capturing stream swallowed */
    long pageable;              /* asynchronous copies from or to memory that is not pinned */
    long failed;                /* operations that failed when they ran */
    long released_twice;        /* DLPack deleters called more than once */
};
extern struct statistics core_statistics;

extern bool core_initialised; /* cuInit was called */

void core_lock(void);
void core_unlock(void);
void core_wait_locked(int64_t until_ns); /* for a change, at most until then; 0 is for ever */
void core_changed_locked(void);
int64_t core_now_ns(void);

/* Calls and faults. */
struct function;
struct outcome {
    int error;    /* returned by the call, or 0 */
    int system;   /* errno of a read, or 0 */
    bool limited; /* `count` is given */
    long count;   /* most bytes of a read; negative: what it reports, nothing read */
    long sleep_us;
};
/* Count the call and find what is to go wrong. Sleeps at once, unless the caller takes the outcome. */
int core_begin(struct function **cache, const char *name, struct outcome *outcome);
void core_sleep(long us);

/* Contexts. A handle is a number that nothing is mapped at. */
int core_context_retain(int device, void **handle);
int core_context_release(int device);
int core_context_active(int device);
int core_context_create(int device, void **handle);
int core_context_destroy(void *handle);
int core_context_push(void *handle);
int core_context_pop(void **handle);
int core_context_set(void *handle);
void *core_context_current(void);
void *core_context_primary(int device);
int core_context_touch(int device);   /* HIP: the first use of a device makes its context */
int core_device_current(int *device); /* INVALID_CONTEXT without one */
int core_hip_device(void);
int core_hip_set_device(int device);

/* Memory. */
struct allocation {
    uint64_t base;
    size_t size;
    int device;
    enum memory_kind kind;
    unsigned flags;
    bool live;
    uint64_t identity;
};
int core_allocate(enum memory_kind kind, int device, size_t size, unsigned flags, uint64_t *pointer);
int core_free(uint64_t pointer, bool host);
int core_register(void *pointer, size_t size, int device, unsigned flags);
int core_unregister(void *pointer);
bool core_find(uint64_t pointer, struct allocation *found);
long core_device_bytes(int device);
struct allocation *core_find_locked(uint64_t pointer);
void core_device_lost_locked(int device); /* its context is gone, and its memory with it */
/* The bytes that the emulation may touch for an address: a device's shadow, or host memory itself. */
int core_view_locked(uint64_t pointer, size_t size, char **view, struct allocation **allocation);

/* Streams, events and what is queued. */
struct plane {
    uint64_t target, source;
    size_t target_pitch, source_pitch, width, height;
};
int core_stream_create(int device, bool blocking, void **handle);
int core_stream_destroy(void *handle);
int core_stream_synchronize(void *handle, int current);
int core_stream_query(void *handle, int current);
int core_stream_wait(void *handle, int current, void *event);
int core_stream_capture(void *handle, int current, int *status, uint64_t *identity);
int core_stream_facts(void *handle, int current, int *device, bool *blocking);
int core_stream_host(void *handle, int current, void (*function)(void *), void *argument);
int core_device_synchronize(int device);
int core_event_create(int device, void **handle);
int core_event_destroy(void *handle);
int core_event_record(void *handle, void *stream, int current);
int core_event_synchronize(void *handle);
int core_event_query(void *handle);
/* `snapshot`: the source is read before this returns, as for memory that is not pinned. */
int core_copy(const struct plane *plane, void *stream, int current, bool snapshot);
int core_copy_now(const struct plane *plane, int current); /* on the NULL stream, and waits */
int core_fill(const struct plane *target, int value, void *stream, int current, bool wait); /* no source */
void core_streams_lost_locked(int device);
void core_streams_reset_locked(void);

/* Files. */
int core_file_register(int fd, void **handle);
int core_file_deregister(void *handle);
int core_buffer_register(uint64_t base, size_t size);
int core_buffer_deregister(uint64_t base);
struct file_read {
    void *file;
    uint64_t base;
    size_t size, limit;
    off_t file_offset, buffer_offset;
    struct outcome outcome;
};
ssize_t core_file_read(const struct file_read *read); /* bytes, -1 with errno, or minus an error number */
int core_file_read_async(struct file_read read, size_t *size, off_t *file_offset, off_t *buffer_offset, ssize_t *done,
                         void *stream, int current, bool fixed);
void core_file_drivers(int change);

#endif
