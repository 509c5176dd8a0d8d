/*
 * libnvidia-ml.so.1, played: GPUs out of a text file, for tests, the benchmark and machines without a GPU.
 *
 * Compiled against NVIDIA's own nvml.h, so that the compiler checks every signature. It exports what nvplug calls and
 * what NVIDIA's plugin calls, so that both can run on it.
 *
 * The environment variable NVML_STANDIN names the control file. It is read again when it changes, by any process, at
 * any time; replace it by rename(2) to change several things at once. One command a line, later lines win:
 *
 *   gpus N                         N GPUs, with made-up and distinct properties
 *   count N                        what nvmlDeviceGetCount says, if not that
 *   driver TEXT                    the driver's version
 *   uuid I TEXT, name I TEXT, pci I TEXT, minor I N, memory I BYTES
 *   events I MASK                  event types that GPU I supports
 *   gone I                         GPU I is not there any more, and those after it move up
 *   action I N                     the driver's recovery action, a field that drivers do not have without this line
 *   ecc I N, energy I N            uncorrectable errors; millijoules
 *   rows I FAILURE PENDING         of row remapping; without this line the GPU cannot
 *   pages I N                      retired pages; without this line the GPU does not have them
 *   mig I CURRENT PENDING          its MIG mode
 *   cut I J UUID GI CI PROFILE GPU_SLICES COMPUTE_SLICES MIB
 *                                  MIG device J of GPU I; an NVML_GPU_INSTANCE_PROFILE
 *   path I J LEVEL                 nvmlGpuTopologyLevel_t between two GPUs, both ways
 *   link I TEXT                    GPU I has one more active NVLink, which leads to this PCI address
 *   error FUNCTION|* I|* CODE      this function (*: every one) returns CODE (for GPU I)
 *   hang FUNCTION|* I|*            this function does not return (for GPU I) while this line is there
 *   event ID I|? XID [GI [CI]]     GPU I (?: no GPU that exists) has an XID. IDs grow; a process gets each once, and
 *                                  like a driver loses those of GPUs that are not registered, or from before nvmlInit
 *   notice ID I MASK               the same for an event of another type
 *
 * A process that has attached a GPU has the file nvidiaI open, beside the control file: by nvmlInit_v2 all, and by
 * nvmlInitWithFlags(NVML_INIT_FLAG_NO_ATTACH) only those whose handle was asked for; until the last nvmlShutdown.
 *
 * Calls are counted, by name, in NVML_STANDIN.calls if that file exists: records of 56 bytes of name and 8 of count.
 * So are the crimes misuse_shutdown and misuse_free (with another thread inside the library), misuse_set (a freed
 * event set) and misuse_overlap (two calls for one GPU at a time).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <nvml.h>

enum { GPUS = 64, MIGS = 8, RULES = 256, EVENTS = 1024, RECORDS = 128, WHOLE = -1, NOBODY = -2 };

struct mig {
    char uuid[96];
    unsigned int gpu_instance, compute_instance, profile, gpu_slices, compute_slices;
    unsigned long long memory;
};

struct gpu {
    struct mig cut[MIGS];
    char uuid[96], name[96], pci[32];
    unsigned int minor, links;
    unsigned long long memory, events, ecc, energy;
    bool gone, has_action, has_rows, has_pages;
    unsigned int action, failure, pending, pages, mig, mig_pending;
    char link[NVML_NVLINK_MAX_LINKS][32];
    int path[GPUS];
};

struct rule {
    char function[64];
    int index, code;
    bool hang;
};

struct event {
    long id;
    int index;
    unsigned long long type, xid;
    unsigned int gpu_instance, compute_instance;
};

struct nvmlDevice_st {
    int unused;
};

struct nvmlGpuInstance_st {
    int gpu;
    unsigned int id;
};

struct nvmlEventSet_st {
    unsigned long long mask[GPUS];
    bool freed;
};

struct record {
    char name[56];
    unsigned long long count;
};

/* All of this is guarded by `lock`. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char control[PATH_MAX];
static struct stat seen;
static char driver[80];
static int gpus, count;
static struct gpu gpu[GPUS];
static int rules;
static struct rule rule[RULES];
static int events;
static struct event event[EVENTS];
static long delivered;
static int initialised, inside, busy[GPUS], attached[GPUS];
static struct record *records;
static int records_fd;
static struct nvmlDevice_st handles[GPUS + 1], mig_handles[GPUS * MIGS];
static struct nvmlGpuInstance_st instances[GPUS][MIGS];

/* Not inlined, so that no compiler guesses at lengths: what is too long is cut. */
static __attribute__((noinline)) void copy(char *to, size_t size, const char *from)
{
    snprintf(to, size, "%s", from);
}

static void defaults(int i)
{
    struct gpu *g = &gpu[i];

    memset(g, 0, sizeof *g);
    snprintf(g->uuid, sizeof g->uuid, "GPU-00000000-0000-4000-8000-%012d", i);
    snprintf(g->name, sizeof g->name, "NVIDIA H100 80GB HBM3");
    snprintf(g->pci, sizeof g->pci, "00000000:%02X:00.0", 0x10 + i);
    g->minor = (unsigned int)i;
    g->memory = 80ULL << 30;
    g->events = nvmlEventTypeXidCriticalError | nvmlEventTypeDoubleBitEccError | nvmlEventTypeSingleBitEccError;
    for (int j = 0; j < GPUS; j++)
        g->path[j] = i == j ? NVML_TOPOLOGY_INTERNAL : NVML_TOPOLOGY_SYSTEM;
}

static int index_of(const char *word)
{
    int i = atoi(word);

    if (*word == '*')
        return WHOLE;
    return *word == '?' || i < 0 || i >= GPUS ? NOBODY : i;
}

/* Carries out one line of the control file. What makes no sense is left out: tests see that soon enough. */
static void obey(char *line)
{
    char verb[32] = "", a[64] = "", b[96] = "";
    char *rest = line;
    int used = 0, i, j, level, code;
    struct event e = {0, NOBODY, nvmlEventTypeXidCriticalError, 0, UINT_MAX, UINT_MAX};

    if (sscanf(line, "%31s %63s %n", verb, a, &used) < 2)
        return;
    rest += used;
    i = index_of(a);
    sscanf(rest, "%95s", b);
    if (!strcmp(verb, "gpus") && i >= 0) {
        gpus = count = i;
    } else if (!strcmp(verb, "count")) {
        count = atoi(a);
    } else if (!strcmp(verb, "driver")) {
        copy(driver, sizeof driver, a);
    } else if (!strcmp(verb, "error") && rules < RULES && sscanf(rest, "%*s %d", &code) == 1) {
        copy(rule[rules].function, sizeof rule->function, a);
        rule[rules].index = index_of(b);
        rule[rules].hang = false;
        rule[rules++].code = code;
    } else if (!strcmp(verb, "hang") && rules < RULES && *b) {
        copy(rule[rules].function, sizeof rule->function, a);
        rule[rules].index = index_of(b);
        rule[rules++].hang = true;
    } else if (!strcmp(verb, "event") && events < EVENTS
               && sscanf(rest, "%*s %llu %u %u", &e.xid, &e.gpu_instance, &e.compute_instance) >= 1) {
        e.id = atol(a);
        e.index = index_of(b);
        event[events++] = e;
    } else if (!strcmp(verb, "notice") && events < EVENTS && sscanf(rest, "%*s %llu", &e.type) == 1) {
        e.id = atol(a);
        e.index = index_of(b);
        event[events++] = e;
    } else if (i >= 0) {
        struct gpu *g = &gpu[i];

        if (!strcmp(verb, "uuid"))
            copy(g->uuid, sizeof g->uuid, rest);
        else if (!strcmp(verb, "name"))
            copy(g->name, sizeof g->name, rest);
        else if (!strcmp(verb, "pci"))
            copy(g->pci, sizeof g->pci, rest);
        else if (!strcmp(verb, "minor"))
            g->minor = (unsigned int)strtoul(rest, NULL, 0);
        else if (!strcmp(verb, "memory"))
            g->memory = strtoull(rest, NULL, 0);
        else if (!strcmp(verb, "events"))
            g->events = strtoull(rest, NULL, 0);
        else if (!strcmp(verb, "gone"))
            g->gone = true;
        else if (!strcmp(verb, "ecc"))
            g->ecc = strtoull(rest, NULL, 0);
        else if (!strcmp(verb, "energy"))
            g->energy = strtoull(rest, NULL, 0);
        else if (!strcmp(verb, "action"))
            g->has_action = sscanf(rest, "%u", &g->action) == 1;
        else if (!strcmp(verb, "rows"))
            g->has_rows = sscanf(rest, "%u %u", &g->failure, &g->pending) == 2;
        else if (!strcmp(verb, "pages"))
            g->has_pages = sscanf(rest, "%u", &g->pages) == 1;
        else if (!strcmp(verb, "mig"))
            sscanf(rest, "%u %u", &g->mig, &g->mig_pending);
        else if (!strcmp(verb, "cut")) {
            struct mig m;

            if (sscanf(rest, "%d %95s %u %u %u %u %u %llu", &j, m.uuid, &m.gpu_instance, &m.compute_instance, &m.profile,
                       &m.gpu_slices, &m.compute_slices, &m.memory) == 8
                && j >= 0 && j < MIGS)
                g->cut[j] = m;
        } else if (!strcmp(verb, "link") && g->links < NVML_NVLINK_MAX_LINKS)
            copy(g->link[g->links++], sizeof g->link[0], rest);
        else if (!strcmp(verb, "path") && sscanf(rest, "%d %d", &j, &level) == 2 && j >= 0 && j < GPUS)
            gpu[i].path[j] = gpu[j].path[i] = level;
    }
}

/* Reads the control file again if it is not the one seen last. */
static void refresh(void)
{
    struct stat now;
    char line[512];
    FILE *file;

    if (stat(control, &now) || (now.st_ino == seen.st_ino && now.st_size == seen.st_size
                                && now.st_mtim.tv_sec == seen.st_mtim.tv_sec
                                && now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec))
        return;
    file = fopen(control, "re");
    if (!file)
        return;
    fstat(fileno(file), &seen);
    gpus = count = rules = events = 0;
    snprintf(driver, sizeof driver, "570.86.15");
    for (int i = 0; i < GPUS; i++)
        defaults(i);
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\r\n")] = 0;
        obey(line);
    }
    fclose(file);
}

/* Counts a call, or a crime. */
static void tally(const char *name)
{
    int i;

    if (!records)
        return;
    for (i = 0; i < RECORDS && *records[i].name; i++)
        if (!strcmp(records[i].name, name))
            break;
    if (i < RECORDS && !*records[i].name) {
        flock(records_fd, LOCK_EX);
        while (i < RECORDS && *records[i].name && strcmp(records[i].name, name))
            i++;
        if (i < RECORDS)
            copy(records[i].name, sizeof records[i].name, name);
        flock(records_fd, LOCK_UN);
    }
    if (i < RECORDS)
        __atomic_add_fetch(&records[i].count, 1, __ATOMIC_RELAXED);
}

static void open_once(void)
{
    static bool opened;
    char name[PATH_MAX + 8];
    struct stat size;

    if (opened)
        return;
    opened = true;
    copy(control, sizeof control, getenv("NVML_STANDIN") ? getenv("NVML_STANDIN") : "");
    snprintf(name, sizeof name, "%s.calls", control);
    records_fd = open(name, O_RDWR | O_CLOEXEC);
    if (records_fd < 0 || fstat(records_fd, &size) || size.st_size < (off_t)(RECORDS * sizeof *records))
        return;
    records = mmap(NULL, RECORDS * sizeof *records, PROT_READ | PROT_WRITE, MAP_SHARED, records_fd, 0);
    if (records == MAP_FAILED)
        records = NULL;
}

static const struct rule *find(const char *function, int index)
{
    const struct rule *found = NULL;

    for (int i = 0; i < rules; i++)
        if ((!strcmp(rule[i].function, function) || (*rule[i].function == '*' && index >= 0)) && (rule[i].index == WHOLE || rule[i].index == index))
            found = &rule[i];
    return found;
}

static bool is_mig(nvmlDevice_t device)
{
    return device >= mig_handles && device < mig_handles + GPUS * MIGS;
}

static const struct mig *mig_by_handle(nvmlDevice_t device)
{
    long n = is_mig(device) ? device - mig_handles : 0;
    const struct mig *found = &gpu[n / MIGS].cut[n % MIGS];

    return is_mig(device) && *found->uuid ? found : NULL;
}

/* The GPU's own, also of a MIG device. */
static int index_by_handle(nvmlDevice_t device)
{
    if (is_mig(device))
        return (int)((device - mig_handles) / MIGS);
    return device >= handles && device < handles + GPUS ? (int)(device - handles) : NOBODY;
}

/* A call on its way through the library. It holds the lock, but for a wait or a hang. */
struct visit {
    int index;
    nvmlReturn_t code;
};

static struct visit enter(const char *function, int index, bool needs_init)
{
    struct visit visit = {index, NVML_SUCCESS};
    const struct rule *found;

    pthread_mutex_lock(&lock);
    open_once();
    refresh();
    tally(function);
    inside++;
    if (index >= 0 && busy[index]++)
        tally("misuse_overlap");
    while ((found = find(function, index)) && found->hang) {
        pthread_mutex_unlock(&lock);
        nanosleep(&(struct timespec){0, 5000000}, NULL);
        pthread_mutex_lock(&lock);
        refresh();
    }
    if (found)
        visit.code = (nvmlReturn_t)found->code;
    else if (needs_init && !initialised)
        visit.code = NVML_ERROR_UNINITIALIZED;
    else if (index != WHOLE && (index < 0 || index >= gpus))
        visit.code = NVML_ERROR_INVALID_ARGUMENT;
    else if (index >= 0 && gpu[index].gone)
        visit.code = NVML_ERROR_GPU_IS_LOST;
    return visit;
}

static void leave(struct visit *visit)
{
    inside--;
    if (visit->index >= 0)
        busy[visit->index]--;
    pthread_mutex_unlock(&lock);
}

#define VISIT(index, needs_init)                                                           \
    struct visit visit __attribute__((cleanup(leave))) = enter(__func__, index, needs_init); \
    if (visit.code != NVML_SUCCESS)                                                        \
    return visit.code
#define LIBRARY VISIT(WHOLE, true)
#define DEVICE                               \
    VISIT(index_by_handle(device), true);    \
    struct gpu *self = &gpu[visit.index];    \
    (void)self

static nvmlReturn_t text(char *to, unsigned int length, const char *from)
{
    if (strlen(from) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, from);
    return NVML_SUCCESS;
}

static void attach(int i)
{
    char name[PATH_MAX + 32];

    if (attached[i])
        return;
    copy(name, sizeof name, control);
    snprintf(strrchr(name, '/') ? strrchr(name, '/') + 1 : name, 32, "nvidia%d", i);
    /* Never 0 in a process that has a standard input. */
    attached[i] = open(name, O_RDONLY | O_CREAT | O_CLOEXEC, 0600);
}

/* The GPU of an index. */
static int slot(unsigned int index)
{
    int found = NOBODY;

    pthread_mutex_lock(&lock);
    open_once();
    refresh();
    for (int i = 0; i < gpus && found == NOBODY; i++)
        if (!gpu[i].gone && !index--)
            found = i;
    pthread_mutex_unlock(&lock);
    return found;
}

static nvmlReturn_t handle(int i, nvmlDevice_t *device)
{
    attach(i);
    *device = &handles[i];
    return NVML_SUCCESS;
}

static nvmlReturn_t pci_info(nvmlPciInfo_t *pci, const char *address)
{
    memset(pci, 0, sizeof *pci);
    copy(pci->busId, sizeof pci->busId, address);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%.15s", strlen(address) > 4 ? address + 4 : address);
    sscanf(address, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    pci->pciDeviceId = 0x233010de;
    return NVML_SUCCESS;
}

/* The library as a whole. */

static nvmlReturn_t initialise(unsigned int flags)
{
    if (!(flags & NVML_INIT_FLAG_NO_ATTACH))
        for (int i = 0; i < gpus; i++)
            if (!gpu[i].gone)
                attach(i);
    if (!initialised++)
        for (int i = 0; i < events; i++)
            delivered = event[i].id > delivered ? event[i].id : delivered;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void)
{
    VISIT(WHOLE, false);
    return initialise(0);
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    VISIT(WHOLE, false);
    return initialise(flags);
}

nvmlReturn_t nvmlShutdown(void)
{
    LIBRARY;
    if (inside > 1)
        tally("misuse_shutdown");
    if (!--initialised)
        for (int i = 0; i < GPUS; i++) {
            if (attached[i] > 0)
                close(attached[i]);
            attached[i] = 0;
        }
    return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    switch (result) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case NVML_ERROR_TIMEOUT: return "Timeout";
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    LIBRARY;
    return text(version, length, driver);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    LIBRARY;
    return text(version, length, driver);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    LIBRARY;
    *version = 12080;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *n)
{
    LIBRARY;
    *n = (unsigned int)count;
    for (int i = 0; i < count && i < GPUS; i++)
        *n -= gpu[i].gone;
    return NVML_SUCCESS;
}

/* Handles. A rule for the GPU that they lead to applies; but lookups do not hang. */

static nvmlReturn_t looked_up(const char *function, int i, nvmlDevice_t *device)
{
    const struct rule *found = find(function, i);

    return found && !found->hang ? (nvmlReturn_t)found->code : handle(i, device);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    VISIT(slot(index), true);
    return handle(visit.index, device);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    LIBRARY;
    for (int i = 0; i < gpus; i++)
        if (!gpu[i].gone && !strcmp(gpu[i].uuid, uuid))
            return looked_up(__func__, i, device);
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *address, nvmlDevice_t *device)
{
    LIBRARY;
    for (int i = 0; i < gpus; i++)
        if (!gpu[i].gone && !strcasecmp(gpu[i].pci, address))
            return looked_up(__func__, i, device);
    return NVML_ERROR_NOT_FOUND;
}

/* What a GPU is. */

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    DEVICE;
    if (is_mig(device))
        return mig_by_handle(device) ? text(uuid, length, mig_by_handle(device)->uuid) : NVML_ERROR_NOT_FOUND;
    return text(uuid, length, self->uuid);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    DEVICE;
    return text(name, length, self->name);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    DEVICE;
    *index = (unsigned int)visit.index;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    DEVICE;
    *minor = self->minor;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    DEVICE;
    return pci_info(pci, self->pci);
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    DEVICE;
    *memory = (nvmlMemory_t){.total = self->memory, .free = self->memory, .used = 0};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    DEVICE;
    *memory = (nvmlMemory_v2_t){.version = memory->version, .total = self->memory, .free = self->memory};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    DEVICE;
    *major = 9;
    *minor = 0;
    return NVML_SUCCESS;
}

/* How a GPU is. */

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int n, nvmlFieldValue_t *values)
{
    DEVICE;
    for (int i = 0; i < n; i++) {
        nvmlFieldValue_t *value = &values[i];

        value->nvmlReturn = NVML_SUCCESS;
        if (value->fieldId == NVML_FI_DEV_GET_GPU_RECOVERY_ACTION && self->has_action) {
            value->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
            value->value.uiVal = self->action;
        } else if (value->fieldId == NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION && self->energy) {
            value->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
            value->value.ullVal = self->energy;
        } else {
            value->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
        }
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter,
                                         unsigned long long *n)
{
    DEVICE;
    *n = type == NVML_MEMORY_ERROR_TYPE_UNCORRECTED && counter == NVML_VOLATILE_ECC ? self->ecc : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                                       unsigned int *pending, unsigned int *failure)
{
    DEVICE;
    *corrected = *uncorrected = 0;
    *pending = self->pending;
    *failure = self->failure;
    return self->has_rows ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, nvmlPageRetirementCause_t cause, unsigned int *n,
                                       unsigned long long *addresses)
{
    DEVICE;
    unsigned int room = *n;

    if (!self->has_pages)
        return NVML_ERROR_NOT_SUPPORTED;
    *n = cause == NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR ? self->pages : 0;
    if (room < *n)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < *n; i++)
        addresses[i] = i;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, nvmlEnableState_t *pending)
{
    DEVICE;
    *pending = NVML_FEATURE_DISABLED;
    return self->has_pages ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

/* How GPUs hang together. */

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t device, nvmlDevice_t other, nvmlGpuTopologyLevel_t *level)
{
    DEVICE;
    if (index_by_handle(other) < 0 || index_by_handle(other) >= gpus)
        return NVML_ERROR_INVALID_ARGUMENT;
    *level = (nvmlGpuTopologyLevel_t)self->path[index_by_handle(other)];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *state)
{
    DEVICE;
    if (!self->links)
        return NVML_ERROR_NOT_SUPPORTED;
    *state = link < self->links ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return link < NVML_NVLINK_MAX_LINKS ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
    DEVICE;
    return link < self->links ? pci_info(pci, self->link[link]) : NVML_ERROR_NOT_SUPPORTED;
}

/* Events. */

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    LIBRARY;
    *set = calloc(1, sizeof **set);
    return *set ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

/* The memory stays, so that the use of a freed set is seen instead of being a crash. */
nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    LIBRARY;
    if (inside > 1)
        tally("misuse_free");
    if (set->freed)
        tally("misuse_set");
    set->freed = true;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    DEVICE;
    *types = self->events;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    DEVICE;
    if (types & ~self->events)
        return NVML_ERROR_NOT_SUPPORTED;
    if (set->freed)
        tally("misuse_set");
    set->mask[visit.index] |= types;
    return NVML_SUCCESS;
}

/* Takes the next event that the set is registered for. One of no GPU goes to whoever waits. */
static bool take(nvmlEventSet_t set, nvmlEventData_t *data)
{
    for (int i = 0; i < events; i++) {
        const struct event *e = &event[i];

        if (e->id <= delivered)
            continue;
        delivered = e->id;
        if (e->index != NOBODY && (e->index < 0 || !(set->mask[e->index] & e->type)))
            continue;
        *data = (nvmlEventData_t){
            .device = &handles[e->index == NOBODY ? GPUS : e->index],
            .eventType = e->type,
            .eventData = e->xid,
            .gpuInstanceId = e->gpu_instance,
            .computeInstanceId = e->compute_instance,
        };
        return true;
    }
    return false;
}

static long now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Sleeps in the kernel until the control file's directory changes: an idle wait costs what a real one costs. */
nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout)
{
    LIBRARY;
    long end = now_ms() + timeout, left;
    char directory[PATH_MAX], drain[4096];
    int watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    const struct rule *found;
    nvmlReturn_t code = NVML_ERROR_TIMEOUT;

    copy(directory, sizeof directory, control);
    if (strrchr(directory, '/'))
        *strrchr(directory, '/') = 0;
    if (watch >= 0 && inotify_add_watch(watch, directory, IN_CLOSE_WRITE | IN_MODIFY | IN_MOVED_TO) < 0) {
        close(watch);
        watch = -1;
    }
    for (;;) {
        refresh();
        if (set->freed)
            tally("misuse_set");
        if ((found = find(__func__, WHOLE)) && !found->hang) {
            code = (nvmlReturn_t)found->code;
            break;
        }
        if (take(set, data)) {
            code = NVML_SUCCESS;
            break;
        }
        if ((left = end - now_ms()) <= 0)
            break;
        pthread_mutex_unlock(&lock);
        poll(&(struct pollfd){watch, POLLIN, 0}, 1, (int)(watch < 0 && left > 10 ? 10 : left));
        while (watch >= 0 && read(watch, drain, sizeof drain) > 0)
            ;
        pthread_mutex_lock(&lock);
    }
    if (watch >= 0)
        close(watch);
    return code;
}

/* MIG. */

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    DEVICE;
    *current = self->mig;
    *pending = self->mig_pending;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *n)
{
    DEVICE;
    *n = self->mig ? MIGS - 1 : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *result)
{
    DEVICE;
    *result = is_mig(device);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig)
{
    DEVICE;
    if (index >= MIGS || !*self->cut[index].uuid)
        return NVML_ERROR_NOT_FOUND;
    *mig = &mig_handles[visit.index * MIGS + (int)index];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *parent)
{
    DEVICE;
    *parent = &handles[visit.index];
    return NVML_SUCCESS;
}

#define MIG                                           \
    DEVICE;                                           \
    const struct mig *mig = mig_by_handle(device);    \
    if (!mig)                                         \
    return NVML_ERROR_INVALID_ARGUMENT

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    MIG;
    *id = mig->gpu_instance;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    MIG;
    *id = mig->compute_instance;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    MIG;
    *attributes = (nvmlDeviceAttributes_t){
        .gpuInstanceSliceCount = mig->gpu_slices,
        .computeInstanceSliceCount = mig->compute_slices,
        .memorySizeMB = mig->memory,
    };
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *instance)
{
    DEVICE;
    for (int j = 0; j < MIGS; j++)
        if (*self->cut[j].uuid && self->cut[j].gpu_instance == id) {
            *instance = &instances[visit.index][j];
            **instance = (struct nvmlGpuInstance_st){visit.index, id};
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

/* The ids of profiles are other numbers than the profiles, as with the real ones. */
nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
    LIBRARY;
    const struct mig *cut = gpu[instance->gpu].cut;

    for (int j = 0; j < MIGS; j++)
        if (*cut[j].uuid && cut[j].gpu_instance == instance->id) {
            *info = (nvmlGpuInstanceInfo_t){
                .device = &handles[instance->gpu], .id = instance->id, .profileId = cut[j].profile + 40};
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int profile,
                                                 nvmlGpuInstanceProfileInfo_t *info)
{
    DEVICE;
    if (profile >= NVML_GPU_INSTANCE_PROFILE_COUNT)
        return NVML_ERROR_INVALID_ARGUMENT;
    memset(info, 0, sizeof *info);
    info->id = profile + 40;
    return NVML_SUCCESS;
}

#define NOT_HERE(name, ...)           \
    nvmlReturn_t name(__VA_ARGS__)    \
    {                                 \
        LIBRARY;                      \
        return NVML_ERROR_NOT_SUPPORTED; \
    }

#pragma GCC diagnostic ignored "-Wunused-parameter"
NOT_HERE(nvmlGpuInstanceGetComputeInstanceById, nvmlGpuInstance_t instance, unsigned int id, nvmlComputeInstance_t *compute)
NOT_HERE(nvmlGpuInstanceGetComputeInstanceProfileInfo, nvmlGpuInstance_t instance, unsigned int profile, unsigned int engine,
         nvmlComputeInstanceProfileInfo_t *info)
NOT_HERE(nvmlComputeInstanceGetInfo_v2, nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info)
NOT_HERE(nvmlDeviceGetAddressingMode, nvmlDevice_t device, nvmlDeviceAddressingMode_t *mode)
