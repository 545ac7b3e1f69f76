/* A pretend libnvidia-ml.so.1: what the NVIDIA driver would tell of the machine that the file $PRETEND_NVML describes.
 *
 *   card UUID PCI MINOR TOTAL RESERVED FREE MIG NAME...     TOTAL -1: the card tells no memory
 *   instance UUID TOTAL RESERVED FREE NAME...               of the card above
 *   process UUID PID BYTES
 *   old             no nvmlDeviceGetMemoryInfo_v2, as before driver 510
 *   lost INDEX      the card at INDEX has fallen off the bus
 *   hang            nothing is ever answered
 *   mismatch        the driver in the kernel is another than this library's
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SUCCESS 0
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7
#define GPU_IS_LOST 15
#define LIB_RM_VERSION_MISMATCH 18
#define MOST 64

typedef struct device {
    char uuid[96], pci[32], name[96];
    unsigned minor;
    long long total, reserved, free;
    int mig, lost, instances;
    struct device *instance[MOST];
} device;

typedef struct { char uuid[96]; unsigned pid; unsigned long long bytes; } process;
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned pid; unsigned long long bytes; unsigned gi, ci; } process_info;
typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} pci_info;

static device *cards[MOST];
static process processes[MOST];
static int card_count, process_count, old, mismatch;

static void read_machine(void) {
    FILE *file = fopen(getenv("PRETEND_NVML"), "r");
    char line[512], kind[32];
    int used, index;
    card_count = process_count = old = mismatch = 0;
    if (!file) abort();
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%31s%n", kind, &used) != 1) continue;
        device *one = calloc(1, sizeof *one);
        process *running = &processes[process_count];
        if (!strcmp(kind, "card")) {
            sscanf(line + used, "%95s %31s %u %lld %lld %lld %d %95[^\n]", one->uuid, one->pci, &one->minor,
                   &one->total, &one->reserved, &one->free, &one->mig, one->name);
            cards[card_count++] = one;
        } else if (!strcmp(kind, "instance")) {
            sscanf(line + used, "%95s %lld %lld %lld %95[^\n]", one->uuid, &one->total, &one->reserved, &one->free,
                   one->name);
            device *card = cards[card_count - 1];
            card->instance[card->instances++] = one;
        } else if (!strcmp(kind, "process")) {
            sscanf(line + used, "%95s %u %llu", running->uuid, &running->pid, &running->bytes);
            process_count++;
        } else if (!strcmp(kind, "lost")) {
            sscanf(line + used, "%d", &index);
            cards[index]->lost = 1;
        } else if (!strcmp(kind, "old")) old = 1;
        else if (!strcmp(kind, "mismatch")) mismatch = 1;
        else if (!strcmp(kind, "hang")) for (;;) pause();
    }
    fclose(file);
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    read_machine();
    return mismatch ? LIB_RM_VERSION_MISMATCH : SUCCESS;
}

const char *nvmlErrorString(int error) {
    return error == GPU_IS_LOST ? "GPU is lost"
         : error == LIB_RM_VERSION_MISMATCH ? "Driver/library version mismatch" : "an error";
}

int nvmlDeviceGetCount_v2(unsigned *count) { *count = card_count; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **found) {
    if ((int)index >= card_count) return INVALID_ARGUMENT;
    *found = cards[index];
    return cards[index]->lost ? GPU_IS_LOST : SUCCESS;
}

static int text(char *to, unsigned length, const char *from) {
    if (strlen(from) >= length) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

int nvmlDeviceGetUUID(device *one, char *to, unsigned length) { return text(to, length, one->uuid); }
int nvmlDeviceGetName(device *one, char *to, unsigned length) { return text(to, length, one->name); }
int nvmlDeviceGetMinorNumber(device *one, unsigned *minor) { *minor = one->minor; return SUCCESS; }

int nvmlDeviceGetPciInfo_v3(device *one, pci_info *info) {
    memset(info, 0, sizeof *info);
    return text(info->bus_id, sizeof info->bus_id, one->pci);
}

int nvmlDeviceGetMemoryInfo_v2(device *one, memory_v2 *told) {
    if (old || one->total < 0) return NOT_SUPPORTED;
    if (told->version != (sizeof *told | 2 << 24)) return INVALID_ARGUMENT;
    told->total = one->total;
    told->reserved = one->reserved;
    told->free = one->free;
    told->used = one->total - one->free;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(device *one, memory *told) {
    if (one->total < 0) return NOT_SUPPORTED;
    told->total = one->total;
    told->free = one->free;
    told->used = one->total - one->free;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(device *one, unsigned *current, unsigned *pending) {
    if (one->mig < 0) return NOT_SUPPORTED;
    *current = *pending = one->mig;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(device *one, unsigned *count) {
    *count = one->mig == 1 ? 7 : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device *one, unsigned index, device **found) {
    if ((int)index >= one->instances) return NOT_FOUND;
    *found = one->instance[index];
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(device *one, unsigned *count, process_info *infos) {
    unsigned found = 0;
    for (int i = 0; i < process_count; i++) {
        if (strcmp(processes[i].uuid, one->uuid)) continue;
        if (infos && found < *count) {
            infos[found].pid = processes[i].pid;
            infos[found].bytes = processes[i].bytes;
            infos[found].gi = infos[found].ci = 0xffffffff;
        }
        found++;
    }
    int fits = found <= *count && (infos || !found);
    *count = found;
    return fits ? SUCCESS : INSUFFICIENT_SIZE;
}
