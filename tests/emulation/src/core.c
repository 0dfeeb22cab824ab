/* Calls, faults, settings and contexts. */
#define _GNU_SOURCE
#include "core.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const struct settings defaults = {
    .devices = 3,
    .memory = 16L << 30,
    .cuda_version = 13000,
    .hip_version = 70200000,
    .delay_us = 20000,
    .patience = 1000,
    .hold_timeout_ms = 10000,
    .async_supported = 1,
};
struct settings core_settings = defaults;
struct statistics core_statistics;
bool core_initialised;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static bool used, forked;

int64_t core_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void core_lock(void) { pthread_mutex_lock(&mutex); }
void core_unlock(void) { pthread_mutex_unlock(&mutex); }
void core_changed_locked(void) { pthread_cond_broadcast(&changed); }

void core_wait_locked(int64_t until_ns) {
    struct timespec until = {until_ns / 1000000000, until_ns % 1000000000};
    if (until_ns)
        pthread_cond_timedwait(&changed, &mutex, &until);
    else
        pthread_cond_wait(&changed, &mutex);
}

void core_sleep(long us) {
    if (us > 0) usleep(us);
}

static void make_condition(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* A driver that was used before a fork is of no use in the child, which is told so by every call. */
static void in_child(void) {
    pthread_mutex_init(&mutex, NULL);
    make_condition();
    forked = used;
}

__attribute__((constructor)) static void start(void) {
    make_condition();
    pthread_atfork(NULL, NULL, in_child);
}

/* ---- calls and faults ---- */

struct function {
    char name[64];
    long calls;
    struct function *next;
};

struct fault {
    struct function *function;
    long first, times; /* from which call on, and for how many; times < 0 is for ever */
    long seen, fired;
    struct outcome outcome;
    struct fault *next;
};

static struct function *functions;
static struct fault *faults;

/* The public name: headers map cuMemAlloc to cuMemAlloc_v2, and users know the first. */
static size_t public_length(const char *name) {
    size_t length = strlen(name);
    if (length > 3 && !strncmp(name + length - 3, "_v", 2) && name[length - 1] >= '0' && name[length - 1] <= '9')
        return length - 3;
    return length;
}

static struct function *function_locked(const char *name) {
    size_t length = public_length(name);
    struct function *function;
    for (function = functions; function; function = function->next)
        if (strlen(function->name) == length && !strncmp(function->name, name, length)) return function;
    function = calloc(1, sizeof *function);
    memcpy(function->name, name, length < sizeof function->name ? length : sizeof function->name - 1);
    function->next = functions;
    return functions = function;
}

int core_begin(struct function **cache, const char *name, struct outcome *outcome) {
    struct outcome found = {0};
    core_lock();
    used = true;
    if (!*cache) *cache = function_locked(name);
    (*cache)->calls++;
    for (struct fault *fault = faults; fault; fault = fault->next) {
        if (fault->function != *cache) continue;
        long turn = ++fault->seen - fault->first;
        if (turn < 0 || (fault->times >= 0 && turn >= fault->times)) continue;
        fault->fired++;
        if (fault->outcome.error) found.error = fault->outcome.error;
        if (fault->outcome.system) found.system = fault->outcome.system;
        if (fault->outcome.limited) found.limited = true, found.count = fault->outcome.count;
        found.sleep_us += fault->outcome.sleep_us;
    }
    bool gone = forked;
    core_unlock();
    if (gone) found.error = NOT_INITIALIZED;
    if (outcome)
        *outcome = found;
    else
        core_sleep(found.sleep_us);
    return found.error;
}

/* ---- contexts ---- */

#define CONTEXT_BASE 0x510000000000ul
#define MAX_CONTEXTS 4096
#define STACK 64

struct context {
    int device;
    bool live;
    long retained, pushed;
    bool touched;
};
/* The first MAX_DEVICES are the primary ones. */
static struct context contexts[MAX_CONTEXTS];
static int context_count = MAX_DEVICES;
static long context_made[MAX_DEVICES], context_used[MAX_DEVICES];
static __thread int stack[STACK];
static __thread int depth;
static __thread int hip_device;

static void *context_handle(int index) { return (void *)(CONTEXT_BASE + (uint64_t)index * 16); }

static struct context *context_of(void *handle) {
    uint64_t index = ((uint64_t)handle - CONTEXT_BASE) / 16;
    if ((uint64_t)handle < CONTEXT_BASE || index >= (uint64_t)context_count) return NULL;
    return &contexts[index];
}

static bool known_device(int device) { return device >= 0 && device < core_settings.devices; }

static void context_up_locked(struct context *context, int device) {
    context->device = device;
    if (context->live) return;
    context->live = used = true;
    context_made[device]++;
    core_statistics.contexts++;
}

static void context_down_locked(struct context *context) {
    if (!context->live) return;
    context->live = context->touched = false;
    core_statistics.contexts--;
    /* Memory and streams belong to the device here, so they go with its last context. */
    for (int i = 0; i < context_count; i++)
        if (contexts[i].live && contexts[i].device == context->device) return;
    core_streams_lost_locked(context->device);
    core_device_lost_locked(context->device);
}

int core_context_retain(int device, void **handle) {
    if (!known_device(device)) return INVALID_DEVICE;
    core_lock();
    contexts[device].retained++;
    context_used[device]++;
    context_up_locked(&contexts[device], device);
    core_unlock();
    *handle = context_handle(device);
    return OK;
}

int core_context_release(int device) {
    if (!known_device(device)) return INVALID_DEVICE;
    core_lock();
    int code = contexts[device].retained ? OK : INVALID_CONTEXT;
    if (!code && !--contexts[device].retained && !contexts[device].touched) context_down_locked(&contexts[device]);
    core_unlock();
    return code;
}

int core_context_active(int device) { return contexts[device].live; }

int core_context_touch(int device) {
    if (!known_device(device)) return INVALID_DEVICE;
    core_lock();
    contexts[device].touched = true;
    context_used[device]++;
    context_up_locked(&contexts[device], device);
    core_unlock();
    return OK;
}

int core_context_create(int device, void **handle) {
    if (!known_device(device)) return INVALID_DEVICE;
    core_lock();
    int index = context_count < MAX_CONTEXTS ? context_count++ : -1;
    if (index >= 0) context_used[device]++, context_up_locked(&contexts[index], device);
    core_unlock();
    if (index < 0) return OUT_OF_MEMORY;
    *handle = context_handle(index);
    return core_context_push(*handle);
}

int core_context_destroy(void *handle) {
    struct context *context = context_of(handle);
    if (!context || context < contexts + MAX_DEVICES || !context->live) return INVALID_CONTEXT;
    if (depth && context_handle(stack[depth - 1]) == handle) depth--;
    core_lock();
    context_down_locked(context);
    core_unlock();
    return OK;
}

int core_context_push(void *handle) {
    struct context *context = context_of(handle);
    if (!context) return INVALID_CONTEXT;
    if (!context->live) return CONTEXT_IS_DESTROYED;
    if (depth == STACK) return INVALID_VALUE;
    stack[depth++] = (int)(context - contexts);
    core_lock();
    context_used[context->device]++;
    core_unlock();
    return OK;
}

int core_context_pop(void **handle) {
    if (!depth) return INVALID_CONTEXT;
    depth--;
    if (handle) *handle = context_handle(stack[depth]);
    return OK;
}

int core_context_set(void *handle) {
    if (!handle) {
        if (depth) depth--;
        return OK;
    }
    struct context *context = context_of(handle);
    if (!context) return INVALID_CONTEXT;
    if (!context->live) return CONTEXT_IS_DESTROYED;
    if (depth) depth--;
    return core_context_push(handle);
}

void *core_context_current(void) { return depth ? context_handle(stack[depth - 1]) : NULL; }
void *core_context_primary(int device) { return context_handle(device); }

int core_device_current(int *device) {
    if (!depth) return INVALID_CONTEXT;
    if (!contexts[stack[depth - 1]].live) return CONTEXT_IS_DESTROYED;
    *device = contexts[stack[depth - 1]].device;
    return OK;
}

int core_hip_device(void) { return hip_device; }

int core_hip_set_device(int device) {
    if (!known_device(device)) return INVALID_DEVICE;
    hip_device = device;
    return OK;
}

/* ---- what the tests read and set; emulation/library.py declares these ---- */

struct field {
    const char *name;
    size_t offset;
};
static const struct field setting_names[] = {
#define SETTING(name) {#name, offsetof(struct settings, name)}
    SETTING(devices),          SETTING(memory),
    SETTING(cuda_version),     SETTING(hip_version),
    SETTING(init_error),       SETTING(mode),
    SETTING(delay_us),         SETTING(seed),
    SETTING(patience),         SETTING(hold_timeout_ms),
    SETTING(strict_alignment), SETTING(read_limit),
    SETTING(async_supported),  SETTING(async_limit),
    SETTING(integrated),
};
static const struct field statistic_names[] = {
#define STATISTIC(name) {#name, offsetof(struct statistics, name)}
    STATISTIC(device_bytes),     STATISTIC(device_peak),   STATISTIC(pinned_bytes),   STATISTIC(pinned_peak),
    STATISTIC(registered_bytes), STATISTIC(managed_bytes), STATISTIC(allocations),    STATISTIC(streams),
    STATISTIC(events),           STATISTIC(contexts),      STATISTIC(files),          STATISTIC(buffers),
    STATISTIC(file_drivers),     STATISTIC(pending),       STATISTIC(pending_peak),   STATISTIC(captured),
    STATISTIC(pageable),         STATISTIC(failed),        STATISTIC(released_twice),
};

static long *named(const char *name) {
    for (size_t i = 0; i < sizeof setting_names / sizeof *setting_names; i++)
        if (!strcmp(name, setting_names[i].name)) return (long *)((char *)&core_settings + setting_names[i].offset);
    for (size_t i = 0; i < sizeof statistic_names / sizeof *statistic_names; i++)
        if (!strcmp(name, statistic_names[i].name))
            return (long *)((char *)&core_statistics + statistic_names[i].offset);
    return NULL;
}

API int emulation_set(const char *name, long value) {
    core_lock();
    long *number = named(name);
    bool good = number && (number != &core_settings.devices || (value >= 0 && value <= MAX_DEVICES));
    if (good) *number = value;
    core_changed_locked();
    core_unlock();
    return good ? OK : INVALID_VALUE;
}

API int emulation_get(const char *name, long *value) {
    core_lock();
    long *number = named(name);
    if (number) *value = *number;
    core_unlock();
    return number ? OK : INVALID_VALUE;
}

/* The number-th function that was called or has a fault; false after the last. */
API bool emulation_function(long number, const char **name, long *calls) {
    core_lock();
    struct function *function = functions;
    while (function && number--) function = function->next;
    if (function) *name = function->name, *calls = function->calls;
    core_unlock();
    return function;
}

API void *emulation_fault(const char *name, long first, long times, int error, int system, bool limited, long count,
                          long sleep_us) {
    struct fault *fault = calloc(1, sizeof *fault);
    core_lock();
    *fault =
        (struct fault){function_locked(name), first, times, 0, 0, {error, system, limited, count, sleep_us}, faults};
    faults = fault;
    core_unlock();
    return fault;
}

API long emulation_fired(const struct fault *fault) { return fault->fired; }

API void emulation_faultless(void) {
    core_lock();
    faults = NULL; /* not freed: the tests may still ask how often one fired */
    core_unlock();
}

/* A device's context: whether it is live, how often it was made and how often it was retained, pushed or touched. */
API bool emulation_context(int device, long *made, long *uses, long *retained) {
    core_lock();
    bool live = false;
    for (int i = 0; i < context_count; i++) live |= contexts[i].live && contexts[i].device == device;
    *made = context_made[device];
    *uses = context_used[device];
    *retained = contexts[device].retained;
    core_unlock();
    return live;
}

/* As the framework does that has memory there: it calls cuInit, and is not counted as the tested code. */
API int emulation_context_retain(int device) {
    void *handle;
    int code = core_context_retain(device, &handle);
    core_lock();
    if (!code) context_used[device]--, core_initialised = true;
    core_unlock();
    return code;
}
API int emulation_context_release(int device) { return core_context_release(device); }

API int emulation_device_current(bool hip) {
    int device;
    if (hip) return hip_device;
    return core_device_current(&device) ? -1 : device;
}

/* Settings, faults, counters, peaks and the thread's HIP device as they were; what the tested code holds stays. */
API void emulation_reset(void) {
    core_lock();
    faults = NULL;
    for (struct function *function = functions; function; function = function->next) function->calls = 0;
    core_settings = defaults;
    core_streams_reset_locked();
    hip_device = 0;
    memset(context_made, 0, sizeof context_made);
    memset(context_used, 0, sizeof context_used);
    core_statistics.device_peak = core_statistics.device_bytes;
    core_statistics.pinned_peak = core_statistics.pinned_bytes;
    core_statistics.pending_peak = core_statistics.pending;
    core_statistics.captured = core_statistics.pageable = core_statistics.failed = core_statistics.released_twice = 0;
    core_changed_locked();
    core_unlock();
}
