/* Streams and what is queued on them.
 *
 * Each stream is a queue whose operations run strictly in order. An operation is numbered when it is queued; a stream
 * is complete up to a number. An event is a (stream, number) pair, and so is what a wait waits for: recording the
 * event again does not move a wait that was queued before. The modes differ only in who runs an operation, and when:
 *
 *   eager     the caller, before the call returns (with all that it has to wait for)
 *   deferred  whoever synchronises, and only what that depends on; a query never runs anything, until it was asked
 *             `patience` times, so that a caller that polls does not poll for ever
 *   late      a background thread, once `delay_us` have passed; in which order among the streams, `seed` says
 *
 * A held stream runs nothing, in any mode, until it is let go.
 */
#ifndef QUEUE_H
#define QUEUE_H

#include "core.h"

enum kind { COPY, FILL, HOST, WAIT, MARK };

struct stream;
struct operation {
    enum kind kind;
    uint64_t number;
    int64_t due; /* 0: by the caller; NEVER: by who synchronises; else by the background thread */
    struct plane plane;
    uint64_t target_identity, source_identity;
    char *snapshot;
    int value;
    void (*function)(void *);
    void *argument;
    struct stream *awaited;
    uint64_t awaited_number;
    struct operation *next;
};

struct stream {
    int index, device;
    bool live, blocking, held, running, legacy;
    enum capture capture;
    uint64_t capture_identity;
    struct operation *head, *tail;
    uint64_t queued, complete;
    int error; /* of the first operation that failed; it stays */
    uint64_t error_number;
    long queries;
};

/* Never shortened: handles are not reused, so a stale one is recognised. */
extern struct stream **core_streams;
extern int core_stream_count;

void *core_stream_handle(const struct stream *stream);
struct stream *core_stream_locked(void *handle, int current); /* NULL for a handle that is none */
struct stream *core_null_stream_locked(int device);           /* NULL where it was never used */
/* Takes the operation's snapshot, whatever happens. */
int core_queue_locked(struct stream *stream, struct operation operation);
/* Until a stream is complete up to a number: run what that takes, or wait for those who run it. */
int core_reach_locked(struct stream *stream, uint64_t number);
/* The same, but NOT_READY where a stream is held. */
int core_try_reach_locked(struct stream *stream, uint64_t number);
void core_executed_reset_locked(void);

#endif
