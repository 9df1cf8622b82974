/* What JAX's compiler of GPU kernels needs of a driver and of its runtime, where there is no GPU.
 *
 * The functions of the driver answer for the chip that is named. Those of the runtime record what
 * the host function of a compiled kernel asks for: tensor maps and launches. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int major_version = 10, minor_version = 0;
static char record[1 << 20];
static size_t used;
static void (*parameters_callback)(void **);

void stand_in_capability(int major, int minor) { major_version = major, minor_version = minor; }
void stand_in_reset(void (*callback)(void **)) { used = 0, parameters_callback = callback; }
size_t stand_in_record(char **start) { return *start = record, used; }

static void put(const void *data, size_t size) {
  if (used + size > sizeof record) abort();
  memcpy(record + used, data, size);
  used += size;
}

enum { MAJOR = 75, MINOR = 76, NOT_FOUND = 500, ANY_VERSION = 13000 };

int cuInit(unsigned flags) { return 0; }
int cuCtxGetDevice(int *device) { return *device = 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)1, 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == MAJOR ? major_version : attribute == MINOR ? minor_version : 0;
  return 0;
}
int cuDriverGetVersion(int *version) { return *version = ANY_VERSION, 0; }
int cuGetErrorString(int error, const char **text) { return *text = "no driver", 0; }
int cuGetErrorName(int error, const char **text) { return *text = "no driver", 0; }
int cuDeviceGetCount(int *count) { return *count = 0; }
int cuModuleLoadData(void **module, const void *image) { return *module = (void *)2, 0; }
int cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *options, void *values) {
  return *module = (void *)2, 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  return *function = (void *)3, 0;
}
int cuModuleUnload(void *module) { return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuModuleGetGlobal_v2(void *pointer, void *bytes, void *module, const char *name) {
  return NOT_FOUND;
}
int cuModuleGetGlobal(void *pointer, void *bytes, void *module, const char *name) {
  return NOT_FOUND;
}
int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e,
                      unsigned f) {
  return *library = (void *)2, 0;
}
int cuLibraryGetModule(void **module, void *library) { return *module = (void *)2, 0; }
int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
  return *kernel = (void *)3, 0;
}
int cuKernelGetFunction(void **function, void *kernel) { return *function = (void *)3, 0; }
int cuKernelSetAttribute(int attribute, int value, void *kernel, int device) { return 0; }

/* A record of a tensor map is 'T', its number, the buffer, element type, rank, swizzle, sizes, strides
 * and the box; in its place the kernel's parameters have "TMAP", four bytes, and the number. */
void mosaic_gpu_init_tma_desc(void *map, void *base, int64_t element, int64_t rank, int64_t *sizes,
                              int64_t *strides, int64_t swizzle, int64_t *box) {
  static int64_t count = 0;
  int64_t head[] = {++count, (int64_t)base, element, rank, swizzle};
  put("T", 1);
  put(head, sizeof head);
  put(sizes, 8 * rank);
  put(strides, 8 * rank);
  put(box, 8 * rank);
  memset(map, 0, 128);
  memcpy(map, "TMAP", 4);
  memcpy((char *)map + 8, &count, 8);
}
void *mosaic_gpu_module_load(void *image) { return (void *)2; }
void *mosaic_gpu_get_function(void *module, const char *name, int32_t shared, int32_t cluster) {
  return (void *)3;
}
/* A record of a launch is 'L' and ten numbers. */
void mosaic_gpu_launch_kernel(void *function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t cx,
                              uint32_t cy, uint32_t cz, uint32_t bx, uint32_t by, uint32_t bz,
                              uint32_t shared, int32_t dependent, void *stream, void **parameters) {
  uint32_t numbers[] = {gx, gy, gz, cx, cy, cz, bx, by, bz, shared};
  put("L", 1);
  put(numbers, sizeof numbers);
  parameters_callback(parameters);
}
