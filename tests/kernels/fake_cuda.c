/* A stand-in for libcuda.so.1: enough of the driver API for kernels/driver.py, with device memory in host memory.
 *
 * Streams are worker threads with a queue, events carry time stamps, captured streams collect nodes, graphs replay them. The only
 * kernel is a model of the persistent radix top-k: it selects correctly, and a row whose length read as unsigned is above the
 * threshold while the host promised none makes the leader of its group wait for a peer that has left - by really polling the
 * arrival counter in "device" memory, so that a write from another stream releases it, as on a card. The "cubin" is a text that
 * names its own defects: "guard" (lengths are bounded), "wrong" (one index of row 0 is bad), "slow=MS", "fault" (the launch fails),
 * "resident=N" (N CTAs of a group ever start), "lost=N" (N arrivals of a group are wiped out).
 * Beside it there are models of the companions: slot_holder counts its CTAs and waits for its flag, sparse_mla_decode_kernel marks its
 * CTAs, cross_rank_all_reduce publishes a round and polls its peer's word.
 * With CUDA_ENABLE_USER_TRIGGERED_COREDUMP=1 a byte on the pipe writes a file and ends the context.
 *
 * Nothing here stands for what a real driver does; it exercises the code on this side of the calls.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int R;
enum { OK = 0, INVALID_VALUE = 1, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_IMAGE = 200, NOT_FOUND = 500, NOT_READY = 600,
       LAUNCH_FAILED = 719 };

typedef struct { uint64_t input, output, lengths, states; uint32_t rows, stride, k, chunk, ctas, max_len; } Params;
typedef struct { char text[256]; } Module;
typedef struct { Module *module; char name[512]; int smem; } Function;
typedef struct Event { volatile int recorded, done; struct timespec at; } Event;
typedef enum { COPY, FILL, KERNEL, RECORD } Kind;
typedef struct Op { Kind kind; struct Op *next; uint64_t dst, src; size_t n; uint32_t value; Function *f; Params p; Event *event;
                    unsigned grid, block, smem; Params *params_pointer[1]; } Op;
typedef struct { Op *head, *tail; int count; } Graph;
typedef struct { pthread_t thread; pthread_mutex_t lock; pthread_cond_t wake; Op *head, *tail; Graph *capture; } Stream;

static volatile int sticky = 0;

static void pause_us(long us) { struct timespec t = {us / 1000000, (us % 1000000) * 1000}; nanosleep(&t, 0); }

static int descending(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return x < y ? 1 : x > y ? -1 : 0;
}

static void topk(const float *row, uint32_t len, uint32_t k, int32_t *out) {
  uint32_t n = 0;
  if (len <= k) {
    for (; n < len; n++) out[n] = (int32_t)n;
  } else {
    float *copy = malloc(len * sizeof(float));
    memcpy(copy, row, len * sizeof(float));
    qsort(copy, len, sizeof(float), descending);
    float pivot = copy[k - 1];
    free(copy);
    for (uint32_t i = 0; i < len && n < k; i++) if (row[i] > pivot) out[n++] = (int32_t)i;
    for (uint32_t i = 0; i < len && n < k; i++) if (row[i] == pivot) out[n++] = (int32_t)i;
  }
  for (; n < k; n++) out[n] = -1;
}

static long number(const char *text, const char *key, long otherwise) {
  const char *at = strstr(text, key);
  return at ? atol(at + strlen(key)) : otherwise;
}

static int run_companion(Op *op) {
  const char *name = op->f->name;
  uint64_t *a = (uint64_t *)&op->p;
  if (!strcmp(name, "slot_holder")) {
    *(volatile uint32_t *)a[1] = op->grid;
    while (!*(volatile uint32_t *)a[0] && !sticky) pause_us(100);
  } else if (!strcmp(name, "sparse_mla_decode_kernel")) {
    for (unsigned i = 0; i < op->grid; i++) ((uint32_t *)a[0])[i] = 1;
  } else if (!strcmp(name, "cross_rank_all_reduce")) {
    *(volatile uint32_t *)a[0] = (uint32_t)a[2];
    while (*(volatile uint32_t *)a[1] < (uint32_t)a[2] && !sticky) pause_us(20);
  } else if (!strcmp(name, "sparse_row_reader")) {
    for (uint32_t i = 0; i < op->grid * (uint32_t)a[3]; i++)
      if (((int32_t *)a[0])[i] > 1 << 24) sticky = 700; /* an address outside of every allocation */
  } else return 0;
  return 1;
}

static void run_kernel(Op *op) {
  if (run_companion(op)) return;
  Params *p = &op->p;
  const char *text = op->f->module->text, *slow = strstr(text, "slow=");
  if (strstr(text, "fault")) { sticky = LAUNCH_FAILED; return; }
  if (slow) pause_us(1000L * atoi(slow + 5));
  uint32_t groups = op->grid / (p->ctas ? p->ctas : 1);
  for (uint32_t r = 0; r < p->rows; r++) {
    int32_t length = ((int32_t *)p->lengths)[r];
    uint32_t len = (uint32_t)length;
    int32_t *out = (int32_t *)p->output + (size_t)r * p->k;
    if (strstr(text, "guard")) {
      uint32_t bound = p->stride < p->max_len ? p->stride : p->max_len;
      len = length < 0 ? 0 : ((uint32_t)length < bound ? (uint32_t)length : bound);
    }
    if (len <= 32768) { topk((float *)p->input + (size_t)r * p->stride, len, p->k, out); continue; }
    volatile int32_t *counter = (volatile int32_t *)(p->states + (uint64_t)(r % groups) * 3088 + 3080);
    int peers_left = p->max_len <= 32768;
    long arrive = number(text, "resident=", p->ctas) - number(text, "lost=", 0);
    __sync_fetch_and_add((int32_t *)counter, peers_left ? 1 : (int32_t)(arrive < (long)p->ctas ? arrive : (long)p->ctas));
    while (*counter < (int32_t)p->ctas && !sticky) pause_us(20);
    if (len <= p->stride && len <= p->max_len && arrive == (long)p->ctas) {
      topk((float *)p->input + (size_t)r * p->stride, len, p->k, out);
      continue;
    }
    for (uint32_t i = 0; i < p->k; i++) out[i] = (int32_t)(i * 7919u);
  }
  if (strstr(text, "wrong")) ((int32_t *)p->output)[0] = ((int32_t *)p->output)[1];
}

static void run_op(Op *op) {
  switch (op->kind) {
    case COPY: memmove((void *)op->dst, (void *)op->src, op->n); break;
    case FILL: for (size_t i = 0; i < op->n; i++) ((uint32_t *)op->dst)[i] = op->value; break;
    case KERNEL: run_kernel(op); break;
    case RECORD: clock_gettime(CLOCK_MONOTONIC, &op->event->at); op->event->done = 1; break;
  }
}

static void *worker(void *argument) {
  Stream *s = argument;
  for (;;) {
    pthread_mutex_lock(&s->lock);
    while (!s->head) pthread_cond_wait(&s->wake, &s->lock);
    Op *op = s->head;
    s->head = op->next;
    if (!s->head) s->tail = 0;
    pthread_mutex_unlock(&s->lock);
    if (!sticky) run_op(op);
    free(op);
  }
  return 0;
}

static R put(Stream *s, Op model) {
  if (sticky) return sticky;
  Op *op = malloc(sizeof *op);
  *op = model;
  op->next = 0;
  if (s->capture) {
    Graph *g = s->capture;
    if (g->tail) g->tail->next = op; else g->head = op;
    g->tail = op;
    g->count++;
    return OK;
  }
  pthread_mutex_lock(&s->lock);
  if (s->tail) s->tail->next = op; else s->head = op;
  s->tail = op;
  pthread_cond_signal(&s->wake);
  pthread_mutex_unlock(&s->lock);
  return OK;
}

/* -- core dump pipe ------------------------------------------------------------------------------------------------------- */

static void expand(char *out, size_t size, const char *template) {
  const char *at = strstr(template, "%p");
  if (at) snprintf(out, size, "%.*s%d%s", (int)(at - template), template, (int)getpid(), at + 2);
  else snprintf(out, size, "%s", template);
}

static void *dumper(void *argument) {
  char path[2048], byte;
  int pipe_fd = (int)(intptr_t)argument;
  while (read(pipe_fd, &byte, 1) != 1) pause_us(1000);
  expand(path, sizeof path, getenv("CUDA_COREDUMP_FILE"));
  const char *source = getenv("FAKE_CUDA_DUMP");
  FILE *out = fopen(path, "wb"), *in = source ? fopen(source, "rb") : 0;
  if (in) { char buffer[65536]; size_t n; while ((n = fread(buffer, 1, sizeof buffer, in))) fwrite(buffer, 1, n, out); fclose(in); }
  else fprintf(out, "not a real dump");
  fclose(out);
  fprintf(stderr, "coredump: Writing ELF file to %s\ncoredump: All done\n", path);
  sticky = LAUNCH_FAILED;
  return 0;
}

static void start_dumper(void) {
  const char *on = getenv("CUDA_ENABLE_USER_TRIGGERED_COREDUMP"), *template = getenv("CUDA_COREDUMP_PIPE");
  char path[2048];
  if (!on || strcmp(on, "1") || !template) return;
  expand(path, sizeof path, template);
  if (mkfifo(path, 0600) && errno != EEXIST) return;
  int fd = open(path, O_RDWR);
  pthread_t thread;
  pthread_create(&thread, 0, dumper, (void *)(intptr_t)fd);
}

/* -- the API --------------------------------------------------------------------------------------------------------------- */

R cuInit(unsigned f) { (void)f; return getenv("FAKE_CUDA_NO_DEVICE") ? NO_DEVICE : OK; }
R cuDriverGetVersion(int *v) { *v = 13000; return OK; }
static int devices(void) { const char *n = getenv("FAKE_CUDA_DEVICES"); return n ? atoi(n) : 1; }
R cuDeviceGetCount(int *n) { *n = devices(); return OK; }
R cuDeviceGet(int *d, int o) { *d = o; return o >= 0 && o < devices() ? OK : INVALID_DEVICE; }
R cuDeviceCanAccessPeer(int *can, int a, int b) { *can = a != b; return OK; }
R cuCtxEnablePeerAccess(void *c, unsigned f) { (void)c; (void)f; return OK; }
R cuDeviceGetName(char *name, int n, int d) { (void)d; snprintf(name, n, "Fake GPU"); return OK; }
R cuDeviceGetUuid(unsigned char *u, int d) { for (int i = 0; i < 16; i++) u[i] = (unsigned char)(i + 1 + d); return OK; }
R cuDeviceGetPCIBusId(char *s, int n, int d) { (void)d; snprintf(s, n, "0000:00:06.0"); return OK; }
R cuDeviceTotalMem(size_t *n, int d) { (void)d; *n = (size_t)1 << 34; return OK; }
R cuDeviceGetAttribute(int *v, int a, int d) {
  (void)d;
  switch (a) {
    case 75: *v = 9; return OK;          /* compute capability */
    case 76: *v = 0; return OK;
    case 16: *v = 132; return OK;        /* multiprocessors */
    case 97: *v = 232448; return OK;     /* shared memory per block, opt-in */
    case 81: *v = 233472; return OK;     /* shared memory per SM */
    case 39: *v = 2048; return OK;       /* threads per SM */
    default: return INVALID_VALUE;
  }
}
R cuDevicePrimaryCtxRetain(void **c, int d) {
  static int started;
  *c = (void *)(intptr_t)(d + 1);
  if (!started++) start_dumper();
  return OK;
}
R cuCtxSetCurrent(void *c) { (void)c; return OK; }
R cuCtxGetStreamPriorityRange(int *l, int *g) { *l = 0; *g = -5; return OK; }
R cuModuleLoadData(Module **m, const void *image) {
  if (memcmp(image, "\177ELF", 4)) return INVALID_IMAGE;
  *m = calloc(1, sizeof **m);
  strncpy((*m)->text, (const char *)image + 4, sizeof (*m)->text - 1);
  return OK;
}
R cuModuleGetFunction(Function **f, Module *m, const char *name) {
  if (!strstr(name, "topk") && strcmp(name, "slot_holder") && strcmp(name, "sparse_mla_decode_kernel") &&
      strcmp(name, "cross_rank_all_reduce") && strcmp(name, "sparse_row_reader")) return NOT_FOUND;
  *f = calloc(1, sizeof **f);
  (*f)->module = m;
  strncpy((*f)->name, name, sizeof (*f)->name - 1);
  return OK;
}
R cuFuncGetName(const char **name, Function *f) { *name = f->name; return OK; }
R cuFuncSetAttribute(Function *f, int a, int v) { if (a == 8) f->smem = v; return OK; }
R cuFuncGetAttribute(int *v, int a, Function *f) { (void)f; *v = a == 0 ? 1024 : a == 4 ? 32 : a == 6 ? 90 : 1024; return OK; }
R cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, Function *f, int b, size_t s) { (void)f; (void)b; (void)s; *n = 2; return OK; }
R cuMemAlloc(uint64_t *p, size_t n) { *p = (uint64_t)calloc(1, n); return OK; }
R cuMemGetInfo(size_t *f, size_t *t) { *f = (size_t)1 << 33; *t = (size_t)1 << 34; return OK; }
R cuMemHostAlloc(void **p, size_t n, unsigned f) { (void)f; *p = calloc(1, n); return OK; }
R cuMemcpyHtoDAsync(uint64_t d, const void *s, size_t n, Stream *t) { return put(t, (Op){.kind = COPY, .dst = d, .src = (uint64_t)s, .n = n}); }
R cuMemcpyDtoHAsync(void *d, uint64_t s, size_t n, Stream *t) { return put(t, (Op){.kind = COPY, .dst = (uint64_t)d, .src = s, .n = n}); }
R cuMemcpyDtoDAsync(uint64_t d, uint64_t s, size_t n, Stream *t) { return put(t, (Op){.kind = COPY, .dst = d, .src = s, .n = n}); }
R cuMemsetD32Async(uint64_t d, unsigned v, size_t n, Stream *t) { return put(t, (Op){.kind = FILL, .dst = d, .value = v, .n = n}); }
R cuStreamCreateWithPriority(Stream **s, unsigned f, int p) {
  (void)f; (void)p;
  *s = calloc(1, sizeof **s);
  pthread_mutex_init(&(*s)->lock, 0);
  pthread_cond_init(&(*s)->wake, 0);
  return pthread_create(&(*s)->thread, 0, worker, *s);
}
R cuStreamBeginCapture(Stream *s, int mode) { (void)mode; s->capture = calloc(1, sizeof(Graph)); return OK; }
R cuStreamEndCapture(Stream *s, Graph **g) { *g = s->capture; s->capture = 0; return OK; }
R cuGraphGetNodes(Graph *g, Op **nodes, size_t *n) {
  if (nodes) { size_t i = 0; for (Op *op = g->head; op && i < *n; op = op->next) nodes[i++] = op; *n = i; }
  else *n = g->count;
  return OK;
}
R cuGraphNodeGetType(Op *op, int *type) { *type = op->kind == KERNEL ? 0 : op->kind == COPY ? 1 : op->kind == FILL ? 2 : 7; return OK; }
typedef struct { void *func; unsigned gx, gy, gz, bx, by, bz, smem; void **params; void **extra; void *kern, *ctx; } NodeParams;
R cuGraphKernelNodeGetParams(Op *op, NodeParams *out) {
  op->params_pointer[0] = &op->p;
  *out = (NodeParams){op->f, op->grid, 1, 1, op->block, 1, 1, op->smem, (void **)op->params_pointer, 0, 0, 0};
  return OK;
}
R cuGraphInstantiateWithFlags(Graph **e, Graph *g, unsigned long long f) { (void)f; *e = g; return OK; }
R cuGraphInstantiate(Graph **e, Graph *g, unsigned long long f) { return cuGraphInstantiateWithFlags(e, g, f); }
R cuGraphUpload(Graph *g, Stream *s) { (void)g; (void)s; return OK; }
R cuGraphLaunch(Graph *g, Stream *s) {
  for (Op *op = g->head; op; op = op->next) { R r = put(s, *op); if (r) return r; }
  return OK;
}
R cuEventCreate(Event **e, unsigned f) { (void)f; *e = calloc(1, sizeof **e); return OK; }
R cuEventRecord(Event *e, Stream *s) { e->recorded = 1; e->done = 0; return put(s, (Op){.kind = RECORD, .event = e}); }
R cuEventQuery(Event *e) { return sticky ? sticky : !e->recorded || e->done ? OK : NOT_READY; }
R cuEventElapsedTime(float *ms, Event *a, Event *b) {
  *ms = (float)((b->at.tv_sec - a->at.tv_sec) * 1e3 + (b->at.tv_nsec - a->at.tv_nsec) / 1e6);
  return OK;
}
R cuLaunchKernel(Function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem, Stream *s,
                 void **params, void **extra) {
  (void)gy; (void)gz; (void)by; (void)bz; (void)extra;
  if (!params || smem > (unsigned)f->smem) return INVALID_VALUE;
  Op op = {.kind = KERNEL, .f = f, .grid = gx, .block = bx, .smem = smem};
  if (strstr(f->name, "topk")) memcpy(&op.p, params[0], sizeof op.p);
  else {
    uint64_t *words = (uint64_t *)&op.p;
    int pointers = strstr(f->name, "sparse_mla") ? 1 : 2;
    for (int i = 0; i < pointers; i++) words[i] = *(uint64_t *)params[i];
    if (strstr(f->name, "cross_rank")) words[2] = *(uint32_t *)params[2];
    if (strstr(f->name, "row_reader")) { words[2] = *(uint64_t *)params[2]; words[3] = *(uint32_t *)params[3]; }
  }
  return put(s, op);
}
R cuGetProcAddress_v2(const char *name, void **p, int v, unsigned long long f, int *status) {
  (void)v; (void)f;
  static void *self;
  Dl_info info;
  if (!self && dladdr((void *)cuInit, &info)) self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *p = self ? dlsym(self, name) : 0;
  if (status) *status = *p ? 0 : 1;
  return *p ? OK : NOT_FOUND;
}
R cuGetProcAddress(const char *name, void **p, int v, unsigned long long f) { return cuGetProcAddress_v2(name, p, v, f, 0); }
