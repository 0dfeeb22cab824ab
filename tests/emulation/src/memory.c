/* Device, managed and pinned memory.
 *
 * A device is a range of addresses that is mapped PROT_NONE, so that an access by the host faults and read(2) into it
 * gives EFAULT, and a private readable and writable mapping of the same pages, which only the emulation's copies use.
 * No address is ever given out twice, so a pointer that was freed stays wrong.
 */
#define _GNU_SOURCE
#include "core.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define RANGE ((size_t)256 << 30) /* addresses of one device; pages come when they are written */
#define PAGE ((size_t)4096)
#define GRAIN ((size_t)65536) /* what an allocation takes at least, with a page after it that is never given out */

static struct {
    char *addresses, *shadow;
    int fd;
    size_t used;
} devices[MAX_DEVICES];

/* By address. Freed memory stays, marked, except for what was registered: others' memory comes and goes. */
static struct allocation *allocations;
static size_t allocation_count, allocation_room;
static uint64_t identities;

static size_t rounded(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

static size_t place_of(uint64_t pointer) { /* of the first allocation after it */
    size_t low = 0, high = allocation_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (allocations[middle].base <= pointer)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct allocation *core_find_locked(uint64_t pointer) {
    size_t place = place_of(pointer);
    if (!place) return NULL;
    struct allocation *found = &allocations[place - 1];
    return pointer - found->base < found->size ? found : NULL;
}

bool core_find(uint64_t pointer, struct allocation *copy) {
    core_lock();
    struct allocation *found = core_find_locked(pointer);
    bool live = found && found->live;
    if (live) *copy = *found;
    core_unlock();
    return live;
}

static void count_locked(const struct allocation *allocation, int sign) {
    long size = sign * (long)allocation->size;
    core_statistics.allocations += sign;
    switch (allocation->kind) {
    case DEVICE: core_statistics.device_bytes += size; break;
    case MANAGED: core_statistics.managed_bytes += size; break;
    case PINNED: core_statistics.pinned_bytes += size; break;
    case REGISTERED: core_statistics.registered_bytes += size; break;
    }
    if (core_statistics.device_bytes > core_statistics.device_peak)
        core_statistics.device_peak = core_statistics.device_bytes;
    if (core_statistics.pinned_bytes > core_statistics.pinned_peak)
        core_statistics.pinned_peak = core_statistics.pinned_bytes;
}

static void add_locked(uint64_t base, size_t size, int device, enum memory_kind kind, unsigned flags) {
    if (allocation_count == allocation_room) {
        allocation_room = allocation_room ? 2 * allocation_room : 256;
        allocations = realloc(allocations, allocation_room * sizeof *allocations);
    }
    size_t place = place_of(base);
    memmove(allocations + place + 1, allocations + place, (allocation_count - place) * sizeof *allocations);
    allocations[place] = (struct allocation){base, size, device, kind, flags, true, ++identities};
    allocation_count++;
    count_locked(&allocations[place], 1);
}

static bool open_device_locked(int device) {
    if (devices[device].addresses) return true;
    int fd = memfd_create("emulated-device", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, RANGE)) return false;
    char *addresses = mmap(NULL, RANGE, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    char *shadow = mmap(NULL, RANGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (addresses == MAP_FAILED || shadow == MAP_FAILED) return false;
    madvise(shadow, RANGE, MADV_DONTDUMP);
    devices[device].addresses = addresses;
    devices[device].shadow = shadow;
    devices[device].fd = fd;
    return true;
}

static long device_live_locked(int device) {
    long bytes = 0;
    for (size_t i = 0; i < allocation_count; i++)
        if (allocations[i].live && allocations[i].kind == DEVICE && allocations[i].device == device)
            bytes += allocations[i].size;
    return bytes;
}

long core_device_bytes(int device) {
    core_lock();
    long bytes = device_live_locked(device);
    core_unlock();
    return bytes;
}

int core_allocate(enum memory_kind kind, int device, size_t size, unsigned flags, uint64_t *pointer) {
    if (!size) return INVALID_VALUE;
    int code = OK;
    core_lock();
    if (kind == DEVICE) {
        size_t taken = rounded(size + PAGE, GRAIN);
        if (!open_device_locked(device) || size > (size_t)core_settings.memory ||
            device_live_locked(device) + (long)size > core_settings.memory || devices[device].used + taken > RANGE) {
            code = OUT_OF_MEMORY;
        } else {
            *pointer = (uint64_t)devices[device].addresses + devices[device].used;
            devices[device].used += taken;
        }
    } else {
        /* The page after it is mapped PROT_NONE: running over the end faults. */
        size_t body = rounded(size, PAGE);
        char *memory =
            mmap(NULL, body + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED)
            code = OUT_OF_MEMORY;
        else
            mprotect(memory + body, PAGE, PROT_NONE), *pointer = (uint64_t)memory;
    }
    if (!code) add_locked(*pointer, size, device, kind, flags);
    core_unlock();
    return code;
}

static void release_locked(struct allocation *allocation) {
    size_t body = rounded(allocation->size, PAGE);
    if (allocation->kind == DEVICE) {
        size_t offset = allocation->base - (uint64_t)devices[allocation->device].addresses;
        fallocate(devices[allocation->device].fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, body);
    } else if (allocation->kind != REGISTERED) {
        /* The addresses stay taken, and fault. */
        mmap((void *)allocation->base, body, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    }
    count_locked(allocation, -1);
    allocation->live = false;
}

int core_free(uint64_t pointer, bool host) {
    core_lock();
    struct allocation *found = core_find_locked(pointer);
    bool mine = found && found->live && found->base == pointer &&
                (host ? found->kind == PINNED : found->kind == DEVICE || found->kind == MANAGED);
    if (mine) release_locked(found);
    core_unlock();
    return mine ? OK : INVALID_VALUE;
}

int core_register(void *pointer, size_t size, int device, unsigned flags) {
    uint64_t base = (uint64_t)pointer;
    if (!pointer || !size) return INVALID_VALUE;
    core_lock();
    size_t place = place_of(base);
    bool taken = core_find_locked(base) || (place < allocation_count && allocations[place].base < base + size);
    if (!taken) add_locked(base, size, device, REGISTERED, flags);
    core_unlock();
    return taken ? ALREADY_REGISTERED : OK;
}

int core_unregister(void *pointer) {
    core_lock();
    struct allocation *found = core_find_locked((uint64_t)pointer);
    bool mine = found && found->kind == REGISTERED && found->base == (uint64_t)pointer;
    if (mine) {
        release_locked(found);
        memmove(found, found + 1, (allocations + allocation_count - found - 1) * sizeof *found);
        allocation_count--;
    }
    core_unlock();
    return mine ? OK : NOT_REGISTERED;
}

void core_device_lost_locked(int device) {
    for (size_t i = 0; i < allocation_count; i++)
        if (allocations[i].live && allocations[i].device == device && allocations[i].kind != REGISTERED)
            release_locked(&allocations[i]);
}

int core_view_locked(uint64_t pointer, size_t size, char **view, struct allocation **allocation) {
    struct allocation *found = core_find_locked(pointer);
    if (found && (!found->live || size > found->size - (pointer - found->base))) return INVALID_VALUE;
    *allocation = found;
    *view = (char *)pointer;
    if (found) {
        if (found->kind == DEVICE)
            *view = devices[found->device].shadow + (pointer - (uint64_t)devices[found->device].addresses);
        return OK;
    }
    for (int i = 0; i < MAX_DEVICES; i++)
        if (devices[i].addresses && pointer + size > (uint64_t)devices[i].addresses &&
            pointer < (uint64_t)devices[i].addresses + RANGE)
            return INVALID_VALUE; /* never given out */
    return OK;
}

/* ---- what the tests use ---- */

API int emulation_allocate(int kind, int device, size_t size, uint64_t *pointer) {
    return core_allocate(kind, device, size, 0, pointer);
}
API int emulation_free(uint64_t pointer, bool host) { return core_free(pointer, host); }

API int emulation_read(uint64_t pointer, void *target, size_t size) {
    char *view;
    struct allocation *allocation;
    core_lock();
    int code = core_view_locked(pointer, size, &view, &allocation);
    if (!code) memcpy(target, view, size);
    core_unlock();
    return code;
}

API int emulation_write(uint64_t pointer, const void *source, size_t size) {
    char *view;
    struct allocation *allocation;
    core_lock();
    int code = core_view_locked(pointer, size, &view, &allocation);
    if (!code) memcpy(view, source, size);
    core_unlock();
    return code;
}

API bool emulation_find(uint64_t pointer, uint64_t *base, size_t *size, int *device, int *kind) {
    struct allocation found;
    if (!core_find(pointer, &found)) return false;
    *base = found.base, *size = found.size, *device = found.device, *kind = found.kind;
    return true;
}

API long emulation_device_bytes(int device) { return core_device_bytes(device); }
