/* Streams and events, by their handles. */
#define _GNU_SOURCE
#include "queue.h"

#include <stdlib.h>
#include <string.h>

#define STREAM_BASE 0x520000000000ul
#define EVENT_BASE 0x530000000000ul

struct event {
    int device;
    bool live;
    struct stream *stream; /* NULL: never recorded */
    uint64_t number;
    long queries;
};

struct stream **core_streams;
int core_stream_count;
static struct event **events;
static int stream_room, event_count, event_room;
static int legacy_streams[MAX_DEVICES]; /* index + 1 */
static __thread int thread_streams[MAX_DEVICES];
static uint64_t captures;

void *core_stream_handle(const struct stream *stream) { return (void *)(STREAM_BASE + (uint64_t)stream->index * 16); }

static struct stream *new_stream_locked(int device, bool blocking) {
    if (core_stream_count == stream_room) {
        stream_room = stream_room ? 2 * stream_room : 64;
        core_streams = realloc(core_streams, stream_room * sizeof *core_streams);
    }
    struct stream *stream = calloc(1, sizeof *stream);
    stream->index = core_stream_count;
    stream->device = device;
    stream->live = true;
    stream->blocking = blocking;
    return core_streams[core_stream_count++] = stream;
}

/* A handle as the callers have it: 0 and 1 are the device's NULL stream, 2 is the thread's own. */
struct stream *core_stream_locked(void *handle, int current) {
    uint64_t value = (uint64_t)handle;
    if (value <= 1) {
        if (!legacy_streams[current]) {
            struct stream *stream = new_stream_locked(current, false);
            stream->legacy = true;
            legacy_streams[current] = stream->index + 1;
        }
        return core_streams[legacy_streams[current] - 1];
    }
    if (value == 2) {
        if (!thread_streams[current]) thread_streams[current] = new_stream_locked(current, true)->index + 1;
        return core_streams[thread_streams[current] - 1];
    }
    uint64_t index = (value - STREAM_BASE) / 16;
    if (value < STREAM_BASE || value % 16 || index >= (uint64_t)core_stream_count || !core_streams[index]->live)
        return NULL;
    return core_streams[index];
}

struct stream *core_null_stream_locked(int device) {
    return legacy_streams[device] ? core_streams[legacy_streams[device] - 1] : NULL;
}

static struct event *event_of_locked(void *handle) {
    uint64_t value = (uint64_t)handle, index = (value - EVENT_BASE) / 16;
    if (value < EVENT_BASE || value % 16 || index >= (uint64_t)event_count || !events[index]->live) return NULL;
    return events[index];
}

/* ---- streams ---- */

int core_stream_create(int device, bool blocking, void **handle) {
    core_lock();
    *handle = core_stream_handle(new_stream_locked(device, blocking));
    core_statistics.streams++;
    core_unlock();
    return OK;
}

int core_stream_destroy(void *handle) {
    if ((uint64_t)handle <= 2) return INVALID_HANDLE;
    core_lock();
    struct stream *stream = core_stream_locked(handle, 0);
    if (stream) stream->live = false, core_statistics.streams--; /* what is queued still runs */
    core_unlock();
    return stream ? OK : INVALID_HANDLE;
}

/* Waiting for a stream that is being captured is an error, and spoils the capture. */
static int usable_locked(struct stream *stream) {
    if (!stream) return INVALID_HANDLE;
    if (stream->capture == CAPTURE_NONE) return OK;
    stream->capture = CAPTURE_BROKEN;
    return CAPTURE_UNSUPPORTED;
}

int core_stream_synchronize(void *handle, int current) {
    core_lock();
    struct stream *stream = core_stream_locked(handle, current);
    int code = usable_locked(stream);
    if (!code) code = core_reach_locked(stream, stream->queued);
    core_unlock();
    return code;
}

static int ask_locked(struct stream *stream, uint64_t number, long *queries) {
    if (stream->complete < number) {
        if (core_settings.mode == LATE || stream->held || ++*queries < core_settings.patience) return NOT_READY;
        core_reach_locked(stream, number);
    }
    *queries = 0;
    return stream->error && stream->error_number <= number ? stream->error : OK;
}

int core_stream_query(void *handle, int current) {
    core_lock();
    struct stream *stream = core_stream_locked(handle, current);
    int code = usable_locked(stream);
    if (!code) code = ask_locked(stream, stream->queued, &stream->queries);
    core_unlock();
    return code;
}

int core_stream_wait(void *handle, int current, void *event_handle) {
    core_lock();
    struct stream *stream = core_stream_locked(handle, current);
    struct event *event = event_of_locked(event_handle);
    int code = stream && event ? OK : INVALID_HANDLE;
    if (!code && event->stream && event->stream != stream) {
        if (stream->capture)
            code = CAPTURE_UNSUPPORTED; /* of an event that was recorded outside the capture */
        else
            code = core_queue_locked(
                stream, (struct operation){.kind = WAIT, .awaited = event->stream, .awaited_number = event->number});
    }
    core_unlock();
    return code;
}

int core_stream_capture(void *handle, int current, int *status, uint64_t *identity) {
    int code = OK;
    core_lock();
    struct stream *stream = core_stream_locked(handle, current);
    if (!stream)
        code = INVALID_HANDLE;
    else if (stream->legacy)
        for (int i = 0; i < core_stream_count; i++)
            if (core_streams[i]->blocking && core_streams[i]->device == stream->device && core_streams[i]->capture)
                code = CAPTURE_IMPLICIT;
    if (!code) *status = stream->capture;
    if (!code && identity) *identity = stream->capture_identity;
    core_unlock();
    return code;
}

int core_stream_facts(void *handle, int current, int *device, bool *blocking) {
    core_lock();
    struct stream *stream = core_stream_locked(handle, current);
    if (stream) *device = stream->device, *blocking = stream->blocking || stream->legacy;
    core_unlock();
    return stream ? OK : INVALID_HANDLE;
}

int core_device_synchronize(int device) {
    int code = OK;
    core_lock();
    for (int i = 0; i < core_stream_count; i++)
        if (core_streams[i]->device == device) {
            int failed = core_reach_locked(core_streams[i], core_streams[i]->queued);
            if (failed && core_streams[i]->live) code = failed;
        }
    core_unlock();
    return code;
}

void core_streams_lost_locked(int device) {
    for (int i = 0; i < core_stream_count; i++)
        if (core_streams[i]->device == device && core_streams[i]->live && !core_streams[i]->legacy) {
            core_streams[i]->live = false;
            core_statistics.streams--;
        }
    for (int i = 0; i < event_count; i++)
        if (events[i]->device == device && events[i]->live) events[i]->live = false, core_statistics.events--;
}

/* ---- events ---- */

int core_event_create(int device, void **handle) {
    core_lock();
    if (event_count == event_room) {
        event_room = event_room ? 2 * event_room : 64;
        events = realloc(events, event_room * sizeof *events);
    }
    struct event *event = calloc(1, sizeof *event);
    *event = (struct event){.device = device, .live = true};
    *handle = (void *)(EVENT_BASE + (uint64_t)event_count * 16);
    events[event_count++] = event;
    core_statistics.events++;
    core_unlock();
    return OK;
}

int core_event_destroy(void *handle) {
    core_lock();
    struct event *event = event_of_locked(handle);
    if (event) event->live = false, core_statistics.events--;
    core_unlock();
    return event ? OK : INVALID_HANDLE;
}

int core_event_record(void *handle, void *stream_handle, int current) {
    core_lock();
    struct stream *stream = core_stream_locked(stream_handle, current);
    struct event *event = event_of_locked(handle);
    int code = stream && event && event->device == stream->device ? OK : INVALID_HANDLE;
    if (!code) code = core_queue_locked(stream, (struct operation){.kind = MARK});
    if (!code && !stream->capture) event->stream = stream, event->number = stream->queued, event->queries = 0;
    core_unlock();
    return code;
}

int core_event_synchronize(void *handle) {
    core_lock();
    struct event *event = event_of_locked(handle);
    int code = event ? OK : INVALID_HANDLE;
    if (!code && event->stream) code = core_reach_locked(event->stream, event->number);
    core_unlock();
    return code;
}

int core_event_query(void *handle) {
    core_lock();
    struct event *event = event_of_locked(handle);
    int code = event ? OK : INVALID_HANDLE;
    if (!code && event->stream) code = ask_locked(event->stream, event->number, &event->queries);
    core_unlock();
    return code;
}

/* ---- what the tests use ---- */

void core_streams_reset_locked(void) {
    for (int i = 0; i < core_stream_count; i++) {
        core_streams[i]->held = false;
        core_streams[i]->capture = CAPTURE_NONE;
        core_streams[i]->error = OK;
    }
    core_executed_reset_locked();
}

API int emulation_stream_create(int device, bool blocking, void **handle) {
    return core_stream_create(device, blocking, handle);
}
API int emulation_stream_destroy(void *handle) { return core_stream_destroy(handle); }
API int emulation_stream_synchronize(void *handle, int device) { return core_stream_synchronize(handle, device); }
API int emulation_device_synchronize(int device) { return core_device_synchronize(device); }

/* Number of operations queued and not run; -1 for a handle that is none. */
API long emulation_stream_pending(void *handle, int device) {
    core_lock();
    struct stream *stream = core_stream_locked(handle, device);
    long pending = stream ? (long)(stream->queued - stream->complete) : -1;
    core_unlock();
    return pending;
}

API int emulation_stream_hold(void *handle, int device, bool held) {
    core_lock();
    struct stream *stream = core_stream_locked(handle, device);
    if (stream) stream->held = held;
    if (stream && core_settings.mode == EAGER) core_try_reach_locked(stream, stream->queued);
    core_changed_locked();
    core_unlock();
    return stream ? OK : INVALID_HANDLE;
}

API int emulation_stream_set_capture(void *handle, int device, int capture) {
    core_lock();
    struct stream *stream = core_stream_locked(handle, device);
    if (stream) stream->capture = capture, stream->capture_identity = capture ? ++captures : 0;
    core_unlock();
    return stream ? OK : INVALID_HANDLE;
}

/* Whose device a stream is; -1 for a handle that is none. */
API int emulation_stream_device(void *handle, int device) {
    bool blocking;
    return core_stream_facts(handle, device, &device, &blocking) ? -1 : device;
}

/* Make a stream wait for what another one has queued, as an event would. */
API int emulation_order(void *producer, int producer_device, void *consumer, int consumer_device) {
    core_lock();
    struct stream *first = core_stream_locked(producer, producer_device);
    struct stream *second = core_stream_locked(consumer, consumer_device);
    int code = first && second ? OK : INVALID_HANDLE;
    if (!code && first != second)
        code = core_queue_locked(second,
                                 (struct operation){.kind = WAIT, .awaited = first, .awaited_number = first->queued});
    core_unlock();
    return code;
}
