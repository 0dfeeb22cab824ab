/* What is queued, and who runs it, and when. */
#define _GNU_SOURCE
#include "queue.h"

#include <stdlib.h>
#include <string.h>

#define NEVER INT64_MAX

struct executed {
    int kind, device;
    void *stream;
    uint64_t target, source;
    size_t size;
};

static struct executed *executed;
static size_t executed_count, executed_room;
static bool worker_started;

/* ---- running ---- */

static void log_locked(const struct stream *stream, const struct operation *operation) {
    if (executed_count == executed_room) {
        executed_room = executed_room ? 2 * executed_room : 256;
        executed = realloc(executed, executed_room * sizeof *executed);
    }
    executed[executed_count++] = (struct executed){
        operation->kind,         stream->device,          core_stream_handle(stream),
        operation->plane.target, operation->plane.source, operation->plane.width * operation->plane.height};
}

static size_t extent(size_t pitch, const struct plane *plane) { return (plane->height - 1) * pitch + plane->width; }

static int move_locked(const struct operation *operation) {
    const struct plane *plane = &operation->plane;
    struct allocation *allocation;
    char *target, *source = operation->snapshot;
    if (core_view_locked(plane->target, extent(plane->target_pitch, plane), &target, &allocation))
        return ILLEGAL_ADDRESS;
    if ((allocation ? allocation->identity : 0) != operation->target_identity) return ILLEGAL_ADDRESS;
    if (operation->kind == FILL) {
        for (size_t row = 0; row < plane->height; row++)
            memset(target + row * plane->target_pitch, operation->value, plane->width);
        return OK;
    }
    size_t source_pitch = operation->snapshot ? plane->width : plane->source_pitch;
    if (!source) {
        if (core_view_locked(plane->source, extent(source_pitch, plane), &source, &allocation)) return ILLEGAL_ADDRESS;
        if ((allocation ? allocation->identity : 0) != operation->source_identity) return ILLEGAL_ADDRESS;
    }
    for (size_t row = 0; row < plane->height; row++)
        memmove(target + row * plane->target_pitch, source + row * source_pitch, plane->width);
    return OK;
}

/* Run the head of a stream that is not running. The mutex is let go while a host function runs. */
static void run_head_locked(struct stream *stream) {
    struct operation *operation = stream->head;
    int code = OK;
    if (operation->kind == HOST) {
        stream->running = true;
        core_unlock();
        operation->function(operation->argument);
        core_lock();
        stream->running = false;
    } else if (operation->kind == COPY || operation->kind == FILL) {
        code = move_locked(operation);
    }
    if (code) {
        core_statistics.failed++;
        if (!stream->error) stream->error = code, stream->error_number = operation->number;
    }
    log_locked(stream, operation);
    stream->head = operation->next;
    if (!stream->head) stream->tail = NULL;
    stream->complete = operation->number;
    core_statistics.pending--;
    free(operation->snapshot);
    free(operation);
    core_changed_locked();
}

struct goal {
    struct stream *stream;
    uint64_t number;
};

static bool blocked(const struct operation *operation) {
    return operation->kind == WAIT && operation->awaited->complete < operation->awaited_number;
}

static int reach_with_locked(struct stream *stream, uint64_t number, bool wait_for_held) {
    size_t room = 16, count = 1;
    struct goal *goals = malloc(room * sizeof *goals);
    int64_t held_until = 0;
    int code = OK;
    goals[0] = (struct goal){stream, number};
    while (count && !code) {
        struct goal goal = goals[count - 1];
        struct operation *head = goal.stream->head;
        if (goal.stream->complete >= goal.number) {
            count--;
        } else if (goal.stream->held) {
            if (!held_until) held_until = core_now_ns() + core_settings.hold_timeout_ms * 1000000;
            if (!wait_for_held)
                code = NOT_READY;
            else if (core_now_ns() >= held_until)
                code = LAUNCH_TIMEOUT;
            else
                core_wait_locked(held_until);
        } else if (goal.stream->running) {
            core_wait_locked(0);
        } else if (blocked(head)) {
            if (count == room) goals = realloc(goals, (room *= 2) * sizeof *goals);
            goals[count++] = (struct goal){head->awaited, head->awaited_number};
        } else if (head->due && head->due != NEVER) {
            core_wait_locked(0);
        } else {
            run_head_locked(goal.stream);
        }
    }
    free(goals);
    if (!code && stream->error && stream->error_number <= number) code = stream->error;
    return code;
}

int core_reach_locked(struct stream *stream, uint64_t number) { return reach_with_locked(stream, number, true); }
int core_try_reach_locked(struct stream *stream, uint64_t number) { return reach_with_locked(stream, number, false); }

static void *worker(void *nothing) {
    (void)nothing;
    core_lock();
    for (;;) {
        int64_t now = core_now_ns(), next = 0;
        struct stream *ready[64];
        int count = 0;
        for (int i = 0; i < core_stream_count; i++) {
            struct operation *head = core_streams[i]->head;
            if (!head || !head->due || head->due == NEVER || core_streams[i]->held || core_streams[i]->running ||
                blocked(head))
                continue;
            if (head->due > now)
                next = !next || head->due < next ? head->due : next;
            else if (count < 64)
                ready[count++] = core_streams[i];
        }
        if (count) {
            int chosen = 0;
            if (core_settings.seed) {
                core_settings.seed =
                    (long)((uint64_t)core_settings.seed * 6364136223846793005u + 1442695040888963407u) | 1;
                chosen = (int)(((uint64_t)core_settings.seed >> 33) % count);
            } else {
                for (int i = 1; i < count; i++)
                    if (ready[i]->head->due < ready[chosen]->head->due) chosen = i;
            }
            run_head_locked(ready[chosen]);
        } else {
            core_wait_locked(next);
        }
    }
    return NULL;
}

static void start_worker_locked(void) {
    pthread_t thread;
    if (worker_started) return;
    worker_started = !pthread_create(&thread, NULL, worker, NULL);
    if (worker_started) pthread_detach(thread);
}

/* ---- queueing ---- */

static void append_locked(struct stream *stream, struct operation operation) {
    struct operation *made = malloc(sizeof *made);
    *made = operation;
    made->number = ++stream->queued;
    made->due = core_settings.mode == EAGER      ? 0
                : core_settings.mode == DEFERRED ? NEVER
                                                 : core_now_ns() + core_settings.delay_us * 1000;
    made->next = NULL;
    if (stream->tail)
        stream->tail->next = made;
    else
        stream->head = made;
    stream->tail = made;
    if (++core_statistics.pending > core_statistics.pending_peak)
        core_statistics.pending_peak = core_statistics.pending;
}

static void await_locked(struct stream *stream, struct stream *awaited, uint64_t number) {
    if (awaited != stream && awaited->complete < number)
        append_locked(stream, (struct operation){.kind = WAIT, .awaited = awaited, .awaited_number = number});
}

/* What is queued on the NULL stream comes after what the device's blocking streams have, and the other way round. */
static void order_with_null_locked(struct stream *stream) {
    if (stream->legacy) {
        for (int i = 0; i < core_stream_count; i++)
            if (core_streams[i]->blocking && core_streams[i]->device == stream->device)
                await_locked(stream, core_streams[i], core_streams[i]->queued);
    } else if (stream->blocking) {
        struct stream *null = core_null_stream_locked(stream->device);
        if (null) await_locked(stream, null, null->queued);
    }
}

int core_queue_locked(struct stream *stream, struct operation operation) {
    int code = OK;
    if (stream->capture) {
        if (stream->capture == CAPTURE_ACTIVE)
            core_statistics.captured++;
        else
            code = CAPTURE_INVALIDATED;
        free(operation.snapshot);
        return code;
    }
    order_with_null_locked(stream);
    append_locked(stream, operation);
    if (core_settings.mode == LATE) {
        start_worker_locked();
        core_changed_locked();
    } else if (core_settings.mode == EAGER) {
        /* Behind a stream that is held it stays queued. A failure shows when someone synchronises. */
        core_try_reach_locked(stream, stream->queued);
    }
    return OK;
}

static bool pageable(const struct allocation *allocation) { return !allocation; }

static int copy(const struct plane *plane, void *handle, int current, bool snapshot, bool counted) {
    char *target_view, *source_view;
    struct allocation *target, *source;
    if (!plane->width || !plane->height) return OK;
    if (plane->height > 1 && (plane->target_pitch < plane->width || plane->source_pitch < plane->width))
        return INVALID_VALUE;
    core_lock();
    struct stream *stream = core_stream_locked(handle, current);
    int code = stream ? OK : INVALID_HANDLE;
    if (!code) code = core_view_locked(plane->target, extent(plane->target_pitch, plane), &target_view, &target);
    uint64_t target_identity = !code && target ? target->identity : 0;
    bool to_pageable = !code && pageable(target);
    if (!code) code = core_view_locked(plane->source, extent(plane->source_pitch, plane), &source_view, &source);
    if (!code) {
        struct operation operation = {.kind = COPY,
                                      .plane = *plane,
                                      .target_identity = target_identity,
                                      .source_identity = source ? source->identity : 0};
        if (counted && (to_pageable || pageable(source))) core_statistics.pageable++;
        if (snapshot || pageable(source)) {
            /* A driver stages memory that is not pinned before the call returns. */
            operation.snapshot = malloc(plane->width * plane->height);
            for (size_t row = 0; row < plane->height; row++)
                memcpy(operation.snapshot + row * plane->width, source_view + row * plane->source_pitch, plane->width);
        }
        code = core_queue_locked(stream, operation);
        if (!code && to_pageable && !stream->capture) code = core_reach_locked(stream, stream->queued);
    }
    core_unlock();
    return code;
}

int core_copy(const struct plane *plane, void *handle, int current, bool snapshot) {
    return copy(plane, handle, current, snapshot, true);
}

/* Nothing asynchronous about it, so it does not count as a copy of memory that is not pinned. */
int core_copy_now(const struct plane *plane, int current) {
    int code = copy(plane, NULL, current, false, false);
    return code ? code : core_stream_synchronize(NULL, current);
}

int core_fill(const struct plane *plane, int value, void *handle, int current, bool wait) {
    char *view;
    struct allocation *target;
    if (!plane->width || !plane->height) return OK;
    if (plane->height > 1 && plane->target_pitch < plane->width) return INVALID_VALUE;
    core_lock();
    struct stream *stream = core_stream_locked(handle, current);
    int code = stream ? core_view_locked(plane->target, extent(plane->target_pitch, plane), &view, &target)
                      : INVALID_HANDLE;
    if (!code)
        code = core_queue_locked(stream, (struct operation){.kind = FILL,
                                                            .value = value,
                                                            .plane = *plane,
                                                            .target_identity = target ? target->identity : 0});
    if (!code && wait) code = core_reach_locked(stream, stream->queued);
    core_unlock();
    return code;
}

int core_stream_host(void *handle, int current, void (*function)(void *), void *argument) {
    core_lock();
    struct stream *stream = core_stream_locked(handle, current);
    int code =
        stream ? core_queue_locked(stream, (struct operation){.kind = HOST, .function = function, .argument = argument})
               : INVALID_HANDLE;
    core_unlock();
    return code;
}

/* ---- what the tests use ---- */

API int emulation_stream_write(void *handle, int device, uint64_t target, const void *source, size_t size) {
    struct plane plane = {target, (uint64_t)source, size, size, size, 1};
    return copy(&plane, handle, device, true, false);
}

void core_executed_reset_locked(void) { executed_count = 0; }

API bool emulation_executed(size_t number, int *kind, int *device, void **stream, uint64_t *target, uint64_t *source,
                            size_t *size) {
    core_lock();
    bool there = number < executed_count;
    if (there) {
        struct executed entry = executed[number];
        *kind = entry.kind, *device = entry.device, *stream = entry.stream;
        *target = entry.target, *source = entry.source, *size = entry.size;
    }
    core_unlock();
    return there;
}
