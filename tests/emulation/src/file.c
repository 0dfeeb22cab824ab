/* Reads from files into device memory: what cuFile and hipFile do, through the file's own descriptor. */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FILE_BASE 0x540000000000ul
#define PAGE_MASK 4095
#define MAX_FILES 65536
#define MAX_BUFFERS 4096

static struct {
    int fd;
    bool live;
} files[MAX_FILES]; /* handles are not reused */
static int file_count;
static struct {
    uint64_t base;
    size_t size;
} buffers[MAX_BUFFERS];
static int buffer_count;
static long outstanding;

int core_file_register(int fd, void **handle) {
    int code = OK;
    if (fcntl(fd, F_GETFL) < 0) return FILE_INVALID_VALUE;
    core_lock();
    if (file_count == MAX_FILES) code = FILE_INTERNAL_ERROR;
    if (!code) {
        files[file_count].fd = fd;
        files[file_count].live = true;
        *handle = (void *)(FILE_BASE + (uint64_t)file_count++ * 16);
        core_statistics.files++;
    }
    core_unlock();
    return code;
}

static int index_locked(void *handle) {
    uint64_t value = (uint64_t)handle, index = (value - FILE_BASE) / 16;
    bool good = value >= FILE_BASE && value % 16 == 0 && index < (uint64_t)file_count && files[index].live;
    return good ? (int)index : -1;
}

int core_file_deregister(void *handle) {
    core_lock();
    int index = index_locked(handle);
    if (index >= 0) files[index].live = false, core_statistics.files--;
    core_unlock();
    return index >= 0 ? OK : FILE_HANDLE_NOT_REGISTERED;
}

void core_file_drivers(int change) {
    core_lock();
    core_statistics.file_drivers += change;
    core_unlock();
}

static int check_device_memory_locked(uint64_t base, uint64_t pointer, size_t size, char **view) {
    struct allocation *found = core_find_locked(base);
    if (!found || !found->live) return FILE_POINTER_INVALID;
    if (found->kind != DEVICE && found->kind != MANAGED) return FILE_MEMORY_TYPE_INVALID;
    return core_view_locked(pointer, size, view, &found) ? FILE_RANGE_ERROR : OK;
}

int core_buffer_register(uint64_t base, size_t size) {
    char *view;
    core_lock();
    int code = check_device_memory_locked(base, base, size, &view);
    for (int i = 0; i < buffer_count; i++)
        if (!code && base < buffers[i].base + buffers[i].size && buffers[i].base < base + size)
            code = FILE_BUFFER_ALREADY_REGISTERED;
    if (!code && buffer_count == MAX_BUFFERS) code = FILE_INTERNAL_ERROR;
    if (!code) {
        buffers[buffer_count].base = base;
        buffers[buffer_count++].size = size;
        core_statistics.buffers++;
    }
    core_unlock();
    return code;
}

int core_buffer_deregister(uint64_t base) {
    int code = FILE_BUFFER_NOT_REGISTERED;
    core_lock();
    for (int i = 0; i < buffer_count; i++)
        if (buffers[i].base == base) {
            buffers[i] = buffers[--buffer_count];
            core_statistics.buffers--;
            code = OK;
            break;
        }
    core_unlock();
    return code;
}

/* A descriptor with O_DIRECT wants aligned memory; the bytes come through a buffered one of the same file. */
static int buffered_twin(int fd) {
    char path[64];
    if (!(fcntl(fd, F_GETFL) & O_DIRECT)) return fd;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, O_RDONLY | O_CLOEXEC);
}

ssize_t core_file_read(const struct file_read *read) {
    const struct outcome *outcome = &read->outcome;
    uint64_t pointer = read->base + read->buffer_offset;
    size_t size = read->size, done = 0;
    char *view;
    core_sleep(outcome->sleep_us);
    if (outcome->error) return outcome->error > 0 ? -outcome->error : outcome->error;
    if (outcome->system) {
        errno = outcome->system;
        return -1;
    }
    if (outcome->limited && outcome->count < 0) return outcome->count;
    if (read->file_offset < 0 || read->buffer_offset < 0) {
        errno = EINVAL;
        return -1;
    }
    if (core_settings.strict_alignment && (((uint64_t)read->file_offset | size | pointer) & PAGE_MASK)) {
        errno = EINVAL;
        return -1;
    }
    core_lock();
    int index = index_locked(read->file), fd = index >= 0 ? files[index].fd : -1;
    int code = fd < 0 ? FILE_HANDLE_NOT_REGISTERED : check_device_memory_locked(read->base, pointer, size, &view);
    core_unlock();
    if (code) return -code;
    size_t limit = core_settings.read_limit ? (size_t)core_settings.read_limit : read->limit;
    if (limit && size > limit) size = limit;
    if (outcome->limited && size > (size_t)outcome->count) size = outcome->count;
    int twin = buffered_twin(fd);
    if (twin < 0) return -1;
    ssize_t got = 0;
    while (done < size && (got = pread(twin, view + done, size - done, read->file_offset + done)) > 0) done += got;
    int failed = errno;
    if (twin != fd) close(twin);
    if (got < 0) {
        errno = failed;
        return -1;
    }
    return done;
}

struct job {
    struct file_read read;
    size_t *size;
    off_t *file_offset, *buffer_offset;
    ssize_t *done;
    bool fixed;
};

static void run_job(void *argument) {
    struct job *job = argument;
    if (!job->fixed) {
        job->read.size = *job->size;
        job->read.file_offset = *job->file_offset;
        job->read.buffer_offset = *job->buffer_offset;
    }
    *job->done = core_file_read(&job->read);
    core_lock();
    outstanding--;
    core_unlock();
    free(job);
}

/* `fixed`: the caller promised that the three numbers do not change. Otherwise they are looked at when it runs. */
int core_file_read_async(struct file_read read, size_t *size, off_t *file_offset, off_t *buffer_offset, ssize_t *done,
                         void *stream, int current, bool fixed) {
    if (read.outcome.error) return read.outcome.error;
    if (!core_settings.async_supported) return FILE_ASYNC_NOT_SUPPORTED;
    if (!size || !file_offset || !buffer_offset || !done) return FILE_INVALID_VALUE;
    core_lock();
    bool full = core_settings.async_limit && outstanding >= core_settings.async_limit;
    if (!full) outstanding++;
    core_unlock();
    if (full) return FILE_INTERNAL_ERROR;
    read.size = *size, read.file_offset = *file_offset, read.buffer_offset = *buffer_offset;
    struct job *job = malloc(sizeof *job);
    *job = (struct job){read, size, file_offset, buffer_offset, done, fixed};
    int code = core_stream_host(stream, current, run_job, job);
    if (code) {
        core_lock();
        outstanding--;
        core_unlock();
        free(job);
    }
    return code ? FILE_DRIVER_ERROR : OK;
}
