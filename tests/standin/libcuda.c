/* A libcuda.so.1 that launches nothing: every call that Triton makes succeeds, a launch is checked
   and handed to `watcher`. As the real one it refuses an impossible grid and memory of the host. */

#include <stdint.h>
#include <string.h>

typedef int Result;
typedef unsigned long long Pointer;
typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    void *attributes;
    unsigned num_attributes;
} LaunchConfig;
typedef void (*Watcher)(const char *name, const unsigned *grid, const unsigned *block,
                        unsigned shared_bytes, void *stream);

enum { SUCCESS = 0, INVALID_VALUE = 1 };
enum { MAX_THREADS = 1024, MAX_X = 0x7fffffff, MAX_Y_AND_Z = 65535 };
enum { MAX_SHARED = 232448, NUM_SMS = 132, MAX_REGISTERS = 65536, CAPABILITY = 9 };

/* addresses with this bit are those of the device; the host has none of them */
static const Pointer ON_DEVICE = 1ull << 62;
static Watcher watcher;
static Watcher loaded;
static int context;

void watch(Watcher on_launch, Watcher on_load) {
    watcher = on_launch;
    loaded = on_load;
}

/* ---- the device ---- */

Result cuInit(unsigned flags) { return SUCCESS; }
Result cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
Result cuDeviceGet(int *device, int number) { *device = number; return SUCCESS; }
Result cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }

Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 8: case 97: *value = MAX_SHARED; break;  /* of a block; of a block that opts in */
    case 10: *value = 32; break;                  /* threads of a warp */
    case 12: *value = MAX_REGISTERS; break;
    case 16: *value = NUM_SMS; break;
    case 75: *value = CAPABILITY; break;
    case 76: *value = 0; break;
    default: *value = 1024;
    }
    return SUCCESS;
}

Result cuDevicePrimaryCtxRetain(void **made, int device) { *made = &context; return SUCCESS; }
Result cuCtxGetCurrent(void **current) { *current = &context; return SUCCESS; }
Result cuCtxSetCurrent(void *current) { return SUCCESS; }
Result cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }
Result cuCtxGetLimit(size_t *value, int limit) { *value = 0; return SUCCESS; }
Result cuCtxSetLimit(int limit, size_t value) { return SUCCESS; }
Result cuStreamIsCapturing(void *stream, int *status) { *status = 0; return SUCCESS; }

Result cuGetErrorString(Result error, const char **text) {
    *text = error == INVALID_VALUE ? "invalid argument" : "no error";
    return SUCCESS;
}
Result cuGetErrorName(Result error, const char **name) { return cuGetErrorString(error, name); }

/* ---- memory ---- */

static Result find(Pointer *found, Pointer address) {
    if (!(address & ON_DEVICE)) return INVALID_VALUE;
    *found = address;
    return SUCCESS;
}

Result cuPointerGetAttribute(void *value, int attribute, Pointer address) {
    return find(value, address);
}

Result cuPointerGetAttributes(unsigned count, int *attributes, void **values, Pointer address) {
    Pointer found = 0; /* a pointer that is not found is 0, and no error */
    find(&found, address);
    for (unsigned i = 0; i < count; i++)
        if (values[i]) *(Pointer *)values[i] = found;
    return SUCCESS;
}

Result cuTensorMapEncodeTiled(void) { return SUCCESS; }
Result cuTensorMapEncodeIm2col(void) { return SUCCESS; }

/* ---- kernels ---- */

Result cuModuleLoadData(void **module, const void *image) { *module = &context; return SUCCESS; }
Result cuModuleUnload(void *module) { return SUCCESS; }

Result cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = strdup(name); /* for as long as the process lives */
    if (loaded) loaded(name, 0, 0, 0, 0);
    return SUCCESS;
}

Result cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? MAX_THREADS : 0;
    return SUCCESS;
}
Result cuFuncSetAttribute(void *function, int attribute, int value) { return SUCCESS; }
Result cuFuncSetCacheConfig(void *function, int config) { return SUCCESS; }
Result cuOccupancyMaxActiveClusters(int *count, void *function, void *config) {
    *count = 1;
    return SUCCESS;
}

Result cuLaunchKernelEx(const LaunchConfig *config, void *function, void **arguments,
                        void **extra) {
    const unsigned *grid = config->grid, *block = config->block;
    unsigned threads = block[0] * block[1] * block[2];
    if (grid[0] < 1 || grid[1] < 1 || grid[2] < 1 || threads < 1) return INVALID_VALUE;
    if (grid[0] > MAX_X || grid[1] > MAX_Y_AND_Z || grid[2] > MAX_Y_AND_Z) return INVALID_VALUE;
    if (threads > MAX_THREADS || config->shared_bytes > MAX_SHARED) return INVALID_VALUE;
    if (watcher) watcher(function, grid, block, config->shared_bytes, config->stream);
    return SUCCESS;
}
