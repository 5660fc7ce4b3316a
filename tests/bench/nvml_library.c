/* The part of libnvidia-ml.so.1 that spbench calls, for tests: two GPUs of made-up figures.
 *
 * The environment variable SPBENCH_TEST_NVML chooses what goes wrong, and is read at nvmlInit. Figures change
 * with the number of samples, never with time. With -DOLD_DRIVER the functions of newer drivers are missing. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
  SUCCESS = 0,
  INVALID_ARGUMENT = 2,
  NOT_SUPPORTED = 3,
  NO_PERMISSION = 4,
  NOT_FOUND = 6,
  DRIVER_NOT_LOADED = 9,
  GPU_IS_LOST = 15,
  VERSION_MISMATCH = 18
};
enum { GPUS = 2, SAMPLES_BEFORE = 3, LINKS = 2 };
#define ALL_LINKS 0xffffffffu

typedef struct {
  uint32_t field, scope;
  int64_t timestamp, latency;
  uint32_t type, result;
  union {
    double d;
    unsigned long long ull;
  } value;
} field_value;

static const char *UUIDS[GPUS] = {"GPU-00000000-aaaa-bbbb-cccc-000000000000",
                                  "GPU-11111111-aaaa-bbbb-cccc-111111111111"};
static int gpus[GPUS];
static unsigned samples, energies, ecc_reads, link_reads;
static char scenario[64];

static int is(const char *name) { return strcmp(scenario, name) == 0; }
static unsigned index_of(void *device) { return (unsigned)((int *)device - gpus); }

/* What every reading of a device begins with. */
static int state(void) {
  if (is("lost") && samples > SAMPLES_BEFORE) return GPU_IS_LOST;
  if (is("lost from the beginning")) return GPU_IS_LOST;
  if (is("not supported")) return NOT_SUPPORTED;
  if (is("no permission to read")) return NO_PERMISSION;
  return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
  const char *given = getenv("SPBENCH_TEST_NVML");
  strncpy(scenario, given ? given : "", sizeof scenario - 1);
  samples = energies = ecc_reads = link_reads = 0;
  if (is("driver not loaded")) return DRIVER_NOT_LOADED;
  if (is("no permission")) return NO_PERMISSION;
  if (is("versions differ")) return VERSION_MISMATCH;
  return SUCCESS;
}
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return "an error of the test's library"; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
  strncpy(text, "580.65.06", size);
  return SUCCESS;
}
int nvmlSystemGetCudaDriverVersion(int *version) {
  *version = 13000;
  return SUCCESS;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = GPUS;
  return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  if (index >= GPUS) return INVALID_ARGUMENT;
  *device = &gpus[index];
  return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  for (unsigned i = 0; i < GPUS; i++)
    if (strcmp(uuid, UUIDS[i]) == 0) return nvmlDeviceGetHandleByIndex_v2(i, device);
  return NOT_FOUND;
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
  strncpy(text, UUIDS[index_of(device)], size);
  return SUCCESS;
}
int nvmlDeviceGetName(void *device, char *text, unsigned size) {
  strncpy(text, index_of(device) ? "Test GPU one" : "Test GPU zero", size);
  return state();
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
  *major = 9, *minor = 0;
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *total_free_used) {
  total_free_used[0] = 80ull << 30, total_free_used[1] = 79ull << 30, total_free_used[2] = 1ull << 30;
  return SUCCESS;
}

/* Milliwatts; the first reading of a sample. 300.5 W, then 400.5 W in every second one; GPU 1: 100 W less. */
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
  samples++;
  *milliwatts = 300500 + 100000 * (samples % 2 == 0) - 100000 * index_of(device);
  return is("no power") ? NOT_SUPPORTED : state();
}
/* Millijoules; from one reading to the next 50 J. The second never ends if the library is to hang. */
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
  while (is("hangs") && energies) pause();
  *millijoules = 123456789ull + 50000ull * energies++;
  return is("no energy counter") || is("no power") ? NOT_SUPPORTED : state();
}
static int slow(void) { return is("clocks fall") && samples > SAMPLES_BEFORE; }
int nvmlDeviceGetClockInfo(void *device, unsigned kind, unsigned *mhz) {
  *mhz = kind == 2 ? 2619 : slow() ? 1410 : is("slow from the beginning") ? 1200 : is("idle") ? 345 : 1980;
  return state();
}
int nvmlDeviceGetMaxClockInfo(void *device, unsigned kind, unsigned *mhz) {
  *mhz = kind == 2 ? 2619 : 1980;
  return state();
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *bits) {
  *bits = slow() ? 0x4 | 0x20 : is("slow from the beginning") ? 0x4 : is("idle") ? 0x1 : 0;
  return state();
}
int nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *celsius) {
  *celsius = 60 + samples;
  return state();
}
#ifndef OLD_DRIVER
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *bits) {
  return nvmlDeviceGetCurrentClocksThrottleReasons(device, bits);
}
int nvmlDeviceGetTemperatureV(void *device, struct { unsigned version, sensor; int celsius; } *out) {
  out->celsius = 60 + (int)samples;
  return out->version == 0x100000C ? state() : 25;
}
#endif
int nvmlDeviceGetUtilizationRates(void *device, unsigned *gpu_memory) {
  gpu_memory[0] = 97, gpu_memory[1] = 41;
  return state();
}
/* KB/s */
int nvmlDeviceGetPcieThroughput(void *device, unsigned counter, unsigned *value) {
  *value = counter == 0 ? 1500 : 2500;
  return state();
}
/* Corrected: one more at each reading; uncorrected: always 7. */
int nvmlDeviceGetTotalEccErrors(void *device, unsigned type, unsigned counter, unsigned long long *count) {
  *count = type == 0 ? ecc_reads++ : 7;
  return state();
}
/* KiB; sent grows by 1000 from reading to reading, received by 2000, over all links. */
int nvmlDeviceGetFieldValues(void *device, int count, field_value *values) {
  for (int i = 0; i < count; i++) {
    values[i].result = values[i].scope == ALL_LINKS && !is("no links") ? SUCCESS : NOT_SUPPORTED;
    values[i].value.ull = (values[i].field == 138 ? 1000ull : 2000ull) * (link_reads++ / 2);
  }
  return state();
}
int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active) {
  *active = link < LINKS;
  return is("no links") ? NOT_SUPPORTED : link < LINKS ? SUCCESS : INVALID_ARGUMENT;
}
int nvmlDeviceGetP2PStatus(void *one, void *other, unsigned index, unsigned *status) {
  *status = is("no peer access") ? 5 : 0;
  return SUCCESS;
}
int nvmlDeviceGetTopologyCommonAncestor(void *one, void *other, unsigned *level) {
  *level = 30;
  return SUCCESS;
}
