/* Which DLPack deleters were called, and how often. The real one is called the first time only. */
#define _GNU_SOURCE
#include "core.h"

#include <stdlib.h>

typedef void deleter_type(void *);

struct export {
    void *managed;
    deleter_type *deleter;
    long calls;
    struct export *next;
};

static struct export *exports; /* newest first: an address may come again after it was freed */

static void counting_deleter(void *managed) {
    deleter_type *deleter = NULL;
    core_lock();
    for (struct export *export = exports; export; export = export->next)
        if (export->managed == managed) {
            if (export->calls++)
                core_statistics.released_twice++;
            else
                deleter = export->deleter;
            break;
        }
    core_unlock();
    if (deleter) deleter(managed);
}

/* Put a counting deleter in the place of a managed tensor's own. */
API void *emulation_export(void *managed, void **deleter) {
    struct export *export = calloc(1, sizeof *export);
    core_lock();
    *export = (struct export){managed, (deleter_type *)*deleter, 0, exports};
    exports = export;
    core_unlock();
    *deleter = (void *)counting_deleter;
    return export;
}

API long emulation_export_calls(const struct export *export) { return export->calls; }
